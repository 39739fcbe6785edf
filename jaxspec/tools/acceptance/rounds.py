"""Decoding with a record of every round: what it accepted, and what theory expected of it.

The engine runs the requests. Its rounds are `recorded_round` (ResidentState.round_program), which
returns a Verification with the record, and its observer (Engine.on_rounds) collects them.

One program serves every K up to the one it was compiled for: a request that is allowed fewer drafts
gets placeholders (-1) for the others, which rejection sampling takes for the end of the proposal.
The draws before them are those of a smaller K, so the tokens are too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.stages import Compiled

from jaxspec import models
from jaxspec.cache.group_blocks import NULL_BLOCK
from jaxspec.cache.metadata import BlockTables, build_metadata
from jaxspec.config import (
    REFERENCE_OPS,
    EngineConfig,
    KVCacheDtype,
    Ops,
    RoundConfig,
    SamplingFeatures,
    SpeculativeConfig,
)
from jaxspec.decode import round as decode
from jaxspec.decode import state as decode_state
from jaxspec.decode.state import DecodeState
from jaxspec.decode.verify import Verification
from jaxspec.drafts import DraftConfig, layered_drafter
from jaxspec.drafts.drafter import Proposal
from jaxspec.drafts.families import layered
from jaxspec.engine.engine import Engine
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.engine.request import Request
from jaxspec.engine.runner import ModelRunner
from jaxspec.layers.context import Pass
from jaxspec.layers.params import Params
from jaxspec.sampling.params import SamplingParams
from jaxspec.tools.acceptance.expected import Expected, expected_acceptance

Corrupt = Callable[[jax.Array, jax.Array], jax.Array]
PREFILL_TOKENS = 64  # tokens of a prefill call for each request that may run


@struct.dataclass
class Record(Verification):
    """A round's Verification, and what theory says of it.

    expected: each rule's expected acceptance; None when greedy.
    surprise: float32 [batch, K+1], -log p of each sampled token, 0 elsewhere; None when greedy.
    entropy:  float32 [batch, K+1], the entropy of that p, 0 elsewhere; None when greedy.

    The difference of the last two has mean 0 if the text is the target's, and hardly otherwise.
    """

    expected: Expected | None = None
    surprise: jax.Array | None = None
    entropy: jax.Array | None = None


def recorded_round(
    cfg: RoundConfig,
    corrupt: Corrupt | None,
    params: Params,
    state: DecodeState,
    draft_logits: jax.Array,
    block_tables: BlockTables,
) -> tuple[Record, DecodeState, jax.Array]:
    """Propose, verify and commit as decoding does, with the drafts that are allowed; record it.

    draft_logits: float32 [batch, K, draft_vocab], the buffer that the draft writes its logits to,
        as the last round left it; returned as this round leaves it
    corrupt: corrupt(written, before) gives the draft logits that verification sees; None: as they
        were written
    """
    K = cfg.num_speculative_tokens
    context = decode_state.draft_context(cfg, state, block_tables)
    before, live = draft_logits, state.active
    buffers = Proposal(
        jnp.zeros((live.shape[0], K), jnp.int32), jnp.zeros_like(before) if cfg.sampled else None
    )
    drafter = layered_drafter(layered(cfg.draft))
    proposal, draft = drafter.propose(cfg, params["draft"], state.draft, context, buffers)
    proposal = decode.limit_drafts(decode.allowed_drafts(cfg, state, None), proposal)
    tokens, written = proposal.draft_tokens, proposal.draft_logits
    seen = None
    if cfg.keeps_draft_logits:
        assert written is not None
        seen = written if corrupt is None else corrupt(written, before)
    state = replace(state, draft=draft)
    logits = (
        _target_logits(cfg, params["target"], state, tokens, block_tables) if cfg.sampled else None
    )
    temperature = state.sampling.temperature
    verification, state = decode.verify_and_commit(
        cfg, params, state, block_tables, Proposal(tokens, seen)
    )
    record = Record(**vars(verification))
    if logits is None:
        return record, state, before
    assert written is not None
    sampled_drafts = cfg.draft_sampling == "probabilistic"
    has_map = layered(cfg.draft).maps_vocabulary
    draft_to_target = params["draft"]["draft_to_target"] if has_map else None
    expected = expected_acceptance(
        logits, tokens, written if sampled_drafts else None, draft_to_target, temperature
    )
    log_p = jax.nn.log_softmax(logits / temperature[:, None, None], axis=-1)
    entropy = -(jnp.exp(log_p) * log_p).sum(axis=-1)
    output = record.output_tokens
    surprise = -jnp.take_along_axis(log_p, jnp.maximum(output, 0)[..., None], axis=-1)[..., 0]
    real = output >= 0
    record = replace(
        record,
        expected=expected,
        surprise=jnp.where(real, surprise, 0.0),
        entropy=jnp.where(real, entropy, 0.0),
    )
    return record, state, jnp.where(live[:, None, None], written, before)


def _target_logits(
    cfg: RoundConfig,
    params: Params,
    state: DecodeState,
    draft_tokens: jax.Array,
    block_tables: BlockTables,
) -> jax.Array:
    """Return the logits [batch, K+1, vocab] that verification reads.

    The same pass as verification's, so the compiler runs it once.
    """
    rows = draft_tokens.shape[1] + 1
    tokens = jnp.concatenate([state.next_token[:, None], jnp.maximum(draft_tokens, 0)], axis=1)
    metadata = build_metadata(
        cfg.target_groups,
        cfg.target_tables(block_tables),
        state.seq_lens,
        jnp.where(state.active, rows, 0),
        rows,
        attention=cfg.target.attention,
        ops=REFERENCE_OPS,
    )
    family = models.family(cfg.target)
    out = family.forward(
        params,
        cfg.target,
        tokens,
        Pass(metadata, cfg.ops),
        state.target_caches,
        aux_layers=layered(cfg.draft).aux_layers,
    )
    return family.logits(params, cfg.target, out.hidden, cfg.ops)


@dataclass(frozen=True)
class Pair:
    """A loaded target and draft.

    max_k:             the largest K that is measured
    stop_token_ids:    end a request
    draft_cache_dtype: of the draft's keys and values; None: that of the target's
    """

    target: models.TargetConfig
    draft: DraftConfig
    params: Params
    max_k: int
    stop_token_ids: tuple[int, ...]
    dtype: jax.typing.DTypeLike = jnp.float32
    ops: Ops = REFERENCE_OPS
    kv_cache_dtype: KVCacheDtype = "auto"
    draft_cache_dtype: jax.typing.DTypeLike | None = None


@dataclass(frozen=True)
class Requests:
    """Prompts (token ids) and what all of them are decoded with; the i-th has seed + i."""

    prompts: Sequence[Sequence[int]]
    temperature: float
    max_tokens: int
    seed: int = 0


@dataclass(frozen=True)
class Counts:
    """Sums over the rounds of each request, float64 or int64 [requests, ...].

    rounds:   [requests]
    tokens:   [requests], of the request's text, its first one and its stop token included
    prompt_tokens: [requests]; None in a record of 0.1.0, which does not say
    accepted: [requests, K], rounds that accepted drafts 0..i
    expected: {rule: [requests, K]}, empty when greedy
    surprise: [requests], sum of -log p over the tokens of the text but the first; 0 when greedy
    entropy:  [requests], sum of p's entropy over the same tokens
    squares:  [requests], sum of their squared differences
    """

    rounds: np.ndarray
    tokens: np.ndarray
    prompt_tokens: np.ndarray | None
    accepted: np.ndarray
    expected: dict[str, np.ndarray]
    surprise: np.ndarray
    entropy: np.ndarray
    squares: np.ndarray

    def select(self, requests: np.ndarray) -> Counts:
        """Return the counts of some requests, by their indices."""
        return Counts(**jax.tree.map(lambda sums: sums[requests], vars(self)))


class Recorder:
    """An engine over one pair that records its rounds.

    At most max_num_seqs requests run together, each of at most max_tokens tokens, prompt included.
    Programs of rounds compile in threads when they are announced, one for each (rule, drafts,
    sampled or greedy). They serve every K and data set. Prefill's compile when they first run.
    """

    def __init__(
        self, pair: Pair, *, max_num_seqs: int, max_tokens: int, block_size: int = 64
    ) -> None:
        pages = -(-(max_tokens + 2 * (pair.max_k + 1)) // block_size)
        config = EngineConfig(
            max_model_len=pages * block_size,
            max_num_seqs=max_num_seqs,
            block_size=block_size,
            max_num_batched_tokens=PREFILL_TOKENS * max_num_seqs,
            rounds_per_step=1,
            # A block more than a request fills: admission keeps one free for each that runs.
            num_gpu_blocks_override=max_num_seqs * (pages + 1),
            kv_cache_dtype=pair.kv_cache_dtype,
            enable_prefix_caching=False,
            batch_invariant=True,
        )
        runner = ModelRunner(
            pair.target,
            pair.draft,
            pair.params,
            SpeculativeConfig(num_speculative_tokens=pair.max_k),
            config,
            ops=pair.ops,
            dtype=pair.dtype,
            draft_cache_dtype=pair.draft_cache_dtype,
            eos_token_ids=pair.stop_token_ids,
        )
        self.pair, self.batch, self.pages = pair, max_num_seqs, pages
        self.engine = Engine(runner)
        self._pool = ThreadPoolExecutor(min(8, max(1, (os.cpu_count() or 1) // 2)))
        self._compiled: dict[tuple[RoundConfig, Corrupt | None], Future[Compiled]] = {}

    def config(self, rule: str, drafts: str, *, sampled: bool) -> RoundConfig:
        """Return the engine's rounds, with this rule and this kind of drafts."""
        cfg = self.engine.runner.configs.get(SamplingFeatures(sampled=sampled), batch=self.batch)
        return replace(
            cfg,
            rule=rule,  # type: ignore[arg-type]
            draft_sampling=drafts,  # type: ignore[arg-type]
        )

    @property
    def num_programs(self) -> int:
        """Programs of rounds, and one of prefill for sampled and for greedy requests each."""
        return len(self._compiled) + len({cfg.sampled for cfg, _ in self._compiled})

    def announce(
        self, rule: str, drafts: str, *, sampled: bool, corrupt: Corrupt | None = None
    ) -> None:
        """Start to compile what a case will need."""
        cfg = self.config(rule, drafts, sampled=sampled)
        if (cfg, corrupt) in self._compiled:
            return
        program = jax.jit(
            recorded_round,
            static_argnums=(0, 1),
            donate_argnums=3,
            compiler_options=dict(cfg.compiler_options) or None,
        )
        resident = self.engine.runner.resident
        state = jax.eval_shape(lambda state: state, resident.state)
        buffer = jax.eval_shape(lambda: self._buffer(cfg))
        tables = resident.tables.idle(self.batch, self.pages)
        args = (resident.params, state, buffer, tables)
        self._compiled[cfg, corrupt] = self._pool.submit(
            lambda: program.lower(cfg, corrupt, *args).compile()
        )

    def _buffer(self, cfg: RoundConfig) -> jax.Array:
        width = layered(cfg.draft).draft_vocab_size if cfg.sampled else 0
        return jnp.zeros((self.batch, cfg.num_speculative_tokens, width), jnp.float32)

    def _whole(self, block_tables: BlockTables) -> BlockTables:
        """Block tables with a column for every page: the program is compiled for no others."""
        missing = self.pages - jax.tree.leaves(block_tables)[0].shape[1]
        if missing == 0:
            return block_tables
        return jax.tree.map(
            lambda table: jnp.pad(table, ((0, 0), (0, missing)), constant_values=NULL_BLOCK),
            block_tables,
        )

    def run(
        self,
        requests: Requests,
        rule: str,
        drafts: str,
        K: int,
        *,
        corrupt: Corrupt | None = None,
    ) -> tuple[Counts, list[list[int]]]:
        """Decode all requests, max_num_seqs at a time: their counts, and their texts' token ids."""
        sampled = requests.temperature > 0
        self.announce(rule, drafts, sampled=sampled, corrupt=corrupt)
        cfg = self.config(rule, drafts, sampled=sampled)
        program, buffer = self._compiled[cfg, corrupt].result(), self._buffer(cfg)

        def run_recorded(
            cfg: RoundConfig,
            num_rounds: int,
            params: Params,
            state: DecodeState,
            block_tables: BlockTables,
            compilation: str,
        ) -> tuple[Verification, DecodeState]:
            del cfg, num_rounds, compilation  # those that the program was compiled for
            nonlocal buffer
            record, state, buffer = program(params, state, buffer, self._whole(block_tables))
            return record, state

        self.engine.runner.resident.round_program = run_recorded
        parts, texts = [], []
        for begin in range(0, len(requests.prompts), self.batch):
            prompts = requests.prompts[begin : begin + self.batch]
            batch = [self._request(requests, begin + i, K) for i in range(len(prompts))]
            records = self._records(batch)
            parts.append(count(records, batch, K, sampled=sampled))
            texts += [request.token_ids for request in batch]
        return join(parts), texts

    def _request(self, requests: Requests, index: int, K: int) -> Request:
        return Request(
            prompt_token_ids=list(requests.prompts[index]),
            params=SamplingParams(requests.temperature),
            max_tokens=requests.max_tokens,
            stop_token_ids=self.pair.stop_token_ids,
            draft_limit=K,
            seed=(requests.seed + index) % 2**64,
            metrics=SpecDecodeMetrics(self.pair.max_k),
        )

    def _records(self, batch: Sequence[Request]) -> list[Record]:
        """Run the requests to their ends, request i in row i, and return their rounds."""
        records: list[Record] = []
        self.engine.on_rounds = lambda record, _: records.append(record)  # type: ignore[arg-type]
        for request in batch:
            self.engine.add(request)
        while self.engine.has_requests:
            self.engine.step()
        return records


