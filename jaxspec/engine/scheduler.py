"""Which request runs where and when: slots, blocks, admission, prefill in chunks, preemption. Host logic alone, no jax.

A request waits until a slot and blocks for its known tokens are free, is prefilled in chunks between the others' steps, and then
generates in every round until it ends. The device runs ahead of what the host has read, so a request holds blocks for every token
that its unread rounds may bring, and for those of the next step's. Where blocks run out, the request admitted last gives its own up and
waits again at the head of the queue: it is prefilled anew over its prompt and all that it generated, and nothing of that is sampled again.

Each KV-cache group has blocks of its own. Of one with a window a request holds what its next program reads and writes, and no more: while
it is prefilled, blocks for the next chunk alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jaxspec.cache.block_pool import hash_blocks
from jaxspec.cache.group_blocks import GroupBlocks, Held, longest_prefix
from jaxspec.config import CacheGroup
from jaxspec.engine.metrics import SchedulerCounts
from jaxspec.engine.request import FinishReason, Request


@dataclass(frozen=True)
class SchedulerConfig:
    """buckets: batch sizes that rounds are compiled for, ascending. max_num_batched_tokens: of one prefill call, which is made of tiles of
    prefill_tile rows, each of one request. head_room: positions past a request's cached ones that a round may write, K + 1.
    rounds_per_step: rounds that are launched together. has_draft: whether prefix blocks hold a draft's keys and values as well."""

    max_num_seqs: int
    buckets: tuple[int, ...]
    max_model_len: int
    max_num_batched_tokens: int
    prefill_tile: int
    block_size: int
    head_room: int = 1
    rounds_per_step: int = 1
    has_draft: bool = False

    @property
    def max_chunk(self) -> int:
        """Tokens of one prefill call, in whole tiles."""
        return max(1, self.max_num_batched_tokens // self.prefill_tile) * self.prefill_tile

    @property
    def step_room(self) -> int:
        """Positions past a request's cached ones that the rounds of a step may write."""
        return self.rounds_per_step * self.head_room


@dataclass(frozen=True)
class Chunk:
    """Known tokens of one request that are prefilled together. next_token: the known one after them, -1 where they are the last."""

    request: Request
    start: int
    token_ids: list[int]
    next_token: int

    @property
    def ends(self) -> bool:
        return self.next_token < 0


@dataclass
class Step:
    """What the device is to do before the next rounds, in this order.

    cleared: slots whose row must stop generating, as the host alone knows that it has ended. sources: the row that each row of the new
    batch comes from (-1: an idle one), None if rows stay. admitted: requests whose parameters go to their slots. chunks: prefill.
    """

    cleared: list[int] = field(default_factory=list)
    sources: list[int] | None = None
    admitted: list[Request] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)


@dataclass
class Rounds:
    """Of the next step. requests: who generates (nobody: there are none). cleared: as in Step. wait: blocks are short, read first."""

    requests: list[Request] = field(default_factory=list)
    cleared: list[int] = field(default_factory=list)
    wait: bool = False


