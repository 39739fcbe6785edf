"""Steps of a Markov head by one kernel draft what separate ops draft; and when the kernel runs."""

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
from jaxspec.drafts.drafter import DraftContext, Proposal
from jaxspec.layers.params import init_random
from pallas_kernels import markov_head
from tests.kernels.interpreter import interpreted, needs_mosaic
from tests.support.slow import slow
from tests.support.tiny import HIDDEN, block_config, sampling_state, tiny_model

pytestmark = needs_mosaic
VOCAB, K = 192, 4


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Kernel and requests of each step that is traced with one."""
    found: list[tuple[str, int]] = []

    def noted(name: str) -> Any:
        run = getattr(markov_head, name)

        def note(inputs: markov_head.Inputs, *, implementation: str) -> Any:
            found.append((name, inputs.rows))
            return run(inputs, implementation=implementation)

        return note

    for name in ("markov_argmax", "markov_draw"):
        monkeypatch.setattr(markov_head, name, noted(name))
    return found


def drafted(
    batch: int,
    *,
    num_drafts: int = K,
    sampled: bool = False,
    rule: str = "probabilistic",
    draft_sampling: str = "probabilistic",
    dtype: Any = jnp.bfloat16,
    vocab: int = VOCAB,
    gumbel_sample: str = "mosaic_gpu",
    **changes: Any,
) -> Proposal:
    """What a random head drafts for random hidden states. Every third sampled request is greedy."""
    draft = block_config(
        "dspark",
        **{"vocab_size": VOCAB, "draft_vocab": vocab, "markov_rank": 64, **changes},
    )
    cfg = RoundConfig.for_models(
        tiny_model("dspark").target,
        draft,
        ops=Ops(matmul="mosaic_gpu", gumbel_sample=gumbel_sample),
        block_size=4,
        max_model_len=64,
        num_speculative_tokens=num_drafts,
    )
    cfg = replace(cfg, sampled=sampled, rule=rule, draft_sampling=draft_sampling)
    keys = jax.random.split(jax.random.key(batch), 3)
    params = init_random(drafts.family(draft).param_specs(draft), keys[0], dtype)
    if vocab != VOCAB:
        params["draft_to_target"] = jnp.arange(vocab, dtype=jnp.int32) + VOCAB - vocab
    context = DraftContext(
        seq_lens=jnp.arange(batch, dtype=jnp.int32),
        next_token=jax.random.randint(keys[1], (batch,), 0, VOCAB, jnp.int32),
        active=jnp.ones(batch, bool),
        block_tables=(),
        sampling=sampling_state([0.8 * (i % 3 < 2) if sampled else 0 for i in range(batch)]),
    )
    hidden = jax.random.normal(keys[2], (batch, num_drafts, HIDDEN), dtype)
    # One program: the interpreter's callbacks may wait for ever for ops that run beside them.
    draw = jax.jit(lambda hidden: draw_block(cfg, params, context, hidden))
    with interpreted():
        return jax.tree.map(np.asarray, draw(hidden))


@pytest.mark.parametrize(
    ("batch", "changes"),
    [
        (1, {}),
        (16, {}),
        (3, {"vocab": 128}),
        (2, {"confidence_threshold": 0.4}),
        (2, {"rule": "block"}),
        slow(3, {"num_drafts": 1}),
        slow(2, {"markov_rank": 256}),
    ],
)
@pytest.mark.parametrize(("sampled", "kernel"), [(False, "markov_argmax"), (True, "markov_draw")])
def test_drafts_are_those_of_several_ops(
    batch: int,
    changes: dict[str, Any],
    sampled: bool,
    kernel: str,
    steps: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proposal = drafted(batch, sampled=sampled, **changes)
    assert steps == [(kernel, batch)] and len(np.unique(proposal.draft_tokens)) > 1
    monkeypatch.setattr(dspark, "markov_step", lambda *_: None)
    expected = drafted(batch, sampled=sampled, **changes)
    np.testing.assert_array_equal(proposal.draft_tokens, expected.draft_tokens)
    assert (proposal.draft_logits is None) == (expected.draft_logits is None) == (not sampled)
    if sampled:
        np.testing.assert_array_equal(proposal.draft_logits, expected.draft_logits)
    assert steps == [(kernel, batch)]


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 9},
        {"batch": 9, "sampled": True},
        {"sampled": True, "rule": "strict"},
        {"sampled": True, "gumbel_sample": "reference"},
        {"sampled": True, "draft_sampling": "greedy"},
        {"markov_kind": "gated"},
        {"markov_kind": "rnn"},
        {"vocab": 100},
        {"dtype": jnp.float32},
        {"markov_rank": 0, "confidence_reads_token": False},
    ],
    ids=str,
)
def test_other_steps_run_by_several_ops(
    changes: dict[str, Any], steps: list[tuple[str, int]]
) -> None:
    changes = {"batch": 2, **changes}
    assert drafted(**changes).draft_tokens.shape == (changes["batch"], K) and not steps
