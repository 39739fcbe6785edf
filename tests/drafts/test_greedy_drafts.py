"""Greedy drafts of a Markov head by one kernel: the tokens of its logits, and when it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import drafts
from jaxspec.config import Ops, RoundConfig
from jaxspec.drafts import dspark
from jaxspec.drafts.block import draw_block
from jaxspec.drafts.drafter import DraftContext
from jaxspec.layers.params import init_random
from pallas_kernels import markov_argmax
from tests.kernels.interpreter import interpreted, needs_mosaic
from tests.support.slow import slow
from tests.support.tiny import HIDDEN, block_config, sampling_state, tiny_model

pytestmark = needs_mosaic
VOCAB, K = 192, 4


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Requests of each step that is traced with the kernel."""
    found: list[int] = []
    run = markov_argmax.markov_argmax

    def note(inputs: markov_argmax.Inputs, *, implementation: str) -> jax.Array:
        found.append(inputs.rows)
        return run(inputs, implementation=implementation)

    monkeypatch.setattr(markov_argmax, "markov_argmax", note)
    return found


def drafted(
    batch: int,
    *,
    num_drafts: int = K,
    sampled: bool = False,
    dtype: Any = jnp.bfloat16,
    vocab: int = VOCAB,
    **changes: Any,
) -> np.ndarray:
    """The tokens that a random head drafts for random hidden states, [batch, num_drafts]."""
    draft = block_config(
        "dspark",
        **{"vocab_size": VOCAB, "draft_vocab": vocab, "markov_rank": 64, **changes},
    )
    cfg = RoundConfig.for_models(
        tiny_model("dspark").target,
        draft,
        ops=Ops(matmul="mosaic_gpu"),
        block_size=4,
        max_model_len=64,
        num_speculative_tokens=num_drafts,
    )
    cfg = replace(cfg, sampled=sampled)
    keys = jax.random.split(jax.random.key(batch), 3)
    params = init_random(drafts.family(draft).param_specs(draft), keys[0], dtype)
    if vocab != VOCAB:
        params["draft_to_target"] = jnp.arange(vocab, dtype=jnp.int32) + VOCAB - vocab
    context = DraftContext(
        seq_lens=jnp.arange(batch, dtype=jnp.int32),
        next_token=jax.random.randint(keys[1], (batch,), 0, VOCAB, jnp.int32),
        active=jnp.ones(batch, bool),
        block_tables=(),
        sampling=sampling_state([0] * batch),
    )
    hidden = jax.random.normal(keys[2], (batch, num_drafts, HIDDEN), dtype)
    with interpreted():
        return np.asarray(draw_block(cfg, params, context, hidden).draft_tokens)


@pytest.mark.parametrize(
    ("batch", "changes"),
    [
        (1, {}),
        (16, {}),
        (3, {"vocab": 128}),
        (2, {"confidence_threshold": 0.4}),
        slow(3, {"num_drafts": 1}),
        slow(2, {"markov_rank": 256}),
    ],
)
def test_drafts_are_those_of_the_logits(
    batch: int, changes: dict[str, Any], steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = drafted(batch, **changes)
    assert steps == [batch] and len(np.unique(tokens)) > 1
    monkeypatch.setattr(dspark, "greedy_draft", lambda *_: None)
    np.testing.assert_array_equal(drafted(batch, **changes), tokens)
    assert steps == [batch]


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 9},
        {"sampled": True},
        {"markov_kind": "gated"},
        {"markov_kind": "rnn"},
        {"vocab": 100},
        {"dtype": jnp.float32},
        {"markov_rank": 0, "confidence_reads_token": False},
    ],
    ids=str,
)
def test_other_steps_make_their_logits(changes: dict[str, Any], steps: list[int]) -> None:
    changes = {"batch": 2, **changes}
    assert drafted(**changes).shape == (changes["batch"], K) and not steps
