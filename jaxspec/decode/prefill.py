"""Prefill: chunks of prompts through target and draft together.

It also samples the first token of a request whose prompt ends in the chunk.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxspec import drafts, models
from jaxspec.cache.arrays import KVCache
from jaxspec.cache.metadata import PREFILL_METADATA_OPS, BlockTables, build_metadata
from jaxspec.config import AttentionConfig, RoundConfig
from jaxspec.decode.fallback import prefill_text
from jaxspec.decode.round import advance
from jaxspec.decode.state import DecodeState
from jaxspec.decode.verify import Verification
from jaxspec.drafts.drafter import PromptChunk
from jaxspec.layers.context import Pass
from jaxspec.layers.moe import moe_of
from jaxspec.layers.params import Params
from jaxspec.layers.products import pick_row
from jaxspec.sampling.logits import process_target_logits
from jaxspec.sampling.logprobs import score_hidden, score_tokens
from jaxspec.sampling.processors.processor import Window
from jaxspec.sampling.state import gumbel_noise, sample

OVERLAPPED_ROWS = 2048  # of a chunk that is halved; 4,128 are measured


def prefill(
    cfg: RoundConfig,
    params: Params,
    state: DecodeState,
    block_tables: BlockTables,
    chunk: PromptChunk,
) -> tuple[Verification, DecodeState]:
    """Run one chunk of each request's prompt through target and draft together.

    block_tables: int32 [batch, pages] of each of cfg.cache_groups. A request with no tokens in the
    chunk does not change.

    Returns the first token of each request whose prompt ends in the chunk (num_sampled 1), and the
    state. A preempted request (num_generated above 0) has all its tokens but the last for a prompt.
    The last is its next_token, and nothing is sampled (num_sampled 0).
    """
    # Few rows of a prompt are computed as many are (jaxspec.layers: sums.partial_dtype, products).
    cfg = replace(cfg, ops=replace(cfg.ops, is_prefill=True))
    family, ends = models.family(cfg.target), chunk.ends
    is_in_chunk = chunk.num_tokens > 0
    seq_lens = jnp.where(is_in_chunk, chunk.start + chunk.num_tokens, state.seq_lens)
    out = _target_pass(cfg, params["target"], state.target_caches, block_tables, chunk)

    def logits_of(hidden: jax.Array) -> jax.Array:
        return family.logits(params["target"], cfg.target, hidden, cfg.ops)

    raw = logits_of(pick_row(out.hidden, chunk.last_row))
    shards = cfg.vocab_shards
    vocab = shards.piece(cfg.target.vocab_size)  # the tokens of a device
    logits = process_target_logits(cfg, raw, state.sampling, Window(seq_lens, shards=shards))
    noise = None
    if cfg.sampled:
        noise = gumbel_noise(state.sampling.keys, "sample", seq_lens, 0, vocab, shards)
    is_new = state.num_generated == 0
    first = sample(logits[:, 0], noise, state.sampling.greedy, shards)
    first = jnp.where(is_new, first, state.next_token)
    samples = ends & is_new
    verification = Verification(
        jnp.where(samples, first, -1)[:, None],
        samples.astype(jnp.int32),
        # NaN is not below infinity either.
        overflowed=samples & shards.any(~jnp.all(raw < jnp.inf, axis=(1, 2))),
    )
    if cfg.logprobs:
        scores = score_tokens(raw, verification.output_tokens, shards, everything=cfg.all_logprobs)
        verification = replace(verification, logprobs=scores)
    if cfg.prompt_logprobs:
        scores = score_hidden(logits_of, vocab, out.hidden, chunk.following, shards)
        verification = replace(verification, prompt_logprobs=scores)
    draft = state.draft
    if cfg.draft is not None:
        tables = cfg.draft_tables(block_tables)
        drafter = drafts.drafter(cfg.draft)
        draft = drafter.prefill(cfg, params["draft"], draft, tables, chunk, first, out)
    if cfg.fallback is not None:
        state = prefill_text(cfg, state, block_tables, chunk, first, out)
    state = replace(
        state,
        seq_lens=seq_lens,
        target_caches=out.caches,
        draft=draft,
        active=state.active | ends,
    )
    return verification, advance(cfg, state, verification)


def _target_pass(
    cfg: RoundConfig,
    target: Params,
    caches: KVCache,
    block_tables: BlockTables,
    chunk: PromptChunk,
) -> models.TargetOutput:
    """Run the target over the chunk's tiles, in parts whose exchanges hide behind each other."""
    tables, outputs, parts = cfg.target_tables(block_tables), [], _parts(cfg, chunk)
    ops = replace(cfg.ops, in_halves=len(parts) > 1)
    for part in parts:
        own_tables, own = jax.tree.map(lambda array, part=part: array[part], (tables, chunk))
        metadata = build_metadata(
            cfg.target_groups,
            own_tables,
            own.start,
            own.num_tokens,
            own.tokens.shape[1],
            attention=cfg.target.attention,
            ops=PREFILL_METADATA_OPS,
        )
        out = models.family(cfg.target).forward(
            target,
            cfg.target,
            own.tokens,
            Pass(metadata, ops),
            caches,
            aux_layers=cfg.draft.aux_layers if cfg.draft else (),
        )
        caches = out.caches
        outputs.append(out)
    if len(outputs) == 1:
        return outputs[0]
    hidden, aux = zip(*((out.hidden, out.aux) for out in outputs), strict=True)
    joined = None if aux[0] is None else jnp.concatenate(aux)
    return models.TargetOutput(jnp.concatenate(hidden), joined, caches)


def _parts(cfg: RoundConfig, chunk: PromptChunk) -> tuple[slice, ...]:
    """Return the tiles of each part of a chunk: two halves on several devices, if rows are many.

    XLA exchanges the sums of many rows. While it exchanges those of one half, the devices compute
    the other half. A later tile of a prompt reads the cache that an earlier one writes, so halves
    follow the order of the tiles. They have the same shape: a row's products do not depend on its
    half. Experts stay whole, since they multiply blocks of rows, which halves would fill less. So
    do other kinds of attention than `attend_qkv`, which waits for a cache's reader.
    """
    tiles, rows = chunk.tokens.shape
    few = tiles % 2 or tiles * rows < OVERLAPPED_ROWS
    is_dense = type(cfg.target.attention) is AttentionConfig and moe_of(cfg.target) is None
    if few or cfg.ops.layers.size == 1 or not is_dense:
        return (slice(None),)
    return slice(0, tiles // 2), slice(tiles // 2, tiles)
