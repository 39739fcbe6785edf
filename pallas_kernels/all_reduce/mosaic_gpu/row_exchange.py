"""The exchange of a row's pieces between devices, and their sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.all_reduce.mosaic_gpu.words import from_words, to_words, with_registers
from pallas_kernels.peers import mailbox
from pallas_kernels.peers.ptx import Value, at, c32, equal, inline_ptx, vector_of
from pallas_kernels.peers.turn import WARPGROUP, Devices, Turn, wait_for
from pallas_kernels.types import Ref

if TYPE_CHECKING:
    from pallas_kernels.mosaic import Layout


def exchange(
    piece: int, layout: Layout, size: int, warpgroups: int
) -> Callable[[Ref, Ref, jax.Array], jax.Array]:
    """Return the exchange of a warpgroup's piece of a row, between `size` devices.

    It takes the addresses, the rank and the piece, and returns the sum of all devices' pieces in
    float32. All warpgroups of the block take part.
    """

    def run(_ctx: object, addresses: Value, rank: Value, own: FragmentedArray) -> FragmentedArray:
        devices = Devices.load(size, addresses, rank)
        turn = Turn.begin(devices, mailbox.row_region(size))
        words = to_words(own)
        groups = _Groups.of(len(words), WARPGROUP * warpgroups)
        _send(devices, turn, words, groups)
        turn.count()
        total, own32 = None, own.astype(ir.F32Type.get())
        for k in range(size - 1):
            received = from_words(_receive(devices, turn, k, groups), own)
            share = received.astype(ir.F32Type.get())
            if size == 2:
                return own32 + share  # in either order
            # In rank order: the own piece comes before that of peer k if k is the own rank.
            with_own = own32 if total is None else total + own32
            is_next = equal(devices.rank, c32(k))
            if total is None:
                total = _select(is_next, with_own + share, share)
            else:
                total = _select(is_next, with_own, total) + share
        assert total is not None
        return _select(equal(devices.rank, c32(size - 1)), total + own32, total)

    return plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), layout),
        return_type=plgpu.ShapeDtypeStruct((piece,), jnp.float32, layout=layout),
    )(run)


class _Groups:
    """How a thread's words lie in a slot: in groups of 4, 2 or 1, each stored by one instruction.

    A group's words of all threads lie side by side.

    sizes:   words of each group
    offsets: bytes from the slot's start to the group of thread 0
    """

    def __init__(self, sizes: list[int], offsets: list[int]) -> None:
        self.sizes, self.offsets = sizes, offsets

    @classmethod
    def of(cls, count: int, threads: int) -> _Groups:
        sizes = [4] * (count // 4) + [size for size in (2, 1) if count % 4 & size]
        offsets = [4 * threads * sum(sizes[:i]) for i in range(len(sizes))]
        return cls(sizes, offsets)

    @property
    def count(self) -> int:
        return sum(self.sizes)

    @property
    def kinds(self) -> list[int]:
        """The different sizes."""
        return sorted(set(self.sizes), reverse=True)

    def of_thread(self, slot: Value) -> dict[int, Value]:
        """Return this thread's address in a slot, for each size of a group."""
        thread = utils.thread_idx()
        return {size: at(slot, arith.muli(thread, c32(4 * size))) for size in self.kinds}

    def words(self) -> list[range]:
        """Return the indices of each group's words."""
        ends = np.cumsum(self.sizes)
        return [range(end - size, end) for size, end in zip(self.sizes, ends, strict=True)]


def _send(devices: Devices, turn: Turn, words: Sequence[Value], groups: _Groups) -> None:
    """Store the words in every peer's mailbox; nothing after a failure.

    A word that looks EMPTY is a NaN, and another NaN is sent.
    """
    full = [arith.minui(word, c32(mailbox.EMPTY - 1)) for word in words]
    for k, peer in enumerate(devices.peers):
        targets = groups.of_thread(at(peer, turn.slot(devices.sender(k))))
        for size, offset, indices in zip(groups.sizes, groups.offsets, groups.words(), strict=True):
            suffix, registers = vector_of([f"${1 + i}" for i in range(size)])
            inline_ptx(
                f"st.volatile.global.{suffix} [$0 + {offset}], {registers};",
                *(targets[size], *(full[i] for i in indices)),
                predicate=turn.healthy,
                has_side_effects=True,
            )


def _receive(devices: Devices, turn: Turn, k: int, groups: _Groups) -> list[Value]:
    """Return the words of peer k, and leave their slot EMPTY."""
    sources = groups.of_thread(at(devices.own, turn.slot(c32(k))))
    name = {size: f"${groups.count + i}" for i, size in enumerate(groups.kinds)}
    places = zip(groups.sizes, groups.offsets, groups.words(), strict=True)
    look, clear = [], ["mov.u32 empty, -1;"]
    for size, offset, indices in places:
        suffix, registers = vector_of([f"${i}" for i in indices])
        _, empty = vector_of(["empty"] * size)
        look.append(f"ld.volatile.global.{suffix} {registers}, [{name[size]} + {offset}];")
        clear.append(f"st.volatile.global.{suffix} [{name[size]} + {offset}], {empty};")
    look.append("setp.eq.u32 again, $0, -1;")
    look += [f"setp.eq.or.u32 again, ${i}, -1, again;" for i in range(1, groups.count)]
    return wait_for(
        devices,
        turn,
        k,
        [sources[size] for size in groups.kinds],
        count=groups.count,
        registers=[".reg .u32 empty;"],
        look=look,
        arrived=clear,
    )


def _select(condition: Value, yes: FragmentedArray, no: FragmentedArray) -> FragmentedArray:
    pairs = zip(yes.registers.flat, no.registers.flat, strict=True)
    return with_registers(yes, [arith.select(condition, *pair) for pair in pairs])
