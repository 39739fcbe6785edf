"""The engine's loop: schedule, dispatch, read what is due.

The only place with a Python loop over rounds, and the only one that waits for the device.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import jax
import numpy as np

from jaxspec.cache.block_pool import BlockPool
from jaxspec.cache.group_blocks import GroupBlocks
from jaxspec.cache.pool_sizes import steps_ahead
from jaxspec.config import ConfigError, SamplingFeatures
from jaxspec.decode.several_rounds import each_round
from jaxspec.decode.state import DecodeState
from jaxspec.decode.verify import Verification
from jaxspec.engine.buckets import Shapes
from jaxspec.engine.draft_choice import Candidate, DraftChoice
from jaxspec.engine.first_logits import check_first_logits
from jaxspec.engine.metrics import LatencyMetrics, SchedulerCounts, SpecDecodeMetrics, Timings
from jaxspec.engine.outputs import EngineConfigError, EngineError
from jaxspec.engine.request import FinishReason, Request
from jaxspec.engine.round_configs import GREEDY
from jaxspec.engine.runner import ModelRunner
from jaxspec.engine.scheduler import (
    AdmissionTest,
    Chunk,
    Scheduler,
    SchedulerConfig,
    admit_any,
)
from jaxspec.engine.totals import Totals
from jaxspec.loading.placement import as_on_one_device
from jaxspec.parallel.processes import ProcessError
from jaxspec.sampling.logprobs import Scores, logprobs_of
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.rows import features_of

logger = logging.getLogger(__name__)

# A device without an answer waits TIMEOUT_SECONDS (pallas_kernels.peers.mailbox), then it goes on
# with meaningless results. A shorter time since a good result holds no such wait.
SUSPICIOUS_SECONDS = 5.0


@dataclass
class Stats:
    """Counts of an engine, or of several replicas, since it was made or since reset_stats.

    metrics: acceptance over all requests
    timings: the wall clock
    latency: latencies of the requests that finished
    scheduling: what the scheduler did
    clock: the time up to which the wall clock is counted
    """

    metrics: SpecDecodeMetrics
    timings: Timings
    latency: LatencyMetrics
    scheduling: SchedulerCounts
    clock: float = field(default_factory=time.perf_counter)

    @classmethod
    def new(cls, num_speculative_tokens: int) -> Stats:
        return cls(
            SpecDecodeMetrics(num_speculative_tokens),
            Timings(),
            LatencyMetrics(),
            SchedulerCounts(),
        )


@dataclass
class InFlight:
    """A result that is not read yet, of a step's rounds or of a prefill.

    verification: once launched without num_sampled, which follows from the tokens
    rows: the requests that it holds tokens for, and their rows in it
    num_speculative_tokens: the rounds' K
    batch: slots of the batch that it ran in
    launched: when, as time.perf_counter() says
    prompts: chunks of prefill whose tokens need log-probabilities, and the rows of their tiles
    """

    verification: Verification
    rows: list[tuple[Request, int]]
    is_round: bool
    num_speculative_tokens: int = 0
    batch: int = 0
    launched: float = field(default_factory=lambda: time.perf_counter())
    prompts: list[tuple[Chunk, range]] = field(default_factory=list)


Commands = deque[Callable[[], None]]
RoundsObserver = Callable[[Verification, Sequence[tuple[Request, int]]], object]


class Engine:
    """Requests in, tokens appended to them, round by round.

    One thread uses it at a time. Driver shares it between the calls of several threads.

    on_rounds: called with each step's rounds, once their result is read and the requests have their
        tokens: the Verification as numpy arrays (of several rounds with an axis of rounds in
        front), and the requests with their rows in it. Tools time and record rounds with it; None
        calls nothing.
    others_run: whether requests run in other engines that the same thread steps
    is_replica: whether there are such engines, so that no wait for a result may hold them up
    must_wait: whether the next step of a replica may wait for a result all the same
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.stats = Stats.new(runner.num_speculative_tokens)
        # On a GPU more programs are launched before a result is read; requests that have ended are
        # idle there. On a CPU both would share the cores.
        self.depth = steps_ahead(runner.rounds_per_step) if runner.on_gpu else 0
        self.choice = _draft_choice(runner)
        self.on_rounds: RoundsObserver | None = None
        self.others_run: Callable[[], bool] = lambda: False
        self.is_replica = False
        self.must_wait = False
        self._lacks_result = False  # the last step had nothing to launch before a result is ready
        self._in_flight: deque[InFlight] = deque()
        self._scheduler: Scheduler | None = None
        self._features = GREEDY
        self._features_at = -1  # Scheduler.changes when _features was found
        self._logits_seen = False  # whether a prefill's logits were finite
        self._answered_at = -math.inf  # by this time.perf_counter(), all devices had answers
        self._stepping = False
        self._live: dict[Request, None] = {}  # requests that have not ended, by arrival
        self.failed = False  # a step or a command, since the last restart (advance)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler; the first use makes it (_ensure_scheduler)."""
        return self._ensure_scheduler()

    def _ensure_scheduler(self) -> Scheduler:
        """Make the scheduler unless it exists: its pools take the memory that is free by then.

        ConfigError if that is too little for one request, or if the sizes exceed the whole memory.
        """
        if self._scheduler is None:
            self._scheduler = self._make_scheduler()
        return self._scheduler

    def _make_scheduler(self) -> Scheduler:
        config, runner = self.runner.config, self.runner
        assert config.batch_buckets is not None
        runner.resident.check_room()
        settings = SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            buckets=config.batch_buckets,
            max_model_len=config.max_model_len,
            max_tiles=config.prefill_tiles(runner.prefill_tile),
            prefill_tile=runner.prefill_tile,
            block_size=config.block_size,
            head_room=runner.num_speculative_tokens + 1,
            rounds_per_step=runner.rounds_per_step,
            lookahead=runner.configs.lookahead,
            lag=runner.configs.lag,
            may_wait=runner.configs.may_wait(config.batch_buckets[-1]),
        )
        groups = [
            GroupBlocks(group, BlockPool(n, enable_prefix_caching=config.enable_prefix_caching))
            for group, n in zip(runner.configs.cache_groups, runner.memory.num_blocks, strict=True)
        ]
        scheduler = Scheduler(settings, groups)
        scheduler.counts = self.stats.scheduling
        return scheduler

    def forget_prefixes(self) -> None:
        """Forget the contents of all blocks, so that no later prompt shares them."""
        if self._scheduler is not None:
            self._scheduler.forget_prefixes()

    def reset_stats(self) -> None:
        """Start to count anew."""
        self.count_in(Stats.new(self.runner.num_speculative_tokens))

    def count_in(self, stats: Stats) -> None:
        """Count in these Stats from here on."""
        self.stats = stats
        if self._scheduler is not None:
            self._scheduler.counts = stats.scheduling

    @property
    def has_requests(self) -> bool:
        """Whether some request waits or runs."""
        return bool(self._live)

    @property
    def is_running(self) -> bool:
        """Whether some request has a slot."""
        return self._scheduler is not None and next(self._scheduler.running, None) is not None

    @property
    def num_free(self) -> int:
        """Requests that could get a slot, beside those that have not ended.

        Those that wait for a program to be compiled leave their slots to others, which may turn out
        to wait for it too. So no more than one for each slot does.
        """
        slots = self.runner.config.max_num_seqs
        return slots - len(self._live) + min(self.runner.compiler.num_waiting, slots)

    @property
    def would_wait(self) -> bool:
        """Whether the next step would wait for the device."""
        is_full = 0 < self.depth <= len(self._in_flight)
        if self.failed or not (is_full or self._lacks_result):
            return False
        return not self._is_oldest_ready()

    def _is_oldest_ready(self) -> bool:
        """Return whether the result that is read next needs no wait."""
        if not self._in_flight:
            return True
        oldest: Any = self._in_flight[0].verification.output_tokens
        return oldest.is_ready()

    def add(self, request: Request) -> None:
        """Queue a request; nothing happens to one that is queued or runs."""
        scheduler = self.scheduler
        if request not in self._live:
            self._lacks_result = False
            self._live[request] = None
            scheduler.add(request)

    def cancel(
        self,
        request: Request,
        reason: FinishReason = "cancelled",
        error: BaseException | None = None,
    ) -> None:
        """End a request; nothing happens to one that has ended."""
        if request.finish_reason is None:
            self._lacks_result = False
            if self._scheduler is not None:
                self._scheduler.finish(request, reason)
            request.finish_reason, request.error = reason, error
            self._notify(request, 0)

    def step(self) -> None:
        """Dispatch the next prefill chunk and the next rounds, and read the results that are due.

        For tools that own all requests. An exception (Ctrl-C is one) may leave the device's
        state incomplete: every request is then cancelled, and the engine starts anew. Raises
        ConfigError if called from a callback: the tokens of the current result must be delivered
        first.
        """
        self._refuse_inside_step()
        self._ensure_scheduler()  # too small a pool raises here and cancels nothing
        try:
            self._stepping = True
            self._step()
        except BaseException as e:
            self.reset()
            if isinstance(e, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(e):
                raise ConfigError(self._out_of_memory()) from e
            raise
        finally:
            self._stepping = False

    def advance(self, commands: Commands, *, step: bool = True) -> None:
        """Carry out the commands, then do as `step`, for requests that belong to several callers.

        commands: each is removed once it is done, so an interrupted one is done again.
        step: False for the commands alone.

        An interrupt (any BaseException that is no Exception) is raised, and ends no request. An
        Exception ends the requests that it belongs to, and is their `error`:
        - an XLA error or a ConfigError: all that run, each with an EngineError;
        - any other: one request, which is found by trying. All that ran are suspects. They run
          again one after the other, beside those that are cleared already. The one with which the
          step fails again has the error. If it never fails again, they all go on.
        The others go on from their last delivered tokens, in new blocks, with the same text.
        """
        self._refuse_inside_step()
        try:
            self._stepping = True
            if self.failed:
                self._restart()
            while commands:
                commands[0]()
                commands.popleft()
            if step:
                self._step()
        except Exception as e:
            self.failed = True
            self._end_blamed(e)
        except BaseException:
            self.failed = True
            raise
        finally:
            self._stepping = False

    def _refuse_inside_step(self) -> None:
        if self._stepping and self._is_inside_step():
            refuse_inside_callback()

    def _is_inside_step(self) -> bool:
        """Return whether a step of this engine is on the stack.

        An interrupt at the last line of a step leaves `_stepping` set.
        """
        steps = (Engine.step.__code__, Engine.advance.__code__)
        frame = sys._getframe(2).f_back  # the caller of the step that asks
        while frame is not None:
            if frame.f_code in steps and frame.f_locals.get("self") is self:
                return True
            frame = frame.f_back
        return False

    def reset(self) -> None:
        """Cancel every request and forget the device's state."""
        self._forget()
        for request in list(self._live):
            if request.finish_reason is None:
                request.finish_reason, request.slot = "cancelled", None
                self._notify(request, 0)
        self._live.clear()

    def _forget(self) -> None:
        self._in_flight.clear()
        self._scheduler = None
        self.runner.resident.forget()
        self._features_at = -1

    # --- after a step that failed ----------------------------------------------------------------

    def _end_blamed(self, error: Exception) -> None:
        """End the requests that a failure belongs to, or make suspects of those that ran."""
        live = [r for r in self._live if not r.ended]
        running = [r for r in live if r.slot is not None or r.blocks]
        scheduler = self._scheduler
        of_all = jax.errors.JaxRuntimeError | ConfigError | ProcessError
        if scheduler is None or isinstance(error, of_all):
            self._end_all(running or live, error)
            return
        if not scheduler.is_trial_over():
            assert scheduler.on_trial is not None
            self._end(scheduler.on_trial, error)
            for request in live:
                if request.standing == "cleared":
                    request.standing = "trusted"
            return
        # The request that would be admitted next may have failed at that.
        involved = list(dict.fromkeys([*running, *[*scheduler.waiting][:1]]))
        trusted = [r for r in involved if r.standing == "trusted"]
        if len(involved) == 1:
            self._end(involved[0], error)
        elif trusted:
            logger.warning("a step failed: its requests are tried one by one", exc_info=error)
            for request in trusted:
                request.standing = "suspect"
        else:
            self._end_all(involved or live, error)

    def _end_all(self, requests: Iterable[Request], error: Exception) -> None:
        """End these requests, each with an EngineError of its own."""
        for request in requests:
            own = self._engine_error(error)
            own.__cause__ = error
            self._end(request, own)

    def _engine_error(self, error: Exception) -> EngineError:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
            return EngineConfigError(self._out_of_memory())
        if isinstance(error, ConfigError):
            return EngineConfigError(str(error))
        reason = (str(error).splitlines() or [""])[0]
        return EngineError(
            "engine: expected prefill and rounds that run, "
            f"got {type(error).__name__}: {reason:.500}; the requests that ran have ended"
        )

    def _restart(self) -> None:
        """Start anew with all requests that have not ended: suspects first, then by arrival."""
        self._forget()
        for request in sorted(self._live, key=lambda r: r.standing != "suspect"):
            if request.ended:
                del self._live[request]
                continue
            try:
                request.rewind()
            except Exception as e:  # of a tokenizer
                self._end(request, e)
            else:
                self.scheduler.add(request)
        self.failed = False

    def _fail(self, request: Request, error: Exception) -> None:
        """End one request with an error of its own; nothing happens to one that has ended."""
        if request in self._live:
            request.finish_reason, request.error = None, error
            del request.logprobs[request.num_generated :]
            self.scheduler.finish(request, "error")
            self._end(request, error)

    def _end(self, request: Request, error: Exception) -> None:
        logger.warning("a request ends with an error", exc_info=error)
        request.finish_reason, request.error = "error", error
        self._notify(request, 0)

    # --- rounds of a state that was made elsewhere -----------------------------------------------

    def set_state(
        self, state: DecodeState, requests: Sequence[Request], blocks: Sequence[Sequence[int]]
    ) -> None:
        """Go on from a state whose row i is requests[i], prefilled and holding blocks[i] in every
        KV-cache group.

        For benchmarks: rounds at a long context can be timed on random caches, where prefilling the
        batch would take longer than the measurement. `state` has greedy rows' structure
        (ModelRunner.set_state). Raises ConfigError while requests run.
        """
        if self.has_requests:
            raise ConfigError("state: expected no requests in the engine, got some that run")
        self._in_flight.clear()
        self.runner.set_state(state)
        groups = len(self.runner.configs.cache_groups)
        for slot, (request, own) in enumerate(zip(requests, blocks, strict=True)):
            self._live[request] = None
            self.scheduler.place(request, slot, [list(own)] * groups)

    def take_state(self) -> DecodeState:
        """Return the state, caches included, and forget it; the next request starts with a new one.

        The counterpart of set_state, after its requests have ended.
        """
        self._in_flight.clear()
        return self.runner.resident.take_state()

    # --- one step --------------------------------------------------------------------------------

    def _step(self) -> None:
        scheduler, runner, resident = self.scheduler, self.runner, self.runner.resident
        self._lacks_result = False
        self._drop_idle_results()
        if not self._in_flight and not self.others_run():
            self.stats.clock = time.perf_counter()
        runner.compiler.poll()
        refused: dict[Request, ConfigError] = {}
        step = scheduler.schedule(self._admission_test(refused), self._may_shrink, self._batch_for)
        for request, error in refused.items():
            self._fail(request, error)
        resident.deactivate(step.cleared)
        if step.sources is not None:
            resident.move(step.sources)
        running = list(scheduler.running)
        if self.choice is not None:
            for request in step.admitted:
                request.acceptance = request.acceptance or self.choice.begin(
                    greedy=request.params.greedy, batch=resident.num_slots
                )
        failed = runner.admit(step.admitted, running) if step.admitted else {}
        features = (
            features_of(r.params for r in running if r not in failed)
            if failed
            else self._running_features()
        )
        hands_out_now = False
        if step.chunks:
            was_idle = not self._in_flight
            verification, rows = runner.prefill(features, step.chunks)
            chunks = list(zip(step.chunks, rows, strict=True))
            new = [
                (c.request, tiles[-1])
                for c, tiles in chunks
                if c.ends and c.request.num_generated == 0
            ]
            prompts = [
                (c, tiles)
                for c, tiles in chunks
                if c.request.params.prompt_logprobs is not None and c.request not in failed
            ]
            others = len(list(scheduler.running)) + len(scheduler.waiting) - len(new)
            hands_out_now = was_idle and others == 0 and self.depth > 0 and not self.is_replica
            self._launched(InFlight(verification, new, is_round=False, prompts=prompts))
        # After prefill, since other prompts may already share the blocks that it fills.
        for request, error in failed.items():
            self._fail(request, error)
        if hands_out_now:
            # Launching a round takes the host longer than the device needs for these prompts. So
            # the device waits a millisecond for its first round, and first tokens do not.
            if self._in_flight:
                self._read()
            return
        launched = self._launch_rounds() or bool(step.chunks)
        if not launched and self._in_flight:
            self._read_unless_others_wait()
        self.must_wait = False

    def _admission_test(self, refused: dict[Request, ConfigError]) -> AdmissionTest:
        """Return the test of a waiting request whether programs that serve it are compiled.

        refused: gets the requests whose programs did not compile, each with its error
        """
        if not self.scheduler.waiting:
            return admit_any
        running, needed = list(self.scheduler.running), self._running_features()
        others_run, num_admitted = self.others_run(), 0
        totals: Totals | None = None

        def may_admit(request: Request, admitted: Sequence[Request]) -> bool:
            nonlocal needed, num_admitted
            for new in admitted[num_admitted:]:
                needed |= features_of([new.params])
                if totals is not None:
                    totals.add(new)
            num_admitted = len(admitted)

            def others() -> Totals:
                nonlocal totals
                if totals is None:
                    totals = self.runner.program_choice.totals_of([*running, *admitted])
                return totals

            try:
                return self.runner.compiler.may_admit(
                    request, needed, others, alone=not (running or admitted or others_run)
                )
            except ConfigError as e:
                refused[request] = e
                return False

        return may_admit

    def _may_shrink(self, size: int) -> bool:
        running = list(self.scheduler.running)
        return self.runner.compiler.may_shrink(size, self._running_features(), running)

    def _batch_for(self, least: int, admitted: Sequence[Request]) -> int:
        """Return the batch for the requests that run and those just admitted.

        See Scheduler.schedule.
        """
        requests, features = [*self.scheduler.running, *admitted], self._running_features(admitted)
        return self.runner.program_choice.batch_for(features, requests, least)

    def _drop_idle_results(self) -> None:
        """Drop the rounds that were launched before the last request's end was read."""
        if next(self.scheduler.running, None) is None:
            self._in_flight.clear()

    def _running_features(self, admitted: Sequence[Request] = ()) -> SamplingFeatures:
        """Return what the running requests need of sampling, computed anew when others run.

        admitted: requests that Scheduler.changes counts, and that have no slots yet
        """
        if self._features_at != self.scheduler.changes:
            requests = (*self.scheduler.running, *admitted)
            self._features = features_of(r.params for r in requests)
            self._features_at = self.scheduler.changes
        return self._features

    def _launch_rounds(self) -> bool:
        scheduler, runner = self.scheduler, self.runner
        found = scheduler.schedule_rounds()
        while found.wait:
            if not self._read_unless_others_wait():
                return False
            found = scheduler.schedule_rounds()
        runner.resident.deactivate(found.cleared)
        if not found.requests:
            return False
        features = self._running_features().of_rounds
        K = runner.configs.k_of_batch(len(found.requests))
        if self.choice is not None:
            K = self._choose_k(self.choice, features, found.requests)
        limits = runner.configs.always_limits_drafts or any(
            self._allowed_drafts(r, K, longest=True) < K for r in found.requests
        )
        verification = runner.round(
            features, found.requests, num_speculative_tokens=K, limits_drafts=limits
        )
        rows = [(r, r.slot) for r in found.requests if r.slot is not None]
        self._launched(
            InFlight(
                verification,
                rows,
                is_round=True,
                num_speculative_tokens=K,
                batch=runner.resident.num_slots,
            )
        )
        return True

    def _choose_k(
        self, choice: DraftChoice, features: SamplingFeatures, requests: Sequence[Request]
    ) -> int:
        """Return the K of the next step's rounds; num_unread_rounds counts them already."""
        per_step = self.runner.rounds_per_step
        candidates = [
            Candidate(r.acceptance, r.draft_limit, r.num_unread_rounds - per_step)
            for r in requests
            if r.acceptance is not None
        ]
        return choice.choose(
            candidates,
            self.runner.resident.num_slots,
            per_step,
            partial(self.runner.compiler.is_compiled, features, requests),
        )

    def _allowed_drafts(self, request: Request, K: int, *, longest: bool = False) -> int:
        """Return the drafts that the request may have in a round of K drafts.

        The result is that of decode.allowed_drafts on the device. The round starts at the request's
        cached tokens. With `longest` it starts at the most tokens that the request can have by the
        next step's last round; `num_unread_rounds` counts that step's rounds already.
        """
        allowed = min(K, request.draft_limit)
        speculative = self.runner.speculative
        if speculative is not None and speculative.draft_max_model_len is not None:
            ahead = (
                (request.num_unread_rounds - 1) * self.scheduler.config.head_room if longest else 0
            )
            allowed = min(allowed, speculative.draft_max_model_len + 1 - request.num_cached - ahead)
        return max(allowed, 0)

    def _launched(self, result: InFlight) -> None:
        # The host copies each array, and a first token waits for the last copy. The number of
        # tokens follows from the tokens. Logits are checked until those of a prompt were finite.
        checked = None if self._logits_seen else result.verification.overflowed
        result.verification = replace(
            result.verification,
            num_sampled=None,  # type: ignore[arg-type]
            overflowed=checked,
        )
        for array in jax.tree.leaves(result.verification):
            array.copy_to_host_async()
        self._in_flight.append(result)
        while len(self._in_flight) > self.depth or self._has_first_tokens():
            self._read()

    def _has_first_tokens(self) -> bool:
        """Return whether first tokens are there, which are read and handed out at once.

        Rounds wait until `depth` more results are in flight. Their tokens are on the host by then;
        fetching them sooner takes the host a tenth of a millisecond in every round. Several
        processes must launch the same programs, so none may go by its own clock.
        """
        if jax.process_count() > 1:
            return False
        prefills = [each for each in self._in_flight if each.rows and not each.is_round]
        arrays: list[Any] = [each.verification.output_tokens for each in prefills]
        return any(array.is_ready() for array in arrays)

    def _read_unless_others_wait(self) -> bool:
        """Read the oldest result, and return whether that was done.

        A replica reads none that is not ready. It is passed by until then (would_wait).
        """
        if self.is_replica and not self.must_wait and not self._is_oldest_ready():
            self._lacks_result = True
            return False
        self._read()
        return True

    def _read(self) -> None:
        """Wait for the oldest result, here and nowhere else, and give each request its tokens."""
        result = self._in_flight.popleft()
        verification = jax.tree.map(np.asarray, result.verification)
        num_sampled: Any = (verification.output_tokens >= 0).sum(-1, dtype=np.int32)
        verification = replace(verification, num_sampled=num_sampled)
        now = time.perf_counter()
        self._check_devices(result, now)
        if result.is_round:
            self.stats.timings.decode_seconds += now - self.stats.clock
            if self.choice is not None and not self.is_replica:  # the clock is that of all
                seconds = (now - self.stats.clock) / self.runner.rounds_per_step
                self.choice.timed(result.batch, result.num_speculative_tokens, seconds)
        else:
            self.stats.timings.prefill_seconds += now - self.stats.clock
        self.stats.clock = now
        if verification.overflowed is not None and not self._logits_seen:
            check_first_logits(verification, self.runner.resident.params["target"])
            self._logits_seen = bool(verification.num_sampled.any())
        for chunk, tiles in result.prompts:
            try:
                add_prompt_logprobs(chunk, tiles, verification.prompt_logprobs)
            except Exception as e:
                self._fail(chunk.request, e)
        if self._is_plain(result, verification):
            self._hand_out_plain(result, verification, now)
        else:
            for part in each_round(verification):
                self._hand_out(result, part, now)
        if result.is_round and self.on_rounds is not None:
            self.on_rounds(verification, result.rows)

    def _check_devices(self, result: InFlight, now: float) -> None:
        """Raise JaxRuntimeError if the result may have no meaning, for want of a device's answer.

        Devices run programs in the order of their launches. A program that failed after the last
        known good one took its long wait since that one's launch. This holds too if its result is
        never read (Ctrl-C), and if another engine on the devices launched it.
        """
        if now - self._answered_at > SUSPICIOUS_SECONDS:
            self.runner.resident.check_devices()
            self._answered_at = now
        else:
            self._answered_at = max(self._answered_at, result.launched)

    def _hand_out(self, result: InFlight, verification: Verification, now: float) -> None:
        """Give each request the tokens of one round, or of a prefill.

        An exception on the way, such as one of the tokenizer, ends that request alone.
        """
        tokens, num_sampled = verification.output_tokens, verification.num_sampled
        if result.is_round:
            self._count_rounds(result, int(num_sampled.any()))
        for request, row in result.rows:
            sampled = tokens[row, : num_sampled[row]].tolist()
            try:
                if request.params.logprobs is not None and request.finish_reason is None:
                    assert verification.logprobs is not None
                    request.logprobs += logprobs_of(
                        verification.logprobs, row, sampled, request.params.logprobs
                    )
                proposed = verification.num_proposed
                num_proposed = None if proposed is None else int(proposed[row])
                is_lookup = verification.is_lookup is not None and bool(verification.is_lookup[row])
                self._hand_over(request, sampled, result, now, num_proposed, is_lookup=is_lookup)
            except Exception as e:
                self._fail(request, e)

    def _is_plain(self, result: InFlight, verification: Verification) -> bool:
        """Return whether the result is of several rounds without drafts, and holds tokens alone."""
        return (
            result.is_round
            and result.num_speculative_tokens == 0
            and self.choice is None
            and verification.logprobs is None
            and verification.num_sampled.ndim == 2
        )

    def _hand_out_plain(self, result: InFlight, verification: Verification, now: float) -> None:
        """Give each request the tokens of all rounds of a step at once.

        The same as _hand_out of each round, in a fraction of the host's time: with a thousand
        requests a device makes tokens faster than Python takes them one by one.
        """
        tokens = verification.output_tokens[..., 0]  # [rounds, batch]
        self._count_rounds(result, int(verification.num_sampled.any(-1).sum()))
        num_rounds, of_rows = len(tokens), tokens.T.tolist()
        for request, row in result.rows:
            sampled = [token for token in of_rows[row] if token >= 0]
            try:
                self._hand_over(
                    request, sampled, result, now, 0, is_lookup=False, num_rounds=num_rounds
                )
            except Exception as e:
                self._fail(request, e)

    def _count_rounds(self, result: InFlight, number: int) -> None:
        """Count rounds of a result in which some request sampled."""
        if number:
            timings, K = self.stats.timings, result.num_speculative_tokens
            timings.num_rounds += number
            timings.num_rounds_of[K] = timings.num_rounds_of.get(K, 0) + number

    def _hand_over(
        self,
        request: Request,
        tokens: list[int],
        result: InFlight,
        now: float,
        num_proposed: int | None,
        *,
        is_lookup: bool,
        num_rounds: int = 1,
    ) -> None:
        """Take over the tokens of one round, or of num_rounds without drafts, or of a prefill.

        num_proposed: the request's drafts in a round; None: all that it may have
        """
        if num_proposed is None:
            num_proposed = self._allowed_drafts(request, result.num_speculative_tokens)
        kept = self.scheduler.read(request, tokens, is_round=result.is_round, num_rounds=num_rounds)
        if kept == 0:
            return
        del request.logprobs[request.num_generated :]
        if result.is_round:
            stopped = request.detokenizer is not None and request.detokenizer.stopped
            num_accepted = min(len(tokens) - 1, kept) if stopped else len(tokens) - 1
            if self.choice is not None and request.acceptance is not None:
                if not is_lookup:
                    self.choice.observe(num_proposed, len(tokens) - 1)
                request.acceptance.observe(
                    num_proposed,
                    len(tokens) - 1,
                    is_lookup=is_lookup,
                    num_generated=request.num_generated,
                    num_delivered=request.num_delivered,
                )
            for metrics in (request.metrics, self.stats.metrics):
                metrics.observe(num_accepted, num_proposed, is_lookup=is_lookup)
        request.times.observe(now, kept)
        self.stats.timings.num_output_tokens += kept
        self._notify(request, kept)

    def _notify(self, request: Request, num_new: int) -> None:
        """Call the request's on_tokens; what that raises ends this request and no other."""
        if request.on_tokens is not None:
            try:
                request.on_tokens(request, num_new)
            except Exception as e:
                if request.error is None:
                    self._fail(request, e)  # which calls it once more, with the error
                    return
                logger.warning("a request's on_tokens raised again", exc_info=e)
        if request.finish_reason is not None:
            self.stats.latency.observe(request.times)
            self._live.pop(request, None)

    # --- ahead of time, and when memory is short -------------------------------------------------

    def warm(
        self,
        features: Iterable[SamplingFeatures],
        *,
        params: Sequence[SamplingParams],
        shapes: Shapes,
        limits_drafts: bool,
    ) -> int:
        """Compile the programs of these shapes, for each of these features; only between requests.

        params: requests that the state's arrays shall have room for. Returns the number of
        programs.
        """
        return self._warm(
            lambda: self.runner.warm(features, params, shapes, limits_drafts=limits_drafts)
        )

    def warm_levels(self, shapes: Shapes) -> int:
        """Compile programs of these shapes that serve every request; as `warm`."""
        return self._warm(lambda: self.runner.warm_levels(shapes))

    def _warm(self, compile_programs: Callable[[], int]) -> int:
        if self.has_requests:
            raise ConfigError(
                "warmup: expected no requests in the engine, got some that have not finished"
            )
        self._ensure_scheduler()
        self._drop_idle_results()
        try:
            count = compile_programs()
        except BaseException as e:
            self.reset()
            if isinstance(e, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(e):
                raise ConfigError(self._out_of_memory()) from e
            raise
        self.runner.resident.move([-1] * len(self.scheduler.rows))
        return count

    def _out_of_memory(self) -> str:
        runner, memory, config = self.runner, self.runner.memory, self.runner.config
        stats = runner.configs.greedy.placement.devices[0].memory_stats() or {}
        limit = (
            f"{stats['bytes_limit'] / 1e9:.1f} GB"
            if "bytes_limit" in stats
            else "an unknown amount"
        )
        return (
            f"device memory: expected room for weights of {runner.weight_bytes / 1e9:.1f} GB, "
            f"a KV cache of {memory.cache_bytes / 1e9:.1f} GB ({sum(memory.num_blocks)} blocks) "
            f"and the round's own arrays, got {limit} in all; "
            f"lower gpu_memory_utilization ({config.gpu_memory_utilization}), "
            f"max_num_seqs ({config.max_num_seqs}), "
            f"max_num_batched_tokens ({config.prefill_tokens}) "
            f"or max_model_len ({config.max_model_len})"
        )


def _draft_choice(runner: ModelRunner) -> DraftChoice | None:
    """Return what chooses the number of drafts; None where it is given."""
    if not runner.adapts:
        return None
    cfg, speculative = runner.configs.greedy, runner.speculative
    assert speculative is not None and cfg.draft is not None
    fixed_k = runner.config.batch_invariant
    # A sampled text depends on the bytes of the weights, and shall not depend on the devices.
    params = as_on_one_device(cfg.placement, cfg.target, cfg.draft, runner.resident.params)
    return DraftChoice(speculative, cfg.target, cfg.draft, params, fixed_k=fixed_k)


def refuse_inside_callback() -> NoReturn:
    """Raise the error of a call that generates inside a callback."""
    raise ConfigError("callback: expected no generating inside it, got a call that generates")


def add_prompt_logprobs(chunk: Chunk, tiles: Iterable[int], scores: Scores) -> None:
    """Append the log-probabilities of the tokens after a chunk's rows to the request's.

    A request that is prefilled again has the first of them already.
    """
    request, tile = chunk.request, scores.logprob.shape[1]
    num = request.params.prompt_logprobs
    assert num is not None
    found = request.prompt_logprobs or [None]
    for i, row in enumerate(tiles):
        start = chunk.start + i * tile
        following = request.prompt_token_ids[
            start + 1 : min(start + tile, chunk.start + len(chunk.token_ids)) + 1
        ]
        new = logprobs_of(scores, row, following, num)
        found += new[len(found) - start - 1 :]
    request.prompt_logprobs = found
