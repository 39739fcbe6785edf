"""Real shapes of the fp8_matmul op, shared by tests and benchmarks."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fp8_matmul.weight import BLOCK, DTYPE, Activation, Fp8Weight
from pallas_kernels.matmul.inputs import Inputs

ROWS = (1, 4, 16, 64, 256)
FINITE = 0xB7  # bits of a code that leave no NaN


@dataclasses.dataclass(frozen=True)
class Shape:
    """A product of x [rows, depth] and weights [width, depth], one for each of `widths`.

    form: "channel", "block" or "static"; see pallas_kernels.fp8_matmul.weight.
    """

    rows: int
    depth: int
    widths: tuple[int, ...]
    form: str = "channel"
    residual: bool = False
    swiglu: bool = False
    out_dtype: str = "bfloat16"

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.widths[0] if self.swiglu else sum(self.widths)

    def scale_shape(self, width: int) -> tuple[int, ...]:
        """Shape of the scales of a weight of this width."""
        if self.form == "block":
            return -(-width // BLOCK), -(-self.depth // BLOCK)
        return (width,) if self.form == "channel" else ()

    @property
    def activation(self) -> Activation:
        """How rows are quantised."""
        kinds: dict[str, Activation] = {"channel": "token", "block": "block", "static": "static"}
        return kinds[self.form]


_PRODUCTS = {
    "llama-3-8b qkv": Shape(1, 4096, (6144,)),
    "llama-3-8b o": Shape(1, 4096, (4096,), residual=True),
    "llama-3-8b gate_up": Shape(1, 4096, (14336, 14336), swiglu=True),
    "llama-3-8b down": Shape(1, 14336, (4096,), residual=True),
    "llama-3-8b head": Shape(1, 4096, (128256,), out_dtype="float32"),
    "smollm2 qkv": Shape(1, 576, (960,)),
    "smollm2 gate_up": Shape(1, 576, (1536, 1536), swiglu=True),
    "smollm2 down": Shape(1, 1536, (576,), residual=True),
}
_Q_K_V = Shape(1, 576, (576, 192, 192), form="block")  # which blocks keep apart
_FORMS = ("channel", "block", "static")

SHAPES = {
    f"{name} {form} rows {rows}": dataclasses.replace(product, rows=rows, form=form)
    for name, product in _PRODUCTS.items()
    for form in _FORMS
    for rows in ROWS
} | {f"smollm2 q, k, v block rows {rows}": dataclasses.replace(_Q_K_V, rows=rows) for rows in ROWS}


def make_inputs(shape: Shape, seed: int) -> Inputs[Fp8Weight]:
    """Return random codes and scales, such that every product is of the residual's size."""
    keys = jax.random.split(jax.random.key(seed), 2 + len(shape.widths))

    def weight(key: jax.Array, width: int) -> Fp8Weight:
        bits = jax.random.bits(key, (width, shape.depth), jnp.uint8) & jnp.uint8(FINITE)
        scales = jax.random.uniform(key, shape.scale_shape(width), jnp.float32, 0.5, 2.0)
        return Fp8Weight(
            lax.bitcast_convert_type(bits, DTYPE),
            scales / (32 * math.sqrt(shape.depth)),  # of codes up to 240
            jnp.float32(0.01) if shape.form == "static" else None,
            shape.activation,
        )

    residual = None
    if shape.residual:
        residual = jax.random.normal(keys[1], (shape.rows, shape.width), jnp.bfloat16)
    return Inputs(
        x=jax.random.normal(keys[0], (shape.rows, shape.depth), jnp.bfloat16),
        weights=tuple(map(weight, keys[2:], shape.widths)),
        residual=residual,
        swiglu=shape.swiglu,
        out_dtype=jnp.dtype(shape.out_dtype),
    )


def bytes_moved(shape: Shape) -> int:
    """Return the fewest bytes of device memory.

    Every weight, the input and the residual are read once; the result is written once.
    """
    weights = sum(shape.depth * w + 4 * math.prod(shape.scale_shape(w)) for w in shape.widths)
    result = shape.rows * shape.width * jnp.dtype(shape.out_dtype).itemsize
    rows = 2 * shape.rows * (shape.depth + (shape.width if shape.residual else 0))
    return weights + rows + result


def flops(shape: Shape) -> int:
    """Return the arithmetic of the products."""
    return 2 * shape.rows * shape.depth * sum(shape.widths)
