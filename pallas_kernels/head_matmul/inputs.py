"""Inputs of head_matmul."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pallas_kernels.types import STATIC


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Rows of heads, a matrix for each head, and the rotation of the numbers past its depth.

    x:         [rows, num_heads or more, depth], or [..., depth + rope_head_dim] with cos and sin
    weights:   [num_heads, depth, width]
    cos, sin:  float32 [rows, rope_head_dim / 2], or both None; halves are paired (Hugging Face's
               rotate_half layout)
    out_heads: heads of the result, None for num_heads; any content in those past num_heads
    """

    x: jax.Array
    weights: jax.Array
    cos: jax.Array | None = None
    sin: jax.Array | None = None
    out_heads: int | None = field(default=None, metadata=STATIC)

    def check(self) -> None:
        """Raise ValueError for shapes that do not fit together."""
        x, weights = self.x.shape, self.weights.shape
        if len(x) != 3 or len(weights) != 3 or x[1] < weights[0]:
            expected = "[rows, heads, depth] and [heads, depth, width]"
            raise ValueError(f"x and weights: expected {expected}, got {x} and {weights}")
        heads, depth, _ = weights
        rope = x[2] - depth
        if (self.cos is None) != (self.sin is None) or (rope == 0) != (self.cos is None):
            raise ValueError(
                f"cos and sin: expected both for {rope} numbers a head beyond the depth {depth}, "
                "or neither for none"
            )
        table = (x[0], rope // 2)
        for name, array in (("cos", self.cos), ("sin", self.sin)):
            if array is not None and (array.shape != table or array.dtype != jnp.float32):
                got = f"{array.dtype} {array.shape}"
                raise ValueError(f"{name}: expected float32 {table}, got {got}")
        if self.out_heads is not None and self.out_heads < heads:
            raise ValueError(f"out_heads: expected at least {heads}, got {self.out_heads}")
