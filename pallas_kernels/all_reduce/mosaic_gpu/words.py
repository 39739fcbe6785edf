"""Arrays of a warpgroup as the 32-bit words of each thread, and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import llvm
from jax.experimental.mosaic.gpu import FragmentedArray, WGStridedFragLayout, utils

from pallas_kernels.peers.ptx import Value, c32, i32
from pallas_kernels.peers.turn import WARPGROUP


def to_words(array: FragmentedArray) -> list[Value]:
    """Return the words of a thread's values."""
    words = []
    for register in array.registers.flat:
        count = _count(register.type)
        packed = llvm.bitcast(ir.VectorType.get((count,), i32()), register)
        words += [llvm.extractelement(packed, c32(i)) for i in range(count)]
    return words


def from_words(words: Sequence[Value], like: FragmentedArray) -> FragmentedArray:
    """Return the words as an array of the same layout and dtype."""
    rest = iter(words)
    kinds = [register.type for register in like.registers.flat]
    packed = [_pack([next(rest) for _ in range(_count(kind))], kind) for kind in kinds]
    return with_registers(like, packed)


def strided_array(
    words: Sequence[Value], piece: int, values: int, dtype: np.dtype
) -> FragmentedArray:
    """Return the words as an array [piece] in Layout.WG_STRIDED with `values` a register."""
    kind = ir.VectorType.get((values,), utils.dtype_to_ir_type(dtype))
    size, count = _count(kind), piece // (WARPGROUP * values)
    registers = np.empty((count,), dtype=object)
    for i in range(count):
        registers[i] = _pack(words[i * size : (i + 1) * size], kind)
    layout = WGStridedFragLayout((piece,), values)
    return FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def with_registers(like: FragmentedArray, values: Sequence[Value]) -> FragmentedArray:
    """Return an array of the same layout with these registers."""
    registers = np.empty(like.registers.shape, dtype=object)
    for i, register in enumerate(values):
        registers.flat[i] = register
    return FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=None)


def _count(kind: ir.Type) -> int:
    """Return the number of words of a register."""
    vector = ir.VectorType(kind)
    return vector.shape[0] * utils.bitwidth(vector.element_type) // 32


def _pack(words: Sequence[Value], kind: ir.Type) -> Value:
    """Return a register of these words."""
    packed = llvm.mlir_undef(ir.VectorType.get((len(words),), i32()))
    for i, word in enumerate(words):
        packed = llvm.insertelement(packed, word, c32(i))
    return llvm.bitcast(kind, packed)
