"""The scheduler: slots, blocks, admission, prefill in chunks, preemption. No jax.

A request waits until a slot and blocks for its known tokens are free. It is prefilled in chunks
between the others' steps, and then generates in every round until it ends. The device runs ahead of
what the host has read. So a request holds blocks for every token of its unread rounds and of the
next step. If blocks run out, the request admitted last gives up its own and waits again at the head
of the queue. It is prefilled anew over its prompt and all tokens that it generated; none of these
is sampled again.

Each KV-cache group has blocks of its own. In a group with a window, a request holds only the blocks
that its next program reads and writes: during prefill, those of the next chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from jaxspec.cache.block_pool import hash_blocks
from jaxspec.cache.group_blocks import GroupBlocks, RequestBlocks, longest_prefix
from jaxspec.config import CacheGroup
from jaxspec.engine.metrics import SchedulerCounts
from jaxspec.engine.request import FinishReason, Request

AdmissionTest = Callable[[Request, Sequence[Request]], bool]
BatchChoice = Callable[[int, Sequence[Request]], int]
MAX_PASSED = 64  # requests at the head of the queue that may not be admitted yet


def admit_any(request: Request, admitted: Sequence[Request]) -> bool:
    """Return True: every request may be admitted."""
    return True


def shrink_always(size: int) -> bool:
    """Return True: the batch may have any size."""
    return True


def smallest_batch(least: int, admitted: Sequence[Request]) -> int:
    """Return `least`: every batch serves all requests."""
    return least


@dataclass(frozen=True)
class SchedulerConfig:
    """The engine's limits and sizes.

    max_num_seqs: requests that run together at most
    buckets: batch sizes that rounds are compiled for, ascending
    max_model_len: tokens of a request at most
    max_tiles: tiles of one prefill call
    prefill_tile: rows of a tile, which belongs to one request
    block_size: tokens of a block
    head_room: positions past a request's cached ones that a round may write, K + 1
    rounds_per_step: rounds that are launched together
    lookahead: tokens after its own that a cached position depends on (see Drafter)
    lag: cached tokens that the draft may not have read after a round (see Drafter)
    may_wait: whether a request may get no token from a round (RoundConfigs.may_wait)
    """

    max_num_seqs: int
    buckets: tuple[int, ...]
    max_model_len: int
    max_tiles: int
    prefill_tile: int
    block_size: int
    head_room: int = 1
    rounds_per_step: int = 1
    lookahead: int = 0
    lag: int = 0
    may_wait: bool = False

    @property
    def max_chunk(self) -> int:
        """Tokens of one prefill call."""
        return self.max_tiles * self.prefill_tile

    @property
    def step_room(self) -> int:
        """Positions past a request's cached ones that the rounds of a step may write."""
        return self.rounds_per_step * self.head_room


@dataclass(frozen=True)
class Chunk:
    """Known tokens of one request that are prefilled together.

    start: position of the first
    next_token: the known token after them, -1 where they are the last
    """

    request: Request
    start: int
    token_ids: list[int]
    next_token: int

    @property
    def ends(self) -> bool:
        return self.next_token < 0


@dataclass
class Step:
    """The device's work before the next rounds, in this order.

    cleared: slots that must stop generating; only the host knows that their requests have ended
    sources: the old slot of each slot of the new batch (-1: an idle one); None if slots stay
    admitted: requests whose parameters go to their slots
    chunks: what is prefilled
    """

    cleared: list[int] = field(default_factory=list)
    sources: list[int] | None = None
    admitted: list[Request] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)


@dataclass
class Rounds:
    """The rounds of the next step.

    requests: those that generate; empty: no rounds
    cleared: as in Step
    wait: blocks are short, so a result must be read first
    """

    requests: list[Request] = field(default_factory=list)
    cleared: list[int] = field(default_factory=list)
    wait: bool = False


