"""Two replicas on devices of their own give one device's tokens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jaxspec import ConfigError, EngineConfig
from jaxspec.loading.placement import choose_placements
from tests.support.devices import run_on_devices
from tests.support.slow import slow

pytestmark = pytest.mark.once

MODULE = Path(__file__).with_name("replicas_on_devices.py")


@pytest.mark.parametrize("tensor_parallel_size", [1, slow(2)])
def test_replicas_behave_as_one_engine(tensor_parallel_size: int) -> None:
    size = tensor_parallel_size
    printed = run_on_devices(2 * size, f"tests.parallel.{MODULE.stem}", str(size)).splitlines()
    checks = re.search(r"CHECKS.*?= \((.*?)\)\n", MODULE.read_text(), re.DOTALL)
    assert checks and printed == re.findall(r"\w+", checks[1])


def test_too_few_devices_are_named_with_the_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"data_parallel_size: expected at most \d+ replicas of 1 on the \d+ dev"
    ):
        choose_placements(EngineConfig(data_parallel_size=1000))
    for bad in (0, -1, 1.5, True, "2"):
        with pytest.raises(ConfigError, match="data_parallel_size: expected an integer"):
            EngineConfig(data_parallel_size=bad)  # type: ignore[arg-type]
