"""The all-reduce on Hopper, one block for each row, over peer memory.

Every block sends its row to each peer's mailbox, waits for the peers' rows in its own (peers/),
and adds them. A word of 4 bytes is its own flag: a slot is EMPTY until the word has arrived, and
the thread that reads it leaves it EMPTY. ("Lamport" in TensorRT-LLM's all-reduce; NCCL's "low
latency" protocol sends an epoch with each word, twice the bytes.) There is no flag, no fence and no
barrier of devices, and a sum takes one trip over NVLink. Only a NaN has the bits of EMPTY, and it
is sent as another NaN.

**Epochs.** A block counts its exchanges in its own device's mailbox: it reads the counter, takes
the next epoch, and writes it back. Programs carry no epoch. All devices run the same programs in
the same order, so block b has taken part in the same calls on each of them, and its counters
agree, whatever the grids of these calls are.

**Two buffers are enough.** Block b writes epoch e into the buffer of e's parity, which epoch e - 2
of the same block has used. It may do so because the peer's block b has read and emptied that:
- it received the peer's words of epoch e - 1 before its own exchange e - 1 ended,
- the peer sent these in its exchange e - 1, which began after its exchange e - 2 had ended, since
  the kernels of a device run one after another,
- and the exchange e - 2 ended after all of its words had been read and emptied.
The argument speaks of one block, whose slots are its own and do not move with the shape. Both
devices give a call the same shape, so the words that are sent are those that are read and emptied,
and calls of different shapes may follow each other.

**Order.** Two all-reduces of a program must not run at the same time, or in another order on
another device. In a model each depends on the one before it through the residual stream. For
those that do not, XLA runs a program's kernels in one stream, in one order for all devices. In a
CUDA graph it chains ordinary kernels in that order too (command buffers are scheduled as LHS, the
default; tests/aot/test_all_reduce_aot.py holds it).

**No deadlock.** A row's block waits for the same row's blocks on the other devices only. An H200
has room for all blocks of a call at once (the AOT tests hold `unsupported` against the registers),
and no later kernel starts before they have ended.

**A missing device.** A wait ends after TIMEOUT_SECONDS of the GPU's clock: a device may still load
its kernels when another one has. The block records the silent rank in its mailbox. Later exchanges
of the device see the record, send nothing and wait for nothing, so their peers fail too. Results
are meaningless from then on, and so are the slots.

**Early reads.** A few rows leave most SMs idle, and memory too. Blocks after those of the rows ask
L2 for what the next kernel reads first.

    row_exchange.py  what a block sends and receives of a row
    early_reads.py   reads for the next kernel
    ragged_row.py    loads and stores of a row that the threads do not divide
    row_sum.py       the norm's sum over a row
    words.py         arrays as 32-bit words

A block counts and waits in pallas_kernels/peers/turn.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.all_reduce.inputs import EarlyReads, Span
from pallas_kernels.all_reduce.mosaic_gpu.early_reads import early_reads as read_early
from pallas_kernels.all_reduce.mosaic_gpu.ragged_row import load_row, store_row
from pallas_kernels.all_reduce.mosaic_gpu.row_exchange import exchange
from pallas_kernels.all_reduce.mosaic_gpu.row_sum import row_sum
from pallas_kernels.hopper import NUM_SMS, WARPS, interpreting
from pallas_kernels.mosaic import load
from pallas_kernels.peers import Peers, mailbox
from pallas_kernels.peers.turn import WARPGROUP
from pallas_kernels.types import Ref

if TYPE_CHECKING:
    from pallas_kernels.all_reduce.reference import Result

CHUNK = 64  # values; a register's lie on one side of any multiple of it
MAX_WARPGROUPS = 5  # leaves a thread 102 registers
MAX_BYTES = 2 * 1024 * 1024  # of x
MAX_READING_ROWS = 64  # a call of more rows leaves too few SMs for early reads
DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))


def unsupported(rows: int, width: int, dtype: DTypeLike, size: int) -> str | None:
    """Return why this kernel cannot run, None if it can."""
    dtype = jnp.dtype(dtype)
    if dtype not in DTYPES:
        return f"expected bfloat16 or float32, got {dtype.name}"
    if not 2 <= size <= mailbox.MAX_DEVICES:
        return f"expected 2 to {mailbox.MAX_DEVICES} devices, got {size}"
    most = mailbox.MAX_ROWS if size <= 4 else NUM_SMS  # registers leave room for two blocks or one
    if rows > most:
        return f"expected at most {most} rows, got {rows}"
    if width % CHUNK or width > mailbox.MAX_WIDTH:
        expected = f"a multiple of {CHUNK} values up to {mailbox.MAX_WIDTH}"
        return f"expected rows of {expected}, got {width}"
    if rows * width * dtype.itemsize > MAX_BYTES:
        return f"expected at most {MAX_BYTES} bytes, got {rows * width * dtype.itemsize}"
    return None


def padded_width(width: int) -> int:
    """Return the values of a row that its block holds, those past the width included."""
    return -(-width // (2 * WARPGROUP)) * 2 * WARPGROUP


def threads_of(width: int) -> tuple[int, int]:
    """Return (warpgroups of a row's block, neighbouring values that a thread loads at once).

    width: padded
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
    early_reads: EarlyReads = (),
) -> Result:
    """Run the op; see pallas_kernels.all_reduce.all_reduce."""
    rank = lax.axis_index(peers.axis).reshape(1)
    if x.shape[0] > MAX_READING_ROWS:
        early_reads = ()
    return _all_reduce(
        x,
        peers.addresses,
        rank,
        residual,
        gain,
        tuple(array for array, _ in early_reads),
        spans=tuple((i, span) for i, (_, spans) in enumerate(early_reads) for span in spans),
        eps=eps,
        pdl=not interpreting(),
    )


