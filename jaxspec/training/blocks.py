"""DFlash's and DSpark's pass over a block, for many anchors of a row at once.

A block begins at an anchor, a row of the text whose token is known. Its rows read [the anchor's
token, mask, mask, ...] at the anchor's position and on. They see keys and values of the context,
made of the target's hidden states before the anchor, and those of their own block. That is what a
round runs (jaxspec.drafts.block), so weights trained here run in propose unchanged.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.config import REFERENCE_OPS, AttentionConfig
from jaxspec.drafts import dflash
from jaxspec.drafts.dflash import DFlashConfig
from jaxspec.layers.mlp import add_mlp
from jaxspec.layers.norms import rms_norm
from jaxspec.layers.params import Params
from jaxspec.layers.products import linear
from jaxspec.layers.rope import rope_tables
from jaxspec.training.step_attention import StepKeys, project_qkv

_MASKED = -1e30
# Blocks whose scores are in memory together: 64 of 8 rows over 8,192 keys are 150 MB with 9 heads.
BLOCKS_PER_TILE = 64


class Blocks(NamedTuple):
    """The places of a batch's blocks.

    anchors: int32 [batch, blocks], the row that each begins at; any row for a block that is unused
    starts:  int32 [batch, blocks], the row that the anchor's document begins at
    """

    anchors: jax.Array
    starts: jax.Array


def forward_blocks(
    params: Params, cfg: DFlashConfig, tokens: jax.Array, aux: jax.Array, blocks: Blocks
) -> jax.Array:
    """Return the head's inputs of the rows that draft, [batch, blocks, block_capacity, D].

    tokens: int32 [batch, rows]. aux: [batch, rows, len(aux_layers) * target_hidden]

    Draft k of a block predicts the token k + 1 rows after its anchor. Positions are rows: a
    rotation knows only distances.
    """
    batch, rows = tokens.shape
    size = cfg.draft_block_size
    context = dflash.fuse(params, cfg, aux, REFERENCE_OPS)
    known = jnp.take_along_axis(tokens, blocks.anchors, axis=1)
    masks = jnp.full((*known.shape, size - 1), cfg.mask_token_id, jnp.int32)
    block_tokens = jnp.concatenate([known[..., None], masks], axis=-1)
    x = params["embed_tokens"][block_tokens.reshape(batch, -1)].astype(context.dtype)
    positions = blocks.anchors[..., None] + jnp.arange(size, dtype=jnp.int32)
    attention = cfg.attention
    rope = rope_tables(attention.rope, attention.head_dim, positions.reshape(batch, -1))
    of_rows = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), tokens.shape)
    context_rope = rope_tables(attention.rope, attention.head_dim, of_rows)
    for i, layer in enumerate(params["layers"]):
        with jax.named_scope(f"layer_{i}"):
            weights = layer["self_attn"]
            # The queries of the context are not used, and the compiler drops them.
            _, *of_context = project_qkv(weights, attention, context, context_rope)
            normed = rms_norm(x, layer["input_layernorm"], cfg.rms_norm_eps, REFERENCE_OPS)
            q, k, v = project_qkv(weights, attention, normed, rope)
            heads = _attend(cfg, i, q, StepKeys(k, v), StepKeys(*of_context), blocks)
            x = x + linear(heads, weights["o_proj"], weights.get("o_bias"))
            x = add_mlp(layer, cfg.rms_norm_eps, x, REFERENCE_OPS).x
    hidden = rms_norm(x, params["norm"], cfg.rms_norm_eps, REFERENCE_OPS)
    return hidden.reshape(batch, -1, size, hidden.shape[-1])[:, :, size - cfg.block_capacity :]


def visible(cfg: DFlashConfig, layer: int, blocks: Blocks, rows: int) -> jax.Array:
    """Return which keys the rows of each block see, bool [batch, blocks, size, rows + size].

    The keys are those of the context's rows, then those of the block's own.
    """
    seen = cfg.visibility[cfg.group_of_layer[layer]]
    window, size = cfg.windows[layer], cfg.draft_block_size
    own = jnp.arange(size, dtype=jnp.int32)
    anchors, starts = blocks.anchors[..., None, None], blocks.starts[..., None, None]
    position = anchors + own[:, None]  # [batch, blocks, size, 1]
    context = jnp.arange(rows, dtype=jnp.int32)
    in_context = (context >= starts) & (context < anchors)
    in_block = jnp.broadcast_to(
        own <= own[:, None] if seen.causal else True, (*blocks.anchors.shape, size, size)
    )
    if window is not None and seen.one_window:
        in_context = in_context & (context >= anchors - window)
    elif window is not None:
        in_context = in_context & (context > position - window)
        in_block = in_block & (own > own[:, None] - window)
    in_context = jnp.broadcast_to(in_context, (*blocks.anchors.shape, size, rows))
    return jnp.concatenate([in_context, in_block], axis=-1)


def _attend(
    cfg: DFlashConfig,
    layer: int,
    q: jax.Array,
    own: StepKeys,
    context: StepKeys,
    blocks: Blocks,
) -> jax.Array:
    """Attend from q [batch, blocks * size, heads, head_dim], a tile of blocks after the other.

    own has the blocks' rows, context the text's. Returns [batch, blocks * size, heads * head_dim].
    The backward pass makes a tile's scores again.
    """
    batch, count = blocks.anchors.shape
    size, attention = cfg.draft_block_size, cfg.attention
    tile = min(BLOCKS_PER_TILE, count)
    missing = -count % tile

    def tiles(x: jax.Array) -> jax.Array:
        """[batch, blocks, ...] -> [tiles, batch, tile, ...]"""
        x = jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, -1, tile, *x.shape[2:]), 1, 0)

    def in_blocks(x: jax.Array) -> jax.Array:
        return tiles(x.reshape(batch, count, size, *x.shape[2:]))

    @jax.checkpoint
    def attend_tile(of_tile: tuple[jax.Array, StepKeys, Blocks]) -> jax.Array:
        q, own, blocks = of_tile
        seen = visible(cfg, layer, blocks, context.k.shape[1])
        return block_attention(attention, q, own, context, seen)

    given = in_blocks(q), StepKeys(*map(in_blocks, own)), Blocks(*map(tiles, blocks))
    if missing or count > tile:
        out = jax.lax.map(attend_tile, given)
    else:
        out = attend_tile(jax.tree.map(lambda x: x[0], given))[None]
    out = jnp.moveaxis(out, 0, 1).reshape(batch, -1, size, attention.num_heads * attention.head_dim)
    return out[:, :count].reshape(batch, count * size, -1)


def block_attention(
    cfg: AttentionConfig, q: jax.Array, own: StepKeys, context: StepKeys, seen: jax.Array
) -> jax.Array:
    """Attend over a context and the own keys of each block.

    q:       [batch, blocks, size, heads, head_dim]
    own:     [batch, blocks, size, kv_heads, head_dim]
    context: [batch, rows, kv_heads, head_dim], which all blocks of a row share
    seen:    bool [batch, blocks, size, rows + size]

    Returns [batch, blocks, size, heads * head_dim]. The softmax is float32.
    """
    grouped = q.reshape(*q.shape[:3], cfg.num_kv_heads, -1, cfg.head_dim)

    def product(labels: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(labels, a, b, preferred_element_type=jnp.float32)

    scores = jnp.concatenate(
        [
            product("bnshgd,brhd->bnhgsr", grouped, context.k),
            product("bnshgd,bnrhd->bnhgsr", grouped, own.k),
        ],
        axis=-1,
    )
    scores = jnp.where(seen[:, :, None, None], scores * cfg.head_dim**-0.5, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    rows = context.k.shape[1]
    out = product("bnhgsr,brhd->bnshgd", weights[..., :rows], context.v)
    out = out + product("bnhgsr,bnrhd->bnshgd", weights[..., rows:], own.v)
    return out.reshape(*q.shape[:3], -1).astype(q.dtype)
