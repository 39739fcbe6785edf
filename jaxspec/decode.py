"""Decoding: the state, prefill, the round, and plain decoding, which is the round with nothing proposed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec import drafts, models
from jaxspec.config import RoundConfig
from jaxspec.kv_cache import KVCache, init_cache
from jaxspec.logits_processing import count_tokens, process_target_logits
from jaxspec.logprobs import score_hidden, score_tokens
from jaxspec.metadata import BlockTables, build_metadata
from jaxspec.params import Params
from jaxspec.propose import DraftInputs, Proposal, consume_pending, first_step, next_step, propose
from jaxspec.sampling import SamplingState, gumbel_noise, sample
from jaxspec.verify import Verification, verify


@struct.dataclass
class DecodeState:
    """What a batch of requests carries from round to round; one row a slot. A program writes into its caches, and may into the
    rest: who has called one goes on with the state that it returns.

    seq_lens:       int32 [batch], tokens in the target's cache
    next_token:     int32 [batch], sampled but not yet cached
    active:         bool [batch], prefilled and not finished; the others are idle rows
    num_generated:  int32 [batch]
    max_tokens:     int32 [batch], where a request ends by length
    stop_token_ids: int32 [batch, stops], where it ends by content, padded with -1
    max_drafts:     int32 [batch], drafts of a round that a request is allowed, read where RoundConfig.limits_drafts
    pending_tokens, pending_hidden, num_pending: the target rows that the draft has not consumed (DraftInputs); None
                    without a draft
    target_caches, draft_caches: a FullCache a layer
    """

    seq_lens: jax.Array
    next_token: jax.Array
    active: jax.Array
    num_generated: jax.Array
    max_tokens: jax.Array
    stop_token_ids: jax.Array
    max_drafts: jax.Array
    sampling: SamplingState
    pending_tokens: jax.Array | None
    pending_hidden: jax.Array | None
    num_pending: jax.Array | None
    target_caches: KVCache
    draft_caches: KVCache


def init_state(
    cfg: RoundConfig,
    sampling: SamplingState,
    max_tokens: jax.Array,
    stop_token_ids: jax.Array,
    num_blocks: int | tuple[int, ...],
    dtype: Any,
) -> DecodeState:
    """An idle state for sampling's batch, over caches of num_blocks blocks: of every KV-cache group, or of each of cfg.cache_groups."""
    batch = max_tokens.shape[0]
    pools = num_blocks if isinstance(num_blocks, tuple) else (num_blocks,) * len(cfg.cache_groups)
    zeros = lambda: jnp.zeros(batch, jnp.int32)  # noqa: E731  (a fresh buffer each: the state is donated)
    pending_tokens = pending_hidden = num_pending = None
    draft_caches: KVCache = ()
    if cfg.draft is not None:
        rows = cfg.num_speculative_tokens + 1
        width = drafts.hidden_width(cfg.draft, cfg.target)
        pending_tokens, num_pending = jnp.zeros((batch, rows), jnp.int32), zeros()
        pending_hidden = jnp.zeros((batch, rows, width), dtype)
        draft_caches = init_cache(cfg.draft.attention, cfg.draft.num_layers, pools[cfg.draft_pool], cfg.block_size, dtype)
    return DecodeState(
        seq_lens=zeros(),
        next_token=zeros(),
        active=jnp.zeros(batch, bool),
        num_generated=zeros(),
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        max_drafts=jnp.full(batch, cfg.num_speculative_tokens, jnp.int32),
        sampling=sampling,
        pending_tokens=pending_tokens,
        pending_hidden=pending_hidden,
        num_pending=num_pending,
        target_caches=init_cache(
            cfg.target.attention, cfg.target.num_layers, [pools[group] for group in cfg.group_of_layer], cfg.block_size, dtype
        ),
        draft_caches=draft_caches,
    )


