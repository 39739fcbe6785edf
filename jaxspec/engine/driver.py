"""The driver: calls of any thread share one engine, and with it one stream of rounds."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from jaxspec.engine.engine import Commands, Engine, refuse_inside_callback
from jaxspec.engine.output_processor import OutputCollector
from jaxspec.engine.outputs import EngineError, Increment
from jaxspec.engine.replicas import Replicas
from jaxspec.engine.request import Request

T = TypeVar("T")


@dataclass(eq=False)
class Call:
    """A call of LLM whose thread waits for tokens, or for the engine.

    requests: what it generates
    news: increments, and exceptions of its own; None wakes the thread, which may step then
    thread: the thread that waits
    closed: whether it wants no more tokens
    """

    requests: Sequence[Request] = ()
    news: SimpleQueue[Increment | Exception | None] = field(default_factory=SimpleQueue)
    thread: int = field(default_factory=threading.get_ident)
    closed: bool = False


class Driver:
    """Run requests for the calls of any thread.

    There is no thread of the engine's own. A call that waits for tokens steps the engine, for all
    calls, unless another one does so already. Then it sleeps until it has news, or until the call
    that steps has its own news and leaves. So a single caller runs the engine's loop itself, as
    fast as without threads: none has to be woken in a round. Ctrl-C reaches the loop, and the
    caller's jax settings hold in it. Nothing runs once no call waits.

    Requests come and go as commands, which the call that steps carries out between two steps.
    Callbacks run in the thread of their call, and not while it steps.
    """

    def __init__(self, engine: Engine | Replicas) -> None:
        self.engine = engine
        self._commands: Commands = deque()
        # {"turn": the call that may use the engine}. An interrupt may come right after any call of
        # a function, so a lock could be taken without a line that knows. A name can be looked up.
        self._turn: dict[str, Call] = {}
        self._waiting: dict[Call, None] = {}
        self._calling_back: set[int] = set()

    def run(
        self, requests: Sequence[Request], *, streams: bool
    ) -> Generator[Increment, None, None]:
        """Run the requests, and yield what they generate.

        streams: False yields only each request's end. Closing the iterator cancels the requests
        that have not ended. Raises the EngineError of a request.
        """
        call, num_left = Call(requests), len(requests)
        is_empty, take = call.news.empty, call.news.get
        OutputCollector(requests, call.news.put, streams=streams)
        try:
            if num_left:
                self._refuse_inside_callback()
                self._commands.append(partial(self._start, call))
            while num_left:
                if is_empty():
                    found = self._wait(call)
                    self._settle(call)
                else:
                    found = take()
                if isinstance(found, Exception):
                    raise found
                if found is None:
                    continue
                if found.finish_reason is not None:
                    num_left -= 1
                    if isinstance(found.error, EngineError):
                        raise found.error
                yield found
        finally:
            if num_left:
                call.closed = True
                self._commands.append(partial(self._cancel, call))
            self._settle(call)

    def call_back(self, callback: Callable[[Increment], object], increment: Increment) -> None:
        """Call a caller's function, inside which this thread may not generate."""
        thread = threading.get_ident()
        self._calling_back.add(thread)
        try:
            callback(increment)
        finally:
            self._calling_back.discard(thread)

    def fail(self, request: Request, error: Exception) -> None:
        """End a running request with its caller's error."""
        self._commands.append(partial(self.engine.cancel, request, "error", error))

    def alone(self, work: Callable[[], T]) -> T:
        """Return work(), during which no other thread uses the engine."""
        self._refuse_inside_callback()
        call = Call()
        self._waiting[call] = None
        try:
            while not self._takes_turn(call):
                call.news.get()
            self._waiting.pop(call)
            self.engine.advance(self._commands, step=False)
            return work()
        finally:
            self._waiting.pop(call, None)
            self._release(call)
            self._settle(call)

    # --- commands --------------------------------------------------------------------------------

    def _start(self, call: Call) -> None:
        try:
            for request in call.requests:
                if not call.closed:
                    self.engine.add(request)
        except Exception as e:  # too small a pool
            call.news.put(e)

    def _cancel(self, call: Call) -> None:
        for request in call.requests:
            self.engine.cancel(request)

    # --- taking turns ----------------------------------------------------------------------------

    def _wait(self, call: Call) -> Increment | Exception:
        """Return the call's next news. Step until there are some, unless another call does."""
        call.thread = threading.get_ident()
        self._waiting[call] = None
        try:
            while True:
                if self._takes_turn(call):
                    while call.news.empty():
                        self.engine.advance(self._commands)
                found = call.news.get()
                if found is not None:
                    return found
        finally:
            self._waiting.pop(call, None)
            self._release(call)

    def _takes_turn(self, call: Call) -> bool:
        """Return whether the call has the turn, which it takes if it is free."""
        owner = self._turn.setdefault("turn", call)
        if owner is not call and owner.thread == call.thread:
            refuse_inside_callback()  # a function that a step calls would wait for that step
        return owner is call

    def _release(self, call: Call) -> None:
        """Give up the turn, if the call has it, and wake a call that may take it.

        Every call that waits is in `_waiting` before it looks whether the turn is free. So it takes
        the turn, or is seen here.
        """
        if self._turn.get("turn") is call:
            del self._turn["turn"]
        if self._waiting and not self._turn:
            for other in list(self._waiting)[:1]:
                other.news.put(None)

    def _settle(self, call: Call) -> None:
        """Carry out the commands, unless another call has the turn: it does so before it leaves.

        A dropped stream may come here at any line, from the garbage collector.
        """
        call.thread = threading.get_ident()
        while self._commands or self.engine.failed:
            try:
                if self._turn.setdefault("turn", call) is not call:
                    return
                self.engine.advance(self._commands, step=False)
            finally:
                self._release(call)

    def _refuse_inside_callback(self) -> None:
        if threading.get_ident() in self._calling_back:
            refuse_inside_callback()
