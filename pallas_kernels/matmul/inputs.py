"""Inputs of matmul."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.types import STATIC


class Matrix(Protocol):
    """An array, or a quantised weight of the shape [depth, width]."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> jnp.dtype: ...


W = TypeVar("W", bound=Matrix)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Inputs(Generic[W]):
    """Rows, the weights that multiply them, and what is fused with the product.

    x:          [rows, depth]
    weights:    one or more [depth, width]; [width, depth] if transposed
    squares:    float32 [pieces, rows or more], sums over pieces of the squares of the rows that x
                is, before their gain; the product is divided by sqrt(their sum / depth + eps), in
                float32
    bias:       [width], added to the product in float32; not with swiglu
    residual:   [rows, width], added to the cast product
    gain:       [width], the gain of the RMS norm that follows
    eps:        of the norm of `squares`
    swiglu:     weights are (gate, up) and the result is silu(x @ gate) * (x @ up); each of the
                three is cast in turn
    transposed: weights are [width, depth] (a tied embedding as the head)
    in_order:   sum the depth in order above 64 rows: a row's bits do not depend on their number.
                A kernel does so. The order of fp8 by channels, and that of the reference, are
                XLA's
    out_dtype:  of the result

    With squares and gain, an RMS norm between two products costs no pass of its own over the rows,
    which are rounded once, after the gain.
    """

    x: jax.Array
    weights: tuple[W, ...]
    squares: jax.Array | None = None
    bias: jax.Array | None = None
    residual: jax.Array | None = None
    gain: jax.Array | None = None
    eps: float = field(default=0.0, metadata=STATIC)
    swiglu: bool = field(default=False, metadata=STATIC)
    transposed: bool = field(default=False, metadata=STATIC)
    in_order: bool = field(default=False, metadata=STATIC)
    out_dtype: DTypeLike = field(default=jnp.bfloat16, metadata=STATIC)

    def take_rows(self, start: int, stop: int) -> Inputs[W]:
        """Return the inputs of some of the rows."""
        residual = None if self.residual is None else self.residual[start:stop]
        squares = None if self.squares is None else self.squares[:, start:stop]
        return replace(self, x=self.x[start:stop], squares=squares, residual=residual)

    def by_weight(self) -> list[Inputs[W]]:
        """Return the inputs of each weight's product; their results stand side by side.

        A gain, whose norm is one of all results, and swiglu leave no such products.
        """
        assert not self.swiglu and self.gain is None
        found, start = [], 0
        for weight in self.weights:
            stop = start + weight.shape[0 if self.transposed else 1]
            bias = None if self.bias is None else self.bias[start:stop]
            residual = None if self.residual is None else self.residual[:, start:stop]
            found.append(replace(self, weights=(weight,), bias=bias, residual=residual))
            start = stop
        return found

    def check(self) -> None:
        """Raise ValueError for shapes that do not fit together."""
        x, shapes = self.x.shape, [w.shape for w in self.weights]
        depth_axis = 1 if self.transposed else 0
        fits = shapes and all(len(w) == 2 and w[depth_axis] == x[-1] for w in shapes)
        if len(x) != 2 or not fits:
            raise ValueError(f"weights: expected matrices of depth {x[-1]}, got {shapes} for x {x}")
        widths = [w[1 - depth_axis] for w in shapes]
        if self.swiglu and (len(widths) != 2 or widths[0] != widths[1]):
            expected = "gate and up of one width with swiglu"
            raise ValueError(f"weights: expected {expected}, got widths {widths}")
        rows, width = x[0], widths[0] if self.swiglu else sum(widths)
        residual, squares, gain = self.residual, self.squares, self.gain
        if residual is not None and residual.shape != (rows, width):
            raise ValueError(f"residual: expected {(rows, width)}, got {residual.shape}")
        if self.bias is not None and (self.swiglu or self.bias.shape != (width,)):
            got = f"{self.bias.shape}, swiglu {self.swiglu}"
            raise ValueError(f"bias: expected {(width,)} without swiglu, got {got}")
        if squares is not None and (squares.ndim != 2 or squares.shape[1] < rows):
            expected = f"[pieces, {rows} rows or more]"
            raise ValueError(f"squares: expected {expected}, got {squares.shape}")
        if gain is not None and gain.shape != (width,):
            raise ValueError(f"gain: expected {(width,)}, got {gain.shape}")
