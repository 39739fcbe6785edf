"""Processes that lower kernels for this one, which Python's lock would make wait for each other.

A worker is this module as a program. It has no GPU, reads orders from its standard input and writes
exports to its standard output. It ends with its input, and so with the process that started it.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax import export

from pallas_kernels import hopper, lowered_once
from pallas_kernels.lowered_once import Call

MOST_WORKERS = 12
LEAST_CORES = 4  # fewer have no time to spare
SECONDS_TO_END = 5

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Order:
    """A call to lower, as one process tells it another.

    module, name: where the function is
    arguments: a pytree of jax.ShapeDtypeStruct
    settings, traced: as in Call
    platform, versions: of the process that asks
    """

    module: str
    name: str
    arguments: Any
    settings: tuple[tuple[str, Any], ...]
    traced: tuple[tuple[str, Any], ...]
    platform: str
    versions: str

    @classmethod
    def of(cls, call: Call) -> Order:
        """Return the order of a call."""
        arguments = jax.tree.unflatten(call.structure, call.shapes)
        function = call.function
        names = function.__module__, function.__qualname__
        own = lowered_once.PLATFORM, lowered_once.VERSIONS
        return cls(*names, arguments, call.settings, call.traced, *own)

    @property
    def function(self) -> Callable[..., Any]:
        """The function that has this name, without its decorators."""
        found: Any = importlib.import_module(self.module)
        for name in self.name.split("."):
            found = getattr(found, name)
        return inspect.unwrap(found)

    def run(self) -> bytes:
        """Return the serialised export."""
        if self.versions != lowered_once.VERSIONS:
            raise RuntimeError(f"expected {self.versions}, got {lowered_once.VERSIONS}")
        lowered_once.PLATFORM = self.platform
        for name, value in self.traced:
            jax.config.update(name, value)
        shapes, structure = jax.tree.flatten(self.arguments)
        call = Call(self.function, structure, tuple(shapes), self.settings, self.traced)
        return bytes(call.export().serialize())


class Workers:
    """Processes that lower kernels; they start with the first order."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._starting = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes] | None] = queue.SimpleQueue()
        self._has_warned = False

    def lower(self, call: Call) -> export.Exported | None:
        """Return a call's export; None where no other process can make it."""
        try:
            order = Order.of(call)
            message = pickle.dumps(order)
            if order.function is not call.function:
                return None
        except Exception as e:  # of arguments or functions that no other process can have
            logger.debug("%s is lowered in this process: %r", call.function, e)
            return None
        worker = self._take()
        if worker is None:
            return None
        try:
            assert worker.stdin is not None and worker.stdout is not None
            worker.stdin.write(message)
            worker.stdin.flush()
            made = pickle.load(worker.stdout)
        except Exception as e:
            self._warn(repr(e))
            worker.kill()
            return None
        self._idle.put(worker)
        if isinstance(made, bytes):
            return export.deserialize(bytearray(made))
        logger.debug("%s is lowered in this process: %s", call.function, made)
        return None

    def _take(self) -> subprocess.Popen[bytes] | None:
        """Return an idle worker, once there is one; None if all have ended."""
        with self._starting:
            if not self._processes:
                for _ in range(self._number):
                    process = _start()
                    self._processes.append(process)
                    self._idle.put(process)
        while any(process.poll() is None for process in self._processes):
            with contextlib.suppress(queue.Empty):
                return self._idle.get(timeout=1)
        self._warn("all of them")
        return None

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("a process that lowers kernels has ended (%s); this one goes on", reason)

    def end(self) -> None:
        """End the processes."""
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]
        for process in self._processes:
            try:
                process.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()  # type: ignore[union-attr]


@contextlib.contextmanager
def lowering_elsewhere() -> Iterator[None]:
    """Lower kernels in other processes meanwhile, where this machine has the cores for them.

    Only threads gain by it: each waits for its own kernels.
    """
    cores = _num_cores()
    if cores < LEAST_CORES or not sys.executable:
        yield
        return
    workers = Workers(min(MOST_WORKERS, cores - 2))
    lowered_once.lower_by(workers.lower)
    try:
        yield
    finally:
        lowered_once.lower_by(None)
        workers.end()


def _num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _start() -> subprocess.Popen[bytes]:
    path = os.pathsep.join(map(os.path.abspath, filter(None, [*sys.path, os.getcwd()])))
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        start_new_session=True,  # an interrupt is for the process that started it
    )


def serve() -> None:
    """Run the orders of the standard input until it ends."""
    orders = sys.stdin.buffer
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may be written there
    hopper.lower_for_another_process()
    while True:
        try:
            order: Order = pickle.load(orders)
        except EOFError:
            return
        try:
            made: bytes | str = order.run()
        except Exception as e:
            made = repr(e)
        pickle.dump(made, results)
        results.flush()


if __name__ == "__main__":
    # The orders are pickled objects of the module under its own name.
    importlib.import_module("pallas_kernels.lowering_workers").serve()
