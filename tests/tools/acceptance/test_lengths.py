"""Acceptance by prompt length: the ranges, and the counts of the prompts in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from jaxspec.tools.acceptance import show
from jaxspec.tools.acceptance.lengths import ENDS, RANGES, by_range, length_range
from jaxspec.tools.acceptance.rounds import Counts
from jaxspec.tools.acceptance.summary import Case, Result, by_prompt_length, figures

CASE = Case("long", 0.0, "probabilistic", "greedy", 2)


def counts(prompt_tokens: list[int], rounds: list[int], accepted: list[list[int]]) -> Counts:
    none = np.zeros(len(rounds))
    return Counts(
        rounds=np.array(rounds),
        tokens=np.array(rounds) + np.array(accepted).sum(axis=1) + 1,
        prompt_tokens=np.array(prompt_tokens),
        accepted=np.array(accepted),
        expected={},
        surprise=none,
        entropy=none,
        squares=none,
    )


@pytest.mark.parametrize(
    ("num_tokens", "name"),
    [
        (1, "below 512"),
        (511, "below 512"),
        (512, "512 to 1023"),
        (1024, "1024 to 2047"),
        (4095, "2048 to 4095"),
        (8191, "4096 to 8191"),
        (8192, "from 8192"),
    ],
)
def test_a_range_begins_at_its_first_length(num_tokens: int, name: str) -> None:
    assert length_range(num_tokens) == name


def test_every_prompt_is_in_one_range_and_short_ranges_come_first() -> None:
    lengths = [9000, 3, 700, 4, *ENDS]
    found = by_range(lengths)
    assert list(found) == [name for name in RANGES if name in found]
    assert sorted(np.concatenate(list(found.values()))) == list(range(len(lengths)))
    assert found["below 512"].tolist() == [1, 3] and found["512 to 1023"].tolist() == [2, 4]
    assert list(by_range([9000, 3])) == ["below 512", "from 8192"]


def test_figures_of_a_range_are_those_of_its_prompts() -> None:
    made = counts([20, 2000, 30, 1500], [10, 10, 30, 40], [[8, 5], [3, 1], [16, 9], [2, 0]])
    parts = figures(Result(CASE, made))["by_prompt_length"]
    assert list(parts) == ["below 512", "1024 to 2047"]
    short, long = parts.values()
    assert (short["num_prompts"], short["num_rounds"]) == (2, 40)
    assert short["per_position"] == [24 / 40, 14 / 40]
    assert short["mean_acceptance_length"] == pytest.approx(1 + 38 / 40)
    assert (long["num_prompts"], long["num_rounds"]) == (2, 50)
    assert long["mean_acceptance_length"] == pytest.approx(1 + 6 / 50)
    assert 0 < long["mean_acceptance_length_standard_error"] < 0.3


def test_a_range_without_rounds_has_no_figures() -> None:
    """Its answers ended with their first token."""
    made = counts([20, 2000], [10, 0], [[8, 5], [0, 0]])
    assert list(by_prompt_length(made)) == ["below 512"]


def record(*made: Counts, cases: Sequence[Case] = (CASE, CASE)) -> show.Record:
    results = [Result(case, each).to_dict() for case, each in zip(cases, made, strict=False)]
    return {"num_speculative_tokens": 2, "results": results, "check": None}


def test_a_table_of_lengths_needs_prompts_of_several_ranges() -> None:
    accepted = [[8, 5], [3, 1]]
    of_both = show.grids(record(counts([20, 2000], [10, 10], accepted)))
    [table] = [grid for grid in of_both if "by prompt length" in grid.title]
    assert [row[4:] for row in table.rows] == [
        ("below 512", "10", "2.300 ± 0.000", "80.0 / 50.0"),
        ("1024 to 2047", "10", "1.400 ± 0.000", "30.0 / 10.0"),
    ]
    short = counts([20, 30], [10, 10], accepted)
    others = (CASE, replace(CASE, dataset="other"))
    for of_one in (record(short), record(short, short, cases=others)):
        assert not [grid for grid in show.grids(of_one) if "by prompt length" in grid.title]


def test_a_table_of_lengths_is_of_one_number_of_drafts() -> None:
    several = counts([20, 2000], [10, 10], [[8, 5], [3, 1]])
    fewer = counts([20, 2000], [10, 10], [[8], [3]])
    cases = (CASE, replace(CASE, num_speculative_tokens=1))
    found = show.grids(record(several, fewer, cases=cases))
    [table] = [grid for grid in found if "by prompt length" in grid.title]
    assert len(table.rows) == 2
