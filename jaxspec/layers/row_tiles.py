"""Tiles of few rows, whose bits do not depend on the number of rows (Ops.rows_alike)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

ROW_TILE = 8  # the kernels for few rows take up to 8, or a multiple of 8

Arrays = TypeVar("Arrays")


def in_tiles(run: Callable[..., Arrays], *arrays: jax.Array, axis: int = 0) -> Arrays:
    """Return run(*arrays), made in tiles of ROW_TILE rows, so that all products have as many.

    run:    arrays with ROW_TILE rows along the axis -> a pytree of such arrays
    arrays: with equally many rows along the axis. Rows of padding repeat the last one
    """
    rows = arrays[0].shape[axis]

    def tiled(x: jax.Array) -> jax.Array:
        padding = [(0, 0)] * x.ndim
        padding[axis] = (0, -rows % ROW_TILE)
        x = jnp.pad(x, padding, mode="edge")
        tiles = x.reshape(*x.shape[:axis], -1, ROW_TILE, *x.shape[axis + 1 :])
        return jnp.moveaxis(tiles, axis, 0)

    def whole(tiles: jax.Array) -> jax.Array:
        x = jnp.moveaxis(tiles, 0, axis)
        x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
        return lax.slice_in_dim(x, 0, rows, axis=axis)

    return jax.tree.map(whole, lax.map(lambda tile: run(*tile), tuple(map(tiled, arrays))))
