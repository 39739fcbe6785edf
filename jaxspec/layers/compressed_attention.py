"""DeepSeek-V4's attention (section 2.3): a sliding window of tokens, and compressed entries.

One vector a token is key and value of every head. A compressor makes an entry of each closed window
of `rate` tokens. The entry is the sum of the tokens' values, weighted by a softmax of their gates.
With overlap, the sum includes the tokens of the preceding window. They have a second series of
values and gates for this. A row at position p sees the entries of windows that end at p or before.
In a sparse layer it sees only the entries that the indexer scores highest. The indexer is a small
compressor with its own queries.

Compressors run over a stream of tokens, but here they keep no running buffer. Each token's values
and gates are stored at the token's cache slot. The row that closes a window computes its entry from
the cache slots of the window's tokens. It stores the entry in the block of the last token. So a
rejection needs no rollback. Rows past seq_lens are overwritten before a window is closed over them
again. An entry made of them is overwritten by the row that closes its window, before any row sees
it. (vLLM keeps the buffers as separate state, #41162.)

The compressors and attention itself are plain jnp: no kernels exist for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.cache.arrays import (
    PAD_SLOT,
    CompressedCache,
    CompressorCache,
    entries_a_block,
    write_rows,
)
from jaxspec.cache.metadata import AttentionMetadata
from jaxspec.config import REFERENCE_OPS, CompressedAttentionConfig, RopeConfig
from jaxspec.layers.context import Pass
from jaxspec.layers.norms import rms_norm
from jaxspec.layers.params import AssembledSpec, Params, ParamSpec, matrix, projection, vector
from jaxspec.layers.products import linear, project, project_part
from jaxspec.layers.rope import RopeTables, rope_tables
from jaxspec.layers.sums import sum_of_devices
from pallas_kernels.dtypes import wider

_MASKED = -1e30  # finite, so that a row that sees nothing (an idle request) stays free of NaN


def compressed_attention_specs(
    prefix: str, cfg: CompressedAttentionConfig, kind: str, hidden_size: int
) -> dict[str, Any]:
    """Return the weights of a layer of this kind under `prefix` ("...attn")."""
    heads, width = cfg.num_heads, cfg.head_dim
    group_in, group_out = heads * width // cfg.o_groups, cfg.o_groups * cfg.o_lora_rank
    o_a = f"{prefix}.wo_a.weight"
    specs: dict[str, Any] = {
        "q_a_proj": projection(
            f"{prefix}.wq_a.weight", hidden_size, cfg.q_lora_rank, ("embed", None)
        ),
        "q_a_norm": vector(f"{prefix}.q_norm.weight", cfg.q_lora_rank),
        "q_b_proj": projection(
            f"{prefix}.wq_b.weight", cfg.q_lora_rank, heads * width, (None, "heads")
        ),
        "kv_proj": projection(f"{prefix}.wkv.weight", hidden_size, width, ("embed", None)),
        "kv_norm": vector(f"{prefix}.kv_norm.weight", width),
        "sinks": ParamSpec(f"{prefix}.attn_sink", (heads,), ("heads",), dtype="float32"),
        "o_a_proj": AssembledSpec(
            o_a,
            (cfg.o_groups, group_in, cfg.o_lora_rank),
            ("heads", None, None),
            sources=((o_a, (group_out, group_in)),),
            build=partial(_by_group, groups=cfg.o_groups),
        ),
        "o_b_proj": projection(
            f"{prefix}.wo_b.weight", group_out, hidden_size, ("head_out", "embed")
        ),
    }
    rate, sparse = cfg.rate(kind), kind == "compressed_sparse_attention"
    if rate is not None:
        specs["compressor"] = _compressor_specs(
            f"{prefix}.compressor", rate, width, 2 if sparse else 1, hidden_size
        )
    if sparse:
        assert rate is not None
        index_width = cfg.index_heads * cfg.index_head_dim
        specs["indexer"] = {
            "compressor": _compressor_specs(
                f"{prefix}.indexer.compressor", rate, cfg.index_head_dim, 2, hidden_size
            ),
            "q_b_proj": projection(
                f"{prefix}.indexer.wq_b.weight", cfg.q_lora_rank, index_width, (None, None)
            ),
            "weights_proj": matrix(
                f"{prefix}.indexer.weights_proj.weight",
                hidden_size,
                cfg.index_heads,
                ("embed", None),
            ),
        }
    return specs


def _compressor_specs(
    prefix: str, rate: int, width: int, series: int, hidden_size: int
) -> dict[str, ParamSpec]:
    return {
        "kv_proj": matrix(f"{prefix}.wkv.weight", hidden_size, series * width, ("embed", None)),
        "gate_proj": matrix(f"{prefix}.wgate.weight", hidden_size, series * width, ("embed", None)),
        "position_bias": ParamSpec(
            f"{prefix}.ape", (rate, series * width), (None, None), dtype="float32"
        ),
        "norm": vector(f"{prefix}.norm.weight", width),
    }


def _by_group(arrays: Sequence[np.ndarray], *, groups: int) -> np.ndarray:
    """Turn [groups * rank, in] into [groups, in, rank]."""
    (array,) = arrays
    return array.reshape(groups, -1, array.shape[1]).swapaxes(1, 2)


def compressed_attention(
    params: Params,
    cfg: CompressedAttentionConfig,
    kind: str,
    x: jax.Array,
    cache: CompressedCache,
    pass_: Pass,
    *,
    group: int,
) -> tuple[jax.Array, CompressedCache]:
    """Run attention on the normed x [batch, rows, D].

    Returns the output [batch, rows, D], and the cache with these rows written.

    The pass's rope tables are those of rope_head_dim and of the layer's kind. Its rows are
    consecutive.

    group: index of the layer's KV-cache group in the pass's metadata
    """
    assert pass_.rope is not None
    ops, rope, metadata = pass_.ops, pass_.rope, pass_.metadata[group]
    batch, rows, _ = x.shape
    q_latent = rms_norm(
        project(x, (params["q_a_proj"],), ops), params["q_a_norm"], cfg.rms_norm_eps, ops
    )
    q = project(q_latent, (params["q_b_proj"],), ops).reshape(
        batch, rows, cfg.num_heads, cfg.head_dim
    )
    q = rotate_pairs(_unit_rms(q, cfg.rms_norm_eps), rope)
    kv = rms_norm(linear(x, params["kv_proj"]), params["kv_norm"], cfg.rms_norm_eps, REFERENCE_OPS)
    kv = kv.astype(wider(kv.dtype, cache.kv.dtype))  # rounded once, to the cache's dtype
    pool = write_rows(cache.kv, rotate_pairs(kv[:, :, None], rope), metadata.slot_mapping)
    parts = [window_keys(pool, metadata, cfg.sliding_window)]

    compressor = indexer = None
    if cache.compressor is not None:
        rate = cfg.rate(kind)
        assert rate is not None
        compressor = compress(
            params["compressor"], cfg.compressed_rope, rate, x, metadata, cache.compressor, cfg
        )
        slots, visible = entry_slots(metadata, pool.shape[1], rate)
        if cache.indexer is not None:
            indexer = compress(
                params["indexer"]["compressor"],
                cfg.compressed_rope,
                rate,
                x,
                metadata,
                cache.indexer,
                cfg,
            )
            scores = index_scores(
                params["indexer"], cfg, x, q_latent, rope, _rows_at(indexer.entries, slots)
            )
            slots, visible = choose(scores, slots, visible, cfg.index_top_k)
        parts.append((_rows_at(compressor.entries, slots), visible))

    attended = rotate_pairs(
        attend(q, parts, params["sinks"], cfg.head_dim**-0.5), (rope[0], -rope[1])
    )  # values were rotated, as keys
    grouped = attended.reshape(batch, rows, cfg.o_groups, -1)
    low = jnp.einsum(
        "brgi,gio->brgo", grouped, params["o_a_proj"], preferred_element_type=jnp.float32
    ).astype(x.dtype)
    out = project_part(low.reshape(batch, rows, -1), params["o_b_proj"], ops)
    out = sum_of_devices(out, ops.layers, ops).astype(x.dtype)
    return out, CompressedCache(pool, compressor, indexer)


def rotate_pairs(x: jax.Array, tables: RopeTables) -> jax.Array:
    """Rotate the last dimensions of x [batch, rows, heads, width], in float32.

    It rotates as many dimensions as the tables have, in pairs (0, 1), (2, 3), ...
    """
    cos, sin = tables
    plain, rotated = jnp.split(x, [x.shape[-1] - 2 * cos.shape[-1]], axis=-1)
    even, odd = (rotated[..., i::2].astype(jnp.float32) for i in (0, 1))
    pairs = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return jnp.concatenate([plain, pairs.reshape(rotated.shape).astype(x.dtype)], axis=-1)


def _unit_rms(x: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)).astype(
        x.dtype
    )


def _token_slots(metadata: AttentionMetadata, positions: jax.Array, block_size: int) -> jax.Array:
    """Return the cache slots int32 of positions [batch, ...].

    A position outside the block table gets the cache slot of another token.
    """
    table = metadata.block_table
    page = jnp.clip(positions // block_size, 0, table.shape[1] - 1)
    blocks = jnp.take_along_axis(table, page.reshape(table.shape[0], -1), axis=1).reshape(
        positions.shape
    )
    return blocks * block_size + positions % block_size


def _rows_at(pool: jax.Array, slots: jax.Array) -> jax.Array:
    """Gather [..., width] from a pool [num_blocks, rows a block, 1, width] at cache slots [...]."""
    return pool.reshape(-1, pool.shape[-1])[slots]


def window_keys(
    pool: jax.Array, metadata: AttentionMetadata, window: int
) -> tuple[jax.Array, jax.Array]:
    """Return the keys of all rows' windows, and their visibility.

    Returns the keys [batch, keys, width] of the tokens in any row's window, and
    bool [batch, rows, keys], whether a row sees a key. There are rows + window - 1 keys.
    """
    positions = metadata.positions
    key = (
        positions[:, :1] - window + 1 + jnp.arange(positions.shape[1] + window - 1, dtype=jnp.int32)
    )
    first = jnp.maximum(metadata.window_start, positions - window + 1)[..., None]
    key_of_row = key[:, None]
    visible = (
        (key_of_row >= first)
        & (key_of_row <= positions[..., None])
        & (key_of_row < metadata.seq_lens[:, None, None])
    )
    return _rows_at(pool, _token_slots(metadata, key, pool.shape[1])), visible


def compress(
    params: Params,
    rope: RopeConfig,
    rate: int,
    x: jax.Array,
    metadata: AttentionMetadata,
    cache: CompressorCache,
    cfg: CompressedAttentionConfig,
) -> CompressorCache:
    """Write the values and gates of rows x [batch, rows, D] into the cache.

    The windows that these rows close get their entries too. Returns the cache with both.
    """
    positions, block_size, width = (
        metadata.positions,
        cache.inputs.shape[1],
        cache.entries.shape[-1],
    )
    values, gates = (
        jnp.matmul(x, params[name], preferred_element_type=jnp.float32)
        for name in ("kv_proj", "gate_proj")
    )
    gates = gates + params["position_bias"][positions % rate]
    inputs = write_rows(
        cache.inputs, jnp.concatenate([values, gates], axis=-1)[:, :, None], metadata.slot_mapping
    )

    # Consecutive rows close at most this many windows, from the window of the first row on.
    window = positions[:, :1] // rate + jnp.arange(-(-x.shape[1] // rate), dtype=jnp.int32)
    series = values.shape[-1] // width
    # [batch, windows, tokens of one window]
    token = window[..., None] * rate + jnp.arange(-(series - 1) * rate, rate, dtype=jnp.int32)
    members = _rows_at(inputs, _token_slots(metadata, token, block_size))
    values, gates = (_of_series(part, rate) for part in jnp.split(members, 2, axis=-1))
    before = (token < 0)[..., None]  # no window precedes the first one
    weights = jax.nn.softmax(jnp.where(before, -jnp.inf, gates), axis=2)
    entry = jnp.sum(jnp.where(before, 0.0, weights * values), axis=2, keepdims=True)
    entry = rms_norm(
        entry.astype(wider(x.dtype, cache.entries.dtype)),
        params["norm"],
        cfg.rms_norm_eps,
        REFERENCE_OPS,
    )
    entry = rotate_pairs(entry, rope_tables(rope, cfg.rope_head_dim, window * rate))
    return CompressorCache(
        inputs, write_rows(cache.entries, entry, _closing_slots(metadata, window, rate, block_size))
    )


def _of_series(part: jax.Array, rate: int) -> jax.Array:
    """Select from [batch, windows, tokens, series * width] the series that each token contributes.

    The last `rate` tokens are the window's own and contribute their last series. The tokens of the
    window before contribute their first.
    """
    width = part.shape[-1] * rate // part.shape[2]
    return jnp.concatenate([part[:, :, :-rate, :width], part[:, :, -rate:, -width:]], axis=2)


def _closing_slots(
    metadata: AttentionMetadata, window: jax.Array, rate: int, block_size: int
) -> jax.Array:
    """Return the cache slots of the entries of windows [batch, windows].

    The cache slot is PAD_SLOT unless a row that writes is the window's last token.
    """
    row = window * rate + rate - 1 - metadata.positions[:, :1]
    num_rows = metadata.positions.shape[1]
    slot = jnp.take_along_axis(metadata.slot_mapping, jnp.minimum(row, num_rows - 1), axis=1)
    closes = (row < num_rows) & (slot != PAD_SLOT)
    return jnp.where(closes, _entry_slot(slot, rate, block_size), PAD_SLOT)


def _entry_slot(token_slot: jax.Array, rate: int, block_size: int) -> jax.Array:
    """Return the cache slot of an entry, given that of its last token."""
    return (
        token_slot // block_size * entries_a_block(block_size, rate)
        + token_slot % block_size // rate
    )


def entry_slots(
    metadata: AttentionMetadata, block_size: int, rate: int
) -> tuple[jax.Array, jax.Array]:
    """Return the cache slots of all entries that a block table has room for, and their visibility.

    Returns cache slots int32 [batch, entries], and bool [batch, rows, entries], whether a row sees
    an entry.
    """
    batch, pages = metadata.block_table.shape
    last = jnp.arange(1, max(1, pages * block_size // rate) + 1, dtype=jnp.int32) * rate - 1
    slots = _entry_slot(
        _token_slots(metadata, jnp.broadcast_to(last, (batch, last.shape[0])), block_size),
        rate,
        block_size,
    )
    return slots, (last <= metadata.positions[..., None]) & (
        last < metadata.seq_lens[:, None, None]
    )


def index_scores(
    params: Params,
    cfg: CompressedAttentionConfig,
    x: jax.Array,
    q_latent: jax.Array,
    rope: RopeTables,
    keys: jax.Array,
) -> jax.Array:
    """Return the indexer's scores, float32 [batch, rows, entries].

    keys: [batch, entries, index_head_dim]
    """
    q = linear(q_latent, params["q_b_proj"]).reshape(
        *x.shape[:2], cfg.index_heads, cfg.index_head_dim
    )
    dtype = wider(q.dtype, keys.dtype)
    scores = jnp.einsum(
        "brhd,bnd->brhn",
        rotate_pairs(q, rope).astype(dtype),
        keys.astype(dtype),
        preferred_element_type=jnp.float32,
    )
    weights = jnp.matmul(x, params["weights_proj"], preferred_element_type=jnp.float32)
    scale = (cfg.index_head_dim * cfg.index_heads) ** -0.5
    return jnp.einsum("brhn,brh->brn", jax.nn.relu(scores), weights * scale)


def choose(
    scores: jax.Array, slots: jax.Array, visible: jax.Array, top_k: int
) -> tuple[jax.Array, jax.Array]:
    """Choose for each row the k visible entries with the highest scores.

    Returns their cache slots [batch, rows, k], and whether the row sees them.
    """
    _, chosen = lax.top_k(jnp.where(visible, scores, -jnp.inf), min(top_k, scores.shape[-1]))
    of_row = jnp.broadcast_to(slots[:, None], scores.shape)
    return jnp.take_along_axis(of_row, chosen, axis=-1), jnp.take_along_axis(
        visible, chosen, axis=-1
    )


def attend(
    q: jax.Array, parts: Sequence[tuple[jax.Array, jax.Array]], sinks: jax.Array, scale: float
) -> jax.Array:
    """Attend with q [batch, rows, heads, width] over several parts together.

    The softmax is float32 and has one sink per head. Products take operands of the wider of the
    queries' and the cache's dtypes.

    parts: pairs (keys, visible). The keys are the values too: [batch, n, width] for all rows, or
        [batch, rows, n, width]. visible is bool [batch, rows, n], whether a row sees a key.
    """
    dtype = wider(q.dtype, parts[0][0].dtype)
    parts = [(keys.astype(dtype), visible) for keys, visible in parts]
    wide, scores = q.astype(dtype), []
    for keys, visible in parts:
        shared = "bnd" if keys.ndim == 3 else "brnd"
        part = jnp.einsum(f"brhd,{shared}->brhn", wide, keys, preferred_element_type=jnp.float32)
        part = part * scale
        scores.append(jnp.where(visible[:, :, None], part, _MASKED))
    scores.append(jnp.broadcast_to(sinks[:, None], (*q.shape[:3], 1)))
    weights = jnp.split(
        jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1),
        np.cumsum([s.shape[-1] for s in scores[:-1]]),
        axis=-1,
    )
    out = jnp.zeros(q.shape, jnp.float32)
    for (keys, visible), part in zip(parts, weights, strict=False):  # the sink has no value
        shared, seen = ("bnd", visible.any(axis=1)) if keys.ndim == 3 else ("brnd", visible)
        # Cache slots never written may hold NaN, and 0 * NaN is NaN.
        keys = jnp.where(seen[..., None], keys, jnp.zeros((), keys.dtype))
        out = out + jnp.einsum(
            f"brhn,{shared}->brhd",
            part.astype(dtype),
            keys,
            preferred_element_type=jnp.float32,
        )
    return out.astype(q.dtype)
