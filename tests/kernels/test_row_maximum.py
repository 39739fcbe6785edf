"""The first of the highest of a row's partial results."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.interpreter import interpreted, needs_mosaic

ROWS, PLACES = 5, 256


@needs_mosaic
@pytest.mark.parametrize("count", [1, 128, 132, 255])
def test_is_the_lowest_index_of_the_highest_value_among_those_that_count(count: int) -> None:
    """Unused places hold larger values. One row is flat, one is -inf, and one is not asked for."""
    from pallas_kernels.row_maximum import first_of_highest

    rng = np.random.default_rng(count)
    best = rng.integers(0, 30, (ROWS, PLACES)).astype(np.float32)  # with ties
    best[1], best[2] = 1.5, -np.inf
    best[3, count - 1] = 50
    best[:, count:] = 99
    index = rng.permuted(np.tile(np.arange(1000, 1000 + PLACES, dtype=np.int32), (ROWS, 1)), axis=1)
    with interpreted():
        found = first_of_highest(jnp.asarray(best), jnp.asarray(index), count, rows=4, name="first")
    highest = best[:, :count].max(axis=1, keepdims=True)
    expected = np.where(best[:, :count] == highest, index[:, :count], 2**31 - 1).min(axis=1)
    np.testing.assert_array_equal(found, expected[:4])
