"""The exchange of a block, in PTX where Pallas has no word for it.

Values are MLIR's: of one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, gpu, llvm
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.all_reduce import mailbox
from pallas_kernels.types import Ref

if TYPE_CHECKING:
    from pallas_kernels.mosaic import Layout

WARPGROUP = 128  # threads
WORD_BYTES = 16  # of a store or load: two times data and epoch
POLLS_PER_LOOK_AT_CLOCK = 1024

Value: TypeAlias = Any  # an ir.Value, whose operands' types MLIR checks

inline_ptx = utils.inline_ptx  # pyright: ignore[reportAttributeAccessIssue]  # new in jax 0.11


def exchange(
    piece: int, layout: Layout, size: int, warpgroups: int
) -> Callable[[Ref, Ref, jax.Array], jax.Array]:
    """Return the exchange of a warpgroup's piece of a row, between `size` devices.

    It takes the addresses, the rank and the piece, and returns the sum of all devices' pieces in
    float32. All warpgroups of the block take part.
    """

    def run(_ctx: object, addresses: Value, rank: Value, own: FragmentedArray) -> FragmentedArray:
        devices = _Devices.load(size, addresses, rank)
        turn = _Turn.begin(devices)
        words = _to_words(own)
        step = WORD_BYTES * WARPGROUP * warpgroups  # from a thread's word to its next
        _send(devices, turn, words, step)
        _count(turn)
        total, own32 = None, own.astype(ir.F32Type.get())
        for k in range(size - 1):
            received = _from_words(_receive(devices, turn, k, len(words), step), own)
            share = received.astype(ir.F32Type.get())
            if size == 2:
                return own32 + share  # in either order
            # In rank order: the own piece comes before that of peer k if k is the own rank.
            with_own = own32 if total is None else total + own32
            is_next = _equal(devices.rank, _c32(k))
            if total is None:
                total = _select(is_next, with_own + share, share)
            else:
                total = _select(is_next, with_own, total) + share
        assert total is not None
        return _select(_equal(devices.rank, _c32(size - 1)), total + own32, total)

    return plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), layout),
        return_type=plgpu.ShapeDtypeStruct((piece,), jnp.float32, layout=layout),
    )(run)


@dataclass(frozen=True)
class _Devices:
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
    def load(cls, size: int, addresses: Value, ranks: Value) -> _Devices:
        """Load rank and addresses, in flight together."""
        table = utils.memref_ptr(addresses)
        rank = _load("global.u32", utils.memref_ptr(ranks), 0, _i32())
        boxes = [_load("global.u64", table, 8 * r, _i64()) for r in range(size)]
        own = boxes[0]
        for r in range(1, size):
            own = arith.select(_equal(rank, _c32(r)), boxes[r], own)
        follows = [arith.cmpi(arith.CmpIPredicate.sge, _c32(k), rank) for k in range(size - 1)]
        peers = [arith.select(follows[k], boxes[k + 1], boxes[k]) for k in range(size - 1)]
        return cls(rank, own, peers, follows)

    def peer_rank(self, k: int) -> Value:
        return arith.addi(_c32(k), arith.extui(_i32(), self.follows[k]))

    def sender(self, k: int) -> Value:
        """Return the own place among the senders of peer k, who counts itself out."""
        return arith.select(self.follows[k], self.rank, arith.subi(self.rank, _c32(1)))


@dataclass(frozen=True)
class _Turn:
    """One exchange of a block.

    block:   i32
    counter: i64, address of the block's counter
    error:   i32, not 0 after a failure
    epoch:   i32
    slots:   i32, bytes from a mailbox's start to this thread's first word from sender 0
    strides: bytes from a block's slots to the next block's, parity's and sender's
    """

    block: Value
    counter: Value
    error: Value
    epoch: Value
    slots: Value
    strides: tuple[int, int, int]

    @classmethod
    def begin(cls, devices: _Devices) -> _Turn:
        strides = mailbox.slot_strides(len(devices.peers) + 1)
        block = arith.index_cast(_i32(), gpu.block_id(gpu.Dimension.x))
        place = arith.addi(_c32(mailbox.COUNTERS), arith.muli(block, _c32(4)))
        counter = _at(devices.own, place)
        error = _load("volatile.global.u32", devices.own, 0, _i32())
        last = _load("volatile.global.u32", counter, 0, _i32())
        epoch = arith.addi(last, _c32(1))
        epoch = arith.select(_equal(epoch, _c32(0)), _c32(2), epoch)  # of the same parity
        slots = arith.addi(
            arith.addi(_c32(mailbox.SLOTS), arith.muli(block, _c32(strides[0]))),
            arith.muli(arith.andi(epoch, _c32(1)), _c32(strides[1])),
        )
        # A warp's words lie side by side.
        slots = arith.addi(slots, arith.muli(utils.thread_idx(), _c32(WORD_BYTES)))
        return cls(block, counter, error, epoch, slots, strides)

    def slot(self, sender: Value) -> Value:
        return arith.addi(self.slots, arith.muli(sender, _c32(self.strides[2])))


def _send(devices: _Devices, turn: _Turn, words: Sequence[Value], step: int) -> None:
    """Store the words with their epoch in every peer's mailbox; nothing after a failure."""
    healthy = _equal(turn.error, _c32(0))
    for k, peer in enumerate(devices.peers):
        target = _at(peer, turn.slot(devices.sender(k)))
        for i in range(0, len(words), 2):
            inline_ptx(
                f"st.volatile.global.v4.u32 [$0 + {step * (i // 2)}], {{$1, $3, $2, $3}};",
                *(target, words[i], words[i + 1], turn.epoch),
                predicate=healthy,
                has_side_effects=True,
            )