class Scheduler:
    """Place requests in slots and in the blocks of each KV-cache group.

    The engine calls `schedule`, then `schedule_rounds`, in turn, and `read` for every result.
    """

    def __init__(self, config: SchedulerConfig, groups: Sequence[GroupBlocks]) -> None:
        self.config, self.groups = config, tuple(groups)
        self.waiting: deque[Request] = deque()
        self.rows: list[Request | None] = [None] * config.buckets[0]
        self.counts = SchedulerCounts()
        self.changes = 0  # counts admissions and departures
        self.on_trial: Request | None = None  # a suspect that was admitted last (Engine.advance)
        self._cleared: list[int] = []
        self._admissions = 0

    @property
    def running(self) -> Iterator[Request]:
        return (r for r in self.rows if r is not None)

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting) or any(True for _ in self.running)

    def forget_prefixes(self) -> None:
        """Forget the contents of all blocks, so that no later prompt shares them."""
        for group in self.groups:
            group.pool.forget()

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def place(self, request: Request, slot: int, blocks: list[list[int]]) -> None:
        """Run a prefilled request in this slot and these blocks (Engine.set_state)."""
        for group, chosen in zip(self.groups, blocks, strict=True):
            group.pool.take(chosen)
        request.slot, request.blocks, self.rows[slot] = (
            slot,
            [RequestBlocks(0, list(chosen)) for chosen in blocks],
            request,
        )
        request.num_prefilled = request.num_cached = len(request.prompt_token_ids)
        request.num_consumed = max(0, request.num_cached - self.config.head_room)
        # Its blocks hold no text that another request could share.
        request.num_registered = request.num_consumed // self.config.block_size
        self._admissions += 1
        self.changes += 1
        request.admitted = self._admissions

    # --- before a step ---------------------------------------------------------------------------

    def schedule(
        self,
        may_admit: AdmissionTest = admit_any,
        may_shrink: Callable[[int], bool] = shrink_always,
        batch_for: BatchChoice = smallest_batch,
    ) -> Step:
        """Admit the requests that there is room for, and choose the next tiles of prefill.

        may_admit: says of a waiting request, and those admitted in this step, whether it may be
            admitted now. Requests that may not stay in the queue, and others pass them.
        may_shrink: says of a smaller batch whether the requests that run may move to it now
        batch_for: returns the batch for the requests that run and those admitted in this step, of
            the size that holds them or larger
        """
        step = Step(admitted=self._admit(may_admit), cleared=self._take_cleared())
        step.sources = self._arrange(step.admitted, may_shrink, batch_for)
        free = (i for i, r in enumerate(self.rows) if r is None)
        for request, slot in zip(step.admitted, free, strict=False):
            self.rows[slot], request.slot = request, slot
        step.chunks = self._next_chunks()
        return step

    def _take_cleared(self) -> list[int]:
        cleared, self._cleared = self._cleared, []
        return cleared

    def _admit(self, may_admit: AdmissionTest) -> list[Request]:
        admitted: list[Request] = []
        if not self.is_trial_over():
            return admitted
        num_running = sum(1 for _ in self.running)
        passed: list[Request] = []  # those that may not be admitted yet
        while self.waiting and num_running + len(admitted) < self.config.max_num_seqs:
            if len(passed) == MAX_PASSED:
                break
            if self.waiting[0].standing == "suspect":
                if admitted:
                    break
                self.on_trial = self.waiting[0]  # before any work for it, which may fail
            if not may_admit(self.waiting[0], admitted):
                self.on_trial = None
                passed.append(self.waiting.popleft())
                continue
            # A running request may need a block soon. A request admitted into the last free blocks
            # would only be preempted again.
            if not self._give_blocks(self.waiting[0], spare=num_running + len(admitted)):
                self.on_trial = None
                break
            request = self.waiting.popleft()
            self._admissions += 1
            request.admitted = self._admissions
            self.changes += 1
            admitted.append(request)
            if self.on_trial is not None:
                break
        self.waiting.extendleft(reversed(passed))
        return admitted

    def is_trial_over(self) -> bool:
        """Return whether no suspect runs that has yet to get through a round.

        One that has is cleared.
        """
        request = self.on_trial
        if request is None:
            return True
        if request.slot is None or request.num_cached <= request.num_prefilled:
            return False
        request.standing, self.on_trial = "cleared", None
        return True

    def _give_blocks(self, request: Request, spare: int) -> bool:
        """Give the request blocks for its known tokens and its first rounds.

        False if too few are free. Blocks of a cached prefix are shared, the others new.
        """
        count = self.find_prefix(request)
        request.num_prefilled = request.num_consumed = count * self.config.block_size
        request.num_registered, request.num_cached = count, 0
        pages = [self._num_pages(request, g.group) for g in self.groups]
        if not all(
            g.has_room(request.hashes, count, n, spare)
            for g, n in zip(self.groups, pages, strict=True)
        ):
            return False
        request.blocks = [
            g.start(request.hashes, count, n) for g, n in zip(self.groups, pages, strict=True)
        ]
        self.counts.num_prefix_queries += request.num_known
        self.counts.num_prefix_hits += request.num_prefilled
        if request.num_prefix_hits is None:
            request.num_prefix_hits = request.num_prefilled
        return True

    def find_prefix(self, request: Request) -> int:
        """Return how many cached blocks the request can start after.

        At least one token is left to compute, for the logits after it. (With a lookahead it is the
        token after the last hash, see hash_blocks.)
        """
        size = self.config.block_size
        known = request.all_token_ids[: request.num_known]
        if request.params.prompt_logprobs is not None or not all(
            g.pool.enable_prefix_caching for g in self.groups
        ):
            return 0  # a prompt's log-probabilities need all of its rows
        hash_blocks(known, size, request.hashes, lookahead=self.config.lookahead)
        return longest_prefix(self.groups, request.hashes[: (len(known) - 1) // size])

    def _num_pages(self, request: Request, group: CacheGroup) -> int:
        """Return the request's pages up to the last that its next program may write.

        That program is a step after its unread rounds, or the next chunk of its prompt. A group
        that sees everything has blocks for the whole prompt, and a step, from the start.
        """
        config = self.config
        if request.is_prefilled:
            end = (
                request.num_cached + request.num_unread_rounds * config.head_room + config.step_room
            )
        else:
            end = request.num_known + config.step_room
            if group.reach is not None:
                end = min(end, request.num_prefilled + config.max_chunk)
        last_round = len(request.prompt_token_ids) + request.max_tokens + config.head_room - 1
        return -(-min(end, last_round, config.max_model_len) // config.block_size)

    def _arrange(
        self,
        admitted: Sequence[Request],
        may_shrink: Callable[[int], bool],
        batch_for: BatchChoice,
    ) -> list[int] | None:
        """Take the smallest batch that serves all requests; None if it is the present one.

        Requests in slots past its end move into free slots before it.
        """
        needed = sum(1 for _ in self.running) + len(admitted)
        size = batch_for(next(b for b in self.config.buckets if b >= needed), admitted)
        if size == len(self.rows):
            return None
        if size < len(self.rows) and not admitted and not may_shrink(size):
            return None
        sources = [
            i if i < len(self.rows) and self.rows[i] is not None else -1 for i in range(size)
        ]
        free = (i for i in range(size) if sources[i] < 0)
        rows = [*self.rows[:size], *[None] * (size - len(self.rows))]
        for request in self.rows[size:]:
            if request is not None:
                assert request.slot is not None
                to = next(free)
                sources[to], rows[to], request.slot = request.slot, request, to
        self.rows = rows
        return sources

    def _next_chunks(self) -> list[Chunk]:
        """Choose tiles of prefill within the budget, in the order of admission.

        A chunk of several tiles belongs to one request.
        """
        tile = self.config.prefill_tile
        tiles = self.config.max_tiles
        chunks: list[Chunk] = []
        for request in sorted(self.running, key=lambda r: r.admitted):
            start, known = request.num_prefilled, request.num_known
            end = min(
                known,
                start + tiles * tile,
                self.config.block_size * min(held.num_pages for held in request.blocks),
            )
            if request.is_prefilled or end <= start:
                continue
            tiles -= -(-(end - start) // tile)
            ends = end == known
            chunks.append(
                Chunk(
                    request,
                    start,
                    request.all_token_ids[start:end],
                    -1 if ends else request.all_token_ids[end],
                )
            )
            request.num_prefilled = end
            # A draft that reads the next token has not read the prompt's last row yet.
            request.num_consumed = end - (self.config.lookahead if ends else 0)
            if ends:
                request.num_cached = end
                # A preempted request has its next token already and samples nothing here.
                request.num_unread += request.num_generated == 0
            self._register(request)
        return chunks

    def schedule_rounds(self) -> Rounds:
        """Choose the requests that generate next, and reserve their blocks.

        A request that is being prefilled gets the blocks of its next chunk. The oldest request may
        preempt others, which guarantees progress. A request that generates may preempt those
        admitted after it; a chunk of prefill waits instead.
        """
        found = Rounds()
        order = sorted(self.running, key=lambda r: r.admitted)
        for request in order:
            if request.slot is None or not request.may_generate(may_wait=self.config.may_wait):
                continue  # without a slot: preempted in this loop
            while request.slot is not None and not self._reserve(request):
                if not request.is_prefilled and request is not order[0]:
                    break
                if any(r.num_unread for r in self.running):
                    return Rounds(wait=True)
                self._preempt_last()
            if request.slot is not None and request.is_prefilled:
                found.requests.append(request)
        found.cleared = self._take_cleared()
        for request in found.requests:
            request.num_unread += self.config.rounds_per_step
            request.num_unread_rounds += self.config.rounds_per_step
        return found

    def _reserve(self, request: Request) -> bool:
        """Free blocks that no later row sees, and take those that the next program may write.

        False if too few are free.
        """
        for group, held in zip(self.groups, request.blocks, strict=True):
            group.free_unseen(held, request.num_consumed)
            if not group.extend(held, self._num_pages(request, group.group)):
                return False
        return True

    def _preempt_last(self) -> None:
        """Take slot and blocks of the request admitted last, and queue it first."""
        request = max(self.running, key=lambda r: r.admitted)
        self._cleared.append(self._leave(request))
        request.num_prefilled = request.num_cached = 0
        self.waiting.appendleft(request)
        self.counts.num_preemptions += 1

    # --- after a step ----------------------------------------------------------------------------

    def read(
        self, request: Request, tokens: Sequence[int], *, is_round: bool, num_rounds: int = 1
    ) -> int:
        """Take over the tokens that rounds, or the end of a prompt, sampled for a request.

        num_rounds: more than 1 only for rounds without drafts, a token each

        Returns how many of them count.
        """
        request.num_unread -= num_rounds
        request.num_unread_rounds -= num_rounds if is_round else 0
        if request.finish_reason is not None:
            return 0
        before = request.num_cached
        if is_round and not tokens:  # no row of it advanced
            self.counts.num_waits += 1
        elif is_round:
            request.num_cached += len(tokens)
            request.num_consumed = self._consumed(before, len(tokens), num_rounds)
        kept = request.extend(tokens)
        if request.finish_reason is not None:
            if num_rounds > 1 and kept > 1:  # the blocks of the rounds before its last one
                request.num_consumed = self._consumed(before, kept - 1, num_rounds)
                self._register(request)
            slot = self._leave(request)
            if (
                request.finish_reason == "stop"
                and request.all_token_ids[-1] not in request.stop_token_ids
            ):
                self._cleared.append(slot)  # a stop string, which the device does not know of
        else:
            self._register(request)
        return kept

    def _consumed(self, cached: int, num_tokens: int, num_rounds: int) -> int:
        """Return the tokens that both models have consumed after rounds brought num_tokens.

        cached: the cached tokens before these rounds

        A draft may read the last rows of a round in the next round. Several rounds have one each.
        """
        before_last = cached + (num_tokens - 1 if num_rounds > 1 else 0)
        return max(before_last, cached + num_tokens - self.config.lag)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request early, cancelled or with an error, unless it has ended."""
        if request.finish_reason is None:
            request.finish_reason = reason
            if request.slot is not None:
                self._cleared.append(self._leave(request))
            elif request in self.waiting:  # Ctrl-C may come before the request is added
                self.waiting.remove(request)

    def _leave(self, request: Request) -> int:
        """Take the request's slot and blocks away, and return the slot."""
        assert request.slot is not None
        for group, held in zip(self.groups, request.blocks, strict=True):
            group.free(held)
        slot, request.slot, request.blocks = request.slot, None, []
        self.rows[slot] = None
        self.changes += 1
        if request is self.on_trial:
            self.on_trial = None
        return slot

    def _register(self, request: Request) -> None:
        """Let other requests share the full blocks that both models have consumed."""
        size, count = self.config.block_size, request.num_consumed // self.config.block_size
        if count <= request.num_registered or not self.groups[0].pool.enable_prefix_caching:
            return
        hash_blocks(
            request.all_token_ids[: request.num_consumed + 1],
            size,
            request.hashes,
            lookahead=self.config.lookahead,
        )
        for page in range(request.num_registered, count):
            for group, held in zip(self.groups, request.blocks, strict=True):
                group.pool.register(held.at(page), request.hashes[page])
        request.num_registered = count
