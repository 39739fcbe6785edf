"""Compile in the background, in one thread, while the engine's own thread runs rounds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import jax

T = TypeVar("T")


class Background(Generic[T]):
    """Run jobs one after the other in a thread, and keep their results until they are taken.

    The thread ends when the object is collected. A process that exits waits for the job that runs.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._futures: dict[Hashable, Future[T]] = {}

    def __contains__(self, job: Hashable) -> bool:
        """Whether a job waits, runs, or has a result that is not taken."""
        return job in self._futures

    def submit(self, job: Hashable, work: Callable[[], T]) -> None:
        """Run work() in the thread, with the jax settings of the calling thread."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="jaxspec-compile")
        settings = _settings()

        def run() -> T:
            with settings():
                return work()

        self._futures[job] = self._pool.submit(run)

    def take(self) -> list[tuple[Hashable, T | Exception]]:
        """Return the finished jobs, each with its result or its exception, and forget them."""
        if not self._futures:
            return []
        found = [(job, future) for job, future in self._futures.items() if future.done()]
        for job, _ in found:
            del self._futures[job]
        return [(job, _outcome(future)) for job, future in found]

    def wait(self, job: Hashable) -> None:
        """Wait until a job is done."""
        self._futures[job].exception()


def _outcome(future: Future[T]) -> T | Exception:
    error = future.exception()
    if error is None:
        return future.result()
    return error if isinstance(error, Exception) else RuntimeError(repr(error))


def _settings() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context with the calling thread's settings of jax, which hold in that thread alone.

    A program is compiled for the settings of the thread that compiles it.
    """
    config = jax.config.values
    found = [
        (jax.default_matmul_precision, config["jax_default_matmul_precision"]),
        (jax.numpy_dtype_promotion, config["jax_numpy_dtype_promotion"]),
        (jax.numpy_rank_promotion, config["jax_numpy_rank_promotion"]),
        (jax.default_device, config["jax_default_device"]),
    ]

    @contextlib.contextmanager
    def settings() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for context, value in found:
                stack.enter_context(context(value))
            yield

    return settings
