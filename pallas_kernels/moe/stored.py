"""Experts' matrices as they are stored, and their products in plain jnp.

Matrices in fp8 multiply rows that are quantised too (pallas_kernels.fp8_matmul); the others
multiply rows as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.fp8_matmul.rows import Rows, quantise
from pallas_kernels.fp8_matmul.weight import Fp8Weight
from pallas_kernels.int4_matmul.weight import Int4Weight
from pallas_kernels.moe.mxfp4 import Mxfp4Weight

Codes = Fp8Weight | Int4Weight  # matrices with scales that have to be multiplied
Stored = jax.Array | Mxfp4Weight | Codes
Contract = Callable[[jax.Array, jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Operand:
    """Rows as a matrix multiplies them.

    values: [..., rows, depth], the rows or their fp8 codes
    scales: float32 [..., rows, 1 or depth / 128], None for plain rows
    """

    values: jax.Array
    scales: jax.Array | None = None

    def to_array(self, dtype: DTypeLike) -> jax.Array:
        """Return the rows, rounded to dtype."""
        if self.scales is None:
            return self.values.astype(dtype)
        *outer, depth = self.values.shape
        flat = self.scales.reshape(-1, self.scales.shape[-1])
        scales = flat[:, 0] if flat.shape[1] == 1 else flat.T
        rows = Rows(self.values.reshape(-1, depth), scales)
        values = rows.codes.astype(jnp.float32) * rows.spread()
        return values.reshape(*outer, depth).astype(dtype)


def check_codes(name: str, weight: Stored) -> None:
    """Raise ValueError for codes whose scales, zeros or activations do not fit them."""
    if isinstance(weight, Fp8Weight) and weight.activation not in ("token", "block"):
        raise ValueError(f"{name}: expected token or block activations, got {weight.activation}")
    if isinstance(weight, Codes):
        weight.check_scales(f"{name} ")


def operand_of(x: jax.Array, weight: Stored) -> Operand:
    """Return x [..., rows, depth] as a matrix multiplies it, quantised for fp8."""
    if not isinstance(weight, Fp8Weight):
        return Operand(x)
    *outer, depth = x.shape
    rows = quantise(x.reshape(-1, depth), weight.activation)
    scales = rows.scales.T if rows.scales.ndim == 2 else rows.scales[:, None]
    return Operand(rows.codes.reshape(x.shape), scales.reshape(*outer, scales.shape[1]))


def multiply(contract: Contract, x: Operand, weight: Codes, dtype: DTypeLike) -> jax.Array:
    """Return float32 [..., rows, out] of rows times matrices.

    contract: multiplies arrays [..., rows, in] by [..., in, out] into float32
    weight:   [..., in, out]
    dtype:    of the activations

    A CPU keeps every bit of the operands. Elsewhere values that take scales along the depth are
    rounded to dtype.
    """
    return lax.platform_dependent(
        x,
        weight,
        cpu=partial(_multiply, contract, jnp.dtype(jnp.float32)),
        default=partial(_multiply, contract, jnp.dtype(dtype)),
    )


def _multiply(contract: Contract, dtype: jnp.dtype, x: Operand, weight: Codes) -> jax.Array:
    if isinstance(weight, Fp8Weight) and not weight.has_blocks:
        assert x.scales is not None
        codes = jnp.swapaxes(weight.codes, -1, -2).astype(dtype)
        return contract(x.values.astype(dtype), codes) * x.scales * weight.scales[..., None, :]
    return contract(x.to_array(dtype), weight.to_array(dtype))
