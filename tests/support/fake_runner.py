"""A ModelRunner without a model: it remembers what every cache slot holds.

Every program checks all that attention would read. Programs run at once; the engine reads their
results when it wants them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np

from jaxspec.config import CacheGroup, ConfigError, EngineConfig, SamplingFeatures
from jaxspec.decode.verify import Verification
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request, slot_of
from jaxspec.engine.runner import ModelRunner
from jaxspec.engine.scheduler import Chunk, SchedulerConfig
from jaxspec.engine.totals import Totals

VOCAB = 7

CacheSlot = tuple[int, int, int]  # group, block, offset


def next_token(text: list[int]) -> int:
    """Return the token after a text: a function of it, so that equal prefixes stay equal."""
    return (3 * text[-1] + 5 * text[len(text) // 2] + len(text)) % VOCAB


def engine_of(runner: FakeRunner, *, depth: int = 0) -> Engine:
    """Return an engine that reads a result once more than `depth` are in flight."""
    engine = Engine(cast(ModelRunner, runner))
    engine.depth = depth
    assert engine.scheduler.config == runner.sizes
    return engine


@dataclass
class Row:
    """The device's knowledge of a slot.

    text: with its last token, which is not cached
    draft_from: the first position that the draft has not consumed
    """

    request: Request
    text: list[int]
    draft_from: int
    active: bool = True


@dataclass
class Result:
    """A program's result.

    requests: those that it holds tokens for
    num_rounds: 0 for a prefill
    is_ready: whether the device has computed it
    """

    requests: list[Request]
    num_rounds: int
    is_read: bool = False
    is_ready: bool = False


class DeviceArray:
    """An array of a result, with what the engine uses of a JAX array."""

    def __init__(
        self, value: np.ndarray, result: Result, is_ready: Callable[[Result], bool]
    ) -> None:
        self._value, self._result, self._is_copied = value, result, False
        self._is_ready = is_ready

    def copy_to_host_async(self) -> None:
        self._is_copied = True

    def is_ready(self) -> bool:
        return self._is_ready(self._result)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        assert self._is_copied, "expected a copy to the host that started at the launch"
        self._result.is_read = True
        return self._value


@dataclass(frozen=True)
class FakeConfigs:
    """The part of RoundConfigs that the engine reads."""

    cache_groups: tuple[CacheGroup, ...]
    lookahead: int
    lag: int
    num_speculative_tokens: int
    waits: bool
    always_limits_drafts: ClassVar[bool] = False

    def may_wait(self, batch: int) -> bool:
        return self.waits

    def k_of_batch(self, num_requests: int) -> int:
        return self.num_speculative_tokens


@dataclass(frozen=True)
class FakeMemory:
    """The part of CacheMemory that the engine reads."""

    num_blocks: tuple[int, ...]


class FakeRunner:
    """The members of ModelRunner, its resident and its compiler that the engine uses.

    sizes: those that the engine shall give its scheduler
    target[group, block, offset]: the token whose key lies there
    draft[group, block, offset]: that token and, with a lookahead, the one after it; empty without
        a lag
    prefills: the chunks of every prefill
    rounds: the requests of every step's rounds
    before_rounds: called with the requests of a step's rounds, before they run
    is_slow: whether results stay unready
    finishes: says of a result whether it has become ready, each time that the engine asks
    batch_of: the batch for requests that one of a given size holds
    """

    speculative = None
    adapts = False
    on_gpu = False
    num_waiting = 0

    def __init__(
        self,
        sizes: SchedulerConfig,
        cache_groups: Sequence[CacheGroup],
        num_blocks: Sequence[int],
        *,
        seed: int,
        caching: bool,
    ) -> None:
        self.sizes, self._rng = sizes, random.Random(seed)
        self.num_speculative_tokens = sizes.head_room - 1
        self.rounds_per_step, self.prefill_tile = sizes.rounds_per_step, sizes.prefill_tile
        self.params: dict[str, dict[str, Any]] = {"target": {}}
        self.config = EngineConfig(
            max_model_len=sizes.max_model_len,
            max_num_seqs=sizes.max_num_seqs,
            block_size=sizes.block_size,
            max_num_batched_tokens=sizes.max_chunk - sizes.prefill_tile + 1,  # is rounded up
            batch_buckets=sizes.buckets,
            rounds_per_step=sizes.rounds_per_step,
            enable_prefix_caching=caching,
        )
        self.configs = FakeConfigs(
            tuple(cache_groups),
            sizes.lookahead,
            sizes.lag,
            self.num_speculative_tokens,
            sizes.may_wait,
        )
        self.memory = FakeMemory(tuple(num_blocks))
        self.before_rounds: Callable[[list[Request]], object] = lambda requests: None
        self.is_slow = False
        self.finishes: Callable[[Result], bool] = lambda _: self._rng.random() < 1 / 3
        self.batch_of: Callable[[int], int] = lambda least: least
        self.prefills: list[list[Chunk]] = []
        self.rounds: list[list[Request]] = []
        self._results: list[Result] = []
        self.forget()

    def num_unread(self, request: Request) -> tuple[int, int]:
        """Return the request's results that were never read, and the rounds among them."""
        found = [r for r in self._results if not r.is_read and request in r.requests]
        return sum(max(r.num_rounds, 1) for r in found), sum(r.num_rounds for r in found)

    @property
    def resident(self) -> FakeRunner:
        return self

    @property
    def compiler(self) -> FakeRunner:
        return self

    @property
    def program_choice(self) -> FakeRunner:
        return self

    # --- the state -------------------------------------------------------------------------------

    def check_room(self) -> None:
        """Do nothing: every pool fits."""

    def check_devices(self) -> None:
        """Do nothing: every device answers."""

    def forget(self) -> None:
        self._num_slots = self.sizes.buckets[0]
        self._rows: dict[int, Row] = {}
        self.target: dict[CacheSlot, int] = {}
        self.draft: dict[CacheSlot, list[int]] = {}

    @property
    def num_slots(self) -> int:
        return self._num_slots

    def poll(self) -> None:
        """Do nothing: nothing compiles."""

    def totals_of(self, requests: Iterable[Request]) -> Totals:
        return Totals.of(requests, self.sizes.prefill_tile)

    def may_admit(
        self,
        request: Request,
        features: SamplingFeatures,
        others: Callable[[], Totals],
        *,
        alone: bool,
    ) -> bool:
        return True

    def may_shrink(
        self, batch: int, features: SamplingFeatures, running: Sequence[Request]
    ) -> bool:
        return True

    def batch_for(self, features: SamplingFeatures, requests: Sequence[Request], least: int) -> int:
        assert least == next(b for b in self.sizes.buckets if b >= len(requests))
        return self.batch_of(least)

    def deactivate(self, cleared: Sequence[int]) -> None:
        for slot in cleared:
            self._rows.pop(slot, None)

    def move(self, sources: Sequence[int]) -> None:
        assert len(sources) in self.sizes.buckets
        self._num_slots = len(sources)
        self._rows = {to: self._rows[at] for to, at in enumerate(sources) if at in self._rows}

    def admit(
        self, added: Sequence[Request], running: Sequence[Request]
    ) -> dict[Request, ConfigError]:
        assert len(running) <= self.sizes.max_num_seqs
        for request in added:
            self._rows.pop(slot_of(request), None)
        return {}

    # --- programs --------------------------------------------------------------------------------

    def prefill(
        self, features: SamplingFeatures, chunks: Sequence[Chunk]
    ) -> tuple[Verification, list[range]]:
        self.prefills.append(list(chunks))
        tile, rows, end = self.prefill_tile, [], 0
        for chunk in chunks:
            first, end = end, end - (-len(chunk.token_ids) // tile)
            rows.append(range(first, end))
        assert end <= self.sizes.max_tiles
        tokens: dict[int, list[int]] = {}
        result = Result([], num_rounds=0)
        for chunk, tiles in zip(chunks, rows, strict=True):
            self._prefill(chunk)
            if chunk.ends and not chunk.request.num_generated:
                tokens[tiles[-1]] = self._rows[slot_of(chunk.request)].text[-1:]
                result.requests.append(chunk.request)
        overflowed = np.zeros(end, bool)
        return self._verification(result, [tokens], end, overflowed=overflowed), rows

    def _prefill(self, chunk: Chunk) -> None:
        request, end = chunk.request, chunk.start + len(chunk.token_ids)
        text = request.all_token_ids
        assert chunk.token_ids == text[chunk.start : end]
        self._check_context(request, text, chunk.start, chunk.start)
        for p in range(chunk.start, end):
            self._write(request, p, text[p])
            if p + self.sizes.lookahead < end or not chunk.ends:
                self._write_draft(request, p, text)
        if not chunk.ends:
            return
        known = text[:end]
        first = next_token(known)
        draft_from = end - self.sizes.lookahead
        row = self._rows[slot_of(request)] = Row(request, [*known, first], draft_from)
        assert not request.num_generated or text[end:] == [first], (
            "a request that goes on is not sampled anew"
        )
        if not request.num_generated:
            self._end(row, 1)

    def round(
        self,
        features: SamplingFeatures,
        requests: Iterable[Request],
        *,
        num_speculative_tokens: int,
        limits_drafts: bool,
    ) -> Verification:
        running = list(requests)
        assert num_speculative_tokens == self.num_speculative_tokens
        assert limits_drafts == any(r.draft_limit < num_speculative_tokens for r in running)
        self.before_rounds(running)
        self.rounds.append(running)
        parts = [self._round(running) for _ in range(self.rounds_per_step)]
        return self._verification(Result(running, self.rounds_per_step), parts, self._num_slots)

    def _round(self, requests: list[Request]) -> dict[int, list[int]]:
        """Run a round, and return the tokens of each slot that generates."""
        found: dict[int, list[int]] = {}
        for request in requests:
            slot = slot_of(request)
            row = self._rows[slot]
            assert row.request is request
            if row.active:
                found[slot] = self._generate(row)
        for slot, row in self._rows.items():
            assert not row.active or (row.request.slot == slot and row.request in requests), (
                "a row that no request waits for still generates"
            )
        return found

    def _generate(self, row: Row) -> list[int]:
        request, text, cached = row.request, row.text, len(row.text) - 1
        limit, K = self.sizes.max_model_len, self.num_speculative_tokens
        self._check_context(request, text, cached, row.draft_from)
        for p in range(row.draft_from, cached):
            self._write_draft(request, p, text)
        # Drafts and their verification leave rows that are written over.
        waits = self.sizes.may_wait and self._rng.random() < 1 / 3
        for p in range(cached, min(cached + K + 1, limit)):
            self._write_draft(request, p, None)
            if not waits:
                self._write(request, p, -1)
        if waits:  # the draft reads the same rows again
            return []
        new: list[int] = []
        for _ in range(self._rng.randint(0, K) + 1):
            new.append(next_token([*text, *new]))
        for p, token in enumerate([text[-1], *new[:-1]], start=cached):
            if p < limit:
                self._write(request, p, token)
        text += new
        row.draft_from = cached
        if not self.sizes.lookahead:  # the draft has read its own drafts but the last
            row.draft_from += min(len(new), max(K, 1))
            for p in range(cached, min(row.draft_from, limit)):
                self._write_draft(request, p, text)
        self._end(row, len(new))
        return new

    def _end(self, row: Row, num_new: int) -> None:
        generated = len(row.text) - len(row.request.prompt_token_ids)
        stops = set(row.text[-num_new:]) & set(row.request.stop_token_ids)
        row.active = generated < row.request.max_tokens and not stops

    def _verification(
        self,
        result: Result,
        parts: list[dict[int, list[int]]],
        num_rows: int,
        *,
        overflowed: np.ndarray | None = None,
    ) -> Verification:
        """Return a result with an axis of rounds in front if there are several."""
        shape = len(parts), num_rows
        tokens = np.full((*shape, self.num_speculative_tokens + 1), -1, np.int32)
        num_sampled = np.zeros(shape, np.int32)
        for i, part in enumerate(parts):
            for row, sampled in part.items():
                tokens[i, row, : len(sampled)], num_sampled[i, row] = sampled, len(sampled)
        if len(parts) == 1:
            tokens, num_sampled = tokens[0], num_sampled[0]
        self._results.append(result)
        arrays: Any = [
            None if value is None else DeviceArray(value, result, self._is_ready)
            for value in (tokens, num_sampled, overflowed)
        ]
        return Verification(arrays[0], arrays[1], overflowed=arrays[2])

    def _is_ready(self, result: Result) -> bool:
        result.is_ready = result.is_ready or (not self.is_slow and self.finishes(result))
        return result.is_ready

    # --- the caches ------------------------------------------------------------------------------

    def _place(self, request: Request, group: int, position: int) -> CacheSlot:
        page, offset = divmod(position, self.sizes.block_size)
        assert page < request.blocks[group].num_pages, f"position {position} has no block"
        return group, request.blocks[group].at(page), offset

    def _places(self, request: Request, position: int) -> list[CacheSlot]:
        """Return the cache slots that a row writes, one in each group."""
        return [self._place(request, i, position) for i in range(len(request.blocks))]

    def _write(self, request: Request, position: int, token: int) -> None:
        self.target |= dict.fromkeys(self._places(request, position), token)

    def _write_draft(self, request: Request, position: int, text: list[int] | None) -> None:
        """Write the draft's entry of a position of a text; None: of a rejected draft."""
        if self.sizes.lag:
            entry = [-1] if text is None else self._entry(text, position)
            self.draft |= dict.fromkeys(self._places(request, position), entry)

    def _entry(self, text: list[int], position: int) -> list[int]:
        """Return the tokens that the draft's entry of a position is made of."""
        return text[position : position + 1 + self.sizes.lookahead]

    def _check_context(
        self, request: Request, text: list[int], num_cached: int, drafted: int
    ) -> None:
        """Check all that attention reads, of the target from num_cached and the draft from drafted.

        Both are positions of the first row that is computed.
        """
        for i, group in enumerate(self.configs.cache_groups):
            for p in range(group.first_seen(num_cached), num_cached):
                assert self.target[self._place(request, i, p)] == text[p], (
                    f"the target's row {p} is another request's"
                )
            if not self.sizes.lag:
                continue
            for p in range(group.first_seen(drafted), drafted):
                assert self.draft[self._place(request, i, p)] == self._entry(text, p), (
                    f"the draft's row {p} is another request's"
                )
