"""Packed arrays: many small arrays of the host that reach a program in one copy.

A jitted program copies each NumPy array among its arguments to the device by itself, and a copy of
a few bytes takes the host nearly 0.1 ms. So `pack` puts the bits of small arrays into one array of
words, and the program, which is compiled for their shapes and dtypes, takes them apart again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

# Bytes of an array that is packed. A larger one, such as a bias for each token, is copied by
# itself: packing it would copy it twice, and devices could not share it by its axes.
MOST_BYTES = 1 << 16
WORD = 4  # bytes
Place = Literal["words", "large", "zeros"]


@dataclass(frozen=True)
class Form:
    """The arrays that are packed together. Programs are compiled for it, so it is hashable.

    tree: their structure, as jax.tree.structure returns it
    arrays: the shape and the dtype of each, and where it is: in the words, an argument of its own
        (large), or made by the program (zeros)
    """

    tree: Any
    arrays: tuple[tuple[tuple[int, ...], np.dtype, Place], ...]


@struct.dataclass
class Packed:
    """A pytree of arrays as an argument of a jitted program.

    words: uint32 [n], the bits of the small arrays, each from a word of its own on
    large: the arrays of more than MOST_BYTES
    form:  what they are
    """

    words: jax.Array
    large: tuple[jax.Array, ...]
    form: Form = struct.field(pytree_node=False)

    def unpack(self) -> Any:
        """Return the pytree that was packed, with the same bits."""
        arrays, large, at = [], iter(self.large), 0
        for shape, dtype, place in self.form.arrays:
            if place == "zeros":
                arrays.append(jnp.zeros(shape, dtype))
            elif place == "large":
                arrays.append(next(large))
            else:
                end = at + -(-math.prod(shape) * dtype.itemsize // WORD)
                arrays.append(_from_words(lax.slice_in_dim(self.words, at, end), shape, dtype))
                at = end
        return jax.tree.unflatten(self.form.tree, arrays)


def pack(tree: Any) -> Packed:
    """Return a pytree of NumPy arrays as one argument of a jitted program, which unpacks it.

    A jax.ShapeDtypeStruct stands for zeros, which need no copy. Items have 1, 2 or 4 bytes;
    TypeError for others, which JAX would convert.
    """
    leaves, structure = jax.tree.flatten(tree)
    arrays, words, large = [], [], []
    for leaf in leaves:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            arrays.append((leaf.shape, leaf.dtype, "zeros"))
            continue
        x = np.asarray(leaf)
        if x.dtype.itemsize > WORD:
            raise TypeError(f"pack: expected items of 1, 2 or 4 bytes, got {x.dtype}")
        is_large = x.nbytes > MOST_BYTES
        (large if is_large else words).append(x if is_large else _words(x))
        arrays.append((x.shape, x.dtype, "large" if is_large else "words"))
    return Packed(
        np.concatenate(words) if words else np.zeros(0, np.uint32),  # type: ignore[arg-type]
        tuple(large),
        Form(structure, tuple(arrays)),
    )


def _words(x: np.ndarray) -> np.ndarray:
    """The bits of an array, uint32 [n]; zeros fill the last word."""
    flat = np.ascontiguousarray(x).reshape(-1)
    if flat.itemsize == WORD:
        return flat.view(np.uint32)
    words = np.zeros(-(-flat.nbytes // WORD), np.uint32)
    words.view(np.uint8)[: flat.nbytes] = flat.view(np.uint8)
    return words


def _from_words(words: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """The array whose bits these words hold."""
    if dtype.itemsize < WORD:
        bits = jnp.uint8 if dtype.itemsize == 1 else jnp.uint16
        words = lax.bitcast_convert_type(words, bits).reshape(-1)[: math.prod(shape)]
    if dtype == np.bool_:
        return (words != 0).reshape(shape)
    return lax.bitcast_convert_type(words, dtype).reshape(shape)
