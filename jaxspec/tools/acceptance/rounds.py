"""Decoding with a record of every round: what it accepted, and what theory expected of it.

One program serves every K up to the one it was compiled for: drafts past the wanted number become placeholders (-1), which rejection
sampling takes for the end of the proposal. The draws before them are those of a smaller K, so the tokens are too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec import models
from jaxspec.cache.metadata import build_metadata
from jaxspec.config import REFERENCE_KERNELS, Kernels, RoundConfig
from jaxspec.decode import programs
from jaxspec.decode import round as decode
from jaxspec.decode import state as decode_state
from jaxspec.decode.state import DecodeState
from jaxspec.drafts.autoregressive import Proposal, propose
from jaxspec.layers.params import Params
from jaxspec.sampling.state import SamplingState
from jaxspec.tools.acceptance.expected import Expected, expected_acceptance

Corrupt = Callable[[jax.Array, jax.Array], jax.Array]


@struct.dataclass
class Round:
    """output_tokens int32 [batch, K+1], num_sampled int32 [batch] as Verification has them. expected: None when greedy.

    surprise, entropy: float32 [batch, K+1], -log p of each sampled token and the entropy of that p, 0 elsewhere; None when greedy. Their
    difference has mean 0 if, and for practical purposes only if, the text is the target's.
    """

    output_tokens: jax.Array
    num_sampled: jax.Array
    expected: Expected | None
    surprise: jax.Array | None
    entropy: jax.Array | None


def recorded_round(
    cfg: RoundConfig,
    corrupt: Corrupt | None,
    params: Params,
    state: DecodeState,
    draft_logits: jax.Array,
    block_table: jax.Array,
    num_drafts: jax.Array,
) -> tuple[Round, DecodeState, jax.Array]:
    """propose, verify and commit as decoding runs them, with num_drafts int32 [] of the K drafts, and the record.

    draft_logits: float32 [batch, K, draft_vocab], the buffer that the draft writes its logits to, as the last round left it; returned as
    this round leaves it. corrupt(written, before) -> draft logits as verification gets to see them; None: as they were written.
    """
    K = cfg.num_speculative_tokens
    inputs = decode_state.draft_inputs(state, cfg.draft_table(block_table))
    before, live = draft_logits, state.active
    buffers = Proposal(
        jnp.zeros((live.shape[0], K), jnp.int32), jnp.zeros_like(before) if cfg.sampled else None
    )
    carry = propose(cfg, params["draft"], inputs, state.draft_caches, buffers)
    tokens = jnp.where(jnp.arange(K) < num_drafts, carry.proposal.draft_tokens, -1)
    written = carry.proposal.draft_logits
    seen = None
    if cfg.keeps_draft_logits:
        assert written is not None
        seen = written if corrupt is None else corrupt(written, before)
    state = replace(state, draft_caches=carry.caches)
    logits = (
        _target_logits(cfg, params["target"], state, tokens, block_table) if cfg.sampled else None
    )
    sampling = state.sampling
    verification, state = decode.verify_and_commit(
        cfg, params, state, block_table, Proposal(tokens, seen)
    )
    output, count = verification.output_tokens, verification.num_sampled
    if logits is None:
        return Round(output, count, None, None, None), state, before
    assert written is not None
    sampled_drafts = cfg.draft_sampling == "probabilistic"
    draft_to_target = params["draft"]["draft_to_target"] if cfg.draft.maps_vocabulary else None
    expected = expected_acceptance(
        logits, tokens, written if sampled_drafts else None, draft_to_target, sampling.temperature
    )
    log_p = jax.nn.log_softmax(logits / sampling.temperature[:, None, None], axis=-1)
    entropy = -(jnp.exp(log_p) * log_p).sum(axis=-1)
    surprise = -jnp.take_along_axis(log_p, jnp.maximum(output, 0)[..., None], axis=-1)[..., 0]
    real = output >= 0
    written = jnp.where(live[:, None, None], written, before)
    return (
        Round(
            output, count, expected, jnp.where(real, surprise, 0.0), jnp.where(real, entropy, 0.0)
        ),
        state,
        written,
    )


def _target_logits(
    cfg: RoundConfig,
    params: Params,
    state: DecodeState,
    draft_tokens: jax.Array,
    block_table: jax.Array,
) -> jax.Array:
    """The logits that verification reads, [batch, K+1, vocab]: the same pass, which the compiler shares."""
    rows = draft_tokens.shape[1] + 1
    tokens = jnp.concatenate([state.next_token[:, None], jnp.maximum(draft_tokens, 0)], axis=1)
    metadata = build_metadata(
        cfg.target_group,
        cfg.target_tables(block_table),
        state.seq_lens,
        jnp.where(state.active, rows, 0),
        rows,
    )
    family = models.family(cfg.target)
    out = family.forward(
        params,
        cfg.target,
        tokens,
        metadata,
        state.target_caches,
        aux_layers=cfg.draft.aux_layers,
        kernels=cfg.kernels,
    )
    return family.logits(params, cfg.target, out.hidden, cfg.kernels)


@dataclass(frozen=True)
class Pair:
    """A loaded target and draft. max_drafts: the largest K that is measured. stop_token_ids end a request."""

    target: Any
    draft: Any
    params: Params
    max_drafts: int
    stop_token_ids: tuple[int, ...]
    dtype: Any = jnp.float32
    kernels: Kernels = REFERENCE_KERNELS


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

    rounds, tokens: [requests]; tokens are those of the request's text, its first one and its stop token included.
    accepted: [requests, K] rounds that accepted drafts 0..i. expected: {rule: [requests, K]}, empty when greedy.
    surprise, entropy, squares: [requests], sums of -log p, of p's entropy and of their difference squared over the tokens of the text but
    the first; 0 when greedy.
    """

    rounds: np.ndarray
    tokens: np.ndarray
    accepted: np.ndarray
    expected: dict[str, np.ndarray]
    surprise: np.ndarray
    entropy: np.ndarray
    squares: np.ndarray


