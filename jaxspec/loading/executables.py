"""The folder of compiled programs that are found without a trace (program_names).

Programs with callbacks into Python are not kept. Code that replaces functions of jaxspec at run
time calls `allow(False)`: a name says nothing of it.

A file holds a pickle, as those of jax.experimental.serialize_executable do: whoever can write to
the folder can run code.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from pickle import dumps, loads
from typing import Any

import jax
from jax._src import config as jax_config
from jax.experimental import serialize_executable

from jaxspec.loading import program_names
from jaxspec.loading.program_names import Call, Undescribed
from jaxspec.parallel.mesh import Device

READ = "/jaxspec/executables/read_duration"  # event of jax.monitoring: a program came from disk
QUIET = 1.0  # seconds without a call after which programs are written
LATEST = 60.0  # seconds after which they are written in any case
MOST_AT_EXIT = 10.0  # seconds after which the end of a process begins no further one
DIGEST = hashlib.sha256().digest_size  # bytes; a file begins with that of its content

Written = list[tuple[Path, Path]]  # files that have no names yet, and these names

logger = logging.getLogger(__name__)


class Store:
    """The folder of this process, and what it has yet to write.

    folder:    None: nothing is kept
    is_on:     whether this process keeps programs at all
    can_write: False after an error of the folder; the programs of this process go on
    at_once:   number of callers that want new programs written where they are compiled
    last_call: time.monotonic() of the last call of a program
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.is_on = True
        self.can_write = True
        self.at_once = 0
        self.last_call = 0.0
        self._waiting: deque[tuple[float, Path, Any]] = deque()  # and time.monotonic() at latest
        self._unnamed: Written = []  # while at_once is not 0
        self._thread: threading.Thread | None = None
        self.changing = threading.Lock()  # of at_once and of the three above
        self._writing = threading.Lock()
        atexit.register(self.write_waiting, MOST_AT_EXIT)

    @property
    def is_used(self) -> bool:
        """Whether programs come from the folder, and go there."""
        return self.folder is not None and self.is_on

    def path(self, call: Call, registered: Mapping[str, Any]) -> Path | None:
        """Return a program's file; None if it is not kept."""
        if self.folder is None or not self.is_on:
            return None
        try:
            return self.folder / call.file_name(registered)
        except Undescribed as e:
            logger.debug("%s is not kept: it depends on %s", call.function.__name__, e)
            return None

    def read(self, path: Path, devices: Sequence[Device]) -> Any:
        """Return the compiled program of a file; None if there is none that can be read."""
        began = time.perf_counter()
        try:
            if path.stat().st_uid not in (0, os.getuid()):
                raise ValueError("a file of another user")  # a pickle can run code
            content = path.read_bytes()
            with contextlib.suppress(OSError):  # of a folder that only others may write
                os.utime(path)  # what is not used makes room
            if hashlib.sha256(content[DIGEST:]).digest() != content[:DIGEST]:
                raise ValueError("other bytes than were written")
            serialised, inputs, outputs = loads(content[DIGEST:])
            found = serialize_executable.deserialize_and_load(
                serialised,
                inputs,
                outputs,
                backend=devices[0].client,
                execution_devices=list(devices),
            )
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as e:  # of an incomplete or a foreign file
            logger.warning("%s: expected a program, got %r; it is compiled anew", path, e)
            return None
        function, seconds = path.name.rpartition("-")[0], time.perf_counter() - began
        jax.monitoring.record_event_duration_secs(READ, seconds, fun_name=function)
        return found

    def write(self, path: Path, compiled: Any) -> None:
        """Write a compiled program now; none if a source has changed since the import."""
        self._name(self._written(path, compiled))

    def _written(self, path: Path, compiled: Any) -> Written:
        """Write a program to a file without a name; return none if it cannot be written."""
        # Several processes, also of several hosts, may write the same program.
        part = path.with_name(f".{uuid.uuid4().hex}")
        try:
            content = dumps(serialize_executable.serialize(compiled))
        except Exception as e:  # callbacks into Python; an executable without a serial form
            logger.debug("%s is not kept: %r", path.name, e)
            return []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(hashlib.sha256(content).digest() + content)
        except OSError as e:
            self._refuse(path, e)
            _remove(part)
            return []
        return [(part, path)]

    def _name(self, written: Written) -> None:
        """Give files their names; remove them if a source has changed since the import.

        A kernel's source is imported while its program is traced, so the look comes after that.
        """
        if written and program_names.have_sources_changed():
            self.can_write = False
            logger.info("compiled programs are not kept: a source of jaxspec has changed")
            for part, _ in written:
                _remove(part)
            return
        for part, path in written:
            try:
                part.replace(path)
            except OSError as e:
                self._refuse(path, e)
                _remove(part)

    def _refuse(self, path: Path, error: OSError) -> None:
        self.can_write = False
        logger.warning("%s: compiled programs are not kept (%s)", path.parent, error)

    def add(self, path: Path, compiled: Any) -> None:
        """Write a new program: in warm-up at once, else when none is called for a while.

        Serialising holds Python's lock, so a round would be launched late. A process that is never
        quiet writes after LATEST seconds, and one that ends writes what is left.
        """
        if not self.can_write:
            return
        with self.changing:
            if not self.at_once:
                self._waiting.append((time.monotonic() + LATEST, path, compiled))
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._write_when_quiet, name="jaxspec-executables", daemon=True
                    )
                    self._thread.start()
                return
        written = self._written(path, compiled)
        with self.changing:
            if self.at_once:
                self._unnamed += written
                return
        self._name(written)  # an interrupted warm-up does not wait for its threads

    def name_all(self) -> None:
        """Name what was written at once, after one look at the sources.

        Threads that compile do not look: each of 400 files would give Python's lock to another
        thread.
        """
        with self.changing:
            written, self._unnamed = self._unnamed, []
        self._name(written)

    def write_waiting(self, seconds: float = float("inf")) -> None:
        """Write what waits to be written; begin none after so many seconds."""
        began = time.monotonic()
        while time.monotonic() - began < seconds and self._write_one():
            pass

    def _write_one(self) -> bool:
        with self._writing:  # the end of the process waits for the thread's
            try:
                _, path, compiled = self._waiting.popleft()
            except IndexError:
                return False
            self.write(path, compiled)
            return True

    def _write_when_quiet(self) -> None:
        while True:
            left = self.last_call + QUIET - time.monotonic()
            latest = next((at for at, *_ in [*self._waiting]), 0.0)
            if left > 0 and time.monotonic() < latest:
                time.sleep(min(left, QUIET))
            elif not self._write_one():
                with self.changing:
                    if not self._waiting:
                        self._thread = None
                        return


