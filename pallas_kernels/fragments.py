"""Fragments of a warp's products (mma.sync), for kernels that decode operands in registers."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils


def ptx(code: str, *args: Any, **options: Any) -> Any:
    """Emit an instruction: utils.inline_ptx, which is new in jax 0.11."""
    return utils.inline_ptx(code, *args, **options)  # pyright: ignore[reportAttributeAccessIssue]


def i32(x: int) -> Any:
    """Return a constant word."""
    return utils.c(x - (1 << 32) if x >> 31 else x, ir.IntegerType.get_signless(32))


def lane_and_warp() -> tuple[Any, Any]:
    """Return the thread's lane, and its warp in the warpgroup."""
    thread = utils.thread_idx()
    warp = arith.andi(arith.shrui(thread, i32(5)), i32(3))
    return arith.andi(thread, i32(31)), warp


def strides(ref: Any) -> list[int]:
    """Return the strides of a ref, in values."""
    found, _ = ir.MemRefType(ref.type).get_strides_and_offset()
    return list(found)


def shared_address(ref: Any) -> Any:
    """Return the address of a ref in shared memory, as a word."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref))


def ldmatrix(address: Any, offset: int = 0, *, transposed: bool = False) -> list[Any]:
    """Return four registers: of four matrices of 8 rows of 16 bytes, at the lanes' addresses.

    offset: to add to the addresses; a sum would take a register
    """
    kind = ".trans" if transposed else ""
    instruction = f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16"
    return load_words(instruction, 4, address, offset, convergent=True)


def load_words(
    instruction: str, count: int, address: Any, offset: int, *, convergent: bool = False
) -> list[Any]:
    """Return the registers that a load from shared memory fills. offset: see ldmatrix"""
    registers = ", ".join(f"${i}" for i in range(count))
    return list(
        ptx(
            f"{instruction} {{{registers}}}, [${count} + {offset}];",
            address,
            result_types=[address.type] * count,
            has_side_effects=True,
            convergent=convergent,
        )
    )


class RowReader:
    """Reads the rows [rows, depth] of a product as operands B, from tiles of 8 x 64 16-bit numbers.

    tiles: number of tiles of 8 rows
    """

    def __init__(self, x: Any) -> None:
        self.tiles = ir.MemRefType(x.type).shape[0]
        self._row_stride, self._depth_stride = strides(x)[:2]
        # ldmatrix: lane 8 * i + r gives the address of row r of matrix i, which is 8 depths wide.
        lane, _ = lane_and_warp()
        row, matrix = arith.andi(lane, i32(7)), arith.shrui(lane, i32(3))
        chunk = arith.shli(arith.xori(row, matrix), i32(4))  # 16 bytes, swizzled
        offset = arith.ori(arith.shli(row, i32(7)), chunk)
        base = shared_address(x)
        self._starts = [arith.addi(base, o) for o in (offset, arith.xori(offset, i32(64)))]

    def load(self, tile: int, block: int) -> list[Any]:
        """Return the four registers of 32 depths of 8 rows: two for each product of 16 depths."""
        place = 2 * (tile * self._row_stride + block // 2 * self._depth_stride)
        return ldmatrix(self._starts[block % 2], place)


def mma(sums: list[Any], a: list[Any], b: list[Any], dtype: str = "bf16") -> list[Any]:
    """Return sums plus a [16 columns, 16 depths] times b [16 depths, 8 rows].

    dtype: of a and b, "bf16" or "f16"
    """
    instruction = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    types = [ir.F32Type.get()] * 4
    return list(ptx(instruction, *a, *b, *sums, result_types=types, convergent=True))


def scalars(array: Any) -> list[Any]:
    """Return the numbers of an array of wgmma's layout in the order of mma's registers."""
    return [llvm.extractelement(pair, i32(i)) for pair in array.registers.flat for i in range(2)]


def zeros(shape: tuple[int, int]) -> Any:
    """Return a float32 array in the layout of wgmma's results."""
    return fa.FragmentedArray.splat(utils.c(0.0, ir.F32Type.get()), shape, fa.WGMMA_LAYOUT)


def array_of(numbers: list[Any], like: Any) -> Any:
    """Return an array of these numbers with the layout of another."""
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    pairs = []
    for first, second in zip(numbers[::2], numbers[1::2], strict=True):
        vector = llvm.insertelement(llvm.mlir_undef(pair), first, i32(0))
        pairs.append(llvm.insertelement(vector, second, i32(1)))
    return of_registers(pairs, like)


def of_registers(registers: list[Any], like: Any) -> Any:
    """Return an array of floating point registers with the layout of another of the same shape."""
    shaped = np.array(registers, dtype=object).reshape(like.registers.shape)
    return fa.FragmentedArray(_registers=shaped, _layout=like.layout, _is_signed=None)
