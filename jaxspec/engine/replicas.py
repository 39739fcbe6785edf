"""Replicas: several engines behind one queue, each on devices of its own (data parallel)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from weakref import WeakKeyDictionary

from jaxspec.engine.engine import Commands, Engine, Stats
from jaxspec.engine.request import FinishReason, Request

# A cached prefix is worth this part of a replica's slots: the replica that holds it takes a request
# as if it had so many fewer.
AFFINITY = 8
# While no result is ready, the host looks again after SHORTEST seconds. After LONGEST it waits for
# one of the results, as an engine alone does: such a wait may be that for a silent device.
SHORTEST, LONGEST = 50e-6, 1.0


class Replicas:
    """Engines of the same models, each request on one of them; used as one Engine is.

    A request waits here until a replica has a free slot for it, so that none idles while another
    one has a queue. It goes to the replica with the fewest requests, or to one that has its prefix
    in the cache. It stays there until it ends. Its tokens do not depend on the replica.

    The replicas take their steps in turn. On a GPU one that needs a result which is not ready is
    passed by, so that a long prefill delays no other replica.

    stats: the counts of all replicas together
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        self._waiting: dict[Request, None] = {}  # by arrival
        self._homes: MutableMapping[Request, Engine] = WeakKeyDictionary()
        for engine in self.engines:
            engine.others_run = self._others_of(engine)
            engine.is_replica = len(self.engines) > 1
        self.reset_stats()

    def _others_of(self, engine: Engine) -> Callable[[], bool]:
        others = [each for each in self.engines if each is not engine]
        return lambda: any(each.is_running for each in others)

    def reset_stats(self) -> None:
        """Start to count anew."""
        self.stats = Stats.new(self.engines[0].runner.num_speculative_tokens)
        for engine in self.engines:
            engine.count_in(self.stats)

    @property
    def has_requests(self) -> bool:
        """Whether some request waits or runs."""
        return bool(self._waiting) or any(engine.has_requests for engine in self.engines)

    @property
    def failed(self) -> bool:
        """Whether a step or a command of some replica failed since its last restart."""
        return any(engine.failed for engine in self.engines)

    def add(self, request: Request) -> None:
        """Queue a request; nothing happens to one that is queued or runs.

        ConfigError if a replica's memory is too small for any request.
        """
        for engine in self.engines:
            _ = engine.scheduler  # the first use decides the sizes of its pools
        if request not in self._homes:
            self._waiting[request] = None

    def cancel(
        self,
        request: Request,
        reason: FinishReason = "cancelled",
        error: BaseException | None = None,
    ) -> None:
        """End a request; nothing happens to one that has ended."""
        self._waiting.pop(request, None)
        self._homes.get(request, self.engines[0]).cancel(request, reason, error)

    def advance(self, commands: Commands, *, step: bool = True) -> None:
        """Carry out the commands, then step each replica; see Engine.advance.

        A failure concerns the requests of the replica in which it happened.
        """
        try:
            for engine in self.engines:  # commands need whole books, as in Engine.advance
                if engine.failed:
                    engine.advance(deque(), step=False)
            while commands:
                commands[0]()
                commands.popleft()
            if step:
                self._assign()
        except BaseException:  # it may have come between any two lines of any engine's books
            for engine in self.engines:
                engine.failed = True
            raise
        for engine in self._due() if step else self.engines:
            if step or engine.failed:
                engine.advance(deque(), step=step)

    def step(self) -> None:
        """Step each replica, for tools that own all requests; see Engine.step."""
        try:
            self._assign()
            for engine in self._due():
                engine.step()
        except BaseException:
            self.reset()
            raise

    def reset(self) -> None:
        """Cancel every request and forget the devices' states."""
        for engine in self.engines:
            engine.reset()
        for request in list(self._waiting):
            self.cancel(request)

    # --- the queue -------------------------------------------------------------------------------

    def _assign(self) -> None:
        """Give the requests that wait to replicas with free slots, in order of arrival."""
        for request in list(self._waiting):
            engine = self._homes.get(request) or self._choose(request)
            if engine is None:
                return
            self._homes[request] = engine  # first, so that an interrupt cannot give it to two
            engine.add(request)
            del self._waiting[request]

    def _choose(self, request: Request) -> Engine | None:
        """Return the replica that shall run a request; None while all are full."""
        free = [engine for engine in self.engines if engine.num_free > 0]
        if len(free) < 2:
            return free[0] if free else None
        worth = max(1, free[0].scheduler.config.max_num_seqs // AFFINITY)
        cached = {engine: engine.scheduler.find_prefix(request) for engine in free}
        longest = max(cached.values())

        def preference(engine: Engine) -> tuple[int, int]:
            has_prefix = 0 < longest == cached[engine]
            return engine.num_free + worth * has_prefix, cached[engine]

        return max(free, key=preference)  # the first of equals

    # --- turns -----------------------------------------------------------------------------------

    def _due(self) -> list[Engine]:
        """Return the replicas that can step without a wait; if none can, wait for one."""
        busy = [engine for engine in self.engines if engine.has_requests or engine.failed]
        end = time.perf_counter() + LONGEST
        while not (due := [engine for engine in busy if not engine.would_wait]) and busy:
            if time.perf_counter() > end:
                busy[0].must_wait = True
                return busy[:1]
            time.sleep(SHORTEST)
        return due
