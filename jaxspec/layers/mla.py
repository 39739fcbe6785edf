"""Multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1), with absorbed projections.

A token caches a latent c and a rotated key r. Head h's key is [K_h c, r] and its value V_h c. So
q . key is (K_h^T q_nope) . c + q_rope . r, and the weighted sum of values is V_h times that of
latents. Attention then reads the latents as they are cached, as one KV head for all heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxspec.cache.arrays import LatentCache
from jaxspec.config import MLAConfig, Ops
from jaxspec.layers.attention import halves_of_pairs, rotated_matrix
from jaxspec.layers.context import Pass
from jaxspec.layers.log_once import log_once
from jaxspec.layers.norms import Norm, rms_norm
from jaxspec.layers.params import (
    AssembledSpec,
    Params,
    ParamSpec,
    joined,
    matrix,
    projection,
    side_by_side,
    vector,
    weight,
)
from jaxspec.layers.products import ResidualStream, add_projection, project
from jaxspec.layers.row_tiles import in_tiles
from pallas_kernels import head_matmul as head_matmul_op
from pallas_kernels import latent_attention as attention_op
from pallas_kernels import latent_cache as cache_op
from pallas_kernels.packing import padded_heads

LATENT_NORM_EPS = 1e-6  # epsilon of the norms on the latents, whatever the model's rms_norm_eps is


def mla_specs(prefix: str, cfg: MLAConfig, hidden_size: int) -> dict[str, Any]:
    """Return the layer's weights under `prefix` ("...self_attn").

    kv_b_proj is read twice: as each head's key projection and as its value projection. latents_proj
    is the query's projection to its latent (if the model has one) and the key's, side by side.
    """
    heads, rank, nope, rope, v = (
        cfg.num_heads,
        cfg.kv_lora_rank,
        cfg.nope_head_dim,
        cfg.rope_head_dim,
        cfg.v_head_dim,
    )
    kv_b = ((f"{prefix}.kv_b_proj.weight", (heads * (nope + v), rank)),)
    split = partial(_head_part, heads=heads, nope=nope)

    kv_a = rotated_matrix(
        f"{prefix}.kv_a_proj_with_mqa.weight", hidden_size, 1, rank, cfg, ("embed", None)
    )
    specs: dict[str, Any] = {
        "kv_a_norm": vector(f"{prefix}.kv_a_layernorm.weight", rank),
        "k_b_proj": AssembledSpec(
            kv_b[0][0],
            (heads, nope, rank),
            ("heads", None, None),
            sources=kv_b,
            build=partial(split, part="k"),
        ),
        "v_b_proj": AssembledSpec(
            kv_b[0][0],
            (heads, rank, v),
            ("heads", None, None),
            sources=kv_b,
            build=partial(split, part="v"),
        ),
        "o_proj": projection(
            f"{prefix}.o_proj.weight", heads * v, hidden_size, ("head_out", "embed")
        ),
    }
    latents, biases, names = [kv_a], [], "kv_a_proj_with_mqa"
    if cfg.bias:
        biases.append(
            _rotated_bias(
                f"{prefix}.kv_a_proj_with_mqa.bias", rank + rope, rank, cfg.rope_interleave
            )
        )
        specs["o_bias"] = vector(f"{prefix}.o_proj.bias", hidden_size)
    if cfg.q_lora_rank is None:
        name, depth, axes = f"{prefix}.q_proj.weight", hidden_size, ("embed", "heads")
        specs["q_proj"] = weight(rotated_matrix(name, depth, heads, nope, cfg, axes))
    else:
        name, depth, axes = f"{prefix}.q_b_proj.weight", cfg.q_lora_rank, (None, "heads")
        specs["q_b_proj"] = weight(rotated_matrix(name, depth, heads, nope, cfg, axes))
        specs["q_a_norm"] = vector(f"{prefix}.q_a_layernorm.weight", cfg.q_lora_rank)
        q_a = f"{prefix}.q_a_proj"
        names = f"{{q_a_proj,{names}}}"
        latents.insert(0, matrix(f"{q_a}.weight", hidden_size, cfg.q_lora_rank, ("embed", None)))
        if cfg.bias:
            biases.insert(0, vector(f"{q_a}.bias", cfg.q_lora_rank))
    specs["latents_proj"] = weight(joined(f"{prefix}.{names}.weight", latents))
    if biases:
        specs["latents_bias"] = joined(f"{prefix}.{names}.bias", biases)
    return specs


def _rotated_bias(name: str, size: int, before: int, interleave: bool) -> ParamSpec:
    if not interleave:
        return vector(name, size)
    order = partial(halves_of_pairs, num_heads=1, before=before)
    return AssembledSpec(name, (size,), (None,), sources=((name, (size,)),), build=order)


def _head_part(arrays: Sequence[np.ndarray], *, heads: int, nope: int, part: str) -> np.ndarray:
    """Take the keys [heads, nope, rank] or values [heads, rank, v] of kv_b_proj.

    kv_b_proj is [heads * (nope + v), rank].
    """
    (array,) = arrays
    per_head = array.reshape(heads, -1, array.shape[1])
    return per_head[:, :nope] if part == "k" else per_head[:, nope:].swapaxes(1, 2)


def add_latent_attention(
    params: Params,
    cfg: MLAConfig,
    x: jax.Array,
    cache: LatentCache,
    pass_: Pass,
    *,
    norm: Norm,
) -> tuple[ResidualStream, LatentCache]:
    """Add attention of the norm of x [batch, rows, D] to the stream x, and write the rows' latents.

    The pass's rope tables are those of rope_head_dim.
    """
    assert pass_.rope is not None
    ops, (metadata,), flat = pass_.ops, pass_.metadata, pass_.flat
    batch, rows = x.shape[:2]
    cos, sin = (table.reshape(batch * rows, -1) for table in pass_.rope)
    normed = rms_norm(x, norm.gain, norm.eps, ops)
    projected = cache_op.Inputs(
        latents=_latents(params, cfg, normed, ops),
        cos=cos,
        sin=sin,
        slot_mapping=metadata.slot_mapping.reshape(-1),
        cache=cache.latent,
        kv_norm=params["kv_a_norm"],
        q_norm=params.get("q_a_norm"),
        eps=LATENT_NORM_EPS,
    )
    q_latent, pool = cache_op.norm_and_write(projected, implementation=ops.rope_cache)
    if q_latent is None:
        q = project(normed, (params["q_proj"],), ops)
    else:
        q = project(q_latent, (params["q_b_proj"],), ops)
    # The results of the padding heads are discarded.
    heads = cfg.num_heads
    if ops.pads_latent_heads:
        heads = padded_heads(metadata.positions.shape[1], heads)
    absorbed = _by_head(
        q.reshape(batch * rows, cfg.num_heads, -1),
        params["k_b_proj"],
        ops,
        cos=cos,
        sin=sin,
        out_heads=heads,
    )
    q = absorbed.reshape(batch, rows, heads, -1)
    queries = attention_op.Inputs(
        q=q if flat is None else flat.by_request(q),
        cache=pool,
        block_table=metadata.block_table,
        positions=metadata.positions,
        seq_lens=metadata.seq_lens,
        kv_lora_rank=cfg.kv_lora_rank,
        scale=cfg.scale,
    )
    attended = _attend(queries, ops)
    if flat is not None:
        attended = flat.flatten(attended)
    values = _by_head(attended.reshape(batch * rows, heads, -1), params["v_b_proj"], ops)
    bias = params["o_bias"] if cfg.bias else None
    stream = add_projection(x, values.reshape(batch, rows, -1), params["o_proj"], ops, bias=bias)
    return stream, LatentCache(pool)


def _attend(queries: attention_op.Inputs, ops: Ops) -> jax.Array:
    """Run the latent_attention op, in tiles of rows where rows are alike."""

    def attend(q: jax.Array, positions: jax.Array) -> jax.Array:
        rows = replace(queries, q=q, positions=positions)
        return attention_op.latent_attention(rows, implementation=ops.attention)

    if ops.rows_alike:
        return in_tiles(attend, queries.q, queries.positions, axis=1)
    return attend(queries.q, queries.positions)


def _latents(params: Params, cfg: MLAConfig, x: jax.Array, ops: Ops) -> jax.Array:
    """Project x [batch, rows, D] to the latents and the key to rotate.

    Returns the query's latent (if the model has one), the key's latent, and the key to rotate, side
    by side: [batch * rows, ...].
    """
    bias = params["latents_bias"] if cfg.bias else None
    latents = project(x, side_by_side(params["latents_proj"]), ops, bias=bias)
    return latents.reshape(-1, latents.shape[-1])


def _by_head(
    x: jax.Array,
    weights: jax.Array,
    ops: Ops,
    *,
    cos: jax.Array | None = None,
    sin: jax.Array | None = None,
    out_heads: int | None = None,
) -> jax.Array:
    """Run the head_matmul op. Its kernel serves few rows; XLA multiplies the other cases."""
    implementation = ops.matmul
    if implementation != "reference" and (reason := head_matmul_op.unsupported(x, weights)):
        log_once(f"XLA multiplies heads by {weights.shape}: the kernel {reason}")
        implementation = "reference"

    def multiply(
        x: jax.Array, cos: jax.Array | None = None, sin: jax.Array | None = None
    ) -> jax.Array:
        inputs = head_matmul_op.Inputs(x=x, weights=weights, cos=cos, sin=sin, out_heads=out_heads)
        return head_matmul_op.head_matmul(inputs, implementation=implementation)

    rows = [x] if cos is None or sin is None else [x, cos, sin]
    return in_tiles(multiply, *rows) if ops.rows_alike else multiply(*rows)