def count(records: Sequence[Record], batch: Sequence[Request], K: int, *, sampled: bool) -> Counts:
    """Return the counts of one batch, whose request i has row i of the records (NumPy arrays)."""
    num_requests = len(batch)
    tokens = np.array([len(request.token_ids) for request in batch])
    prompt_tokens = np.array([len(request.prompt_token_ids) for request in batch])
    surprise, entropy, squares = np.zeros((3, num_requests))
    rules = [f.name for f in fields(Expected)] if sampled else []
    if not records:  # every request ended with its first token
        none = np.zeros((num_requests, K))
        expected = dict.fromkeys(rules, none)
        accepted, sums = none.astype(int), (surprise, entropy, squares)
        return Counts(0 * tokens, tokens, prompt_tokens, accepted, expected, *sums)
    record: Record = jax.tree.map(
        lambda *leaves: np.stack(leaves)[:, :num_requests], *records
    )  # [rounds, requests, ...]
    if record.surprise is not None and record.entropy is not None:
        for i in range(num_requests):
            # The text past its first token, which is prefill's; a round may go on past its end.
            real = record.output_tokens[:, i] >= 0
            s, e = (
                np.asarray(x[:, i][real][: tokens[i] - 1], np.float64)
                for x in (record.surprise, record.entropy)
            )
            surprise[i], entropy[i], squares[i] = s.sum(), e.sum(), ((s - e) ** 2).sum()
    num_sampled = np.asarray(record.num_sampled)
    live = num_sampled > 0
    accepted = (num_sampled[..., None] > 1 + np.arange(K)).sum(axis=0)

    def total(values: jax.Array) -> np.ndarray:
        # A slot that has had no request yet has temperature 0, which makes NaN.
        return np.where(live[..., None], np.asarray(values, np.float64)[..., :K], 0.0).sum(axis=0)

    expected = {rule: total(getattr(record.expected, rule)) for rule in rules}
    rounds, sums = live.sum(axis=0), (surprise, entropy, squares)
    return Counts(rounds, tokens, prompt_tokens, accepted, expected, *sums)


def join(parts: Sequence[Counts]) -> Counts:
    """The counts of several batches, one after the other."""
    return Counts(**jax.tree.map(lambda *leaves: np.concatenate(leaves), *map(vars, parts)))
