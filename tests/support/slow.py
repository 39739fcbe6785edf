"""Cases that `make test` leaves to `make test-slow`.

A case is slow when another case of its test fails for the same mistakes: a further member of a
product of settings, or more trials. The fast cases have each setting at least once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow(*values: object, id: str | None = None) -> Any:
    """Return one case of a parametrised test, marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def slow_unless(usual: Collection[object], cases: Iterable[object]) -> list[Any]:
    """Return the cases, those that are not among the usual ones marked slow."""
    cases = list(cases)
    unknown = [case for case in usual if case not in cases]
    assert not unknown, f"expected usual cases among {cases}, got {unknown}"
    return [case if case in usual else slow(*_values(case)) for case in cases]


def _values(case: object) -> tuple[object, ...]:
    return case if isinstance(case, tuple) else (case,)
