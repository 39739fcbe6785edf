"""Inputs of step_metadata."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pallas_kernels.types import STATIC


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Block tables and first positions of some requests, and the sizes of their pass.

    block_table:      int32 [batch, pages], the blocks that hold a request's tokens in order
    start:            int32 [batch], position of a request's first row, less step
    num_rows:         int32 [batch], its number of real rows at least; 0 for an idle request
    step:             int32 [], added to every start
    rows:             query rows of each request
    block_size:       tokens of a block
    max_model_len:    no row at this position or past it is written; the end of the block table is
                      a limit too
    window:           keys that a row sees, its own among them; None for all
    one_window:       every row's window begins where the first row's does
    causal:           a row sees no later row; else every row sees all real rows
    queries_per_kv:   query heads for each KV head, for `bounds`; None leaves them out
    frequencies:      the rotation's inverse frequencies, rope_dim / 2 of them, in float32's
                      precision; None leaves cos and sin out
    attention_factor: factor on cos and sin
    """

    block_table: jax.Array
    start: jax.Array
    num_rows: jax.Array
    step: jax.Array | int = 0
    rows: int = field(metadata=STATIC)
    block_size: int = field(metadata=STATIC)
    max_model_len: int = field(metadata=STATIC)
    window: int | None = field(default=None, metadata=STATIC)
    one_window: bool = field(default=False, metadata=STATIC)
    causal: bool = field(default=True, metadata=STATIC)
    queries_per_kv: int | None = field(default=None, metadata=STATIC)
    frequencies: tuple[float, ...] | None = field(default=None, metadata=STATIC)
    attention_factor: float = field(default=1.0, metadata=STATIC)

    @property
    def limit(self) -> int:
        """The first position that is not written."""
        return min(self.max_model_len, self.block_table.shape[1] * self.block_size)

    def check(self) -> None:
        """Raise ValueError for shapes and dtypes that do not fit together."""
        batch, step = self.start.shape[0], self.step
        for name, array, shape in (
            ("block_table", self.block_table, (batch, self.block_table.shape[-1])),
            ("start", self.start, (batch,)),
            ("num_rows", self.num_rows, (batch,)),
            ("step", jnp.asarray(step, jnp.int32) if isinstance(step, int) else step, ()),
        ):
            if array.shape != shape or array.dtype != jnp.int32:
                raise ValueError(f"{name}: expected int32 {shape}, got {array.dtype} {array.shape}")
