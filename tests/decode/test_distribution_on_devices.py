"""Rounds on two devices, each with half of the vocabulary, follow the target's distribution: the
chi-square tests of test_distribution.py."""

from __future__ import annotations

import pytest

from tests.decode.test_distribution import CHUNK
from tests.support.devices import run_on_devices
from tests.support.slow import slow

pytestmark = pytest.mark.once
MODULE = "tests.decode.distribution_on_devices"


# Block: tests/parallel/test_vocab_shards.py has the tokens of whole rows, over several rounds.
@pytest.mark.parametrize("cases", [("mapped",), slow(("block", "strict", "probabilistic"))])
def test_every_position_follows_the_target_on_two_devices(cases: tuple[str, ...]) -> None:
    lines = run_on_devices(2, MODULE, *cases).splitlines()
    assert lines == [f"{case} {CHUNK} 0 True" for case in cases]


@pytest.mark.parametrize("mistake", ["own noise", slow("swapped shards")])
def test_noise_of_a_devices_own_and_swapped_pieces_bias_the_output(mistake: str) -> None:
    name, biased = run_on_devices(2, MODULE, mistake).strip().rsplit(" ", 1)
    assert name == mistake and int(biased) >= 4
