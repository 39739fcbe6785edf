"""The experts of a mixture at a decode step: each row's chosen ones, weighted and summed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.typing import DTypeLike

from pallas_kernels import hopper
from pallas_kernels.implementations import IMPLEMENTATIONS, runs_kernel
from pallas_kernels.moe import reference
from pallas_kernels.moe.inputs import GATES, Inputs
from pallas_kernels.moe.mxfp4 import Mxfp4Weight
from pallas_kernels.moe.stored import Codes, Operand, Stored, multiply, operand_of
from pallas_kernels.types import Shaped

__all__ = [
    "GATES",
    "IMPLEMENTATIONS",
    "MAX_ROWS",
    "Codes",
    "Inputs",
    "Mxfp4Weight",
    "Operand",
    "Stored",
    "dequantise",
    "experts",
    "multiply",
    "operand_of",
    "unsupported",
]

MAX_ROWS = 256  # that the kernel takes


def experts(inputs: Inputs, *, implementation: str = "reference") -> jax.Array:
    """Return the sum over k of weights[row, k] * expert ids[row, k] of x[row], [rows, D].

    An expert is down(act(gate_up(x))). Products accumulate in float32; they, with their bias, and
    the activation are cast to x's dtype, which the result has too. Matrices in fp8 multiply x, and
    the activation's result, in fp8 (pallas_kernels.fp8_matmul.rows). Raises ValueError for shapes
    that do not fit together and for inputs that the implementation does not support.
    """
    inputs.check()

    def reason() -> str | None:
        rows, dtype = inputs.x.shape[0], inputs.x.dtype
        return hopper.missing() or unsupported(
            rows, inputs.top_k, inputs.gate_up, inputs.down, dtype
        )

    if not runs_kernel("moe", implementation, reason):
        return reference.experts(inputs)
    from pallas_kernels.moe import mosaic_gpu

    return mosaic_gpu.experts(inputs)


def dequantise(
    weight: Mxfp4Weight, expert: jax.Array, dtype: DTypeLike, *, implementation: str = "reference"
) -> jax.Array:
    """Return the matrix [in, out] of an expert, int32 scalar, in dtype.

    The kernel makes bfloat16. vmap gives it several experts at once.
    """

    def reason() -> str | None:
        if old := hopper.missing() or hopper.too_old():
            return old
        if dtype != jnp.bfloat16:
            return f"expected bfloat16, got {jnp.dtype(dtype)}"
        _, depth, width = weight.shape
        if depth % 64 or width % 64:
            return f"expected matrices of multiples of 64, got {depth} x {width}"
        return None

    if not runs_kernel("moe", implementation, reason):
        return Mxfp4Weight(weight.units[expert], weight.wide).to_array(dtype)
    from pallas_kernels.moe.mosaic_gpu import dequantise as kernel

    @custom_vmap
    def one(weight: Mxfp4Weight, expert: jax.Array) -> jax.Array:
        return kernel.dequantise(weight, expert[None])[0]

    @one.def_vmap
    def several(
        _: int, batched: list[Any], weight: Mxfp4Weight, experts: jax.Array
    ) -> tuple[jax.Array, bool]:
        assert not batched[0].units  # each of the batch reads the same experts
        return kernel.dequantise(weight, experts), True

    return one(weight, expert)


def unsupported(
    rows: int,
    top_k: int,
    gate_up: Shaped | Mxfp4Weight | Codes,
    down: Shaped | Mxfp4Weight | Codes,
    dtype: DTypeLike,
) -> str | None:
    """Return why the Mosaic kernel cannot run, None if it can. rows, dtype: of x."""
    if old := hopper.too_old():
        return old
    from pallas_kernels.moe import mosaic_gpu

    return mosaic_gpu.unsupported(rows, top_k, gate_up, down, dtype)
