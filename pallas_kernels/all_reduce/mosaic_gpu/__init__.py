"""The all-reduce on Hopper, one block for each row, over peer memory.

Every block sends its row to each peer's mailbox (mailbox.py), waits for the peers' rows in its own,
and adds them. It is the "low latency" protocol of NCCL: an 8-byte word carries 4 bytes of data
and the number of the exchange, the epoch. Devices write such a word whole, so data has arrived when
its epoch has. There is no flag, no fence and no barrier of devices, and a sum takes one trip over
NVLink. It doubles the bytes, which is why it is for few rows.

**Epochs.** A block counts its exchanges in its own device's mailbox: it reads the counter, takes
the next epoch, and writes it back. Programs carry no epoch. All devices run the same programs in
the same order, so block b has taken part in the same calls on each of them, and its counters
agree, whatever the grids of these calls are. Epoch 0 is skipped, because new mailboxes hold zeros.

**Two buffers are enough.** Block b writes epoch e into the buffer of e's parity, over epoch e - 2
of the same block. It may do so because the peer's block b has read that:
- it received the peer's words of epoch e - 1 before its own exchange e - 1 ended,
- the peer sent these in its exchange e - 1, which began after its exchange e - 2 had ended, since
  the kernels of a device run one after another,
- and the exchange e - 2 ended after all of its words had been read.
The argument speaks of one block, whose slots are its own and do not move with the shape. So calls
of different shapes may follow each other: a word that a narrow row leaves out keeps an old epoch,
which no later exchange waits for. (Epochs wrap after 2^32 exchanges of a block. A word would have
to lie unwritten for exactly so many.)

**Order.** Two all-reduces of a program must not run at the same time, or in another order on
another device. In a model each depends on the one before it through the residual stream. For
those that do not, XLA runs a program's kernels in one stream, in one order for all devices. In a
CUDA graph it chains ordinary kernels in that order too (command buffers are scheduled as LHS, the
default; tests/aot/test_all_reduce_aot.py holds it).

**No deadlock.** A row's block waits for the same row's blocks on the other devices only. There are
at most MAX_ROWS blocks, which an H200 runs at the same time even beside another kernel.

**A missing device.** A wait ends after TIMEOUT_SECONDS of the GPU's clock: a device may still load
its kernels when another one has. The block records the silent rank in its mailbox. Later exchanges
of the device see the record, send nothing and wait for nothing, so their peers fail too. Results
are meaningless from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.all_reduce import mailbox
from pallas_kernels.all_reduce.inputs import Peers
from pallas_kernels.hopper import interpreting
from pallas_kernels.mosaic import load
from pallas_kernels.types import Ref

if TYPE_CHECKING:
    from pallas_kernels.all_reduce.reference import Result
    from pallas_kernels.mosaic import Layout

WARPGROUP = 128  # threads
MAX_WARPGROUPS = 5  # leaves a thread 102 registers
MAX_BYTES = 2 * 1024 * 1024  # of x: above it, the doubled bytes cost more than they save
DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
POLLS_PER_LOOK = 1024  # at the clock


def unsupported(rows: int, width: int, dtype: DTypeLike, size: int) -> str | None:
    """Return why this kernel cannot run, None if it can."""
    dtype = jnp.dtype(dtype)
    if dtype not in DTYPES:
        return f"expected bfloat16 or float32, got {dtype.name}"
    if not 2 <= size <= mailbox.MAX_DEVICES:
        return f"expected 2 to {mailbox.MAX_DEVICES} devices, got {size}"
    if rows > mailbox.MAX_ROWS:
        return f"expected at most {mailbox.MAX_ROWS} rows, got {rows}"
    if width % (2 * WARPGROUP) or width > mailbox.MAX_WIDTH:
        expected = f"a multiple of {2 * WARPGROUP} values up to {mailbox.MAX_WIDTH}"
        return f"expected rows of {expected}, got {width}"
    if rows * width * dtype.itemsize > MAX_BYTES:
        return f"expected at most {MAX_BYTES} bytes, got {rows * width * dtype.itemsize}"
    return None


def threads_of(width: int) -> tuple[int, int]:
    """Return (warpgroups of a row's block, neighbouring values that a thread loads at once).

    Most threads win, then the wider loads: few values a thread are one trip to memory.
    """
    fits = [
        (warpgroups, values)
        for warpgroups in range(1, MAX_WARPGROUPS + 1)
        for values in (2, 4, 8)
        if width % (warpgroups * values * WARPGROUP) == 0
    ]
    return max(fits)


def all_reduce(
    x: jax.Array,
    peers: Peers,
    *,
    residual: jax.Array | None,
    gain: jax.Array | None,
    eps: float,
) -> Result:
    """Run the op; see pallas_kernels.all_reduce.all_reduce."""
    # Unsigned, as XLA has it: a conversion would be one more launch.
    rank = lax.axis_index(peers.axis).astype(jnp.uint32).reshape(1)
    return _all_reduce(x, peers.addresses, rank, residual, gain, eps=eps, pdl=not interpreting())


# Compiled as a function of its own, so that a model's layers share one kernel.
@partial(jax.jit, static_argnames=("eps", "pdl"))
def _all_reduce(
    x: jax.Array,
    addresses: jax.Array,
    rank: jax.Array,
    residual: jax.Array | None,
    gain: jax.Array | None,
    *,
    eps: float,
    pdl: bool,
) -> Result:
    rows, width = x.shape
    warpgroups, values = threads_of(width)
    piece = width // warpgroups  # of one warpgroup
    layout = plgpu.Layout.WG_STRIDED((piece,), vec_size=values)
    exchange = _exchange(piece, layout, addresses.shape[0] // 2, warpgroups)
    dtype = x.dtype if residual is None else residual.dtype

    def body(
        x_gmem: Ref,
        addresses_gmem: Ref,
        rank_gmem: Ref,
        residual_gmem: Ref | None,
        gain_gmem: Ref | None,
        out_gmem: Ref,
        normed_gmem: Ref | None,
        sums_smem: Ref,
    ) -> None:
        row, wg = lax.axis_index("row"), lax.axis_index("wg")
        columns = pl.ds(wg * piece, piece)
        here = (row, columns)
        gain = None if gain_gmem is None else load(gain_gmem.at[columns], layout)
        if pdl:
            plgpu.griddepcontrol_wait()  # no kernel writes the gain
        share = load(x_gmem.at[here], layout)
        # Loaded before the wait for the peers.
        kept = None if residual_gmem is None else load(residual_gmem.at[here], layout)
        total = exchange(addresses_gmem, rank_gmem, share).astype(dtype)
        if kept is not None:
            total = (kept.astype(jnp.float32) + total.astype(jnp.float32)).astype(dtype)
        out_gmem.at[here][...] = total
        if gain is not None and normed_gmem is not None:
            value = total.astype(jnp.float32)
            sums = _row_sum(piece, layout, warpgroups)(sums_smem, value * value)
            scale = lax.rsqrt(sums / width + eps)
            normed_gmem.at[here][...] = (value * scale).astype(dtype) * gain.astype(dtype)

    out = jax.ShapeDtypeStruct((rows, width), dtype)
    call = plgpu.kernel(
        body,
        out_type=(out, None if gain is None else out),
        grid=(rows,),
        grid_names=("row",),
        num_threads=warpgroups,
        thread_name="wg",
        kernel_name=f"all_reduce_{width}" + ("" if gain is None else "_norm"),
        scratch_types=[plgpu.SMEM((4 * warpgroups,), jnp.float32)],  # one for each warp
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # _row_sum has its own
        ),
    )
    total, normed = call(x, addresses, rank, residual, gain)
    return total if normed is None else (total, normed)


def _exchange(
    piece: int, layout: Layout, size: int, warpgroups: int
) -> Callable[[Ref, Ref, jax.Array], jax.Array]:
    """Return the exchange of a warpgroup's piece of a row.

    It takes the addresses, the rank and the piece, and returns the sum of all devices' pieces in
    float32.
    """
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import arith, gpu, llvm
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu import utils

    inline_ptx = utils.inline_ptx  # pyright: ignore[reportAttributeAccessIssue]  # new in jax 0.11
    block_stride, parity_stride, sender_stride = mailbox.slot_strides(size)

    def run(_ctx: Any, addresses: Any, ranks: Any, value: Any) -> Any:
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        f32 = ir.F32Type.get()

        def c32(number: int) -> Any:
            return utils.c(number, i32)

        def c64(number: int) -> Any:
            return utils.c(number, i64)

        def equal(a: Any, b: Any) -> Any:
            return arith.cmpi(arith.CmpIPredicate.eq, a, b)

        def load_global(kind: str, pointer: Any, offset: int, result: Any) -> Any:
            text = f"ld.{kind} $0, [$1 + {offset}];"
            return inline_ptx(text, pointer, result_types=result, has_side_effects=True)

        # All loads of one step are in flight together.
        table = utils.memref_ptr(addresses)
        rank = load_global("global.u32", utils.memref_ptr(ranks), 0, i32)
        boxes = [load_global("global.u64", table, 8 * r, i64) for r in range(size)]
        own = boxes[0]
        for r in range(1, size):
            own = arith.select(equal(rank, c32(r)), boxes[r], own)
        # Peer k is rank k, or k + 1 from the own rank on.
        follows = [arith.cmpi(arith.CmpIPredicate.sge, c32(k), rank) for k in range(size - 1)]
        peers = [arith.select(follows[k], boxes[k + 1], boxes[k]) for k in range(size - 1)]
        # From the own rank on, this device is one sender earlier to the peer's count.
        as_sender = [
            arith.select(follows[k], rank, arith.subi(rank, c32(1))) for k in range(size - 1)
        ]

        block = arith.index_cast(i32, gpu.block_id(gpu.Dimension.x))
        thread = utils.thread_idx()
        counter = arith.addi(
            own, arith.extui(i64, arith.addi(c32(mailbox.COUNTERS), arith.muli(block, c32(4))))
        )
        error = load_global("volatile.global.u32", own, 0, i32)
        last = load_global("volatile.global.u32", counter, 0, i32)
        epoch = arith.addi(last, c32(1))
        epoch = arith.select(equal(epoch, c32(0)), c32(2), epoch)  # of the same parity
        slots = arith.addi(
            arith.addi(c32(mailbox.SLOTS), arith.muli(block, c32(block_stride))),
            arith.muli(arith.andi(epoch, c32(1)), c32(parity_stride)),
        )
        # A warp's 16-byte words lie side by side.
        slots = arith.addi(slots, arith.muli(thread, c32(16)))
        step = 16 * WARPGROUP * warpgroups  # to a thread's next word

        words = _to_words(value.registers.flat)
        healthy = equal(error, c32(0))
        for peer, sender in zip(peers, as_sender, strict=True):
            offset = arith.addi(slots, arith.muli(sender, c32(sender_stride)))
            target = arith.addi(peer, arith.extui(i64, offset))
            for i in range(0, len(words), 2):
                inline_ptx(
                    f"st.volatile.global.v4.u32 [$0 + {step * (i // 2)}], {{$1, $3, $2, $3}};",
                    *(target, words[i], words[i + 1], epoch),
                    predicate=healthy,
                    has_side_effects=True,
                )

        gpu.barrier()  # all threads have read the counter
        inline_ptx(
            "st.volatile.global.u32 [$0], $1;",
            *(counter, epoch),
            predicate=equal(thread, c32(0)),
            has_side_effects=True,
        )

        def as_float32(registers: list[Any]) -> Any:
            return _array(value, registers).astype(f32)

        mine, total = value.astype(f32), None
        for k in range(size - 1):
            offset = arith.addi(slots, c32(k * sender_stride))
            source = arith.addi(own, arith.extui(i64, offset))
            silent = arith.addi(c32(k + 1), arith.extui(i32, follows[k]))  # its rank, from 1
            record = arith.ori(
                arith.extui(i64, arith.addi(silent, arith.shli(block, c32(8)))),
                arith.shli(arith.extui(i64, epoch), c64(32)),
            )
            got = _poll(source, epoch, error, own, record, len(words), step)
            share = as_float32(_from_words(got, list(value.registers.flat)))
            if total is None:  # rank 0 and rank 1 may be added in either order
                if size == 2:
                    return mine + share
                total = select(equal(rank, c32(0)), mine + share, share)
            else:
                total = select(equal(rank, c32(k)), total + mine, total) + share
        return select(equal(rank, c32(size - 1)), total + mine, total)

    def select(condition: Any, yes: Any, no: Any) -> Any:
        pairs = zip(yes.registers.flat, no.registers.flat, strict=True)
        return _array(yes, [arith.select(condition, *pair) for pair in pairs])

    def _array(like: Any, values: list[Any]) -> Any:
        registers = np.empty(like.registers.shape, dtype=object)
        for i, register in enumerate(values):
            registers.flat[i] = register
        return mgpu.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=None)

    def _to_words(registers: Any) -> list[Any]:
        """Return the 32-bit words of a thread's values, an even number."""
        i32 = ir.IntegerType.get_signless(32)
        words = []
        for register in registers:
            vector = ir.VectorType(register.type)
            count = vector.shape[0] * utils.bitwidth(vector.element_type) // 32
            packed = llvm.bitcast(ir.VectorType.get((count,), i32), register)
            words += [llvm.extractelement(packed, utils.c(i, i32)) for i in range(count)]
        return words if len(words) % 2 == 0 else [*words, utils.c(0, i32)]

    def _from_words(words: list[Any], like: list[Any]) -> list[Any]:
        """Return the words as registers of the types in `like`."""
        i32 = ir.IntegerType.get_signless(32)
        vector = ir.VectorType(like[0].type)
        count = vector.shape[0] * utils.bitwidth(vector.element_type) // 32
        registers = []
        for start in range(0, count * len(like), count):
            packed = llvm.mlir_undef(ir.VectorType.get((count,), i32))
            for i in range(count):
                packed = llvm.insertelement(packed, words[start + i], utils.c(i, i32))
            registers.append(llvm.bitcast(like[0].type, packed))
        return registers

    def _poll(
        source: Any, epoch: Any, error: Any, own: Any, record: Any, count: int, step: int
    ) -> list[Any]:
        """Return `count` words that a peer sends with this epoch, or anything after a failure.

        The loads of one look are in flight together. The clock is not read in the first looks.
        A failure is written to the own mailbox, whose first one stays.
        """
        i32 = ir.IntegerType.get_signless(32)
        names = [f"${i}" for i in range(count)]
        at, want, failed, box, note = (f"${count + i}" for i in range(5))
        lines = [
            "{",
            ".reg .pred again, stop;",
            ".reg .u32 looks, part;",
            ".reg .u64 now, end, before;",
            *(f".reg .u32 epoch{i};" for i in range(count)),
            "mov.u32 looks, 0;",
            "mov.u64 end, 0;",
            "LOOK:",
            *(
                f"ld.volatile.global.v4.u32 "
                f"{{{names[i]}, epoch{i}, {names[i + 1]}, epoch{i + 1}}}, "
                f"[{at} + {step * (i // 2)}];"
                for i in range(0, count, 2)
            ),
            f"setp.ne.u32 again, epoch0, {want};",
            *(f"setp.ne.or.u32 again, epoch{i}, {want}, again;" for i in range(1, count)),
            "@!again bra DONE;",
            f"setp.ne.u32 stop, {failed}, 0;",
            "@stop bra DONE;",
            "add.u32 looks, looks, 1;",
            f"and.b32 part, looks, {POLLS_PER_LOOK - 1};",
            "setp.ne.u32 again, part, 0;",
            "@again bra LOOK;",
            "mov.u64 now, %globaltimer;",
            f"setp.eq.u32 stop, looks, {POLLS_PER_LOOK};",
            f"@stop add.u64 end, now, {mailbox.TIMEOUT_SECONDS * 10**9};",
            "setp.lt.u64 again, now, end;",
            "@again bra LOOK;",
            f"atom.global.cas.b64 before, [{box}], 0, {note};",
            "DONE:",
            "mov.u32 looks, 0;",
            "}",
        ]
        # Results are written before the operands are last read: `&` keeps them apart.
        constraints = ",".join(["=&r"] * count + ["l", "r", "r", "l", "l"])
        result: Any = llvm.inline_asm(
            llvm.StructType.get_literal([i32] * count),
            [source, epoch, error, own, record],
            "\n".join(lines),
            constraints,
            asm_dialect=0,
            has_side_effects=True,
        )
        return [llvm.extractvalue(i32, result, [i]) for i in range(count)]

    return plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), layout),
        return_type=plgpu.ShapeDtypeStruct((piece,), jnp.float32, layout=layout),
    )(run)


