"""Rounds on two devices, each with half of the vocabulary, follow the target's distribution: the
chi-square tests of test_distribution.py."""

from __future__ import annotations

import pytest

from tests.decode.test_distribution import CHUNK
from tests.support.devices import run_on_devices
from tests.support.slow import slow

pytestmark = pytest.mark.once
MODULE = "tests.decode.distribution_on_devices"


@pytest.mark.parametrize("cases", [("mapped", "block"), slow(("strict", "probabilistic"))])
def test_every_position_follows_the_target_on_two_devices(cases: tuple[str, ...]) -> None:
    lines = run_on_devices(2, MODULE, *cases).splitlines()
    assert lines == [f"{case} {CHUNK} 0 True" for case in cases]


def test_noise_of_a_devices_own_and_swapped_pieces_bias_the_output() -> None:
    lines = [line.rsplit(" ", 1) for line in run_on_devices(2, MODULE, "mistakes").splitlines()]
    assert [name for name, _ in lines] == ["own noise", "swapped shards"]
    assert all(int(biased) >= 4 for _, biased in lines)
