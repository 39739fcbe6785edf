"""The processes of one engine, each with devices of its own, on one host or on several.

Process 0 leads: it schedules, and tells the others which programs to launch, with what arguments.
They follow. Messages go through the key-value store of jax's distributed client, so the host of a
follower need not wait for its devices, as it would for a collective.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn, TypeVar

import jax

logger = logging.getLogger(__name__)

T = TypeVar("T")

ENVIRONMENT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
BEAT_SECONDS = 1.0  # between two signs of life of a process
SILENT_SECONDS = 10.0  # without one, a process counts as lost
ACK_EVERY = 64  # messages that a follower acknowledges together
POLL_MS = 2_000  # a wait for a message, after which the follower waits again

_channels = 0  # made so far by this process


class ProcessError(RuntimeError):
    """The processes of an engine no longer run the same programs; no engine of theirs goes on."""


def join_processes(environment: Mapping[str, str] = os.environ) -> None:
    """Connect this process to the others that the environment names, before jax finds its devices.

    JAX_COORDINATOR_ADDRESS is host:port of process 0, JAX_NUM_PROCESSES their number and
    JAX_PROCESS_ID the own one. Nothing happens without them, or if jax.distributed.initialize was
    called already; that finds the processes of SLURM and of Open MPI itself. ValueError says what
    is missing.
    """
    given = [name for name in ENVIRONMENT if environment.get(name)]
    if not given or jax.distributed.is_initialized():
        return
    host, _, port = environment.get(ENVIRONMENT[0], "").rpartition(":")
    numbers = [port, *(environment.get(name, "") for name in ENVIRONMENT[1:])]
    values = [int(number) if number.isdecimal() else -1 for number in numbers]
    if not host or not 0 < values[0] < 1 << 16 or not 0 <= values[2] < values[1]:
        found = ", ".join(f"{name}={environment.get(name)!r}" for name in ENVIRONMENT)
        raise ValueError(
            f"{ENVIRONMENT[0]}: expected host:port, with a number of processes and an own number "
            f"below it in {' and '.join(ENVIRONMENT[1:])}, got {found}"
        )
    _, count, own = values
    jax.distributed.initialize(environment[ENVIRONMENT[0]], num_processes=count, process_id=own)


class Channel:
    """What the leader of an engine tells its followers, in order.

    Every process makes its engines in the same order; their numbers name the channels. One thread
    tells at a time; any other one may close.
    """

    def __init__(self) -> None:
        global _channels
        _channels += 1
        self._name, self._count = f"jaxspec/{_channels}", 0
        self._broken: str | None = None
        self._sending = threading.RLock()  # the garbage collector may close inside `tell`
        self._others = [i for i in range(jax.process_count()) if i != jax.process_index()]
        watch()

    @property
    def leads(self) -> bool:
        """Whether this process schedules."""
        return jax.process_index() == 0

    @property
    def is_open(self) -> bool:
        """Whether the followers still follow."""
        return self._broken is None

    def tell(self, message: object) -> None:
        """Send a message to the followers; ProcessError once the channel is closed."""
        self._refuse_if_closed()  # before a wait for followers that have left
        data = zlib.compress(pickle.dumps(message), level=1)
        if self._count % ACK_EVERY == 0 and self._count > ACK_EVERY:
            self._forget_read(self._count - ACK_EVERY)
        with self._sending:
            self._refuse_if_closed()
            _client().key_value_set_bytes(f"{self._name}/{self._count}", data)
            self._count += 1

    def _refuse_if_closed(self) -> None:
        if self._broken is not None:
            raise ProcessError(f"processes: expected {self._others} to follow, got {self._broken}")

    def _forget_read(self, count: int) -> None:
        """Wait until the followers have read the first `count` messages, and drop the last ones."""
        for rank in self._others:
            key = f"{self._name}/read/{rank}/{count}"
            _wait_for(partial(_client().blocking_key_value_get, key, POLL_MS))
            _client().key_value_delete(key)
        for i in range(count - ACK_EVERY, count):
            _client().key_value_delete(f"{self._name}/{i}")

    def close(self, reason: str) -> None:
        """Tell the followers that nothing follows; only the first call does."""
        with self._sending:
            if self._broken is None:
                self._broken = reason
                self._send_end()

    def _send_end(self) -> None:
        end = zlib.compress(pickle.dumps(None))
        for _ in range(2):  # an interrupt may come after a message is set and before it is counted
            try:
                _client().key_value_set_bytes(f"{self._name}/{self._count}", end)
                return
            except jax.errors.JaxRuntimeError as e:
                if "ALREADY_EXISTS" not in str(e):  # the coordinator is gone, and they know
                    logger.info("the followers were not told: %s", self._broken)
                    return
                self._count += 1

    def receive(self) -> Any:
        """Wait for the next message of the leader; None is the last."""
        key = f"{self._name}/{self._count}"
        try:
            data = _wait_for(partial(_client().blocking_key_value_get_bytes, key, POLL_MS))
        except jax.errors.JaxRuntimeError as e:
            raise ProcessError(
                f"processes: expected process 0 to lead, got {str(e).splitlines()[0]:.200}"
            ) from e
        self._count += 1
        if self._count % ACK_EVERY == 0:
            key = f"{self._name}/read/{jax.process_index()}/{self._count}"
            _client().key_value_set(key, "")
        return pickle.loads(zlib.decompress(data))


def _wait_for(get: Callable[[], T]) -> T:
    """Call get until it returns within its time limit; an interrupt comes between two calls."""
    while True:
        try:
            return get()
        except jax.errors.JaxRuntimeError as e:
            if "DEADLINE_EXCEEDED" not in str(e):
                raise


def _client() -> Any:
    from jax._src import distributed  # jax has no public name for its store

    return distributed.global_state.client


# --- signs of life -------------------------------------------------------------------------------

_watching: list[threading.Thread] = []


def watch() -> None:
    """Start to watch the other processes, in two threads; the first call does.

    A process that waits for a collective cannot notice that another one has stopped: it waits in
    XLA. So a thread ends this process, with one sentence. The other thread reads the signs of life,
    and may itself wait for a coordinator that has stopped.
    """
    if not _watching:
        own = jax.process_index()
        seen = {i: ("", time.monotonic()) for i in range(jax.process_count()) if i != own}
        for function in (_exchange_signs, _end_if_silent):
            _watching.append(threading.Thread(target=function, args=(own, seen), daemon=True))
            _watching[-1].start()


def _exchange_signs(own: int, last_seen: dict[int, tuple[str, float]]) -> None:
    """Give signs of life, and note those of the others and when they changed."""
    count = 0
    while True:
        count += 1
        try:
            _client().key_value_set(f"jaxspec/alive/{own}", str(count), allow_overwrite=True)
            for rank, (sign, _) in list(last_seen.items()):
                found = _sign_of(rank)
                if found != sign:
                    last_seen[rank] = (found, time.monotonic())
        except AttributeError:
            return  # jax.distributed was shut down
        except jax.errors.JaxRuntimeError as e:  # a call that failed, or the coordinator is gone
            logger.debug("no signs of life were exchanged: %s", e)
            if not jax.distributed.is_initialized():
                return
        time.sleep(BEAT_SECONDS)


def _sign_of(rank: int) -> str:
    try:
        return _client().key_value_try_get(f"jaxspec/alive/{rank}")
    except jax.errors.JaxRuntimeError as e:
        if "NOT_FOUND" in str(e):
            return ""
        raise


def _end_if_silent(own: int, last_seen: Mapping[int, tuple[str, float]]) -> None:
    """End this process once another one that has given signs of life is silent."""
    while jax.distributed.is_initialized():
        now = time.monotonic()
        for rank, (sign, at) in list(last_seen.items()):
            if sign and now - at > SILENT_SECONDS:
                end_process(
                    f"processes: expected a sign of life of process {rank} within "
                    f"{SILENT_SECONDS:.0f} s, got none; process {own} ends"
                )
        time.sleep(BEAT_SECONDS / 2)


def end_process(sentence: str) -> NoReturn:
    """Print a sentence and end this process, whose devices may wait for ever."""
    print(sentence, file=sys.stderr, flush=True)
    os._exit(1)
