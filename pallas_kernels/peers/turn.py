"""One exchange of a block, of rows or of words: it begins a turn, sends, counts and waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax._src.lib.mlir.dialects import arith, gpu, llvm
from jax.experimental.mosaic.gpu import utils

from pallas_kernels.peers import mailbox
from pallas_kernels.peers.ptx import Value, at, c32, equal, i32, i64, inline_ptx, load

WARPGROUP = 128  # threads
POLLS_PER_LOOK_AT_CLOCK = 1024


@dataclass(frozen=True)
class Devices:
    """The own device and its peers. Peer k is rank k below the own rank, and k + 1 from it on.

    rank:    i32, the own one
    own:     i64, address of the own mailbox
    peers:   i64 [size - 1], addresses of the peers' mailboxes
    follows: i1 [size - 1], whether the peer's rank is above the own one
    """

    rank: Value
    own: Value
    peers: Sequence[Value]
    follows: Sequence[Value]

    @classmethod
    def load(cls, size: int, addresses: Value, ranks: Value) -> Devices:
        """Load rank and addresses, in flight together."""
        table = utils.memref_ptr(addresses)
        rank = load("global.u32", utils.memref_ptr(ranks), 0, i32())
        boxes = [load("global.u64", table, 8 * r, i64()) for r in range(size)]
        own = boxes[0]
        for r in range(1, size):
            own = arith.select(equal(rank, c32(r)), boxes[r], own)
        follows = [arith.cmpi(arith.CmpIPredicate.sge, c32(k), rank) for k in range(size - 1)]
        peers = [arith.select(follows[k], boxes[k + 1], boxes[k]) for k in range(size - 1)]
        return cls(rank, own, peers, follows)

    @property
    def size(self) -> int:
        return len(self.peers) + 1

    def peer_rank(self, k: int) -> Value:
        return arith.addi(c32(k), arith.extui(i32(), self.follows[k]))

    def sender(self, k: int) -> Value:
        """Return the own place among the senders of peer k, which counts itself out."""
        return arith.select(self.follows[k], self.rank, arith.subi(self.rank, c32(1)))


@dataclass(frozen=True)
class Turn:
    """One exchange of a block, in a region of the mailboxes.

    block:   i32
    counter: i64, address of the block's counter
    error:   i32, not 0 after a failure
    epoch:   i32
    slots:   i32, bytes from a mailbox's start to the block's slot from sender 0
    stride:  bytes from a sender's slot to the next one's
    """

    block: Value
    counter: Value
    error: Value
    epoch: Value
    slots: Value
    stride: int

    @classmethod
    def begin(cls, devices: Devices, region: mailbox.Region) -> Turn:
        of_block, of_parity, stride = region.strides(devices.size)
        block = arith.index_cast(i32(), gpu.block_id(gpu.Dimension.x))
        place = arith.addi(c32(region.counters), arith.muli(block, c32(4)))
        counter = at(devices.own, place)
        error = load("volatile.global.u32", devices.own, 0, i32())
        last = load("volatile.global.u32", counter, 0, i32())
        epoch = arith.addi(last, c32(1))
        epoch = arith.select(equal(epoch, c32(0)), c32(2), epoch)  # of the same parity
        slots = arith.addi(
            arith.addi(c32(region.slots), arith.muli(block, c32(of_block))),
            arith.muli(arith.andi(epoch, c32(1)), c32(of_parity)),
        )
        return cls(block, counter, error, epoch, slots, stride)

    @property
    def healthy(self) -> Value:
        """i1, whether no exchange of this device has failed."""
        return equal(self.error, c32(0))

    def slot(self, sender: Value) -> Value:
        """Return the bytes from a mailbox's start to a sender's slot."""
        return arith.addi(self.slots, arith.muli(sender, c32(self.stride)))

    def count(self) -> None:
        """Write the counter, once all threads of the block have read it."""
        gpu.barrier()
        inline_ptx(
            "st.volatile.global.u32 [$0], $1;",
            *(self.counter, self.epoch),
            predicate=equal(utils.thread_idx(), c32(0)),
            has_side_effects=True,
        )


def wait_for(
    devices: Devices,
    turn: Turn,
    k: int,
    operands: Sequence[Value],
    *,
    count: int,
    registers: Sequence[str],
    look: Sequence[str],
    arrived: Sequence[str] = (),
) -> list[Value]:
    """Return `count` words of peer k, or anything after a failure.

    The loads of one look are in flight together. The clock is not read in the first looks. A
    failure is written to the own mailbox, whose first one stays (mailbox.Failure reads it).

    operands:  i64 or i32, in PTX $count and on
    registers: declarations of what `look` and `arrived` use beside
    look:      PTX that loads the words into $0 and on, and sets the predicate `again` unless all
               have arrived
    arrived:   PTX for when they have
    """
    silent = arith.addi(devices.peer_rank(k), c32(1))
    record = arith.ori(
        arith.extui(i64(), arith.addi(silent, arith.shli(turn.block, c32(8)))),
        arith.shli(arith.extui(i64(), turn.epoch), utils.c(32, i64())),
    )
    given = [*operands, turn.error, devices.own, record]
    failed, box, note = (f"${count + len(operands) + i}" for i in range(3))
    lines = [
        "{",
        ".reg .pred again, stop;",
        ".reg .u32 looks, part;",
        ".reg .u64 now, end, before;",
        *registers,
        "mov.u32 looks, 0;",
        "mov.u64 end, 0;",
        "LOOK:",
        *look,
        "@!again bra ARRIVED;",
        f"setp.ne.u32 stop, {failed}, 0;",
        "@stop bra DONE;",
        "add.u32 looks, looks, 1;",
        f"and.b32 part, looks, {POLLS_PER_LOOK_AT_CLOCK - 1};",
        "setp.ne.u32 again, part, 0;",
        "@again bra LOOK;",
        "mov.u64 now, %globaltimer;",
        f"setp.eq.u32 stop, looks, {POLLS_PER_LOOK_AT_CLOCK};",
        f"@stop add.u64 end, now, {mailbox.TIMEOUT_SECONDS * 10**9};",
        "setp.lt.u64 again, now, end;",
        "@again bra LOOK;",
        f"atom.global.cas.b64 before, [{box}], 0, {note};",
        "bra DONE;",
        "ARRIVED:",
        *arrived,
        "DONE:",
        "mov.u32 looks, 0;",
        "}",
    ]
    # Results are written before the operands are last read: `&` keeps them apart.
    kinds = ["l" if value.type == i64() else "r" for value in given]
    result: Value = llvm.inline_asm(
        llvm.StructType.get_literal([i32()] * count),
        given,
        "\n".join(lines),
        ",".join(["=&r"] * count + kinds),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(i32(), result, [i]) for i in range(count)]
