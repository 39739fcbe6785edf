"""Many rows with fp8 weights by channels: products in order have no parts of the depth."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.fp8_matmul import Inputs, fp8_matmul, reference
from pallas_kernels.fp8_matmul.reference import products_of_parts
from tests.kernels.interpreter import interpreted, needs_mosaic
from tests.kernels.test_fp8_matmul import fp8_weight
from tests.kernels.test_matmul_any_rows import CALLS

pytestmark = needs_mosaic


def test_depths_of_channels_in_order_have_one_part_in_calls_of_all_sizes() -> None:
    """Llama-3-8B's down, whose depth has four parts in rounds of 129 to 256 rows."""
    codes = jax.ShapeDtypeStruct((4096, 14336), jnp.float8_e4m3fn)

    def parts(rows: int, **options: bool) -> int:
        x = jax.ShapeDtypeStruct((rows, 14336), jnp.float8_e4m3fn)
        return jax.eval_shape(partial(products_of_parts, **options), x, codes).shape[0]

    assert {parts(rows, splits=False) for rows in CALLS} == {1}
    assert parts(144) == 4


def test_a_product_of_channels_in_order_asks_for_one_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []

    def note(x: jax.Array, codes: jax.Array, *, splits: bool) -> jax.Array:
        asked.append(splits)
        return products_of_parts(x, codes, splits=splits)

    monkeypatch.setattr(reference, "products_of_parts", note)
    weight = fp8_weight(0, 128, 1024, "channel")
    x = jax.random.normal(jax.random.key(0), (144, 1024), jnp.bfloat16)
    for in_order in (False, True):
        with interpreted():
            inputs = Inputs(x=x, weights=(weight,), in_order=in_order)
            fp8_matmul(inputs, implementation="mosaic_gpu")
    assert asked == [True, False]
