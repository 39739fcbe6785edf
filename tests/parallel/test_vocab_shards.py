"""Sampling on pieces of the vocabulary gives what whole rows give, on 2 and 4 devices of one CPU.

One process runs the usual cases, another one the rest.
"""

from __future__ import annotations

import json
from functools import cache

import jax
import pytest

from pallas_kernels.vocab_shards import WHOLE, VocabShards
from tests.kernels.interpreter import needs_mosaic
from tests.support.devices import run_on_devices
from tests.support.slow import slow


def printed_by(devices: int, module: str, *arguments: str) -> list[str]:
    """Return the lines that a module prints in a process with so many devices."""
    settings = {
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "JAX_COMPILATION_CACHE_DIR": jax.config.values["jax_compilation_cache_dir"] or "",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    printed = run_on_devices(devices, f"tests.parallel.{module}", *arguments, settings=settings)
    return printed.splitlines()


@cache
def compared(part: str) -> list[str]:
    return printed_by(4, "vocab_shards_on_devices", part)


@pytest.mark.once
@pytest.mark.parametrize(("part", "count"), [("usual", 6), slow("rest", 7)])
def test_pieces_give_the_tokens_of_whole_rows(part: str, count: int) -> None:
    printed = compared(part)
    assert printed[:2] == ["processors", "rejection_sample"]
    rules = [line.split()[0] for line in printed[2:-1]]
    assert {"block", "probabilistic", "strict"} <= set(rules)
    assert ("synthetic" in rules) == (part == "usual")
    assert len(rules) == count


@pytest.mark.once
def test_a_round_makes_few_exchanges() -> None:
    """Three draft steps, then the target's; each exchange costs a GPU microseconds."""
    assert json.loads(compared("usual")[-1]) == {
        "greedy": 3 + 1,
        "strict": 3 + 1,
        "probabilistic": 3 + 2,
        "probabilistic, mapped": 3 + 3,
        "block": 3 + 3,
        "block, mapped": 3 + 4,
    }


@needs_mosaic
@pytest.mark.parametrize(
    "names",
    [
        ("draft", "greedy", "probabilistic", "probabilistic, one-hot", "block", "synthetic"),
        slow(
            (
                "target",
                "probabilistic, same vocabulary",
                "block, same vocabulary",
                "block, one draft",
                "plain",
            )
        ),
    ],
)
def test_kernels_give_the_references_tokens_on_two_devices(names: tuple[str, ...]) -> None:
    assert printed_by(2, "vocab_shard_kernels", *names) == list(names)


@pytest.mark.parametrize(("axis", "count"), [("model", 1), (None, 2), ("model", 0)])
def test_a_description_that_does_not_fit_is_an_error(axis: str | None, count: int) -> None:
    with pytest.raises(ValueError, match="expected a mesh axis and at least 2 pieces"):
        VocabShards(axis, count)
    assert WHOLE.is_whole
