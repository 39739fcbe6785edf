"""All devices' words, such as partial results of rows whose vocabulary is cut over devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import hopper
from pallas_kernels.all_gather import reference
from pallas_kernels.implementations import IMPLEMENTATIONS, runs_kernel
from pallas_kernels.peers import Peers, check_addresses

__all__ = ["IMPLEMENTATIONS", "Peers", "all_gather", "unsupported"]


def all_gather(words: jax.Array, peers: Peers, *, implementation: str) -> jax.Array:
    """Return the words of all devices on peers.axis in rank order, int32 [size, n].

    words: int32 [n], this device's

    Runs inside jax.shard_map, under the same conditions as the all_reduce op.

    Raises ValueError for shapes that do not fit together and for inputs that the implementation
    does not support.
    """
    if words.ndim != 1 or words.dtype != jnp.int32:
        raise ValueError(f"words: expected int32 [n], got {words.dtype} {list(words.shape)}")
    check_addresses(peers)

    def reason() -> str | None:
        return hopper.missing() or unsupported(words.shape[0], peers.size)

    if not runs_kernel("all_gather", implementation, reason):
        return reference.all_gather(words, peers)
    from pallas_kernels.all_gather import mosaic_gpu

    return mosaic_gpu.all_gather(words, peers)


def unsupported(count: int, size: int) -> str | None:
    """Return why the Mosaic kernel cannot run, None if it can.

    count: words of a device; size: number of devices.
    """
    if old := hopper.too_old():
        return old
    from pallas_kernels.all_gather import mosaic_gpu

    return mosaic_gpu.unsupported(count, size)
