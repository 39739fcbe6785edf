"""jaxspec driven from numpy: a paged target, and a draft step by step or through propose, over
shuffled block tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import drafts, models
from jaxspec.cache.arrays import KVCache, init_cache
from jaxspec.cache.metadata import build_metadata
from jaxspec.config import REFERENCE_OPS, CacheGroup, RoundConfig, SpeculativeConfig
from jaxspec.drafts import DraftConfig
from jaxspec.drafts.autoregressive import DraftInputs, Proposal, draft_step, propose
from jaxspec.drafts.drafter import DraftContext, Observation, PromptChunk
from jaxspec.drafts.families import layered, step_family
from jaxspec.layers.context import Pass
from jaxspec.layers.params import Params, Weight
from jaxspec.loading.model import load_draft
from jaxspec.sampling.state import SamplingState

MAX_MODEL_LEN = 128


def shuffled_block_table(
    batch: int, block_size: int, seed: int = 0, max_model_len: int = MAX_MODEL_LEN
) -> np.ndarray:
    """int32 [batch, pages]: every block is some request's, in no order."""
    pages = -(-max_model_len // block_size)
    return (
        np.random.default_rng(seed)
        .permutation(batch * pages)
        .reshape(batch, pages)
        .astype(np.int32)
    )


# --- target
# --------------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames=("cfg", "groups", "aux_layers"))
def _target_pass(
    params: Params,
    cfg: Any,
    groups: Any,
    aux_layers: tuple[int, ...],
    table: Any,
    tokens: Any,
    start: Any,
    num: Any,
    caches: Any,
) -> Any:
    metadata = _metadata(cfg, groups, table, start, num, tokens.shape[1])
    family = models.family(cfg)
    pass_ = Pass(metadata, REFERENCE_OPS)
    out = family.forward(params, cfg, tokens, pass_, caches, aux_layers=aux_layers)
    return family.logits(params, cfg, out.hidden, REFERENCE_OPS), out.hidden, out.aux, out.caches


def _metadata(cfg: Any, groups: Any, table: Any, start: Any, num: Any, rows: int) -> Any:
    """Metadata over one block table that serves every group."""
    tables = (table,) * len(groups)
    return build_metadata(
        groups, tables, start, num, rows, attention=cfg.attention, ops=REFERENCE_OPS
    )


class PagedTarget:
    """A target and its cache; `feed` runs some rows of each request and keeps what comes out, by
    position."""

    def __init__(
        self,
        cfg: models.TargetConfig,
        params: Params,
        batch: int,
        block_size: int,
        aux_layers: tuple[int, ...] = (),
    ) -> None:
        self.cfg, self.params, self.aux_layers = cfg, params, aux_layers
        self.groups = cfg.cache_groups(block_size, MAX_MODEL_LEN)
        self.table = shuffled_block_table(batch, block_size)
        self.caches = init_cache(
            cfg.attention,
            (self.table.size,) * cfg.num_layers,
            block_size,
            params["embed_tokens"].dtype,
        )
        self.logits, self.hidden, self.aux = ([{} for _ in range(batch)] for _ in range(3))

    def feed(self, rows: int, start: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """tokens: those of each request from position start on, at most `rows` of them; none for an
        idle request."""
        num = np.array([len(t) for t in tokens], np.int32)
        padded = np.array([[*t, *[1] * (rows - len(t))] for t in tokens], np.int32)
        args = (self.table, padded, np.asarray(start, np.int32), num, self.caches)
        logits, hidden, aux, self.caches = _target_pass(
            self.params, self.cfg, self.groups, self.aux_layers, *args
        )
        for i, first in enumerate(start):
            for row in range(num[i]):
                self.logits[i][first + row] = np.asarray(logits[i, row])
                self.hidden[i][first + row] = np.asarray(hidden[i, row])
                if aux is not None:
                    self.aux[i][first + row] = np.asarray(aux[i, row])

    def prefill(self, prompts: Sequence[Sequence[int]], chunk: int) -> None:
        """A request whose prompt has ended idles from position 0 on: were its masked rows written,
        they would fall on its prompt."""
        for first in range(0, max(map(len, prompts)), chunk):
            self.feed(
                chunk,
                [first if first < len(p) else 0 for p in prompts],
                [p[first : first + chunk] for p in prompts],
            )


def by_position(rows: dict[int, np.ndarray]) -> np.ndarray:
    """[T, ...] from what PagedTarget kept of one request."""
    return np.stack([rows[p] for p in sorted(rows)])


# --- draft
# --------------------------------------------------------------------------------------------------

TARGET = models.config_from_hf(
    dict(
        model_type="llama",
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
)


def shared_weights(seed: int = 7) -> Params:
    """The two arrays that a draft takes from TARGET; heads that bring their own must not read
    them."""
    rng = np.random.default_rng(seed)
    embed = rng.normal(size=(TARGET.vocab_size, TARGET.hidden_size)).astype(np.float32)
    head = (rng.normal(size=(TARGET.hidden_size, TARGET.vocab_size)) / 8).astype(np.float32)
    return {"embed_tokens": jnp.asarray(embed), "lm_head": Weight(jnp.asarray(head))}


def load(
    folder: Path,
    method: str | None = "eagle3",
    *,
    shared: Params | None = None,
    dtype: Any = jnp.float32,
    target: Any = TARGET,
    **overrides: Any,
) -> tuple[Any, Params]:
    """The draft in a folder for TARGET, with its method's own config."""
    return load_draft(
        folder,
        target,
        shared if shared is not None else shared_weights(),
        SpeculativeConfig(method=method, **overrides),
        dtype,
    )


class PagedDraft:
    """A draft whose cache holds the first rows of each request, the rest pending: what a round
    starts from.

    hidden: float32 [T, W] of each request, the target's hidden states of positions 0 .. T-1;
        tokens: [T], the one after each position;
    num_pending: how many of the last rows the draft has not consumed, at most K + 1.
    """

    def __init__(
        self,
        cfg: DraftConfig,
        params: Params,
        hidden: Sequence[np.ndarray],
        tokens: Sequence[np.ndarray],
        num_pending: Sequence[int],
        K: int,
        block_size: int = 4,
        dtype: Any = jnp.float32,
        target: Any = TARGET,
    ) -> None:
        batch = len(hidden)
        self.params = params
        self.cfg = RoundConfig.for_models(
            target,
            cfg,
            ops=REFERENCE_OPS,
            block_size=block_size,
            max_model_len=MAX_MODEL_LEN,
            num_speculative_tokens=K,
            draft_sampling="greedy",
        )
        groups = self.cfg.draft_groups
        lens = np.array([len(t) for t in tokens], np.int32)
        pending = np.asarray(num_pending, np.int32)
        width = int(max(lens - pending))
        table = shuffled_block_table(batch, block_size, seed=1)
        caches = init_cache(cfg.attention, (table.size,) * cfg.num_layers, block_size, dtype)
        if width:
            rows = [
                (h[: n - p], t[: n - p])
                for h, t, n, p in zip(hidden, tokens, lens, pending, strict=True)
            ]
            caches = _consume(
                params,
                cfg,
                groups,
                table,
                _pad([t for _, t in rows], width),
                _pad([h for h, _ in rows], width),
                lens - pending,
                caches,
            )
        self.caches: KVCache = caches
        tails = [
            (h[n - p :], t[n - p :])
            for h, t, n, p in zip(hidden, tokens, lens, pending, strict=True)
        ]
        self.inputs = DraftInputs(
            seq_lens=jnp.asarray(lens),
            pending_tokens=jnp.asarray(_pad([t for _, t in tails], K + 1)),
            pending_hidden=jnp.asarray(_pad([h for h, _ in tails], K + 1)).astype(dtype),
            num_pending=jnp.asarray(pending),
            block_tables=(jnp.asarray(table),) * len(groups),
            sampling=greedy_sampling(batch),
        )

    def propose(self) -> Proposal:
        """The compiled propose, over poisoned buffers: what no step writes stays NaN or -7.
        (Greedy: noise is slow to compile.)"""
        batch, K = self.inputs.num_pending.shape[0], self.cfg.num_speculative_tokens
        logits = jnp.full(
            (batch, K, layered(self.cfg.draft).draft_vocab_size), jnp.nan, jnp.float32
        )
        return _propose(
            self.cfg,
            self.params,
            self.inputs,
            self.caches,
            Proposal(jnp.full((batch, K), -7, jnp.int32), logits),
        ).proposal

    def steps(self, forced: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """draft_step by itself K times, metadata built from scratch: drafts [batch, K] (forced ones
        if given) and logits [batch, K, Vd]."""
        cfg, inputs, caches = self.cfg, self.inputs, self.caches
        rows = cfg.num_speculative_tokens + 1
        start, num = inputs.seq_lens - inputs.num_pending, inputs.num_pending
        tokens, last_row = inputs.pending_tokens, inputs.num_pending - 1
        hidden = step_family(layered(cfg.draft)).fuse(
            self.params, cfg.draft, inputs.pending_hidden, REFERENCE_OPS
        )
        to_target = (
            np.asarray(self.params["draft_to_target"])
            if layered(cfg.draft).maps_vocabulary
            else np.arange(layered(cfg.draft).vocab_size)
        )
        drafted, all_logits = [], []
        for step in range(cfg.num_speculative_tokens):
            table = inputs.block_tables[0]
            metadata = _metadata(cfg.draft, cfg.draft_groups, table, start, num, rows)
            pass_ = Pass(metadata, REFERENCE_OPS, last_row=last_row)
            logits, hidden, caches = draft_step(
                self.params, tokens, hidden, pass_, caches, cfg=cfg.draft
            )
            all_logits.append(np.asarray(logits))
            drafted.append(
                to_target[all_logits[-1].argmax(-1)] if forced is None else forced[:, step]
            )
            start, num, rows = inputs.seq_lens + step, jnp.ones_like(num), 1
            tokens, last_row = jnp.asarray(drafted[-1], jnp.int32)[:, None], jnp.zeros_like(num)
        return np.stack(drafted, axis=1), np.stack(all_logits, axis=1)


class PagedBlocks:
    """A block draft over rounds: its context from random target features, its blocks after given
    tokens. The drafter's own functions, each compiled.

    features: float32 [T, W] of each request, the target's hidden states of every position; tokens:
        [T] of each request. A request's context is the first `lens` of them, and its next token
        follows.
    """

    def __init__(
        self,
        cfg: DraftConfig,
        params: Params,
        features: Sequence[np.ndarray],
        tokens: Sequence[np.ndarray],
        K: int,
        *,
        block_size: int = 4,
        chunk: int = 8,
        max_model_len: int = MAX_MODEL_LEN,
        dtype: Any = jnp.float32,
        target: Any = TARGET,
    ) -> None:
        self.params, self.features, self.tokens, self.chunk = params, features, tokens, chunk
        self.cfg = RoundConfig.for_models(
            target,
            cfg,
            ops=REFERENCE_OPS,
            block_size=block_size,
            max_model_len=max_model_len,
            num_speculative_tokens=K,
            rule="probabilistic",
        )
        batch = len(tokens)
        table = shuffled_block_table(batch, block_size, 1, max_model_len)
        self.tables = (jnp.asarray(table),) * len(self.cfg.draft_groups)
        drafter = drafts.drafter(cfg)
        blocks = (table.size,) * len(self.cfg.cache_groups)
        self.state = drafter.init(self.cfg, batch, blocks, dtype=dtype, cache_dtype=dtype)
        self.lens = np.zeros(batch, np.int32)

    def prefill(self, lens: Sequence[int]) -> None:
        """Make the first lens rows of each request its context, by chunks."""
        for begin in range(0, max(lens), self.chunk):
            num = np.clip(np.asarray(lens, np.int32) - begin, 0, self.chunk)
            ends = (num > 0) & (begin + self.chunk >= np.asarray(lens))
            following = np.where(ends, -1, 7).astype(np.int32)
            start = np.full_like(num, begin)
            chunk: Any = PromptChunk(self._rows(self.tokens, start, num), start, num, following)
            aux = self._features(start, num, self.chunk)
            self.state = _prefill_block(self.cfg, self.params, self.state, self.tables, chunk, aux)
        self.lens = np.asarray(lens, np.int32)

    def propose(self) -> tuple[np.ndarray, np.ndarray]:
        """Drafts [batch, K] and their logits [batch, K, Vd], sampled at temperature 1."""
        next_token = [t[n] for t, n in zip(self.tokens, self.lens, strict=True)]
        sampling = greedy_sampling(len(self.lens))
        context = DraftContext(
            seq_lens=jnp.asarray(self.lens),
            next_token=jnp.asarray(next_token, jnp.int32),
            active=jnp.ones(len(self.lens), bool),
            block_tables=self.tables,
            sampling=replace(sampling, temperature=sampling.temperature + 1),
        )
        proposal, self.state = _propose_block(self.cfg, self.params, self.state, context)
        return np.asarray(proposal.draft_tokens), np.asarray(proposal.draft_logits)

    def accept(self, num_sampled: Sequence[int]) -> None:
        """End a round that sampled so many tokens; rejected rows hold features of no position."""
        num, rows = np.asarray(num_sampled, np.int32), self.cfg.num_speculative_tokens + 1
        aux = self._features(self.lens, num, rows)
        self.state = _observe_block(
            self.cfg, self.params, self.state, self.tables, self.lens, num, aux
        )
        self.lens = self.lens + num

    def _features(self, start: np.ndarray, num: np.ndarray, rows: int) -> jax.Array:
        aux = np.stack(
            [
                np.concatenate([f[s : s + n], np.full((rows - n, f.shape[1]), 3.0, np.float32)])
                for f, s, n in zip(self.features, start, num, strict=True)
            ]
        )
        return jnp.asarray(aux, jax.tree.leaves(self.state)[0].dtype)

    def _rows(self, arrays: Any, start: np.ndarray, num: np.ndarray) -> np.ndarray:
        rows = [a[s : s + n] for a, s, n in zip(arrays, start, num, strict=True)]
        return _pad(rows, self.chunk)


@partial(jax.jit, static_argnums=0)
def _prefill_block(
    cfg: RoundConfig, params: Params, state: Any, tables: Any, chunk: PromptChunk, aux: jax.Array
) -> Any:
    target = models.TargetOutput(aux[..., :1], aux, ())
    first = jnp.zeros_like(chunk.start)
    drafter = drafts.drafter(cfg.draft)
    return drafter.prefill(cfg, params, state, tables, chunk, first, target)


@partial(jax.jit, static_argnums=0)
def _propose_block(cfg: RoundConfig, params: Params, state: Any, context: DraftContext) -> Any:
    return drafts.drafter(cfg.draft).propose(cfg, params, state, context)


@partial(jax.jit, static_argnums=0)
def _observe_block(
    cfg: RoundConfig, params: Params, state: Any, tables: Any, lens: Any, num: Any, aux: jax.Array
) -> Any:
    seen = Observation(
        seq_lens=lens,
        active=num > 0,
        output_tokens=jnp.full(aux.shape[:2], 5, jnp.int32),
        num_sampled=num,
        block_tables=tables,
        target=models.TargetOutput(aux[..., :1], aux, ()),
    )
    return drafts.drafter(cfg.draft).observe(cfg, params, state, seen)


def greedy_sampling(batch: int) -> SamplingState:
    return SamplingState(
        keys=jnp.zeros((batch, 2), jnp.uint32),
        temperature=jnp.zeros(batch, jnp.float32),
    )


_propose = jax.jit(propose, static_argnums=0)


@partial(jax.jit, static_argnames=("cfg", "groups"))
def _consume(
    params: Params,
    cfg: Any,
    groups: tuple[CacheGroup, ...],
    table: Any,
    tokens: Any,
    hidden: Any,
    num: Any,
    caches: KVCache,
) -> KVCache:
    family = step_family(cfg)
    dtype = jax.tree.leaves(caches)[0].dtype
    hidden = family.fuse(params, cfg, hidden.astype(dtype), REFERENCE_OPS)
    metadata = _metadata(cfg, groups, table, jnp.zeros_like(num), num, tokens.shape[1])
    pass_ = Pass(metadata, REFERENCE_OPS)
    return family.forward(params, cfg, tokens, hidden, pass_, caches).caches


def _pad(rows: Sequence[np.ndarray], length: int) -> np.ndarray:
    """[batch, length, ...]; what is masked is not zero, so that reading it is noticed."""
    fill = lambda r: np.full((length - len(r), *r.shape[1:]), 3, r.dtype)  # noqa: E731
    stacked = np.stack([np.concatenate([r, fill(r)]) for r in map(np.asarray, rows)])
    return stacked.astype(np.int32) if np.issubdtype(stacked.dtype, np.integer) else stacked
