"""Processes that lower kernels for another one, whose threads share its interpreter.

Each reads requests from its standard input and writes serialised exports to its standard output,
until the input ends.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

import jax

from pallas_kernels import hopper, lowered_once
from pallas_kernels.lowered_once import Call

MOST_WORKERS = 12
FEWEST_CORES = 4  # with fewer, workers would take the cores that compile
FREE_CORES = 2
PROGRAM = "from pallas_kernels import lowering_workers; lowering_workers.serve()"

Reply = tuple[Literal["export"], bytes] | tuple[Literal["failed", "refused"], str]

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def lowering_workers(most: int | None = None) -> Iterator[None]:
    """Let other processes lower kernels while this is open.

    most: processes; None: by the number of cores, and none where they are few

    A process starts when a call that is not on disk finds all others busy, so a process with every
    export on disk starts none. Each takes some seconds to import JAX, and 0.2 GB. They see no GPU.
    This process lowers the calls that they cannot. Inside another such context, the outer one's
    processes serve.
    """
    most = _most_workers() if most is None else most
    if most < 1 or lowered_once.has_maker():
        yield
        return
    workers = Workers(most)
    lowered_once.make_by(workers.export)
    try:
        yield
    finally:
        lowered_once.make_by(None)
        workers.close()


@dataclass(frozen=True)
class Function:
    """Where a process finds a function.

    depth: how often __wrapped__ leads on from what has the name
    """

    module: str
    qualname: str
    depth: int

    @classmethod
    def of(cls, function: Any) -> Function | None:
        """Return the place of a function; None if no other process would find it."""
        module, qualname = function.__module__, function.__qualname__
        if module == "__main__":
            return None
        found: Any = sys.modules.get(module)
        for name in qualname.split("."):
            found = getattr(found, name, None)
        depth = 0
        while found is not None and found is not function:
            found, depth = getattr(found, "__wrapped__", None), depth + 1
        return None if found is None else cls(module, qualname, depth)

    def find(self) -> Any:
        """Return the function."""
        found: Any = importlib.import_module(self.module)
        for name in self.qualname.split("."):
            found = getattr(found, name)
        for _ in range(self.depth):
            found = found.__wrapped__
        return found


@dataclass(frozen=True)
class Request:
    """A call, and what its export depends on.

    function:  of the call
    arguments: the other fields of the call, in their order
    platform:  lowered_once.PLATFORM
    versions:  lowered_once.VERSIONS
    """

    function: Function
    arguments: tuple[Any, ...]
    platform: str
    versions: str

    @classmethod
    def of(cls, call: Call) -> Request | None:
        """Return the request for a call; None if no other process would find its function."""
        function = Function.of(call.function)
        if function is None:
            return None
        arguments = tuple(getattr(call, field.name) for field in fields(call)[1:])
        return cls(function, arguments, lowered_once.PLATFORM, lowered_once.VERSIONS)

    def pickled(self) -> bytes | None:
        """Return the request as bytes; None if they would not be read as the same request."""
        try:
            data = pickle.dumps(self)
            return data if pickle.loads(data) == self else None
        except Exception as e:  # of any argument
            logger.debug("%s is lowered here: %r", self.function, e)
            return None

    def reply(self) -> Reply:
        """Make the export."""
        if self.versions != lowered_once.VERSIONS:
            return "refused", f"expected {self.versions}, got {lowered_once.VERSIONS}"
        try:
            call = Call(self.function.find(), *self.arguments)
            for name, value in call.traced:
                jax.config.update(name, value)
            lowered_once.PLATFORM = self.platform
            return "export", bytes(call.export().serialize())
        except Exception as e:  # of a kernel, or of an argument's module
            return "failed", repr(e)


class Workers:
    """Processes that make exports, at most so many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._all: list[subprocess.Popen[bytes]] = []
        self._idle: list[subprocess.Popen[bytes]] = []
        self._changed = threading.Condition()
        self._closed = self._has_warned = False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # their standard error

    def export(self, call: Call) -> bytes | None:
        """Return a call's serialised export; None if no worker could make it."""
        request = Request.of(call)
        data = None if request is None else request.pickled()
        worker = None if data is None else self._take()
        if data is None or worker is None:
            return None
        kind, result = "lost", None
        try:
            kind, result = _ask(worker, data)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            pass  # it has ended
        finally:  # after an interrupt, its answer would be taken for another call's
            if kind in ("export", "failed"):
                self._give_back(worker)
            else:
                self._remove(worker, result)
        if isinstance(result, bytes):
            return result
        logger.debug("%s is lowered here: %s", call.function.__qualname__, result)
        return None

    def close(self) -> None:
        """End the processes. Threads that wait for one lower their kernels themselves."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            workers = list(self._all)
        for worker in workers:
            worker.kill()  # it has nothing to lose
        for worker in workers:
            worker.wait()
        with self._changed:
            idle, self._idle = self._idle, []
        for worker in idle:
            _close_pipes(worker)
        self._errors.close()

    def _take(self) -> subprocess.Popen[bytes] | None:
        with self._changed:
            while not self._closed and self._most > 0:
                if self._idle:
                    return self._idle.pop()
                if len(self._all) < self._most:
                    return self._start()
                self._changed.wait()
        return None

    def _give_back(self, worker: subprocess.Popen[bytes]) -> None:
        with self._changed:
            if not self._closed:
                self._idle.append(worker)
                self._changed.notify()
                return
        _close_pipes(worker)

    def _start(self) -> subprocess.Popen[bytes] | None:
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(os.path.abspath(folder) for folder in sys.path),
        }
        try:
            worker = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=environment,
                start_new_session=True,  # an interrupt at the terminal is not for it
            )
        except OSError as e:
            self._most = len(self._all)
            self._changed.notify_all()
            self._warn(repr(e))
            return None
        self._all.append(worker)
        return worker

    def _remove(self, worker: subprocess.Popen[bytes], refusal: str | bytes | None) -> None:
        """End a worker, and start no other: it would end as this one did."""
        worker.kill()
        code = worker.wait()
        _close_pipes(worker)
        with self._changed:
            self._all.remove(worker)
            self._most = len(self._all)
            self._changed.notify_all()
            if not self._closed:
                self._warn(f"{refusal or self._last_error()} (exit code {code})")

    def _last_error(self) -> str:
        size = os.fstat(self._errors.fileno()).st_size
        tail = os.pread(self._errors.fileno(), 2000, max(0, size - 2000))
        return (tail.decode(errors="replace").splitlines() or ["no message"])[-1]

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("a process that lowers kernels ended, so others lower more: %s", reason)


def num_cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _most_workers() -> int:
    cores = num_cores()
    return 0 if cores < FEWEST_CORES else min(MOST_WORKERS, cores - FREE_CORES)


def _ask(worker: subprocess.Popen[bytes], request: bytes) -> Reply:
    assert worker.stdin is not None and worker.stdout is not None
    pickle.dump(request, worker.stdin)
    worker.stdin.flush()
    return pickle.load(worker.stdout)


def _close_pipes(worker: subprocess.Popen[bytes]) -> None:
    for pipe in (worker.stdin, worker.stdout):
        with contextlib.suppress(OSError):
            assert pipe is not None
            pipe.close()


def serve() -> None:
    """Answer requests until there are no more, or until the pipe of replies is closed."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed is no reply
    hopper.lower_for_another_process()
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            pickle.dump(_reply(pickle.load(sys.stdin.buffer)), replies)
            replies.flush()


def _reply(data: bytes) -> Reply:
    try:
        request = pickle.loads(data)
    except Exception as e:  # of an argument's module
        return "failed", repr(e)
    return request.reply()