def prefill(
    cfg: RoundConfig,
    params: Params,
    state: DecodeState,
    block_tables: BlockTables,
    tokens: jax.Array,
    start: jax.Array,
    num_tokens: jax.Array,
    next_prompt_token: jax.Array,
) -> tuple[Verification, DecodeState]:
    """One chunk of each request's prompt through target and draft together.

    block_tables: int32 [batch, pages], a tuple of those of cfg.cache_groups where there are several.
    tokens: int32 [batch, chunk] at positions start [batch] and on, of which num_tokens [batch] are real (0: this request is
    not in the chunk and does not change). next_prompt_token: int32 [batch], the prompt's next token after the chunk, or -1
    if the prompt ends here. The draft's row of a position pairs the target's hidden state with the token after it: the
    chunk's own next one, for its last row the next prompt token. Only the prompt's very last row stays pending, until the
    token after it is sampled, here. Returns that first token (num_sampled 1 where a prompt ended) and the state.

    A request that has generated already (num_generated above 0: it was preempted) has all its tokens but the last for a prompt; the
    last is its next_token, and nothing is sampled (num_sampled 0).
    """
    family = models.family(cfg.target)
    chunk = tokens.shape[1]
    ends = (num_tokens > 0) & (next_prompt_token < 0)
    last_row = jnp.maximum(num_tokens - 1, 0)
    seq_lens = jnp.where(num_tokens > 0, start + num_tokens, state.seq_lens)
    out = family.forward(
        params["target"],
        cfg.target,
        tokens,
        build_metadata(cfg.target_group, cfg.target_tables(block_tables), start, num_tokens, chunk),
        state.target_caches,
        aux_layers=cfg.draft.aux_layers if cfg.draft else (),
        kernels=cfg.kernels,
    )
    last_hidden = jnp.take_along_axis(out.hidden, last_row[:, None, None], axis=1)
    raw = family.logits(params["target"], cfg.target, last_hidden, cfg.kernels)
    logits = process_target_logits(cfg, raw, state.sampling, seq_lens)
    noise = gumbel_noise(state.sampling.keys, "sample", seq_lens, 0, cfg.target.vocab_size) if cfg.sampled else None
    is_new = state.num_generated == 0
    first = jnp.where(is_new, sample(logits[:, 0], noise, state.sampling.greedy), state.next_token)
    verification = Verification(jnp.where(ends & is_new, first, -1)[:, None], (ends & is_new).astype(jnp.int32))
    if cfg.logprobs:
        verification = replace(verification, logprobs=score_tokens(raw, verification.output_tokens, everything=cfg.all_logprobs))
    if cfg.prompt_logprobs:
        logits_of = lambda hidden: family.logits(params["target"], cfg.target, hidden, cfg.kernels)  # noqa: E731
        scores = score_hidden(logits_of, cfg.target.vocab_size, out.hidden, _following(tokens, last_row, next_prompt_token))
        verification = replace(verification, prompt_logprobs=scores)
    state = replace(state, seq_lens=seq_lens, target_caches=out.caches)
    if cfg.draft is not None:
        table = cfg.draft_table(block_tables)
        state = _prefill_draft(cfg, params["draft"], state, table, tokens, start, num_tokens, next_prompt_token, ends, first, out)
    return verification, _advance(cfg, replace(state, active=state.active | ends), verification)