def _count(turn: _Turn) -> None:
    """Write the counter, once all threads of the block have read it."""
    gpu.barrier()
    inline_ptx(
        "st.volatile.global.u32 [$0], $1;",
        *(turn.counter, turn.epoch),
        predicate=_equal(utils.thread_idx(), _c32(0)),
        has_side_effects=True,
    )


def _receive(devices: _Devices, turn: _Turn, k: int, count: int, step: int) -> list[Value]:
    """Return `count` words of peer k with this epoch, or anything after a failure.

    The loads of one look are in flight together. The clock is not read in the first looks. A
    failure is written to the own mailbox, whose first one stays (mailbox.Failure reads it).
    """
    source = _at(devices.own, turn.slot(_c32(k)))
    silent = arith.addi(devices.peer_rank(k), _c32(1))
    record = arith.ori(
        arith.extui(_i64(), arith.addi(silent, arith.shli(turn.block, _c32(8)))),
        arith.shli(arith.extui(_i64(), turn.epoch), utils.c(32, _i64())),
    )
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
            f"ld.volatile.global.v4.u32 {{${i}, epoch{i}, ${i + 1}, epoch{i + 1}}}, "
            f"[{at} + {step * (i // 2)}];"
            for i in range(0, count, 2)
        ),
        f"setp.ne.u32 again, epoch0, {want};",
        *(f"setp.ne.or.u32 again, epoch{i}, {want}, again;" for i in range(1, count)),
        "@!again bra DONE;",
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
        "DONE:",
        "mov.u32 looks, 0;",
        "}",
    ]
    # Results are written before the operands are last read: `&` keeps them apart.
    result: Value = llvm.inline_asm(
        llvm.StructType.get_literal([_i32()] * count),
        [source, turn.epoch, turn.error, devices.own, record],
        "\n".join(lines),
        ",".join(["=&r"] * count + ["l", "r", "r", "l", "l"]),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(_i32(), result, [i]) for i in range(count)]


def _words_of(register: Value) -> int:
    """Return the number of 32-bit words of a register."""
    vector = ir.VectorType(register.type)
    return vector.shape[0] * utils.bitwidth(vector.element_type) // 32


def _to_words(array: FragmentedArray) -> list[Value]:
    """Return the 32-bit words of a thread's values, an even number."""
    words = []
    for register in array.registers.flat:
        count = _words_of(register)
        packed = llvm.bitcast(ir.VectorType.get((count,), _i32()), register)
        words += [llvm.extractelement(packed, _c32(i)) for i in range(count)]
    return words if len(words) % 2 == 0 else [*words, _c32(0)]


def _from_words(words: Sequence[Value], like: FragmentedArray) -> FragmentedArray:
    """Return the words as an array of the same layout and dtype."""
    registers, rest = [], iter(words)
    for register in like.registers.flat:
        count = _words_of(register)
        packed = llvm.mlir_undef(ir.VectorType.get((count,), _i32()))
        for i in range(count):
            packed = llvm.insertelement(packed, next(rest), _c32(i))
        registers.append(llvm.bitcast(register.type, packed))
    return with_registers(like, registers)


def _select(condition: Value, yes: FragmentedArray, no: FragmentedArray) -> FragmentedArray:
    pairs = zip(yes.registers.flat, no.registers.flat, strict=True)
    return with_registers(yes, [arith.select(condition, *pair) for pair in pairs])


def with_registers(like: FragmentedArray, values: Sequence[Value]) -> FragmentedArray:
    """Return an array of the same layout with these registers."""
    registers = np.empty(like.registers.shape, dtype=object)
    for i, register in enumerate(values):
        registers.flat[i] = register
    return FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=None)


def _load(kind: str, pointer: Value, offset: int, result: ir.Type) -> Value:
    text = f"ld.{kind} $0, [$1 + {offset}];"
    return inline_ptx(text, pointer, result_types=result, has_side_effects=True)


def _at(address: Value, offset: Value) -> Value:
    return arith.addi(address, arith.extui(_i64(), offset))


def _equal(a: Value, b: Value) -> Value:
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def _c32(number: int) -> Value:
    return utils.c(number, _i32())
