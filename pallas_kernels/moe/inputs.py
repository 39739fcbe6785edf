"""Inputs of experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from pallas_kernels.moe.stored import Stored, check_codes
from pallas_kernels.types import STATIC

Gate = Literal["silu", "clamped", "clamped_silu"]
GATES = get_args(Gate)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Rows, the experts that they choose, and the experts' weights.

    x:            [rows, D]
    ids:          int32 [rows, top_k or more]; a row names no expert twice, and columns past top_k
                  are not read
    weights:      float32 [rows, top_k]
    gate_up:      [experts, D, 2 * intermediate], gate first
    down:         [experts, intermediate, D]
    gate_up_bias: [experts, 2 * intermediate], or None
    down_bias:    [experts, D], or None
    first_expert: int32 scalar, the id of gate_up's first expert: the result is the sum over the
                  experts first_expert .. first_expert + experts - 1 alone, and no other weights are
                  read. None: the ids are indices of gate_up
    gate:         "silu": SwiGLU. "clamped" (gpt-oss): gate at most `limit`, up within it, then
                  (up + 1) * gate * sigmoid(alpha * gate). "clamped_silu": SwiGLU of halves that
                  are clamped in the same way
    alpha, limit: of the clamped gates
    """

    x: jax.Array
    ids: jax.Array
    weights: jax.Array
    gate_up: Stored
    down: Stored
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None
    first_expert: jax.Array | None = None
    gate: Gate = field(default="silu", metadata=STATIC)
    alpha: float = field(default=1.702, metadata=STATIC)
    limit: float = field(default=7.0, metadata=STATIC)

    @property
    def top_k(self) -> int:
        return self.weights.shape[1]

    def check(self) -> None:
        """Raise ValueError for shapes that do not fit together."""
        count, depth, size = self.gate_up.shape[0], self.x.shape[-1], self.down.shape[1]
        rows = self.weights.shape[0]
        for name, expected in (
            ("gate_up", (count, depth, 2 * size)),
            ("down", (count, size, depth)),
            ("x", (rows, depth)),
            ("gate_up_bias", (count, 2 * size)),
            ("down_bias", (count, depth)),
        ):
            array = getattr(self, name)
            if array is not None and array.shape != expected:
                raise ValueError(f"{name}: expected {expected}, got {array.shape}")
        check_codes("gate_up", self.gate_up)
        check_codes("down", self.down)
        first = self.first_expert
        if first is not None and (first.shape != () or first.dtype != jnp.int32):
            got = f"{first.dtype} {first.shape}"
            raise ValueError(f"first_expert: expected an int32 scalar, got {got}")
        if self.ids.shape[0] != rows or self.ids.shape[1] < self.top_k:
            expected = f"{self.weights.shape} or more columns"
            raise ValueError(f"ids: expected {expected}, got {self.ids.shape}")
        if self.gate not in GATES:
            raise ValueError(f"gate: expected one of {', '.join(GATES)}, got {self.gate!r}")
