"""Inputs of a Markov head's step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import noise
from pallas_kernels.matmul.plan import MAX_ROWS


class Step(NamedTuple):
    """A step's results.

    base:  float32 [rows, steps, vocab], with the step's logits at base[:, step]
    token: int32 [rows]
    """

    base: jax.Array
    token: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Draw:
    """What the tokens of all steps of a block are drawn with.

    Idle rows fill both arrays up to a multiple of 64: the kernel loads whole tiles of rows.

    temperature: float32 [rows and idle rows]; 0 for a greedy row
    keys:        uint32 [2, rows and idle rows], of the noise; step i folds in i
    """

    temperature: jax.Array
    keys: jax.Array

    @classmethod
    def of(cls, temperature: jax.Array, keys: jax.Array, position: jax.Array, stream: int) -> Draw:
        """Return the draw whose step i has gumbel_sample's noise at offset i.

        The arguments are those of gumbel_sample's Inputs.
        """
        key = (keys[:, 0], keys[:, 1])
        key = noise.fold_in(noise.fold_in(key, jnp.int32(stream)), position)
        idle = (0, -len(position) % MAX_ROWS)
        return cls(
            temperature=jnp.pad(temperature, idle), keys=jnp.pad(jnp.stack(key), ((0, 0), idle))
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The logits of a block's drafts, and what the Markov head adds to those of one step.

    base:   float32 [rows, steps, vocab]
    step:   int32 [], the draft's place in the block, an index of base's steps
    token:  int32 [rows], the token before; an id outside W1 reads the nearest row
    table:  [tokens, rank], W1
    weight: [rank, vocab], W2
    draw:   what markov_draw draws with; markov_argmax does not read it
    """

    base: jax.Array
    step: jax.Array
    token: jax.Array
    table: jax.Array
    weight: jax.Array
    draw: Draw | None = None

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
        rows, steps = self.rows, self.base.shape[1]
        checked: list[tuple[str, jax.Array, DTypeLike, tuple[int, ...]]] = [
            ("base", self.base, jnp.float32, (rows, steps, self.weight.shape[1])),
            ("step", self.step, jnp.int32, ()),
            ("token", self.token, jnp.int32, (rows,)),
            ("table", self.table, self.weight.dtype, (self.table.shape[0], self.rank)),
        ]
        if draw := self.draw:
            filled = rows + -rows % MAX_ROWS
            checked += [
                ("temperature", draw.temperature, jnp.float32, (filled,)),
                ("keys", draw.keys, jnp.uint32, (2, filled)),
            ]
        for name, array, dtype, shape in checked:
            if array.dtype != dtype or array.shape != shape:
                wanted, got = f"{jnp.dtype(dtype).name} {list(shape)}", list(array.shape)
                raise ValueError(f"{name}: expected {wanted}, got {array.dtype} {got}")
