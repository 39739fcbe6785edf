"""Inputs of gumbel_sample."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pallas_kernels.types import STATIC
from pallas_kernels.vocab_shards import WHOLE, VocabShards


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Rows of logits, and what their noise is a function of.

    logits:      float32 [rows, vocab], the own piece of each row; NaN counts as -inf, so that a
                 token is always in range
    temperature: float32 [rows]; 0 for a greedy row
    keys:        uint32 [rows, 2]; stream, position and offset are folded in one after another, as
                 jax.random.fold_in does
    position:    int32 [rows]
    offset:      int32 []
    token_ids:   int32, of the whole vocabulary: the id by which each column's noise is drawn;
                 None: the column
    stream:      number of the random stream (pallas_kernels.noise.Stream)
    shards:      how the rows are cut over devices
    """

    logits: jax.Array
    temperature: jax.Array
    keys: jax.Array
    position: jax.Array
    offset: jax.Array
    token_ids: jax.Array | None = None
    stream: int = field(metadata=STATIC)
    shards: VocabShards = WHOLE

    @property
    def rows(self) -> int:
        return self.logits.shape[0]

    @property
    def vocab(self) -> int:
        return self.logits.shape[-1]

    def check(self) -> None:
        """Raise ValueError for shapes and dtypes that do not fit together."""
        if len(self.logits.shape) != 2:
            raise ValueError(f"logits: expected [rows, vocab], got {list(self.logits.shape)}")
        rows, vocab = self.rows, self.vocab
        for name, dtype, shape in (
            ("logits", jnp.float32, self.logits.shape),
            ("temperature", jnp.float32, (rows,)),
            ("keys", jnp.uint32, (rows, 2)),
            ("position", jnp.int32, (rows,)),
            ("offset", jnp.int32, ()),
            ("token_ids", jnp.int32, (self.shards.total(vocab),)),
        ):
            array = getattr(self, name)
            if array is not None and (array.dtype != dtype or array.shape != shape):
                expected = f"{jnp.dtype(dtype).name} {list(shape)}"
                got = f"{array.dtype} {list(array.shape)}"
                raise ValueError(f"{name}: expected {expected}, got {got}")
