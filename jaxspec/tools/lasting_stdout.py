"""Standard output that a run outlasts: text that cannot be printed does not end the run.

A long run writes its files to the end, whether a pipe's reader has gone (`| head -1`), the disk
behind standard output is full, or the terminal knows ASCII only.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

READER_GONE = 141  # exit code: 128 + SIGPIPE, as of a program that the pipe has ended
NOT_WRITTEN = 1


class _RawOutput(io.RawIOBase):
    """A file descriptor that takes everything.

    error: the first failure; what is written after it is lost
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: WriteableBuffer, /) -> int:
        if self.error is None:
            try:
                return os.write(self._descriptor, data)
            except OSError as e:
                self.error = e
        return memoryview(data).nbytes


@contextlib.contextmanager
def lasting_stdout() -> Iterator[None]:
    """Print into standard output as long as it can be written; exit with a status of its own.

    Characters that its encoding lacks are written as escapes. If the block succeeds and not all of
    its text was written, the exit status is READER_GONE, or NOT_WRITTEN with a sentence on stderr.
    """
    before: TextIO = sys.stdout
    try:
        descriptor = before.fileno()
    except (AttributeError, OSError, ValueError):  # none, or a test's
        yield
        return
    before.flush()
    raw = _RawOutput(descriptor)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=before.encoding,
        errors="backslashreplace",
        line_buffering=raw.isatty(),
    )
    try:
        yield
    except SystemExit as e:
        if e.code not in (None, 0):
            raise
    finally:
        sys.stdout.flush()
        sys.stdout = before
    if isinstance(raw.error, BrokenPipeError):
        raise SystemExit(READER_GONE)
    if raw.error is not None:
        print(
            f"error: standard output: {raw.error.strerror}; files that the run writes are whole",
            file=sys.stderr,
        )
        raise SystemExit(NOT_WRITTEN)
