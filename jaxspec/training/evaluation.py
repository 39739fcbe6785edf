"""Acceptance of a target and draft pair through the real propose and verify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import decode, models
from jaxspec.config import CacheGroup, RoundConfig
from jaxspec.drafts import DraftConfig
from jaxspec.metrics import SpecDecodeMetrics
from jaxspec.params import Params
from jaxspec.sampling import SamplingState

BLOCK_SIZE = 64


def evaluate_acceptance(
    target: models.TargetConfig,
    target_params: Params,
    draft: DraftConfig,
    draft_params: Params,
    prompts: Sequence[np.ndarray],
    *,
    stop_token_ids: Sequence[int],
    num_speculative_tokens: int = 3,
    max_tokens: int = 256,
    dtype: Any,
) -> tuple[SpecDecodeMetrics, list[np.ndarray]]:
    """Greedy speculative decoding of all prompts (token ids) in one batch: the counts, and each answer's token ids.

    draft_params as loading.load_draft or bind_draft returns them.
    """
    K, batch = num_speculative_tokens, len(prompts)
    width = max(len(p) for p in prompts)
    pages = -(-(width + max_tokens + 2 * (K + 1)) // BLOCK_SIZE)
    group = CacheGroup(BLOCK_SIZE, pages * BLOCK_SIZE)
    cfg = RoundConfig(
        target=target,
        target_group=group,
        draft=draft,
        draft_group=CacheGroup(BLOCK_SIZE, group.max_model_len, getattr(draft, "sliding_window", None)),
        num_speculative_tokens=K,
        rule="probabilistic",
        draft_sampling="greedy",
        sampled=False,
    )
    zeros = lambda: jnp.zeros(batch, jnp.int32)  # noqa: E731  (a fresh buffer each: the state is donated)
    sampling = SamplingState(jnp.zeros((batch, 2), jnp.uint32), jnp.zeros(batch), zeros(), jnp.ones(batch))
    stops = jnp.tile(jnp.asarray(list(stop_token_ids), jnp.int32), (batch, 1))
    state = decode.init_state(cfg, sampling, jnp.full(batch, max_tokens, jnp.int32), stops, batch * pages, dtype)
    block_table = jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages)
    tokens = np.zeros((batch, width), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    lengths = jnp.asarray([len(p) for p in prompts], jnp.int32)
    params = {"target": target_params, "draft": draft_params}
    first, state = decode.run_prefill(
        cfg, params, state, block_table, jnp.asarray(tokens), zeros(), lengths, zeros() - 1, compilation="round"
    )
    rounds = [jax.device_get(first)]
    metrics = SpecDecodeMetrics(K)
    while bool(jax.device_get(state.active).any()):
        some = []
        for _ in range(8):  # idle rounds past the end report nothing, and the host waits once in eight
            verification, state = decode.run_round(cfg, params, state, block_table, "round")
            some.append(verification)
        some = jax.device_get(some)
        for verification in some:
            for sampled in verification.num_sampled[verification.num_sampled > 0]:
                metrics.observe(int(sampled) - 1)
        rounds += some
    written = np.concatenate([r.output_tokens for r in rounds], axis=1)
    return metrics, [trim(row[row >= 0], max_tokens, stop_token_ids) for row in written]


def trim(answer: np.ndarray, max_tokens: int, stop_token_ids: Sequence[int]) -> np.ndarray:
    """An answer up to its stop token (included) or max_tokens."""
    answer = answer[:max_tokens]
    stops = np.flatnonzero(np.isin(answer, np.asarray(list(stop_token_ids))))
    return answer[: stops[0] + 1] if len(stops) else answer