class Scheduler:
    """Over the blocks of each KV-cache group. `schedule`, then `schedule_rounds`, over and over; `read` for every result."""

    def __init__(self, config: SchedulerConfig, groups: Sequence[GroupBlocks]) -> None:
        self.config, self.groups = config, tuple(groups)
        self.waiting: deque[Request] = deque()
        self.rows: list[Request | None] = [None] * config.buckets[0]
        self.counts = SchedulerCounts()
        self.changes = (
            0  # counts admissions and departures: who compares it knows whether others run
        )
        self._cleared: list[int] = []
        self._admissions = 0

    @property
    def running(self) -> Iterator[Request]:
        return (r for r in self.rows if r is not None)

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting) or any(True for _ in self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def place(self, request: Request, slot: int, blocks: list[list[int]]) -> None:
        """Run a prefilled request in this slot, in these blocks of each group (Engine.set_state)."""
        for group, chosen in zip(self.groups, blocks, strict=True):
            group.pool.take(chosen)
        request.slot, request.blocks, self.rows[slot] = (
            slot,
            [Held(0, list(chosen)) for chosen in blocks],
            request,
        )
        request.num_prefilled = request.num_cached = len(request.prompt_token_ids)
        request.num_consumed = max(0, request.num_cached - self.config.head_room)
        # Its blocks hold no text that another request could share.
        request.num_registered = request.num_consumed // self.config.block_size
        self._admissions += 1
        self.changes += 1
        request.admitted = self._admissions

    # --- before a step -----------------------------------------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Admit whom there is room for, and choose the next tiles of prefill."""
        step = Step(admitted=self._admit(), cleared=self._take_cleared())
        step.sources = self._arrange(len(step.admitted))
        free = (i for i, r in enumerate(self.rows) if r is None)
        for request, slot in zip(step.admitted, free, strict=False):
            self.rows[slot], request.slot = request, slot
        step.chunks = self._next_chunks()
        return step

    def _take_cleared(self) -> list[int]:
        cleared, self._cleared = self._cleared, []
        return cleared

    def _admit(self) -> list[Request]:
        admitted: list[Request] = []
        num_running = sum(1 for _ in self.running)
        while self.waiting and num_running + len(admitted) < self.config.max_num_seqs:
            # Whoever runs may need a block soon; admitting somebody into the last ones would only preempt him again.
            if not self._give_blocks(self.waiting[0], spare=num_running + len(admitted)):
                break
            request = self.waiting.popleft()
            self._admissions += 1
            request.admitted = self._admissions
            self.changes += 1
            admitted.append(request)
        return admitted

    def _give_blocks(self, request: Request, spare: int) -> bool:
        """Blocks for the request's known tokens and its first rounds: shared ones for a cached prefix, and new ones."""
        count = self._find_prefix(request)
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
        return True

    def _find_prefix(self, request: Request) -> int:
        """How many cached blocks the request can start after.

        At least one token is left to compute, for the logits after it. (With a draft that is the one after the last hash, see hash_blocks.)
        """
        size = self.config.block_size
        known = request.all_token_ids[: request.num_known]
        if request.params.prompt_logprobs is not None or not all(
            g.pool.enable_prefix_caching for g in self.groups
        ):
            return 0  # (a prompt's log-probabilities need all of its rows)
        hash_blocks(known, size, request.hashes, has_draft=self.config.has_draft)
        return longest_prefix(self.groups, request.hashes[: (len(known) - 1) // size])

    def _num_pages(self, request: Request, group: CacheGroup) -> int:
        """Blocks of the request up to the last that its next program may write: a step after its unread rounds, or the next chunk of its
        prompt. A group that sees everything has blocks for the whole prompt, and a step, from the start."""
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

    def _arrange(self, num_new: int) -> list[int] | None:
        """Take the smallest batch that holds everybody; those in rows past its end move into free ones before it."""
        needed = sum(1 for _ in self.running) + num_new
        size = next(b for b in self.config.buckets if b >= needed)
        if size == len(self.rows):
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
        """Tiles of prefill within the budget, first come first served; a chunk of several tiles is one request's."""
        tile = self.config.prefill_tile
        tiles = self.config.max_chunk // tile
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
            request.num_consumed = end - (
                ends and self.config.has_draft
            )  # the prompt's last row waits for the token after it
            if ends:
                request.num_cached = end
                request.num_unread += (
                    request.num_generated == 0
                )  # a request that goes on samples nothing here
            self._register(request)
        return chunks

    def schedule_rounds(self) -> Rounds:
        """Who generates next, each with blocks for it; who is being prefilled gets those of his next chunk.

        The request admitted first always gets what it needs, so that something ends. Others give way to whoever generates and was admitted
        before them; for a chunk of prefill they wait.
        """
        found = Rounds()
        order = sorted(self.running, key=lambda r: r.admitted)
        for request in order:
            if request.slot is None or not request.may_generate:
                continue  # (without a slot: preempted a moment ago)
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
        """Give back what no row to come sees, and take what the next program may write."""
        for group, held in zip(self.groups, request.blocks, strict=True):
            group.free_unseen(held, request.num_consumed)
            if not group.extend(held, self._num_pages(request, group.group)):
                return False
        return True

    def _preempt_last(self) -> None:
        """The request admitted last gives up its slot and its blocks, and is the next to be admitted."""
        request = max(self.running, key=lambda r: r.admitted)
        self._cleared.append(self._leave(request))
        request.num_prefilled = request.num_cached = 0
        self.waiting.appendleft(request)
        self.counts.num_preemptions += 1

    # --- after a step ------------------------------------------------------------------------------------------------------------

    def read(self, request: Request, tokens: Sequence[int], *, is_round: bool) -> int:
        """What a round, or the end of a prompt, brought for a request: the tokens that it sampled. Returns how many of them count."""
        request.num_unread -= 1
        request.num_unread_rounds -= is_round
        if request.finish_reason is not None:
            return 0
        if is_round:
            before = request.num_cached
            request.num_cached += len(tokens)
            request.num_consumed = (
                before if self.config.has_draft else request.num_cached
            )  # a draft reads a round's rows in the next
        kept = request.extend(tokens)
        if request.finish_reason is not None:
            slot = self._leave(request)
            if (
                request.finish_reason == "stop"
                and request.all_token_ids[-1] not in request.stop_token_ids
            ):
                self._cleared.append(slot)  # a stop string: the device does not know of it
        else:
            self._register(request)
        return kept

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request from outside: cancelled, or with an error; nothing happens to one that has ended."""
        if request.finish_reason is None:
            request.finish_reason = reason
            if request.slot is not None:
                self._cleared.append(self._leave(request))
            elif request in self.waiting:  # else Ctrl-C came before it was added
                self.waiting.remove(request)

    def _leave(self, request: Request) -> int:
        assert request.slot is not None
        for group, held in zip(self.groups, request.blocks, strict=True):
            group.free(held)
        slot, request.slot, request.blocks = request.slot, None, []
        self.rows[slot] = None
        self.changes += 1
        return slot

    def _register(self, request: Request) -> None:
        """Let others share the blocks that both models have consumed."""
        size, count = self.config.block_size, request.num_consumed // self.config.block_size
        if count <= request.num_registered or not self.groups[0].pool.enable_prefix_caching:
            return
        hash_blocks(
            request.all_token_ids[: request.num_consumed + 1],
            size,
            request.hashes,
            has_draft=self.config.has_draft,
        )
        for page in range(request.num_registered, count):
            for group, held in zip(self.groups, request.blocks, strict=True):
                group.pool.register(held.at(page), request.hashes[page])
        request.num_registered = count
