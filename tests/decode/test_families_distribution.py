"""Sampled text of a hybrid and of a latent-attention model follows the target's distribution,
jointly over several rounds.

The vocabulary is small enough for every text to be enumerated: its probability comes from passes of
the target alone over the whole text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import models
from jaxspec.cache.arrays import init_cache
from jaxspec.cache.metadata import build_metadata
from jaxspec.config import REFERENCE_OPS, RoundConfig
from jaxspec.decode import programs
from jaxspec.decode.state import DecodeState
from jaxspec.decode.verify import Verification
from jaxspec.layers.context import Pass
from jaxspec.layers.params import Weight
from tests.support.families import family_model
from tests.support.slow import slow
from tests.support.statistics import chi_square, within_limit
from tests.support.tiny import Model, block_tables, sampling_state, start

VOCAB, LENGTH, K, BATCH = 5, 4, 2, 2_000
pytestmark = pytest.mark.once

PROMPT = [1, 0, 3, 2, 2, 4, 1]  # longer than the target's window of 5, and through two blocks


def probabilities(model: Model) -> np.ndarray:
    """Of every text of LENGTH tokens after PROMPT, [VOCAB] * LENGTH, float64."""
    cfg, params = model.target, model.params["target"]
    texts = np.array(list(itertools.product(range(VOCAB), repeat=LENGTH)), np.int32)
    tokens = np.concatenate([np.tile(np.array(PROMPT, np.int32), (len(texts), 1)), texts], axis=1)[
        :, :-1
    ]
    batch, rows = tokens.shape
    groups = cfg.cache_groups(rows, rows)
    table = jnp.arange(batch, dtype=jnp.int32)[:, None]  # a block holds a text

    @jax.jit
    def logits() -> jax.Array:
        metadata = build_metadata(
            groups,
            (table,) * len(groups),
            jnp.zeros(batch, jnp.int32),
            jnp.full(batch, rows),
            rows,
            attention=cfg.attention,
            ops=REFERENCE_OPS,
        )
        caches = init_cache(cfg.attention, (batch,) * cfg.num_layers, rows, jnp.float32)
        family, pass_ = models.family(cfg), Pass(metadata, REFERENCE_OPS)
        out = family.forward(params, cfg, jnp.asarray(tokens), pass_, caches)
        return family.logits(params, cfg, out.hidden, REFERENCE_OPS)

    log_p = np.asarray(jax.nn.log_softmax(logits()), np.float64)[:, len(PROMPT) - 1 :]
    return np.exp(np.take_along_axis(log_p, texts[..., None], axis=2).sum((1, 2))).reshape(
        (VOCAB,) * LENGTH
    )


def sampled(
    cfg: RoundConfig,
    params: Any,
    batches: int,
    prepare: Callable[[DecodeState], DecodeState] = lambda state: state,
) -> tuple[np.ndarray, list[Verification]]:
    """Return how often each text came out of prefill and rounds, and all rounds.

    prepare: changes the state before a batch's first round
    """
    tables, num_blocks = block_tables(BATCH, cfg)
    counts, rounds = np.zeros((VOCAB,) * LENGTH), []
    for batch in range(batches):
        seeds = range(batch * BATCH, (batch + 1) * BATCH)
        first, state = start(
            cfg,
            params,
            [PROMPT] * BATCH,
            sampling_state(seeds, 1.0),
            tables,
            num_blocks,
            max_tokens=99,
        )
        state = prepare(state)
        emitted = [np.asarray(first)[:, None]]
        for _ in range(LENGTH - 1):  # each round emits a token at least
            verification, state = programs.run_round(cfg, params, state, tables, "round")
            emitted.append(np.asarray(verification.output_tokens))
            rounds.append(verification)
        flat = np.concatenate(emitted, axis=1)
        kept = np.take_along_axis(flat, np.argsort(flat < 0, axis=1, kind="stable"), axis=1)[
            :, :LENGTH
        ]
        np.add.at(counts, tuple(kept.T), 1)
    return counts, rounds


def numbers_accepted(rounds: Sequence[Verification]) -> set[int]:
    """Return the numbers of accepted drafts that were seen."""
    return {int(n) for found in rounds for n in np.asarray(found.num_sampled) - 1}


def joint_statistic(
    model: Model, K: int, rule: str, batches: int
) -> tuple[tuple[float, int], set[int]]:
    """Return statistic and freedom of whole texts, and the numbers of accepted drafts."""
    expected = probabilities(model)
    assert expected.sum() == pytest.approx(1, abs=1e-4)
    cfg = model.round_config(K, max_model_len=24, rule=rule)
    counts, rounds = sampled(cfg, model.params, batches)
    return chi_square(counts, expected / expected.sum()), numbers_accepted(rounds)


@pytest.mark.parametrize(
    ("family", "method", "rule", "batches"),
    [
        # test_fallback.py has this pair, whose requests begin with the head.
        slow("gpt_oss", "eagle", "probabilistic", 3),
        ("glm4_moe_lite", "mtp", "block", 3),
        slow("gpt_oss", "eagle", "probabilistic", 12),
        slow("glm4_moe_lite", "mtp", "probabilistic", 12),
        slow("deepseek_v3", "mtp", "block", 12),
    ],
)
def test_text_follows_the_target_jointly_over_rounds(
    family: str, method: str, rule: str, batches: int
) -> None:
    model = flattened(family_model(family, method, window=4, disturbance=1.0, vocab=VOCAB))
    found, accepted = joint_statistic(model, K, rule, batches)
    assert accepted == set(range(K + 1))
    assert within_limit(*found), found


def flattened(model: Model) -> Model:
    """Less certain heads, so that drafts are accepted and rejected and every text is seen."""
    target, draft = dict(model.params["target"]), dict(model.params["draft"])
    target["lm_head"] = Weight(0.5 * target["lm_head"].values)
    draft["lm_head"] = target["lm_head"]
    params: Any = {"target": target, "draft": draft}
    return Model(model.target, model.draft, params)