# Compiled as a function of its own, so that a model's layers share one kernel.
@partial(jax.jit, static_argnames=("spans", "eps", "pdl"))
def _all_reduce(
    x: jax.Array,
    addresses: jax.Array,
    rank: jax.Array,
    residual: jax.Array | None,
    gain: jax.Array | None,
    sources: tuple[jax.Array, ...],
    *,
    spans: tuple[tuple[int, Span], ...],
    eps: float,
    pdl: bool,
) -> Result:
    rows, width = x.shape
    padded = padded_width(width)
    warpgroups, values = threads_of(padded)
    piece = padded // warpgroups  # of one warpgroup
    layout = plgpu.Layout.WG_STRIDED((piece,), vec_size=values)
    add_shares = exchange(piece, layout, addresses.shape[0] // 2, warpgroups)
    dtype = x.dtype if residual is None else residual.dtype
    readers = NUM_SMS - rows if spans else 0

    def body(
        x_gmem: Ref,
        addresses_gmem: Ref,
        rank_gmem: Ref,
        residual_gmem: Ref | None,
        gain_gmem: Ref | None,
        sources_gmem: tuple[Ref, ...],
        out_gmem: Ref,
        normed_gmem: Ref | None,
        sums_smem: Ref,
    ) -> None:
        row, wg = lax.axis_index("row"), lax.axis_index("wg")
        columns = pl.ds(wg * piece, piece)
        here = (row, columns)

        def load_piece(array: Ref) -> jax.Array:
            if padded == width:
                return load(array.at[here], layout)
            return load_row(piece, width, values, array.dtype, layout)(array)

        def store_piece(array: Ref, piece_values: jax.Array) -> None:
            if padded == width:
                array.at[here][...] = piece_values
            else:
                store_row(piece, width, values, array.dtype, layout)(array, piece_values)

        def load_gain(array: Ref) -> jax.Array:
            if padded == width:
                return load(array.at[columns], layout)
            return load_row(piece, width, values, array.dtype, layout, is_shared=True)(array)

        def reduce_row() -> None:
            gain = None if gain_gmem is None else load_gain(gain_gmem)
            if pdl:
                plgpu.griddepcontrol_wait()  # no kernel writes the gain
            share = load_piece(x_gmem)
            # Loaded before the wait for the peers.
            kept = None if residual_gmem is None else load_piece(residual_gmem)
            total = add_shares(addresses_gmem, rank_gmem, share).astype(dtype)
            if kept is not None:
                total = (kept.astype(jnp.float32) + total.astype(jnp.float32)).astype(dtype)
            store_piece(out_gmem, total)
            if gain is not None and normed_gmem is not None:
                value = total.astype(jnp.float32)
                sums = row_sum(piece, layout, warpgroups)(sums_smem, value * value)
                scale = lax.rsqrt(sums / width + eps)
                store_piece(normed_gmem, (value * scale).astype(dtype) * gain.astype(dtype))

        if not readers:
            reduce_row()
            return
        pl.when(row < rows)(reduce_row)
        read = read_early(spans, len(sources), rows, readers)
        pl.when(row >= rows)(lambda: read(*sources_gmem))

    out = jax.ShapeDtypeStruct((rows, width), dtype)
    call = plgpu.kernel(
        body,
        out_type=(out, None if gain is None else out),
        grid=(rows + readers,),
        grid_names=("row",),
        num_threads=warpgroups,
        thread_name="wg",
        kernel_name=f"all_reduce_{width}" + ("" if gain is None else "_norm"),
        scratch_types=[plgpu.SMEM((WARPS * warpgroups,), jnp.float32)],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # row_sum has its own
        ),
    )
    total, normed = call(x, addresses, rank, residual, gain, sources)
    return total if normed is None else (total, normed)