def _remove(part: Path) -> None:
    with contextlib.suppress(OSError):
        part.unlink(missing_ok=True)


STORE = Store()


class Compilations(threading.local):
    """Counts what XLA compiles in a thread.

    new:  programs compiled, or read from JAX's compilation cache
    read: those that were read
    """

    new = read = 0

    def count(self, event: str, duration_secs: float, **_: Any) -> None:
        """Count an event; a listener of jax.monitoring."""
        del duration_secs
        self.new += event == "/jax/core/compile/backend_compile_duration"
        self.read += event == "/jax/compilation_cache/cache_retrieval_time_sec"


COMPILATIONS = Compilations()
jax.monitoring.register_event_duration_secs_listener(COMPILATIONS.count)


def compile_fresh(compile: Callable[[], Any]) -> tuple[Any, bool]:
    """Return compile(), and whether XLA compiled it, which a program to be kept needs.

    A program for a CPU that JAX has read from its cache cannot be serialised once more: it loads,
    and fails when it runs. So that cache takes no part. Serialising the 12 MB of a round of 32
    layers for it too would also hold Python's lock for another quarter of a second. JAX has no
    switch for one thread. But with metadata in its keys it finds none of the programs that it has
    written without, and it writes none that took less time than infinity. A program that was
    compiled earlier in this process is not kept: JAX may have read it from its cache.
    """
    new, read = COMPILATIONS.new, COMPILATIONS.read
    with (
        jax_config.compilation_cache_include_metadata_in_key(True),
        jax_config.persistent_cache_min_compile_time_secs(float("inf")),
    ):
        compiled = compile()
    return compiled, COMPILATIONS.new > new and COMPILATIONS.read == read


def keep_in(folder: Path | None) -> None:
    """Keep compiled programs in a folder, and take those that an earlier process left there.

    None: keep none
    """
    STORE.folder, STORE.can_write = folder, True


def allow(on: bool) -> None:
    """Let this process keep compiled programs, or not, whatever keep_in is called with."""
    STORE.is_on = on


@contextlib.contextmanager
def written_at_once() -> Iterator[None]:
    """Write programs as soon as they are compiled, while this is open: no request waits."""
    STORE.write_waiting()
    with STORE.changing:
        STORE.at_once += 1
    try:
        yield
    finally:
        with STORE.changing:
            STORE.at_once -= 1
        STORE.name_all()