def _prefill_draft(
    cfg: RoundConfig,
    params: Params,
    state: DecodeState,
    block_table: jax.Array,
    tokens: jax.Array,
    start: jax.Array,
    num_tokens: jax.Array,
    next_prompt_token: jax.Array,
    ends: jax.Array,
    first: jax.Array,
    out: models.TargetOutput,
) -> DecodeState:
    """The draft's part of prefill: its rows of the chunk, and the pending row of the prompts that end in it."""
    assert cfg.draft_group is not None
    pending_tokens, pending_hidden, num_pending = _pending(state)
    family = drafts.family(cfg.draft)
    last_row = jnp.maximum(num_tokens - 1, 0)
    shifted = _following(tokens, last_row, next_prompt_token)
    rows = num_tokens - ends.astype(jnp.int32)
    hidden = family.target_hidden(cfg.draft, out.hidden, out.aux)
    drafted = family.forward(
        params,
        cfg.draft,
        shifted,
        family.fuse(params, cfg.draft, hidden, cfg.kernels),
        build_metadata(cfg.draft_group, block_table, start, rows, tokens.shape[1]),
        state.draft_caches,
        kernels=cfg.kernels,
    )
    last_hidden = jnp.take_along_axis(hidden, last_row[:, None, None], axis=1)
    first_only = jnp.arange(pending_tokens.shape[1]) == 0
    return replace(
        state,
        draft_caches=drafted.caches,
        pending_tokens=jnp.where(ends[:, None] & first_only, first[:, None], pending_tokens),
        pending_hidden=jnp.where(ends[:, None, None] & first_only[:, None], last_hidden, pending_hidden),
        num_pending=jnp.where(ends, 1, num_pending),
    )


def _following(tokens: jax.Array, last_row: jax.Array, next_prompt_token: jax.Array) -> jax.Array:
    """The token after each of a chunk's rows, int32 [batch, chunk]; 0 after a prompt's very last."""
    is_last = jnp.arange(tokens.shape[1]) == last_row[:, None]
    return jnp.where(is_last, jnp.maximum(next_prompt_token, 0)[:, None], jnp.roll(tokens, -1, axis=1))


def _pending(state: DecodeState) -> tuple[jax.Array, jax.Array, jax.Array]:
    """pending_tokens, pending_hidden, num_pending of a state that has a draft."""
    assert state.pending_tokens is not None and state.pending_hidden is not None and state.num_pending is not None
    return state.pending_tokens, state.pending_hidden, state.num_pending


def draft_inputs(state: DecodeState, block_table: jax.Array) -> DraftInputs:
    """The state as propose reads it, with the block table of the draft's group; an idle request has nothing pending."""
    pending_tokens, pending_hidden, num_pending = _pending(state)
    return DraftInputs(
        seq_lens=state.seq_lens,
        pending_tokens=pending_tokens,
        pending_hidden=pending_hidden,
        num_pending=jnp.where(state.active, num_pending, 0),
        block_table=block_table,
        sampling=state.sampling,
    )


def verify_and_commit(
    cfg: RoundConfig, params: Params, state: DecodeState, block_tables: BlockTables, proposal: Proposal
) -> tuple[Verification, DecodeState]:
    """Judge a proposal, then advance: seq_lens by what was accepted plus one, pending rows for the draft, finished requests.

    The state may have more pending rows than this round has drafts (K was chosen by the batch's size).

    A rejection needs no rollback: seq_lens does not pass the rejected rows, so they are masked, then overwritten.
    """
    if cfg.limits_drafts:
        proposal = limit_drafts(cfg, state, proposal)
    verification, out = verify(
        cfg,
        params["target"],
        state.next_token,
        proposal,
        state.seq_lens,
        state.active,
        cfg.target_tables(block_tables),
        state.target_caches,
        state.sampling,
        params["draft"].get("target_to_draft") if cfg.draft is not None else None,
    )
    live = state.active
    state = replace(state, seq_lens=state.seq_lens + verification.num_sampled, target_caches=out.caches)
    if cfg.draft is not None:
        # Row i of this pass is position seq_lens + i, and output_tokens[i] is the token after it: just the pairs
        # that the draft reads next, rejected rows masked by num_pending.
        hidden = drafts.family(cfg.draft).target_hidden(cfg.draft, out.hidden, out.aux)
        pending_tokens, pending_hidden, num_pending = _pending(state)
        unused = pending_tokens.shape[1] - hidden.shape[1]
        tokens = jnp.pad(jnp.maximum(verification.output_tokens, 0), ((0, 0), (0, unused)))
        state = replace(
            state,
            pending_tokens=jnp.where(live[:, None], tokens, pending_tokens),
            pending_hidden=jnp.where(live[:, None, None], jnp.pad(hidden, ((0, 0), (0, unused), (0, 0))), pending_hidden),
            num_pending=jnp.where(live, verification.num_sampled, num_pending),
        )
    return verification, _advance(cfg, state, verification)


