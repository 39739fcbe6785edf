"""Mailboxes: the memory of each device that its peers write to.

A mailbox is one array that XLA allocates and does not know to be written. From its start:

    error   8 bytes: 0, or the first exchange that got no answer (see `Failure`)
    ROWS    the region of the all-reduce; a block exchanges one row
    WORDS   the region of the all-gather; a block exchanges WORDS_A_BLOCK words

A region has a counter of 4 bytes a block, the epoch of the block's last exchange. Its slots follow,
one for each block, parity of the epoch and sender. A slot of ROWS holds values and is EMPTY between
exchanges; one of WORDS holds each word with its epoch. A block's slots lie at the same place
whatever the shape and the number of rows of a call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MAX_ROWS = 256  # a row is a block
MAX_WIDTH = 8192
WORDS_A_BLOCK = 512
MAX_WORD_BLOCKS = 512
MAX_DEVICES = 8
TIMEOUT_SECONDS = 10
EMPTY = 0xFFFFFFFF  # a word of ROWS that has not arrived; no number but a NaN has these bits

_AXIS = "rank"

# jaxlib has the type, and its stubs leave jax.Device a variable.
Devices: TypeAlias = "Sequence[jax.Device]"  # pyright: ignore[reportInvalidTypeForm]


@dataclass(frozen=True)
class Region:
    """The part of a mailbox that one kind of exchange uses.

    counters:   bytes from the mailbox's start to the first block's counter
    num_blocks: most blocks of a call
    slot_bytes: of one slot
    """

    counters: int
    num_blocks: int
    slot_bytes: int

    @property
    def slots(self) -> int:
        """Bytes from the mailbox's start to the first slot."""
        return self.counters + 4 * self.num_blocks

    def strides(self, size: int) -> tuple[int, int, int]:
        """Return the bytes from a block's slots to the next block's, parity's and sender's.

        size: number of devices. A device has no slot for itself: senders are counted without it.
        """
        return 2 * (size - 1) * self.slot_bytes, (size - 1) * self.slot_bytes, self.slot_bytes

    def end(self, size: int) -> int:
        """Return the bytes from the mailbox's start to the region's end, for so many devices."""
        return self.slots + self.num_blocks * self.strides(size)[0]


# The error lies before the first counter. WORDS comes first: its place depends on no size.
def word_region() -> Region:
    """Return the region of the all-gather: 4 bytes of data and 4 of epoch in turn."""
    return Region(128, MAX_WORD_BLOCKS, 8 * WORDS_A_BLOCK)


def row_region(size: int) -> Region:
    """Return the region of the all-reduce between so many devices: rows of float32 values."""
    return Region(word_region().end(size), MAX_ROWS, 4 * MAX_WIDTH)


def num_bytes(size: int) -> int:
    """Return the bytes of one mailbox, for so many devices."""
    return row_region(size).end(size)


@dataclass(frozen=True)
class Failure:
    """The first exchange of a device that ended without an answer, as its mailbox records it.

    rank:   the device that waited
    silent: the rank that did not answer
    block:  of the all-reduce, which is a row, or of the all-gather
    epoch:  number of the exchange, counted by block
    """

    rank: int
    silent: int
    block: int
    epoch: int

    @classmethod
    def of(cls, rank: int, low: int, high: int) -> Failure | None:
        """Read the two words of an error; None if there is none."""
        if low == 0:
            return None
        return cls(rank, (low & 0xFF) - 1, low >> 8, high)

    def __str__(self) -> str:
        return (
            f"rank {self.silent} did not answer rank {self.rank} within {TIMEOUT_SECONDS} s "
            f"(exchange {self.epoch} of block {self.block})"
        )


def make_mailboxes(devices: Devices) -> tuple[jax.Array, np.ndarray]:
    """Return the devices' mailboxes and their addresses.

    The mailboxes must stay alive as long as a program uses the addresses, which are uint32
    [2 len(devices)], as Peers.addresses has them. The devices are GPUs of this process that reach
    each other's memory. Raises ValueError if they are not.
    """
    if reason := unreachable(devices):
        raise ValueError(f"all_reduce: {reason}")
    mesh = Mesh(np.array(devices), (_AXIS,))
    _open_peer_access(mesh)
    words, empty = num_bytes(len(devices)) // 4, row_region(len(devices)).slots // 4

    def new() -> jax.Array:
        index = lax.broadcasted_iota(jnp.int32, (1, words), 1)
        return jnp.where(index < empty, jnp.uint32(0), jnp.uint32(EMPTY))

    one_each = jax.shard_map(
        new, mesh=mesh, in_specs=(), out_specs=PartitionSpec(_AXIS), check_vma=False
    )
    mailboxes = jax.jit(one_each)()
    jax.block_until_ready(mailboxes)
    pointer_of = {
        shard.device: shard.data.unsafe_buffer_pointer() for shard in mailboxes.addressable_shards
    }
    pointers = np.array([pointer_of[device] for device in devices], np.uint64)
    return mailboxes, pointers.view(np.uint32)


def unreachable(devices: Devices) -> str | None:
    """Return why these devices cannot write to each other's memory, None if they can."""
    if not 2 <= len(devices) <= MAX_DEVICES:
        return f"expected 2 to {MAX_DEVICES} devices, got {len(devices)}"
    other = next((d.platform for d in devices if d.platform != "gpu"), None)
    if other is not None:
        return f"expected NVIDIA GPUs, got {other}"
    if any(device.process_index != jax.process_index() for device in devices):
        return "expected devices of one process, got devices of several"
    driver = ctypes.CDLL("libcuda.so.1")
    for device in devices:
        for peer in devices:
            if device == peer:
                continue
            can = ctypes.c_int(0)
            ordinals = device.local_hardware_id, peer.local_hardware_id
            if driver.cuDeviceCanAccessPeer(ctypes.byref(can), *ordinals) or not can.value:
                return f"expected devices with peer access, got {device} and {peer} without it"
    return None


def mailbox_error(mailboxes: jax.Array) -> str | None:
    """Return which rank did not answer, as one sentence; None while all have.

    Waits for the programs that run on the devices. After an error every later exchange of the
    device returns at once with meaningless results: only new mailboxes and new programs' inputs
    help.
    """
    words = np.asarray(_error_words(mailboxes))
    failures = (Failure.of(rank, int(low), int(high)) for rank, (low, high) in enumerate(words))
    return next((str(failure) for failure in failures if failure is not None), None)


@jax.jit
def _error_words(mailboxes: jax.Array) -> jax.Array:
    # A copy by the device: numpy.asarray of a jax.Array reads its memory once and keeps the value.
    return mailboxes[:, :2]


def _open_peer_access(mesh: Mesh) -> None:
    """Have NCCL give each device access to the others' memory, by a sum over them."""
    ones = jax.device_put(
        np.ones((mesh.size, 1024), np.float32), NamedSharding(mesh, PartitionSpec(_AXIS))
    )
    add = jax.shard_map(
        lambda x: jax.lax.psum(x, _AXIS),
        mesh=mesh,
        in_specs=PartitionSpec(_AXIS),
        out_specs=PartitionSpec(_AXIS),
        check_vma=False,
    )
    # XLA's own kernel for few bytes would leave NCCL out.
    options = {"xla_gpu_experimental_use_collective_kernels": "COLLECTIVE_KERNEL_ALL_GATHER"}
    jax.block_until_ready(jax.jit(add, compiler_options=options)(ones))
