"""Mailboxes: the memory of each device that its peers write to.

A mailbox is one array that XLA allocates and does not know to be written. From its start:

    error     8 bytes: 0, or the first exchange that got no answer (see `Failure`)
    counters  4 bytes a block: the epoch of the block's last exchange
    slots     for each block, parity of the epoch and sender: one row, 4 bytes of data and 4 of
              epoch in turn

A block's slots lie at the same place whatever the shape and the number of rows of a call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MAX_ROWS = 256  # a row is a block
MAX_WIDTH = 8192
MAX_DEVICES = 8
TIMEOUT_SECONDS = 10

COUNTERS = 128  # bytes from the start; the error lies before
SLOTS = COUNTERS + 4 * MAX_ROWS
SLOT_BYTES = 8 * MAX_WIDTH  # float32 values, each with an epoch

_AXIS = "rank"

# jaxlib has the type, and its stubs leave jax.Device a variable.
Devices: TypeAlias = "Sequence[jax.Device]"  # pyright: ignore[reportInvalidTypeForm]


def slot_strides(size: int) -> tuple[int, int, int]:
    """Return the bytes from a block's slots to the next block's, parity's and sender's.

    size: number of devices. A device has no slot for itself: senders are counted without it.
    """
    return 2 * (size - 1) * SLOT_BYTES, (size - 1) * SLOT_BYTES, SLOT_BYTES


def num_bytes(size: int) -> int:
    """Return the bytes of one mailbox, for so many devices."""
    return SLOTS + MAX_ROWS * slot_strides(size)[0]


@dataclass(frozen=True)
class Failure:
    """The first exchange of a device that ended without an answer, as its mailbox records it.

    rank:   the device that waited
    silent: the rank that did not answer
    block:  the row
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
            f"(all-reduce {self.epoch} of row {self.block})"
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
    sharding = NamedSharding(mesh, PartitionSpec(_AXIS))
    _open_peer_access(mesh)
    words = num_bytes(len(devices)) // 4
    mailboxes = jax.jit(
        lambda: jnp.zeros((len(devices), words), jnp.uint32), out_shardings=sharding
    )()
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
