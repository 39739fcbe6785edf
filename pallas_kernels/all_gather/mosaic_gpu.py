"""The all-gather on Hopper, over peer memory.

XLA's own is no part of a CUDA graph: each would end the round's graph. A block sends its words to
each peer's mailbox, each with the number of the exchange (NCCL's "low latency" protocol), and waits
for the peers' words. A word may have any bits, so none could say that it has not arrived, as in the
all-reduce. What is said there of epochs, buffers and missing devices holds here too.

No deadlock: a block waits for the same block of the other devices only, and the GPU starts blocks
in order. So the first block that is not done has started everywhere.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith, gpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import interpreting
from pallas_kernels.peers import Peers, mailbox
from pallas_kernels.peers.ptx import Value, address_of, at, below, c32, i32, inline_ptx, load_if
from pallas_kernels.peers.turn import WARPGROUP, Devices, Turn, wait_for

if TYPE_CHECKING:
    from pallas_kernels.types import Ref

PAIRS = mailbox.WORDS_A_BLOCK // WARPGROUP // 2  # of a thread; a store has two words and epochs
STEP = 16 * WARPGROUP  # bytes of a slot from a thread's pair to its next
MAX_WORDS = mailbox.WORDS_A_BLOCK * mailbox.MAX_WORD_BLOCKS


def unsupported(count: int, size: int) -> str | None:
    """Return why this kernel cannot run, None if it can."""
    if not 2 <= size <= mailbox.MAX_DEVICES:
        return f"expected 2 to {mailbox.MAX_DEVICES} devices, got {size}"
    if not 1 <= count <= MAX_WORDS:
        return f"expected 1 to {MAX_WORDS} words, got {count}"
    return None


def all_gather(words: jax.Array, peers: Peers) -> jax.Array:
    """Run the op; see pallas_kernels.all_gather.all_gather."""
    rank = lax.axis_index(peers.axis).reshape(1)
    return _all_gather(words, peers.addresses, rank, pdl=not interpreting())


# Compiled as a function of its own, so that exchanges of as many words share one kernel.
@partial(jax.jit, static_argnames="pdl")
def _all_gather(words: jax.Array, addresses: jax.Array, rank: jax.Array, *, pdl: bool) -> jax.Array:
    count, size = words.shape[0], addresses.shape[0] // 2
    exchange = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 4)(
        lambda _, *refs: _exchange(count, size, *refs)
    )

    def body(words_gmem: Ref, addresses_gmem: Ref, rank_gmem: Ref, out_gmem: Ref) -> None:
        if pdl:
            plgpu.griddepcontrol_wait()
        exchange(words_gmem, addresses_gmem, rank_gmem, out_gmem)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((size, count), jnp.int32),
        grid=(-(-count // mailbox.WORDS_A_BLOCK),),
        grid_names=("block",),
        kernel_name=f"all_gather_{count}",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # no memory is both read and written
        ),
    )(words, addresses, rank)


def _exchange(
    count: int, size: int, words: Value, addresses: Value, rank: Value, out: Value
) -> None:
    """Send this thread's words, and store all devices' in out [size, count]."""
    devices = Devices.load(size, addresses, rank)
    turn = Turn.begin(devices, mailbox.word_region())
    block, thread = arith.index_cast(i32(), gpu.block_id(gpu.Dimension.x)), utils.thread_idx()
    first = arith.addi(arith.muli(block, c32(mailbox.WORDS_A_BLOCK)), arith.muli(thread, c32(2)))
    columns = [
        arith.addi(first, c32(2 * WARPGROUP * pair + i)) for pair in range(PAIRS) for i in (0, 1)
    ]
    inside = [below(column, c32(count)) for column in columns]
    places = [arith.muli(column, c32(4)) for column in columns]
    source = address_of(words)
    own = [
        load_if(here, at(source, place), 0, 1)[0]
        for here, place in zip(inside, places, strict=True)
    ]

    def store(of: Value, values: list[Value]) -> None:
        row = at(address_of(out), arith.muli(of, c32(4 * count)))
        for here, place, value in zip(inside, places, values, strict=True):
            inline_ptx(
                "st.global.u32 [$0], $1;",
                *(at(row, place), value),
                predicate=here,
                has_side_effects=True,
            )

    in_slot = arith.muli(thread, c32(16))
    for k, peer in enumerate(devices.peers):
        target = at(at(peer, turn.slot(devices.sender(k))), in_slot)
        for pair in range(PAIRS):
            inline_ptx(
                f"st.volatile.global.v4.u32 [$0 + {STEP * pair}], {{$1, $3, $2, $3}};",
                *(target, own[2 * pair], own[2 * pair + 1], turn.epoch),
                predicate=turn.healthy,
                has_side_effects=True,
            )
    turn.count()
    store(devices.rank, own)
    for k in range(size - 1):
        store(devices.peer_rank(k), _receive(devices, turn, k, in_slot))


def _receive(devices: Devices, turn: Turn, k: int, in_slot: Value) -> list[Value]:
    """Return this thread's words of peer k."""
    source = at(at(devices.own, turn.slot(c32(k))), in_slot)
    count = 2 * PAIRS
    slot, epoch = f"${count}", f"${count + 1}"
    look = [
        f"ld.volatile.global.v4.u32 {{${2 * i}, epoch{2 * i}, ${2 * i + 1}, epoch{2 * i + 1}}}, "
        f"[{slot} + {STEP * i}];"
        for i in range(PAIRS)
    ]
    look.append(f"setp.ne.u32 again, epoch0, {epoch};")
    look += [f"setp.ne.or.u32 again, epoch{i}, {epoch}, again;" for i in range(1, count)]
    return wait_for(
        devices,
        turn,
        k,
        [source, turn.epoch],
        count=count,
        registers=[f".reg .u32 epoch{i};" for i in range(count)],
        look=look,
    )
