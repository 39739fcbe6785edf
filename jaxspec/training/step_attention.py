"""Attention of the training-time test: what a row sees while it drafts, for all rows at once."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.config import REFERENCE_OPS, AttentionConfig
from jaxspec.layers.norms import rms_norm
from jaxspec.layers.params import Params
from jaxspec.layers.products import linear
from jaxspec.layers.rope import RopeTables, apply_rope

_MASKED = -1e30


class StepKeys(NamedTuple):
    """Keys and values of one layer and one step, [batch, rows, kv_heads, head_dim] each."""

    k: jax.Array
    v: jax.Array


def shift_left(x: jax.Array, n: int) -> jax.Array:
    """Move x [batch, rows] n to the left, zeros behind: row p holds what was at p + n."""
    return jnp.pad(x[:, n:], ((0, 0), (0, n)))


def project_qkv(
    params: Params, cfg: AttentionConfig, x: jax.Array, rope: RopeTables
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Project x [batch, rows, in] to q, k and v [batch, rows, heads, head_dim].

    q has cfg.num_heads, k and v have cfg.num_kv_heads. Queries and keys are normed, where the model
    norms them, and rotated.
    """
    qkv = linear(x, params["qkv_proj"], params.get("qkv_bias"))
    heads = qkv.reshape(*x.shape[:2], -1, cfg.head_dim)
    q, k, v = jnp.split(heads, [cfg.num_heads, cfg.num_heads + cfg.num_kv_heads], axis=2)
    if cfg.qk_norm:
        q = rms_norm(q, params["q_norm"], cfg.rms_norm_eps, REFERENCE_OPS)
        k = rms_norm(k, params["k_norm"], cfg.rms_norm_eps, REFERENCE_OPS)
    return apply_rope(q, rope), apply_rope(k, rope), v


def step_attention(
    params: Params,
    cfg: AttentionConfig,
    x: jax.Array,
    rope: RopeTables,
    earlier: list[StepKeys],
    starts: jax.Array | None = None,
    window: int | None = None,
) -> tuple[jax.Array, StepKeys]:
    """Attend in one step: causally over step 0, then to the row itself in each later step.

    x [batch, rows, in] -> [batch, rows, out], and the keys and values of this step.

    starts: int32 [batch, rows], the first row that each row sees (document_starts); None for all
    window: positions that a row sees, its own included; None for all
    """
    batch, rows = x.shape[:2]
    q, k, v = project_qkv(params, cfg, x, rope)
    own = StepKeys(k, v)
    first, *later = [*earlier, own]
    grouped = q.reshape(
        batch, rows, cfg.num_kv_heads, cfg.num_heads // cfg.num_kv_heads, cfg.head_dim
    )
    key = jnp.arange(rows)
    seen = key[None, :] <= key[:, None]
    if window is not None:  # row p of step i is at position p + i
        seen = seen & (key[None, :] > key[:, None] + len(earlier) - window)
        later = later[-window:]
    if starts is not None:
        seen = (seen & (key >= starts[..., None]))[:, None, None]
    scores = (
        jnp.einsum("bqhgd,bkhd->bhgqk", grouped, first.k, preferred_element_type=jnp.float32)
        * cfg.head_dim**-0.5
    )
    scores = jnp.where(seen, scores, _MASKED)
    top = jnp.max(scores, axis=-1)
    diagonal = [
        jnp.einsum("bqhgd,bqhd->bhgq", grouped, step.k, preferred_element_type=jnp.float32)
        * cfg.head_dim**-0.5
        for step in later
    ]
    for score in diagonal:
        top = jnp.maximum(top, score)
    top = jax.lax.stop_gradient(top)
    # Normalised after the sum over keys, which saves a pass over the [rows, rows] weights.
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
