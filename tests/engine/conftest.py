"""What all tests of the engine need."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, wait
from typing import Any

import pytest

from jaxspec.engine.background import Background

LONGEST_JOB = 300.0  # seconds


@pytest.fixture(autouse=True)
def background_jobs_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wait for the programs that compile in the background: the next test would count them."""
    jobs: list[Future[Any]] = []
    submit = Background.submit

    def recorded(self: Background[Any], job: Hashable, work: Callable[[], Any]) -> None:
        submit(self, job, work)
        jobs.append(self._futures[job])

    monkeypatch.setattr(Background, "submit", recorded)
    yield
    assert not wait(jobs, LONGEST_JOB).not_done
