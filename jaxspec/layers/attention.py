"""One self-attention layer, target's or draft's: project, rotate, write keys and values, attend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache.arrays import FullCache
from jaxspec.config import AttentionConfig, MLAConfig, Ops
from jaxspec.layers.context import Pass
from jaxspec.layers.norms import Norm
from jaxspec.layers.params import AssembledSpec, Params, ParamSpec, matrix, vector
from jaxspec.layers.products import Stream, project, values_of
from pallas_kernels import attention as attention_op
from pallas_kernels import rope_cache as rope_op


def attention_specs(
    prefix: str, cfg: AttentionConfig, input_size: int, output_size: int
) -> dict[str, ParamSpec]:
    """Return the layer's weights under `prefix` ("...self_attn").

    An EAGLE-3 layer has inputs of width 2D and outputs of width D.
    """
    q_size, kv_size = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    specs = {
        "q_proj": rotated_matrix(
            f"{prefix}.q_proj.weight", input_size, cfg.num_heads, 0, cfg, ("embed", "heads")
        ),
        "k_proj": rotated_matrix(
            f"{prefix}.k_proj.weight", input_size, cfg.num_kv_heads, 0, cfg, ("embed", "kv_heads")
        ),
        "v_proj": matrix(f"{prefix}.v_proj.weight", input_size, kv_size, ("embed", "kv_heads")),
        "o_proj": matrix(f"{prefix}.o_proj.weight", q_size, output_size, ("heads", "embed")),
    }
    if cfg.qkv_bias:
        assert not cfg.rope_interleave  # no family has both
        specs["q_bias"] = vector(f"{prefix}.q_proj.bias", q_size, "heads")
        specs["k_bias"] = vector(f"{prefix}.k_proj.bias", kv_size, "kv_heads")
        specs["v_bias"] = vector(f"{prefix}.v_proj.bias", kv_size, "kv_heads")
    if cfg.o_bias:
        specs["o_bias"] = vector(f"{prefix}.o_proj.bias", output_size)
    if cfg.qk_norm:
        specs["q_norm"] = vector(f"{prefix}.q_norm.weight", cfg.head_dim)
        specs["k_norm"] = vector(f"{prefix}.k_norm.weight", cfg.head_dim)
    if cfg.sinks:
        specs["sinks"] = ParamSpec(f"{prefix}.sinks", (cfg.num_heads,), ("heads",), dtype="float32")
    return specs


def join_projections(params: Any) -> Any:
    """Join the projections of one input into one array, in the weights of any model.

    Query, key and value become qkv_proj (and qkv_bias). The projections to latents, if there are
    two, become qkv_a_proj (and qkv_a_bias).

    XLA joins products of one input itself, and then copies their weights together in every pass:
    25 us for a layer of Llama-3-8B on an H200.

    params: weights in the structure of param_specs, or already joined; other weights stay unchanged
    """
    if isinstance(params, Mapping):
        joined = {name: join_projections(value) for name, value in params.items()}
        for together, parts in (("qkv", ("q", "k", "v")), ("qkv_a", ("q_a", "kv_a"))):
            for kind in ("proj", "bias"):
                names = [f"{part}_{kind}" for part in parts]
                if all(name in joined for name in names):
                    joined[f"{together}_{kind}"] = jnp.concatenate(
                        [joined.pop(name) for name in names], axis=-1
                    )
        return joined
    return [join_projections(value) for value in params] if isinstance(params, list) else params


def _qkv(params: Params, cfg: AttentionConfig, x: Stream, ops: Ops, norm: Norm | None) -> jax.Array:
    """Project (the norm of) x [batch, rows, in] to queries, keys and values, side by side.

    Returns [batch, rows, (num_heads + 2 num_kv_heads) head_dim].
    """
    names = ("qkv",) if "qkv_proj" in params else ("q", "k", "v")
    weights = tuple(params[f"{n}_proj"] for n in names)
    bias = jnp.concatenate([params[f"{n}_bias"] for n in names]) if cfg.qkv_bias else None
    return project(x, weights, ops, norm=norm, bias=bias)


def rotated_matrix(
    name: str,
    depth: int,
    num_heads: int,
    before: int,
    cfg: AttentionConfig | MLAConfig,
    axes: tuple[str | None, str | None],
) -> ParamSpec:
    """Return a projection whose output has rotated dimensions.

    Each head of the output has `before` plain dimensions, and then the rotated ones as halves.
    """
    width = num_heads * (before + cfg.rope_dim)
    if not cfg.rope_interleave:
        return matrix(name, depth, width, axes)
    order = partial(halves_of_pairs, num_heads=num_heads, before=before)
    return AssembledSpec(name, (depth, width), axes, sources=((name, (width, depth)),), build=order)


def halves_of_pairs(arrays: Sequence[np.ndarray], *, num_heads: int, before: int) -> np.ndarray:
    """Reorder each head's rows after `before`, and transpose [out, in] to [in, out].

    The rows are rotated as pairs (0, 1), (2, 3), ... in the checkpoint, and as halves here.
    """
    (array,) = arrays
    per_head = array.reshape(num_heads, -1, *array.shape[1:])
    ordered = np.concatenate(
        [per_head[:, :before], per_head[:, before::2], per_head[:, before + 1 :: 2]], axis=1
    )
    return ordered.reshape(array.shape).T


def attend(
    params: Params,
    cfg: AttentionConfig,
    x: Stream,
    cache: FullCache,
    pass_: Pass,
    *,
    norm: Norm | None,
    group: int = 0,
    window: int | None = None,
    query_scale: jax.Array | None = None,
) -> tuple[jax.Array, FullCache]:
    """Run attention on (the norm of) x [batch, rows, in].

    norm:        the norm before the projections; None if x is normed
    group:       index of the layer's KV-cache group in the pass's metadata
    window:      the most keys that a row of this group sees; None for all
    query_scale: [batch, rows], factor of the queries

    Returns [batch, rows, num_heads * head_dim], and the cache with these rows written.
    """
    assert pass_.rope is not None
    ops, metadata = pass_.ops, pass_.metadata[group]
    batch, rows = values_of(x).shape[:2]
    qkv = _qkv(params, cfg, x, ops, norm)
    cos, sin = (table.reshape(batch * rows, -1) for table in pass_.rope)
    packed = query_scale is None and attention_op.packs(
        ops.attention, rows=rows, queries_per_kv=cfg.num_heads // cfg.num_kv_heads
    )
    projected = rope_op.Inputs(
        qkv=qkv.reshape(batch * rows, -1),
        cos=cos,
        sin=sin,
        slot_mapping=metadata.slot_mapping.reshape(-1),
        k_cache=cache.k,
        v_cache=cache.v,
        q_norm=params["q_norm"] if cfg.qk_norm else None,
        k_norm=params["k_norm"] if cfg.qk_norm else None,
        num_heads=cfg.num_heads,
        eps=cfg.rms_norm_eps,
        pack=rows if packed else None,
    )
    q, k_cache, v_cache = rope_op.rope_and_write(projected, implementation=ops.rope_cache)
    q = q if packed else q.reshape(batch, rows, cfg.num_heads, cfg.head_dim)
    if query_scale is not None:
        q = (q * query_scale[..., None, None]).astype(q.dtype)
    queries = attention_op.Inputs(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=metadata.block_table,
        positions=metadata.positions,
        seq_lens=metadata.seq_lens,
        window_start=metadata.window_start,
        sinks=params["sinks"] if cfg.sinks else None,
        bounds=metadata.bounds,
        scale=cfg.head_dim**-0.5,
        window=window,
        packed_heads=cfg.num_heads if packed else None,
    )
    attended = attention_op.paged_attention(queries, implementation=ops.attention)
    return attended.reshape(batch, rows, -1), FullCache(k_cache, v_cache)