def _row_sum(piece: int, layout: Layout, warpgroups: int) -> Callable[[Ref, jax.Array], jax.Array]:
    """Return the sum of a row's values, in every one of them, over the warpgroups of a block.

    It takes shared memory, one float32 for each warp, and the warpgroup's piece. Pallas' own sums
    share their memory, which only one warpgroup may use.
    """
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import arith, gpu, memref, vector
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu import utils

    def run(_ctx: Any, sums: Any, values: Any) -> Any:
        i32, index, f32 = ir.IntegerType.get_signless(32), ir.IndexType.get(), ir.F32Type.get()
        total = utils.c(0.0, f32)
        for register in values.registers.flat:
            for i in range(ir.VectorType(register.type).shape[0]):
                element = vector.extract(register, [], ir.DenseI64ArrayAttr.get([i]))
                total = arith.addf(total, element)
        for distance in (16, 8, 4, 2, 1):
            total = arith.addf(total, utils.shfl_bfly(total, distance))
        warp = arith.index_cast(index, arith.shrui(utils.thread_idx(), utils.c(5, i32)))
        memref.store(total, sums, [warp])  # all lanes of a warp hold the same bits
        gpu.barrier()
        total = utils.c(0.0, f32)
        for i in range(4 * warpgroups):
            total = arith.addf(total, memref.load(sums, [utils.c(i, index)]))
        registers = np.empty(values.registers.shape, dtype=object)
        for i, register in enumerate(values.registers.flat):
            registers.flat[i] = vector.broadcast(register.type, total)
        return mgpu.FragmentedArray(_registers=registers, _layout=values.layout, _is_signed=None)

    return plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout),
        return_type=plgpu.ShapeDtypeStruct((piece,), jnp.float32, layout=layout),
    )(run)