class Recorder:
    """Compiled rounds of one pair, for batches of max_num_seqs requests of at most max_tokens tokens, prompt included.

    Programs compile in threads when they are announced, once for each (rule, drafts, sampled or greedy), and serve every K and data set.
    chunk: prompt tokens a prefill call. ahead: rounds launched before the host asks whether all requests have ended.
    """

    def __init__(
        self,
        pair: Pair,
        *,
        max_num_seqs: int,
        max_tokens: int,
        block_size: int = 64,
        chunk: int = 64,
        ahead: int = 8,
    ) -> None:
        self.pair, self.batch, self.chunk, self.ahead = pair, max_num_seqs, chunk, ahead
        pages = -(-(max_tokens + 2 * (pair.max_drafts + 1)) // block_size)
        self.block_size, self.max_model_len = block_size, pages * block_size
        self.num_blocks = max_num_seqs * pages
        self.table = jnp.arange(self.num_blocks, dtype=jnp.int32).reshape(max_num_seqs, pages)
        self._pool = ThreadPoolExecutor(min(8, max(1, (os.cpu_count() or 1) // 2)))
        self._compiled: dict[Any, Future[Any]] = {}

    def config(self, rule: str, drafts: str, *, sampled: bool) -> RoundConfig:
        pair = self.pair
        return RoundConfig.of_pair(
            pair.target,
            pair.draft,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            num_speculative_tokens=pair.max_drafts,
            rule=rule,  # type: ignore[arg-type]
            draft_sampling=drafts,  # type: ignore[arg-type]
            sampled=sampled,
            kernels=pair.kernels,
        )

    @property
    def num_programs(self) -> int:
        return len(self._compiled)

    def announce(
        self, rule: str, drafts: str, *, sampled: bool, corrupt: Corrupt | None = None
    ) -> None:
        """Start to compile what a case will need."""
        cfg = self.config(rule, drafts, sampled=sampled)
        if (cfg, corrupt) in self._compiled:
            return
        state, buffer = jax.eval_shape(lambda: (self._state(cfg, []), self._buffer(cfg)))
        program = jax.jit(
            recorded_round,
            static_argnums=(0, 1),
            donate_argnums=3,
            compiler_options=dict(cfg.compiler_options) or None,
        )
        args = (self.pair.params, state, buffer, self.table, jax.ShapeDtypeStruct((), jnp.int32))
        self._compiled[cfg, corrupt] = self._pool.submit(
            lambda: program.lower(cfg, corrupt, *args).compile()
        )
        prefill_cfg = self._prefill_config(sampled)
        if prefill_cfg not in self._compiled:
            ints = jax.ShapeDtypeStruct((self.batch,), jnp.int32)
            chunk = jax.ShapeDtypeStruct((self.batch, self.chunk), jnp.int32)
            jitted = programs.prefill_program.jitted(prefill_cfg)
            prefill_args = (self.pair.params, state, self.table, chunk, ints, ints, ints)
            self._compiled[prefill_cfg] = self._pool.submit(
                lambda: jitted.lower(prefill_cfg, *prefill_args).compile()
            )

    def _prefill_config(self, sampled: bool) -> RoundConfig:
        return self.config("probabilistic", "probabilistic", sampled=sampled)

    def _buffer(self, cfg: RoundConfig) -> jax.Array:
        width = cfg.draft.draft_vocab_size if cfg.sampled else 0
        return jnp.zeros((self.batch, cfg.num_speculative_tokens, width), jnp.float32)

    def _state(
        self, cfg: RoundConfig, keys: Sequence[int], temperature: float = 0.0, max_tokens: int = 0
    ) -> DecodeState:
        """An idle state with a request's key in each of the first rows."""
        batch = self.batch
        halves = np.zeros((batch, 2), np.uint32)
        for row, key in enumerate(keys):
            halves[row] = (key % 2**64) >> 32, key & 0xFFFFFFFF
        sampling = SamplingState(jnp.asarray(halves), jnp.full(batch, temperature, jnp.float32))
        stops = jnp.tile(jnp.asarray(self.pair.stop_token_ids or (-1,), jnp.int32), (batch, 1))
        return decode_state.init_state(
            cfg,
            sampling,
            jnp.full(batch, max_tokens, jnp.int32),
            stops,
            self.num_blocks,
            self.pair.dtype,
        )

    def run(
        self,
        requests: Requests,
        rule: str,
        drafts: str,
        num_drafts: int,
        *,
        corrupt: Corrupt | None = None,
    ) -> tuple[Counts, list[list[int]]]:
        """Decode all requests, max_num_seqs at a time: their counts, and their texts as token ids."""
        sampled = requests.temperature > 0
        self.announce(rule, drafts, sampled=sampled, corrupt=corrupt)
        cfg = self.config(rule, drafts, sampled=sampled)
        prefill, program = (
            self._compiled[self._prefill_config(sampled)].result(),
            self._compiled[cfg, corrupt].result(),
        )
        buffer = self._buffer(cfg)
        parts, texts = [], []
        for begin in range(0, len(requests.prompts), self.batch):
            prompts = [list(p) for p in requests.prompts[begin : begin + self.batch]]
            keys = [requests.seed + begin + i for i in range(len(prompts))]
            state = self._state(cfg, keys, requests.temperature, requests.max_tokens)
            first = np.full(self.batch, -1, np.int32)
            for chunk in _chunks(prompts, self.batch, self.chunk):
                verification, state = prefill(self.pair.params, state, self.table, *chunk)
                first = np.maximum(first, np.asarray(verification.output_tokens)[:, 0])
            rounds: list[Round] = []
            while not rounds or bool(jax.device_get(state.active).any()):
                launched = []
                for _ in range(
                    self.ahead
                ):  # rounds past a request's end are idle and count nothing
                    record, state, buffer = program(
                        self.pair.params, state, buffer, self.table, np.int32(num_drafts)
                    )
                    launched.append(record)
                rounds += jax.device_get(launched)
            batch = replace(requests, prompts=prompts)
            counts, written = _count(first, rounds, batch, num_drafts, self.pair.stop_token_ids)
            parts.append(counts)
            texts += written
        return join(parts), texts


def _chunks(
    prompts: Sequence[Sequence[int]], batch: int, chunk: int
) -> list[tuple[np.ndarray, ...]]:
    """tokens [batch, chunk], start, num_tokens and next_prompt_token [batch] of one prefill call after another."""
    chunks = []
    for begin in range(0, max(map(len, prompts)), chunk):
        tokens, num_tokens, following = (
            np.zeros((batch, chunk), np.int32),
            np.zeros(batch, np.int32),
            np.full(batch, -1, np.int32),
        )
        for row, prompt in enumerate(prompts):
            part = prompt[begin : begin + chunk]
            tokens[row, : len(part)], num_tokens[row] = part, len(part)
            if begin + chunk < len(prompt):
                following[row] = prompt[begin + chunk]
        chunks.append((tokens, np.full(batch, begin, np.int32), num_tokens, following))
    return chunks


def _count(
    first: np.ndarray,
    rounds: Sequence[Round],
    requests: Requests,
    num_drafts: int,
    stops: Sequence[int],
) -> tuple[Counts, list]:
    """The counts of one batch, and its texts. rounds: what decoding returned, on the host; first: [batch] the tokens of prefill."""
    num_requests = len(requests.prompts)
    texts: list[list[int]] = []
    surprise, entropy, squares = np.zeros((3, num_requests))
    record: Round = jax.tree.map(
        lambda *leaves: np.stack(leaves)[:, :num_requests], *rounds
    )  # [rounds, requests, ...]
    for i in range(num_requests):
        real = record.output_tokens[:, i] >= 0
        text = _trim(
            [int(first[i]), *record.output_tokens[:, i][real].tolist()], requests.max_tokens, stops
        )
        texts.append(text)
        if record.surprise is not None and record.entropy is not None:
            s, e = (
                np.asarray(x[:, i][real][: len(text) - 1], np.float64)
                for x in (record.surprise, record.entropy)
            )
            surprise[i], entropy[i], squares[i] = s.sum(), e.sum(), ((s - e) ** 2).sum()
    live = np.asarray(record.num_sampled) > 0
    accepted = (np.asarray(record.num_sampled)[..., None] > 1 + np.arange(num_drafts)).sum(axis=0)
    total = lambda x: (np.asarray(x, np.float64)[..., :num_drafts] * live[..., None]).sum(axis=0)  # noqa: E731
    expected = (
        {}
        if record.expected is None
        else {rule: total(values) for rule, values in vars(record.expected).items()}
    )
    tokens = np.array([len(text) for text in texts])
    return Counts(live.sum(axis=0), tokens, accepted, expected, surprise, entropy, squares), texts


def join(parts: Sequence[Counts]) -> Counts:
    """The counts of several batches, one after the other."""
    return Counts(**jax.tree.map(lambda *leaves: np.concatenate(leaves), *map(vars, parts)))


def _trim(text: list[int], max_tokens: int, stop_token_ids: Sequence[int]) -> list[int]:
    """A text up to its stop token (included) or max_tokens."""
    text = text[:max_tokens]
    stop = next((i for i, token in enumerate(text) if token in stop_token_ids), len(text))
    return text[: stop + 1]
