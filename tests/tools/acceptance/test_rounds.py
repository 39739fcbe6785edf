"""Counts of recorded rounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxspec.tools.acceptance.expected import Expected
from jaxspec.tools.acceptance.rounds import Record, count


def round_of(sampled: list[int], expected: list[float]) -> Record:
    """A round of K = 2: tokens that each request got, and every rule's expectation of a draft."""
    tokens = np.arange(3)
    each: Any = np.repeat(np.asarray(expected, np.float32)[:, None], 2, axis=1)
    zeros: Any = np.zeros((len(sampled), 3), np.float32)
    verification: Any = dict(
        num_sampled=np.asarray(sampled),
        output_tokens=np.where(tokens < np.asarray(sampled)[:, None], tokens, -1),
    )
    missing = dict.fromkeys(
        f for f in Record.__dataclass_fields__ if f not in (*verification, "expected")
    )
    rules = Expected(each, each, each, each)
    record: Any = Record(**(missing | verification), expected=rules)
    return record.replace(surprise=zeros, entropy=zeros)


def test_rounds_of_a_slot_without_a_request_count_as_nothing() -> None:
    requests: Any = [SimpleNamespace(token_ids=[5] * n, prompt_token_ids=[1, 2, 3]) for n in (3, 7)]
    records = [round_of([2, 3], [0.5, 0.25]), round_of([0, 3], [np.nan, 0.75])]
    counts = count(records, requests, 2, sampled=True)
    assert counts.rounds.tolist() == [1, 2]
    assert counts.accepted.tolist() == [[1, 0], [2, 2]]
    for rule in counts.expected.values():
        assert rule.tolist() == [[0.5, 0.5], [1.0, 1.0]]
