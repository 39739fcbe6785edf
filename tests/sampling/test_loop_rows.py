"""Results of loops are those of lax.map, whatever writes them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxspec.sampling.loop_rows import map_rows, scan_rows, with_row


@pytest.mark.parametrize("shape", [(), (3,), (2, 1)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, jnp.bool_])
def test_one_row_is_replaced(shape: tuple[int, ...], dtype: Any) -> None:
    results, new = jnp.zeros((4, *shape), dtype), jnp.ones(shape, dtype)
    for i in range(4):
        np.testing.assert_array_equal(
            jax.jit(with_row)(i, results, new), np.asarray(results.at[i].set(new))
        )


@pytest.mark.parametrize("count", [1, 5])
def test_rows_are_mapped_as_lax_map_does(count: int) -> None:
    rows = {
        "x": jnp.arange(3.0 * count).reshape(count, 3),
        "n": jnp.arange(count, dtype=jnp.int32),
        "none": None,
    }

    def function(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["x"] * 2, row["n"] > 1, {"sum": row["x"].sum()}, row["none"]

    found, expected = jax.jit(lambda r: (map_rows(function, r), lax.map(function, r)))(rows)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_carry_goes_from_step_to_step_as_in_lax_scan() -> None:
    def step(i: jax.Array, carry: jax.Array) -> tuple[Any, jax.Array]:
        return {"before": carry, "step": i}, carry * 2 + i

    start, steps = jnp.int32(3), jnp.arange(5, dtype=jnp.int32)
    found = jax.jit(lambda: scan_rows(step, start, 5))()
    last, rows = lax.scan(lambda carry, i: step(i, carry)[::-1], start, steps)
    jax.tree.map(np.testing.assert_array_equal, found, (rows, last))
