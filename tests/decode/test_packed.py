"""Packed arrays: the bits of each array come through a jitted program, in one argument."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxspec.decode.packed import MOST_BYTES, Packed, pack

FLOATS = [0x7FC00001, 0xFFA12345, 0x80000000, 0x00000001, 0xFF800000, 0x3F800000]
ARRAYS = {
    "float32 with payloads of NaN, -0 and a denormal": np.asarray(FLOATS, np.uint32).view("f4"),
    "float32 scalar": np.float32(-0.0),
    "int32": np.asarray([[-1, 2**31 - 1, -(2**31)], [0, 1, 2]], np.int32),
    "uint32": np.asarray([0, 2**32 - 1, 2**31], np.uint32),
    "bool": np.asarray([[True, False, True, True, False]]),
    "bool scalar": np.bool_(True),
    "int8": np.arange(-3, 4, dtype=np.int8),
    "uint8": np.asarray([255, 0, 128], np.uint8),
    "int16": np.asarray([-(2**15), 2**15 - 1, -1], np.int16),
    "float16": np.asarray([0x7E01, 0x8000, 0x0001], np.uint16).view(np.float16),
    "bfloat16": np.asarray([0x7FC1, 0x8000, 0x0001], np.uint16).view(ml_dtypes.bfloat16),
    "empty int32": np.zeros((3, 0), np.int32),
    "empty bool": np.zeros((0, 5), bool),
    "every other column": np.arange(24, dtype=np.int32).reshape(4, 6)[:, ::2],
    "transposed": np.arange(6, dtype=np.uint8).reshape(2, 3).T,
    "the most that is packed": np.arange(MOST_BYTES // 4, dtype=np.int32),
    "a word more": np.arange(MOST_BYTES // 4 + 1, dtype=np.int32).view(np.float32),
}


@jax.jit
def unpacked(packed: Packed) -> Any:
    return packed.unpack()


def check(tree: Any) -> None:
    """Every array of the tree comes back with its shape, dtype and bits."""
    found = unpacked(pack(tree))
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        got = np.asarray(got)
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ARRAYS)
def test_the_bits_of_every_dtype_come_back(name: str) -> None:
    check(ARRAYS[name])


def test_arrays_of_all_shapes_and_dtypes_come_back_together() -> None:
    arrays = list(ARRAYS.values())
    check({"forward": arrays, "backward": (arrays[::-1], None)})
    check([])


def test_small_arrays_are_one_argument_and_large_ones_their_own() -> None:
    packed = pack(ARRAYS)
    assert len(jax.tree.leaves(packed)) == 2
    (large,) = packed.large
    assert large is ARRAYS["a word more"] and packed.words.dtype == np.uint32


def test_one_program_serves_arrays_of_one_form() -> None:
    @jax.jit
    def program(packed: Packed) -> Any:
        return packed.unpack()

    for value in (1, 2):
        (x,) = program(pack([np.full((2, 3), value, np.int32)]))
        assert x.tolist() == [[value] * 3] * 2
    assert program._cache_size() == 1  # type: ignore[attr-defined]
    # Of the same number of words:
    assert program(pack([np.full((3, 2), 1, np.int32)]))[0].shape == (3, 2)
    assert program(pack([np.full((2, 3), 1, np.float32)]))[0].dtype == np.float32
    assert program(pack((np.full((2, 3), 1, np.int32),)))[0].shape == (2, 3)
    assert program._cache_size() == 4  # type: ignore[attr-defined]


def test_the_program_makes_zeros() -> None:
    shapes = [jax.ShapeDtypeStruct((2, 3), bool), jax.ShapeDtypeStruct((70_000,), np.float32)]
    one = np.asarray([1], np.int32)
    packed = pack([shapes[0], one, shapes[1], one])
    assert len(jax.tree.leaves(packed)) == 1 and packed.words.shape == (2,)
    found = unpacked(packed)
    assert [x.tolist() for x in found[:2]] == [[[False] * 3] * 2, [1]] and found[3] == 1
    assert found[2].shape == (70_000,) and not found[2].any()


@pytest.mark.parametrize("dtype", ["int64", "float64", "complex64"])
def test_items_that_jax_would_convert_are_refused(dtype: str) -> None:
    with pytest.raises(TypeError, match=f"expected items of 1, 2 or 4 bytes, got {dtype}"):
        pack([np.zeros(3, dtype)])
    with pytest.raises(TypeError, match=f"got {dtype}"):
        pack([np.zeros(MOST_BYTES, dtype)])
