"""Products with tiles of keys and values in fp8 (e4m3), which warps widen in registers.

wgmma multiplies operands of one width, and 8-bit ones by rows alone, which values are not. So
mma.sync multiplies here, with codes on the left side. A warp loads them with ldmatrix, as pairs of
8-bit numbers. For the scores it has 16 keys of a tile, for the values a quarter of each key's.
Hopper converts a pair of e4m3 to float16 in one instruction, which is exact; bfloat16 takes four. A
softmax's weights fit float16. So do queries over 16: those between 2^-10 and 2^20 are exact,
smaller ones are off by 2^-21 at most, and larger ones saturate.

Results have the layout of wgmma's, but the rows of values are in another order: ldmatrix hands out
two neighbours together. `store_values` restores the order.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, scf
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.bounds import KEYS
from pallas_kernels.attention.inputs import FP8
from pallas_kernels.attention.mosaic_gpu.plan import Plan
from pallas_kernels.fragments import (
    RowReader,
    array_of,
    i32,
    lane_and_warp,
    ldmatrix,
    load_words,
    mma,
    ptx,
    scalars,
    shared_address,
    strides,
    zeros,
)
from pallas_kernels.hopper import WARPS, interpreting
from pallas_kernels.mosaic import load
from pallas_kernels.types import Index, Ref

if TYPE_CHECKING:
    from pallas_kernels.mosaic import Layout

T = TypeVar("T")  # a ref, or its type
Queries: TypeAlias = jax.Array | Ref  # of a KV head, see load_queries
LAYOUT = plgpu.Layout.WGMMA
DEPTHS = 64  # of a row of float16 that is swizzled as a whole
TRANSFORMS = (plgpu.TilingTransform((8, DEPTHS)), plgpu.SwizzleTransform(2 * DEPTHS))
QUERY_SCALE = 1 / 16
LARGEST = float(jnp.finfo(jnp.float16).max)
CHUNK = 16  # codes of a row that ldmatrix loads together; also the depth of an mma
MOST_WORDS = 32  # of a thread's queries: more would spill
TILE = 64  # rows of a result that a warpgroup's four warps have together, 16 each


class Scratch(NamedTuple, Generic[T]):
    """Shared memory beside the rings.

    queries: float16 [KV heads, columns, head_dim], the queries over 16
    maxima:  float32 [columns, warps], of `maximum`
    """

    queries: T
    maxima: T


def ring(plan: Plan) -> pl.MemoryRef:
    """Return the slots for codes of keys, or of values."""
    return plgpu.SMEM((plan.slots, KEYS, plan.head_dim), FP8, transforms=_transforms(plan.head_dim))


def scratch(plan: Plan) -> Scratch[pl.MemoryRef]:
    """Return the shared memory beside the rings."""
    shape = plan.heads, plan.columns, plan.head_dim
    return Scratch(
        queries=plgpu.SMEM(shape, jnp.float16, transforms=TRANSFORMS),
        maxima=plgpu.SMEM((plan.columns, WARPS), jnp.float32),
    )


def convert_queries(given: Ref, converted: Ref) -> None:
    """Store queries [KV heads, columns, head_dim] over 16, in float16."""
    for head in range(given.shape[0]):
        q = load(given.at[head].transpose((1, 0)), LAYOUT, optimized=False)
        q = jnp.clip(q.astype(jnp.float32) * QUERY_SCALE, -LARGEST, LARGEST)
        converted.at[head].transpose((1, 0))[...] = q.astype(jnp.float16)
    plgpu.commit_smem()


def load_queries(q: Ref) -> Queries:
    """Return the queries of a KV head [columns, head_dim], of convert_queries, for `scores`.

    They are loaded into registers where there are enough: reading them for each tile takes a tenth
    of a step.
    """
    columns, head_dim = map(int, q.shape)
    count = columns * head_dim // 64  # words of a thread: a warp has all queries
    if interpreting() or count > MOST_WORDS:
        return q
    layout = _words(count)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(TRANSFORMS),),
        return_type=plgpu.ShapeDtypeStruct((128 * count,), jnp.int32, layout=layout),
    )
    def run(_: Any, q: Any) -> Any:
        return _load_queries(q, count)

    call: Any = run
    return call(q)


def scores(codes: Ref, q: Queries, columns: int) -> jax.Array:
    """Return codes [KEYS, head_dim] times queries^T, float32 [KEYS, columns]."""
    keys, head_dim = map(int, codes.shape)
    shape = keys, columns
    if interpreting():
        return _product(codes[...].astype(jnp.float16), q[...].T)
    q_type = _words(q.size // 128) if isinstance(q, jax.Array) else plgpu.RefType(TRANSFORMS)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(_transforms(head_dim)), q_type),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=LAYOUT),
    )
    def run(_: Any, codes: Any, q: Any) -> Any:
        return _scores(codes, q, shape)

    call: Any = run
    return call(codes, q)


def maximum(numbers: jax.Array, maxima: Ref) -> jax.Array:
    """Return the maximum of each column of [KEYS, columns], float32 [columns].

    One barrier, where `numbers.max` has two. Callers need another one before the next call:
    store_weights has it.
    """
    if interpreting():
        return numbers.max(axis=0)
    columns = numbers.shape[1]
    by_column = LAYOUT.reduce(0)

    @plgpu.inline_mgpu(
        arg_types=(LAYOUT, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((columns,), jnp.float32, layout=by_column),
    )
    def run(_: Any, numbers: Any, maxima: Any) -> Any:
        return _maximum(numbers, maxima)

    call: Any = run
    return call(numbers, maxima)


def store_weights(weights: jax.Array, target: Ref) -> None:
    """Store float32 [KEYS, columns] for `weigh`, in float16 [columns, KEYS].

    One barrier, which follows, where Mosaic's store has two. It also frees the slots that warps
    have read, for copies. No fence, since mma.sync reads the weights.
    """
    weights = weights.astype(jnp.float16)
    if interpreting():
        target[...] = weights.T
        return

    @plgpu.inline_mgpu(arg_types=(LAYOUT, plgpu.RefType(TRANSFORMS)))
    def run(_: Any, weights: Any, target: Any) -> None:
        weights.store_tiled(utils.memref_transpose(target, (1, 0, 3, 2)), 2 * DEPTHS)
        utils.warpgroup_barrier()

    call: Any = run
    call(weights, target)


def load_values(codes: Ref, written: Index) -> jax.Array:
    """Return the codes of a slot's values for `weigh`, in registers, with zeros for unwritten keys.

    written: number of keys that are written. The others may hold NaN, and 0 * NaN is NaN.
    """
    keys, head_dim = map(int, codes.shape)
    count = keys * head_dim // 512
    if interpreting():
        row = lax.broadcasted_iota(jnp.int32, codes.shape, 0)
        return jnp.where(row < written, codes[...].astype(jnp.float16), 0).T
    number = plgpu.Layout.WG_SPLAT((1,))

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(_transforms(head_dim)), number),
        return_type=plgpu.ShapeDtypeStruct((128 * count,), jnp.int32, layout=_words(count)),
    )
    def run(_: Any, codes: Any, written: Any) -> Any:
        return _load_values(codes, written.registers.flat[0])

    call: Any = run
    return call(codes, jnp.full((1,), written, jnp.int32))


def weigh(sums: jax.Array, values: jax.Array, weights: Ref) -> jax.Array:
    """Return sums, float32 [head_dim, columns], plus values, of load_values, times weights^T.

    weights: float16 [columns, KEYS]
    """
    if interpreting():
        return sums + _product(values, weights[...].T)

    @plgpu.inline_mgpu(
        arg_types=(LAYOUT, _words(values.size // 128), plgpu.RefType(TRANSFORMS)),
        return_type=plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, layout=LAYOUT),
    )
    def run(_: Any, sums: Any, values: Any, weights: Any) -> Any:
        return _weigh(sums, values, weights)

    call: Any = run
    return call(sums, values, weights)


def store_values(mean: jax.Array, target: Ref) -> None:
    """Store bfloat16 [head_dim, columns], of `weigh`, in [columns, head_dim]."""
    if interpreting():
        target[...] = mean.T
        return

    @plgpu.inline_mgpu(arg_types=(LAYOUT, plgpu.RefType()))
    def run(_: Any, mean: Any, target: Any) -> None:
        _store_values(mean, target)

    call: Any = run
    call(mean, target)


def _words(count: int) -> Layout:
    """Return the layout of an array that is `count` words of each thread."""
    return plgpu.Layout.WG_STRIDED((128 * count,), vec_size=1)


def _transforms(head_dim: int) -> tuple[Any, ...]:
    """Return those of a tile of codes, whose rows are as wide as what is swizzled."""
    return plgpu.TilingTransform((8, head_dim)), plgpu.SwizzleTransform(head_dim)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a times b in float32, for the interpreter.

    A number has one order of summation whatever the shapes, as it has with mma.sync. XLA's products
    on a CPU have none.
    """
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)

    def add(depth: jax.Array, total: jax.Array) -> jax.Array:
        column = lax.dynamic_slice_in_dim(a, depth, 1, axis=1)
        return total + column * lax.dynamic_slice_in_dim(b, depth, 1, axis=0)

    return lax.fori_loop(0, a.shape[1], add, jnp.zeros((a.shape[0], b.shape[1]), jnp.float32))