def _advance(cfg: RoundConfig, state: DecodeState, verification: Verification) -> DecodeState:
    """Take over the last sampled token, count, and end requests at a stop token or max_tokens.

    What a round sampled past a request's end is counted too; nothing reads it.
    """
    tokens, num_sampled = verification.output_tokens, verification.num_sampled
    sampled = num_sampled > 0
    last = jnp.take_along_axis(tokens, jnp.maximum(num_sampled - 1, 0)[:, None], axis=1)[:, 0]
    num_generated = state.num_generated + num_sampled
    stopped = jnp.any((tokens[:, :, None] == state.stop_token_ids[:, None, :]) & (tokens[:, :, None] >= 0), axis=(1, 2))
    return replace(
        state,
        next_token=jnp.where(sampled, last, state.next_token),
        num_generated=num_generated,
        active=state.active & ~stopped & (num_generated < state.max_tokens),
        sampling=count_tokens(cfg, state.sampling, tokens),
    )


def limit_drafts(cfg: RoundConfig, state: DecodeState, proposal: Proposal) -> Proposal:
    """Placeholders (-1), which verification rejects without bias, for the drafts past max_drafts and past the draft's own context.

    Draft i of a round comes from a context of seq_lens + i tokens.
    """
    most = state.max_drafts
    if cfg.draft_max_model_len is not None:
        most = jnp.minimum(most, cfg.draft_max_model_len + 1 - state.seq_lens)
    allowed = jnp.arange(proposal.draft_tokens.shape[1], dtype=jnp.int32) < most[:, None]
    return replace(proposal, draft_tokens=jnp.where(allowed, proposal.draft_tokens, -1))


def no_proposal(batch: int) -> Proposal:
    """What plain decoding verifies: K = 0."""
    return Proposal(jnp.zeros((batch, 0), jnp.int32), None)


def decode_round(cfg: RoundConfig, params: Params, state: DecodeState, block_tables: BlockTables) -> tuple[Verification, DecodeState]:
    """propose, verify, commit. params: {"target": ..., "draft": ...}; block_tables as prefill takes them. Without a draft this is one step
    of plain decoding, the oracle that greedy speculative decoding has to equal."""
    if cfg.num_speculative_tokens == 0:
        if cfg.draft is not None:  # it reads its pending rows, to be up to date when it drafts again
            inputs = draft_inputs(state, cfg.draft_table(block_tables))
            state = replace(state, draft_caches=consume_pending(cfg, params["draft"], inputs, state.draft_caches))
        return verify_and_commit(cfg, params, state, block_tables, no_proposal(state.active.shape[0]))
    carry = propose(cfg, params["draft"], draft_inputs(state, cfg.draft_table(block_tables)), state.draft_caches)
    return verify_and_commit(cfg, params, replace(state, draft_caches=carry.caches), block_tables, carry.proposal)


# The compilation modes run the same functions: a whole round as one program, a program a draft step, or none at all.


class Program:
    """function(cfg, *args) compiled with the first `static` arguments static, argument `donate` donated, and the compiler options that cfg
    asks for."""

    def __init__(self, function: Callable[..., Any], donate: int, static: int = 1) -> None:
        self._function, self._donate, self._static = function, donate, tuple(range(static))
        self._compiled: dict[tuple[tuple[str, Any], ...], Any] = {}

    def __call__(self, cfg: RoundConfig, *args: Any) -> Any:
        return self.jitted(cfg)(cfg, *args)

    def jitted(self, cfg: RoundConfig) -> Any:
        """jax.jit's function, with the options of cfg, which it takes first."""
        options = cfg.compiler_options
        if options not in self._compiled:
            self._compiled[options] = jax.jit(
                self._function, static_argnums=self._static, donate_argnums=self._donate, compiler_options=dict(options) or None
            )
        return self._compiled[options]

    def cache_size(self) -> int:
        """How many programs were compiled."""
        return sum(compiled._cache_size() for compiled in self._compiled.values())


