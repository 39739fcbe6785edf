"""Compile in threads: in the background while rounds run, or side by side in warm-up.

Python traces and lowers one program at a time, but XLA compiles without its lock.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Generic, TypeVar

import jax

from pallas_kernels.lowering_workers import num_cores

T = TypeVar("T")
MOST_THREADS = 16  # of large jobs; those wait for the lowering of kernels, and for each other
MOST_SMALL_THREADS = 8  # of small jobs beside them

logger = logging.getLogger(__name__)


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


def side_by_side(
    jobs: Sequence[Callable[[], object]],
    small: Sequence[Callable[[], object]],
    report: Callable[[int, int], object],
) -> None:
    """Run jobs in threads, with the jax settings of the calling thread, and wait for all.

    small: further jobs, in threads of their own, which are not reported
    report: called with the number of finished jobs and of all, at the start and after each

    A job that raises is logged, and no other begins. The caller runs what they compile next, one
    after the other, and the first that fails again raises. No garbage is collected meanwhile.
    """
    settings = _settings()

    def run(job: Callable[[], object]) -> None:
        with settings():
            job()

    cores = num_cores()
    for_large, for_small = pools = [
        ThreadPoolExecutor(threads, thread_name_prefix="jaxspec-warmup")
        for threads in (min(MOST_THREADS, cores), min(MOST_SMALL_THREADS, max(1, cores // 2)))
    ]
    try:
        with _garbage_kept():
            report(0, len(jobs))
            reported = {for_large.submit(run, job) for job in jobs}
            futures = [*reported, *(for_small.submit(run, job) for job in small)]
            finished = 0
            for future in as_completed(futures):
                if not future.cancelled() and (error := future.exception()) is not None:
                    logger.warning("a program did not compile beside others", exc_info=error)
                    for waiting in futures:
                        waiting.cancel()
                if future in reported:
                    finished += 1
                    report(finished, len(jobs))
    finally:
        # An interrupt waits for no program; the end of the process waits for those that run.
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _garbage_kept() -> Iterator[None]:
    """Keep Python's garbage collector off.

    Traces and lowered programs hold no cycles, but their many objects make it begin, and it reads
    every object of the process with Python's lock held.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
            gc.collect()  # now, rather than between two rounds


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
