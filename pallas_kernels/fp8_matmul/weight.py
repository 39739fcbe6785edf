"""Matrices in fp8 (e4m3), and how the rows that they multiply are quantised.

Three forms are in use. They differ in the scales of the weight and in those of the activations:

| `activation` | scales of the weight | scales of the activations | written by |
|---|---|---|---|
| "token" | of each output column | of each row, from its largest value | llm-compressor |
| "block" | of blocks of 128 x 128 | of each 128 depths of a row | DeepSeek, Qwen |
| "static" | one for the matrix | one, stored in the checkpoint | ModelOpt |

A scale for all rows of a batch, found from their values, would make a row depend on the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.types import STATIC

Activation = Literal["token", "block", "static"]
ACTIVATIONS = ("token", "block", "static")
BLOCK = 128  # depths, and columns of a weight, that share a scale
DTYPE = jnp.float8_e4m3fn
LARGEST = 448.0  # of e4m3


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fp8Weight:
    """A matrix in fp8. In a parameter table, its arrays are ParamSpecs.

    codes:            float8_e4m3fn [..., out, in]
    scales:           float32 [..., out], [..., out / 128, in / 128] rounded up, or [] for all
    activation_scale: float32 [], with "static" activations alone; one for all weights of a product
    activation:       static; see ACTIVATIONS
    """

    codes: jax.Array
    scales: jax.Array
    activation_scale: jax.Array | None = None
    activation: Activation = field(default="token", metadata=STATIC)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, [..., in, out]."""
        *outer, width, depth = self.codes.shape
        return (*outer, depth, width)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the codes."""
        return jnp.dtype(DTYPE)

    @property
    def depth(self) -> int:
        """Size of `in`."""
        return self.codes.shape[-1]

    @property
    def has_blocks(self) -> bool:
        """Whether each block of 128 x 128 has a scale of its own."""
        return self.scales.ndim == self.codes.ndim

    def check_scales(self, prefix: str = "") -> None:
        """Raise ValueError for scales that do not fit the codes. prefix: of the message."""
        *outer, depth, width = self.shape
        shapes: list[tuple[int, ...]] = [] if outer else [()]
        shapes += [(*outer, width), (*outer, -(-width // BLOCK), -(-depth // BLOCK))]
        if self.scales.shape not in shapes:
            expected = " or ".join(map(str, shapes))
            raise ValueError(f"{prefix}scales: expected {expected}, got {self.scales.shape}")

    def to_array(self, dtype: DTypeLike) -> jax.Array:
        """Return the matrix [..., in, out], rounded to dtype."""
        return jnp.swapaxes(self.codes.astype(jnp.float32) * self.spread(), -1, -2).astype(dtype)

    def spread(self) -> jax.Array:
        """Return the scales in a shape that broadcasts over the codes."""
        if self.has_blocks:
            *_, width, depth = self.codes.shape
            return spread(spread(self.scales, -1, depth), -2, width)
        return self.scales if self.scales.ndim == 0 else self.scales[..., None]


def spread(scales: jax.Array, axis: int, size: int) -> jax.Array:
    """Return scales with each repeated over its block along an axis that then has this size."""
    repeated = jnp.repeat(scales, BLOCK, axis=axis)
    return jax.lax.slice_in_dim(repeated, 0, size, axis=axis)
