"""Packed arrays: many small arrays of the host that reach a program in one copy.

A jitted program copies each NumPy array among its arguments to the device by itself, and a copy of
a few bytes takes the host nearly 0.1 ms. So `pack` puts the bits of small arrays into one array of
words, and the program, which is compiled for their shapes and dtypes, takes them apart again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

# Bytes of an array that is packed. A larger one, such as a bias for each token, is copied by
# itself: packing it would copy it twice, and it would lose its own axes on several devices.
MOST_BYTES = 1 << 16
WORD = 4  # bytes


@dataclass(frozen=True)
class Form:
    """The arrays that are packed together. Programs are compiled for it, so it is hashable.

    tree: their structure, as jax.tree.structure returns it
    arrays: the shape and the dtype of each
    zeros: the indices of those that are zeros, made by the program
    """

    tree: Any
    arrays: tuple[tuple[tuple[int, ...], np.dtype], ...]
    zeros: frozenset[int]


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
        for index, (shape, dtype) in enumerate(self.form.arrays):
            if index in self.form.zeros:
                arrays.append(jnp.zeros(shape, dtype))
                continue
            num_bytes = int(np.prod(shape)) * dtype.itemsize
            if num_bytes > MOST_BYTES:
                arrays.append(next(large))
                continue
            end = at + -(-num_bytes // WORD)
            arrays.append(_from_words(lax.slice_in_dim(self.words, at, end), shape, dtype))
            at = end
        return jax.tree.unflatten(self.form.tree, arrays)


def pack(tree: Any) -> Packed:
    """Return a pytree of NumPy arrays as one argument of a jitted program, which unpacks it.

    A jax.ShapeDtypeStruct stands for zeros, which need no copy. Items have 1, 2 or 4 bytes;
    TypeError for others, which JAX would convert.
    """
    leaves, structure = jax.tree.flatten(tree)
    zeros = frozenset(i for i, x in enumerate(leaves) if isinstance(x, jax.ShapeDtypeStruct))
    leaves: list[Any] = [x if i in zeros else np.asarray(x) for i, x in enumerate(leaves)]
    for x in leaves:
        if x.dtype.itemsize > WORD:
            raise TypeError(f"pack: expected items of 1, 2 or 4 bytes, got {x.dtype}")
    arrays = [x for i, x in enumerate(leaves) if i not in zeros]
    words = [_words(x) for x in arrays if x.nbytes <= MOST_BYTES]
    return Packed(
        np.concatenate(words) if words else np.zeros(0, np.uint32),  # type: ignore[arg-type]
        tuple(x for x in arrays if x.nbytes > MOST_BYTES),
        Form(structure, tuple((x.shape, x.dtype) for x in leaves), zeros),
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
        words = lax.bitcast_convert_type(words, bits).reshape(-1)[: int(np.prod(shape))]
    if dtype == np.bool_:
        return (words != 0).reshape(shape)
    return lax.bitcast_convert_type(words, dtype).reshape(shape)