# ---- for each thread, which has row g of 8 and place t of 4 in a fragment


def _scores(codes: Any, q: Any, shape: tuple[int, int]) -> Any:
    head_dim, columns = ir.MemRefType(codes.type).shape[-1], shape[1]
    lane, warp = lane_and_warp()
    # ldmatrix: lanes give the rows of keys 0 to 7 and 8 to 15 of one chunk, then of the next one.
    key = arith.ori(arith.shli(warp, i32(4)), arith.andi(lane, i32(15)))
    start = _place(key, arith.shrui(lane, i32(4)), head_dim)
    keys = shared_address(codes)
    steps = head_dim // CHUNK
    reader = None if isinstance(q, fa.FragmentedArray) else _QueryReader(q)
    loaded = _words_of(q) if reader is None else []

    def query(tile: int, step: int) -> list[Any]:
        return (
            loaded[2 * (tile * steps + step) :][:2] if reader is None else reader.load(tile, step)
        )

    # Two sums for each tile of columns, since a product takes long to end.
    none = utils.c(0.0, ir.F32Type.get())
    sums = [[[none] * 4 for _ in range(2)] for _ in range(columns // 8)]
    for pair in range(steps // 2):
        words = ldmatrix(arith.addi(keys, arith.xori(start, i32(2 * CHUNK * pair))))
        for half in range(2):
            # Of a word, the first two codes are depths 2 t of mma, the others depths 2 t + 8.
            (low, high), (low_8, high_8) = (_widened(word) for word in words[2 * half :][:2])
            a = [low, low_8, high, high_8]
            for tile, own in enumerate(sums):
                own[half] = mma(own[half], a, query(tile, 2 * pair + half), "f16")
    numbers = [arith.addf(x, y) for even, odd in sums for x, y in zip(even, odd, strict=True)]
    return array_of(numbers, zeros(shape))


def _load_queries(q: Any, count: int) -> Any:
    reader = _QueryReader(q)
    tiles = ir.MemRefType(q.type).shape[0]
    steps = count // (2 * tiles)
    places = [(tile, step) for tile in range(tiles) for step in range(steps)]
    return _array_of_words([word for place in places for word in reader.load(*place)])


def _array_of_words(words: list[Any]) -> Any:
    vector = ir.VectorType.get((1,), words[0].type)
    registers = np.array([llvm.bitcast(vector, word) for word in words], dtype=object)
    layout = fa.WGStridedFragLayout((128 * len(words),), 1)
    return fa.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)


def _words_of(array: Any) -> list[Any]:
    word = ir.IntegerType.get_signless(32)
    return [llvm.bitcast(word, register) for register in array.registers.flat]


class _QueryReader:
    """Reads queries as operands B.

    A step has 16 depths, 32 bytes. Four neighbours go to one thread, as in a word of codes.
    """

    STEPS = DEPTHS // CHUNK  # of a tile in memory

    def __init__(self, q: Any) -> None:
        self._row_stride, self._depth_stride = strides(q)[:2]
        lane, _ = lane_and_warp()
        row, t = arith.shrui(lane, i32(2)), arith.andi(lane, i32(3))
        # The thread's four numbers are half of a chunk of 16 bytes, which rows swizzle.
        chunk = arith.xori(arith.shrui(t, i32(1)), row)
        start = arith.ori(
            arith.ori(arith.shli(row, i32(7)), arith.shli(chunk, i32(4))),
            arith.shli(arith.andi(t, i32(1)), i32(3)),
        )
        base = shared_address(q)
        places = (arith.xori(start, i32(2 * CHUNK * i)) for i in range(self.STEPS))
        self._starts = [arith.addi(base, place) for place in places]

    def load(self, tile: int, step: int) -> list[Any]:
        """Return the two registers of 8 columns and 16 depths."""
        offset = 2 * (tile * self._row_stride + step // self.STEPS * self._depth_stride)
        return load_words("ld.shared.v2.b32", 2, self._starts[step % self.STEPS], offset)


def _maximum(numbers: Any, maxima: Any) -> Any:
    columns, found, f32 = numbers.shape[1], scalars(numbers), ir.F32Type.get()
    lane, warp = lane_and_warp()
    first = arith.shli(arith.andi(lane, i32(3)), i32(1))  # of the thread's columns
    # Of rows g and g + 8: column 2 t of each tile of columns, then column 2 t + 1 of each.
    own = [
        arith.maximumf(found[4 * tile + i], found[4 * tile + i + 2])
        for i in range(2)
        for tile in range(columns // 8)
    ]
    column, apart = first, 1
    for distance in (4, 8, 16):
        given = own
        if len(own) % 2 == 0:  # of two lanes, each keeps one half, so later exchanges are fewer
            half = len(own) // 2
            bit = arith.andi(lane, i32(distance))
            is_upper = arith.cmpi(arith.CmpIPredicate.ne, bit, i32(0))
            pairs = list(zip(own[:half], own[half:], strict=True))
            own = [arith.select(is_upper, upper, lower) for lower, upper in pairs]
            given = [arith.select(is_upper, lower, upper) for lower, upper in pairs]
            column = arith.addi(column, arith.select(is_upper, i32(apart), i32(0)))
            apart = 4 * half
        taken = [utils.shfl_bfly(x, distance) for x in given]
        own = [arith.maximumf(x, y) for x, y in zip(own, taken, strict=True)]

    def address(column: Any, past: int, warp: Any) -> Any:
        place = arith.addi(arith.shli(arith.addi(column, i32(past)), i32(2)), warp)
        return utils.getelementptr(utils.memref_ptr(maxima), [place], f32)

    for tile, number in enumerate(own):
        llvm.store(number, address(column, 8 * tile, warp), alignment=4)
    utils.warpgroup_barrier()
    results = []
    for i in range(columns // 4):
        of_warps = llvm.load(
            ir.VectorType.get((WARPS,), f32),
            address(first, 8 * (i // 2) + i % 2, i32(0)),
            alignment=4 * WARPS,
        )
        parts = [llvm.extractelement(of_warps, i32(j)) for j in range(WARPS)]
        results.append(functools.reduce(arith.maximumf, parts))
    like = fa.FragmentedArray.splat(utils.c(0.0, f32), (columns,), fa.WGMMA_LAYOUT.reduce((0,)))
    return array_of(results, like)


def _load_values(codes: Any, written: Any) -> Any:
    groups, _, _, head_dim = ir.MemRefType(codes.type).shape
    lane, warp = lane_and_warp()
    base, half = shared_address(codes), 32 * head_dim  # bytes of 32 keys
    # A lane gives the row of its key; a register has two codes of each of two keys.
    start = _place(lane, warp, head_dim)
    # A tile's values are as many bytes: four chunks, one for each warp.
    places = (arith.xori(start, i32(TILE * tile)) for tile in range(head_dim // TILE))
    starts = [arith.addi(base, place) for place in places]
    words = [
        word
        for tile in range(len(starts))
        for keys in range(groups // 4)
        for word in ldmatrix(starts[tile], half * keys, transposed=True)
    ]
    is_partial = arith.cmpi(arith.CmpIPredicate.slt, written, i32(8 * groups))
    branch = scf.IfOp(is_partial, [word.type for word in words], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        first = arith.shli(arith.andi(lane, i32(3)), i32(1))
        left = [arith.subi(arith.subi(written, first), i32(8 * i)) for i in range(groups)]
        masks = [_mask(count) for count in left]
        scf.yield_([arith.andi(word, masks[i % groups]) for i, word in enumerate(words)])
    otherwise = branch.else_block
    assert otherwise is not None
    with ir.InsertionPoint(otherwise):
        scf.yield_(words)
    return _array_of_words(list(branch.results))


def _mask(count: Any) -> Any:
    """Return a mask of the first `count` of two halves of a word."""
    bits = arith.shli(arith.maxsi(count, i32(0)), i32(4))
    # PTX shifts by more than 31 to zero.
    past = ptx("shl.b32 $0, $1, $2;", i32(0xFFFFFFFF), bits, result_types=bits.type)
    return arith.xori(past, i32(0xFFFFFFFF))


def _weigh(sums: Any, values: Any, weights: Any) -> Any:
    reader, numbers, words = RowReader(weights), scalars(sums), _words_of(values)
    blocks = KEYS // (2 * CHUNK)
    for block in range(blocks):
        operands = [
            _value_rows(words[4 * (tile + block) :][:4])
            for tile in range(0, len(words) // 4, blocks)
        ]
        for column in range(reader.tiles):
            b = reader.load(column, block)
            for half in range(2):
                for tile, rows in enumerate(operands):
                    first = 4 * (tile * reader.tiles + column)
                    own = slice(first, first + 4)
                    numbers[own] = mma(numbers[own], rows[4 * half :][:4], b[2 * half :][:2], "f16")
    return array_of(numbers, sums)


def _value_rows(words: list[Any]) -> list[Any]:
    """Return the left sides of two products, of 16 keys each, from codes of 32 keys."""
    found = []
    for word in words:
        # Both keys' first codes, then both keys' second ones: two rows of the result.
        found += _widened(ptx("prmt.b32 $0, $1, $1, 0x3120;", word, result_types=word.type))
    return found


def _store_values(mean: Any, target: Any) -> None:
    head_dim, columns = mean.shape
    lane, warp = lane_and_warp()
    pairs, bf16 = _words_of(mean), ir.BF16Type.get()
    g, t = arith.shrui(lane, i32(2)), arith.andi(lane, i32(3))
    own = arith.addi(arith.shli(warp, i32(4)), arith.shli(g, i32(1)))
    start = arith.addi(arith.muli(t, i32(2 * head_dim)), own)
    for tile in range(head_dim // TILE):
        for column in range(columns // 8):
            first, second = pairs[2 * (tile * (columns // 8) + column) :][:2]
            for i, halves in enumerate(("0x5410", "0x7632")):
                both = ptx(
                    f"prmt.b32 $0, $1, $2, {halves};", first, second, result_types=first.type
                )
                place = arith.addi(start, i32((8 * column + i) * head_dim + TILE * tile))
                address = utils.getelementptr(utils.memref_ptr(target), [place], bf16)
                llvm.store(both, address, alignment=4)


def _place(key: Any, chunk: Any, head_dim: int) -> Any:
    """Return the byte of a key's chunk in a slot, whose rows are swizzled as TMA does it."""
    row = key if head_dim == 128 else arith.shrui(key, i32(1))
    swizzled = arith.xori(chunk, arith.andi(row, i32(head_dim // CHUNK - 1)))
    return arith.ori(arith.muli(key, i32(head_dim)), arith.shli(swizzled, i32(4)))


def _widened(word: Any) -> tuple[Any, Any]:
    """Return four codes as two pairs of float16."""
    return ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; "
        "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
        word,
        result_types=[word.type] * 2,
    )
