"""Inputs of a Markov head's step."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The logits of a block's drafts, and what the Markov head adds to those of one step.

    base:   float32 [rows, steps, vocab]
    step:   int32 [], the draft's place in the block, an index of base's steps
    token:  int32 [rows], the token before; an id outside W1 reads the nearest row
    table:  [tokens, rank], W1
    weight: [rank, vocab], W2
    """

    base: jax.Array
    step: jax.Array
    token: jax.Array
    table: jax.Array
    weight: jax.Array

    @property
    def rows(self) -> int:
        return self.token.shape[0]

    @property
    def rank(self) -> int:
        return self.weight.shape[0]

    def check(self) -> None:
        """Raise ValueError for shapes and dtypes that do not fit together."""
        arrays = self.base, self.token, self.table, self.weight
        if [len(x.shape) for x in arrays] != [3, 1, 2, 2]:
            got = ", ".join(str(x.shape) for x in arrays)
            expected = "[rows, steps, vocab], [rows], [tokens, rank] and [rank, vocab]"
            raise ValueError(f"base, token, table and weight: expected {expected}, got {got}")
        steps = self.base.shape[1]
        for name, dtype, shape in (
            ("base", jnp.float32, (self.rows, steps, self.weight.shape[1])),
            ("step", jnp.int32, ()),
            ("token", jnp.int32, (self.rows,)),
            ("table", self.weight.dtype, (self.table.shape[0], self.rank)),
        ):
            array = getattr(self, name)
            if array.dtype != dtype or array.shape != shape:
                expected = f"{jnp.dtype(dtype).name} {list(shape)}"
                raise ValueError(
                    f"{name}: expected {expected}, got {array.dtype} {list(array.shape)}"
                )
