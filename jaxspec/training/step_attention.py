"""Attention of the training-time test: what a row sees while it drafts, for all rows of a sequence at once."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.config import AttentionConfig, ConfigError
from jaxspec.drafts import DraftConfig
from jaxspec.layers.attention import RopeTables, project_qkv
from jaxspec.layers.params import Params
from jaxspec.layers.products import linear

_MASKED = -1e30


class StepKeys(NamedTuple):
    """Keys and values of one layer and one step, [batch, rows, kv_heads, head_dim] each."""

    k: jax.Array
    v: jax.Array


def shift_left(x: jax.Array, n: int) -> jax.Array:
    """x [batch, rows] moved n to the left, zeros behind: row p holds what was at p + n."""
    return jnp.pad(x[:, n:], ((0, 0), (0, n)))


def require_full_attention(cfg: DraftConfig) -> None:
    """The dense attention below knows no window."""
    if cfg.sliding_window is not None:
        raise ConfigError(
            f"sliding_window: expected full attention in a head that is trained here, got a window of {cfg.sliding_window}"
        )


def step_attention(
    params: Params, cfg: AttentionConfig, x: jax.Array, rope: RopeTables, earlier: list[StepKeys]
) -> tuple[jax.Array, StepKeys]:
    """Attention of one step: causal over step 0, then one's own row of each later step. x [batch, rows, in] -> [batch, rows, out]."""
    batch, rows = x.shape[:2]
    q, k, v = project_qkv(params, cfg, x, rope)
    own = StepKeys(k, v)
    first, *later = [*earlier, own]
    grouped = q.reshape(
        batch, rows, cfg.num_kv_heads, cfg.num_heads // cfg.num_kv_heads, cfg.head_dim
    )
    causal = jnp.arange(rows)[None, :] <= jnp.arange(rows)[:, None]
    scores = (
        jnp.einsum("bqhgd,bkhd->bhgqk", grouped, first.k, preferred_element_type=jnp.float32)
        * cfg.head_dim**-0.5
    )
    scores = jnp.where(causal, scores, _MASKED)
    top = jnp.max(scores, axis=-1)
    diagonal = [
        jnp.einsum("bqhgd,bqhd->bhgq", grouped, step.k, preferred_element_type=jnp.float32)
        * cfg.head_dim**-0.5
        for step in later
    ]
    for score in diagonal:
        top = jnp.maximum(top, score)
    top = jax.lax.stop_gradient(top)
    # Normalised after the sum over keys: the [rows, rows] weights are written and read once less.
    weights = jnp.exp(scores - top[..., None])
    total = jnp.sum(weights, axis=-1)
    out = jnp.einsum(
        "bhgqk,bkhd->bhgqd",
        weights.astype(first.v.dtype),
        first.v,
        preferred_element_type=jnp.float32,
    )
    for score, step in zip(diagonal, later, strict=True):
        weight = jnp.exp(score - top)
        total = total + weight
        out = out + weight[..., None] * jnp.swapaxes(step.v, 1, 2)[:, :, None].astype(jnp.float32)
    out = jnp.moveaxis(out / total[..., None], 3, 1).reshape(batch, rows, -1).astype(x.dtype)
    return linear(out, params["o_proj"], params.get("o_bias")), own