def _draft_first_step(
    cfg: RoundConfig, params: Params, state: DecodeState, block_tables: BlockTables
) -> tuple[Any, DraftInputs, DecodeState]:
    inputs = draft_inputs(state, cfg.draft_table(block_tables))
    carry = first_step(cfg, params["draft"], inputs, state.draft_caches)
    return carry, inputs, replace(state, draft_caches=())


# Of a state, what a round is given to write into. Donating the small arrays too would cost a launch of about 2 us each: XLA copies what is
# still read when its memory is written, and what goes out as it came in.
DONATED = ("target_caches", "draft_caches", "pending_hidden")


def take_apart(state: DecodeState) -> tuple[dict[str, Any], DecodeState]:
    """What is donated to a round, and the state without it. Where penalties count tokens, sampling holds [batch, vocab]."""
    names = DONATED if state.sampling.penalties is None else (*DONATED, "sampling")
    return {name: getattr(state, name) for name in names}, replace(state, **dict.fromkeys(names))


def decode_round_of_parts(
    cfg: RoundConfig, params: Params, donated: dict[str, Any], rows: DecodeState, block_tables: BlockTables
) -> tuple[Verification, dict[str, Any], DecodeState]:
    """decode_round of a state taken apart; None stands for the rows' arrays that it leaves alone."""
    verification, state = decode_round(cfg, params, replace(rows, **donated), block_tables)
    donated, after = take_apart(state)
    return verification, donated, jax.tree.map(lambda new, old: None if new is old else new, after, rows)


def _run_round(cfg: RoundConfig, params: Params, state: DecodeState, block_tables: BlockTables) -> tuple[Verification, DecodeState]:
    donated, rows = take_apart(state)
    verification, donated, changed = _round(cfg, params, donated, rows, block_tables)
    rows = jax.tree.map(lambda new, old: old if new is None else new, changed, rows, is_leaf=lambda x: x is None)
    return verification, replace(rows, **donated)


_prefill = Program(prefill, donate=2)
_round = Program(decode_round_of_parts, donate=2)
_verify_and_commit = Program(verify_and_commit, donate=2)
_first_step = Program(_draft_first_step, donate=2)
_next_step = Program(next_step, donate=4)


def _step_by_step(cfg: RoundConfig, params: Params, state: DecodeState, block_tables: BlockTables) -> tuple[Verification, DecodeState]:
    if cfg.num_speculative_tokens == 0:
        return _run_round(cfg, params, state, block_tables)
    carry, inputs, state = _first_step(cfg, params, state, block_tables)
    for step in range(1, cfg.num_speculative_tokens):
        carry = _next_step(cfg, params["draft"], inputs, np.int32(step), carry)
    return _verify_and_commit(cfg, params, replace(state, draft_caches=carry.caches), block_tables, carry.proposal)


def run_round(
    cfg: RoundConfig, params: Params, state: DecodeState, block_tables: Any, compilation: str
) -> tuple[Verification, DecodeState]:
    """One round in the given compilation mode: "round" (one executable), "step" (one a draft step) or "eager"."""
    if compilation == "eager":
        with jax.disable_jit():
            return decode_round(cfg, params, state, jax.tree.map(jnp.asarray, block_tables))
    if compilation == "step":
        return _step_by_step(cfg, params, state, block_tables)
    return _run_round(cfg, params, state, block_tables)


def run_prefill(cfg: RoundConfig, params: Params, state: DecodeState, *args: Any, compilation: str) -> tuple[Verification, DecodeState]:
    """One prefill chunk in the given compilation mode; args as `prefill` takes them after the state."""
    if compilation == "eager":
        with jax.disable_jit():
            return prefill(cfg, params, state, *jax.tree.map(jnp.asarray, args))
    return _prefill(cfg, params, state, *args)
