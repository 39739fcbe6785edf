"""Rows of activations in fp8: the definition, in plain jnp."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.dtypes import rounded_division
from pallas_kernels.fp8_matmul.weight import BLOCK, DTYPE, LARGEST, Activation, spread
from pallas_kernels.types import STATIC

MOST_IN_PARTS = 256  # rows with a scale for each block that are multiplied MAX_ROWS at a time


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowNorm:
    """The RMS norm of rows before they are quantised; see pallas_kernels.rms_norm.

    gain: [depth]
    """

    gain: jax.Array
    eps: float = field(metadata=STATIC)


class BeforeNorm(NamedTuple):
    """The result of a product, and what the product after its norm needs.

    out:     [rows, width], the result
    scaled:  [rows, width], out times the norm's gain
    squares: float32 [pieces, rows or more], sums over pieces of a row of out's squares
    largest: float32 [pieces, rows or more], largest magnitudes of scaled; None if the next product
             does not quantise its rows itself
    """

    out: jax.Array
    scaled: jax.Array
    squares: jax.Array
    largest: jax.Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Quantised rows.

    codes:  float8_e4m3fn [rows, depth]
    scales: float32 [rows or more] ("token"), [depth / 128 rounded up, rows or more] ("block"),
            [] ("static")
    """

    codes: jax.Array
    scales: jax.Array

    def to_array(self, dtype: DTypeLike) -> jax.Array:
        """Return the rows' values [rows, depth], rounded to dtype."""
        return (self.codes.astype(jnp.float32) * self.spread()).astype(dtype)

    def take_rows(self, start: int, stop: int) -> Rows:
        """Return some of the rows."""
        scales = self.scales[..., start:stop] if self.scales.ndim else self.scales
        return Rows(self.codes[start:stop], scales)

    def with_scales_of(self, rows: int) -> Rows:
        """Return the rows with scales for at least so many, where each row has its own.

        XLA quantises as many rows as there are, and kernels read whole tiles of scales.
        """
        missing = rows - self.scales.shape[-1] if self.scales.ndim else 0
        if missing <= 0:
            return self
        padding = ((0, 0),) * (self.scales.ndim - 1) + ((0, missing),)
        return replace(self, scales=jnp.pad(self.scales, padding))

    def spread(self) -> jax.Array:
        """Return the scales in a shape that broadcasts over the codes."""
        rows, depth = self.codes.shape
        if self.scales.ndim == 2:
            return spread(self.scales[:, :rows].T, 1, depth)
        return self.scales[:rows, None] if self.scales.ndim else self.scales


def quantise(x: jax.Array, activation: Activation, scale: jax.Array | None = None) -> Rows:
    """Return x [rows, depth] in fp8; scale: of "static" activations.

    A dynamic scale is the largest magnitude over 448. Values are divided by it in float32, clipped
    to 448, and rounded to the nearest code, ties to even. A row of zeros has the scale 1.
    """
    values = x.astype(jnp.float32)
    if activation == "static":
        assert scale is not None
        rows = Rows(values, scale.astype(jnp.float32))
    elif activation == "token":
        rows = Rows(values, _scale(values))
    else:
        depth = x.shape[1]
        blocks = jnp.pad(values, ((0, 0), (0, -depth % BLOCK))).reshape(x.shape[0], -1, BLOCK)
        rows = Rows(values, _scale(blocks).T)
    codes = jnp.clip(rounded_division(values, rows.spread()), -LARGEST, LARGEST).astype(DTYPE)
    # XLA would drop the rounding where a product widens the codes at once.
    return replace(rows, codes=lax.optimization_barrier(codes))


def _scale(values: jax.Array) -> jax.Array:
    """Return the scale of values that share one along the last axis."""
    largest = jnp.max(jnp.abs(values), axis=-1)
    return jnp.where(largest == 0, 1.0, rounded_division(largest, jnp.float32(LARGEST)))
