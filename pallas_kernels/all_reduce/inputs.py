"""Where the devices of an all-reduce reach each other, and the checks of its inputs."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

from pallas_kernels.types import STATIC


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Peers:
    """The devices that reduce together, as every one of them sees them inside jax.shard_map.

    addresses: uint32 [2 size], the low and the high word of each rank's mailbox, in rank order;
        make_mailboxes returns it. The reference does not read it
    axis:      name of the mesh axis over which is summed
    size:      number of devices on it
    """

    addresses: jax.Array
    axis: str = field(metadata=STATIC)
    size: int = field(metadata=STATIC)


def check(x: jax.Array, peers: Peers, residual: jax.Array | None, gain: jax.Array | None) -> None:
    """Raise ValueError for shapes that do not fit together."""
    if x.ndim != 2:
        raise ValueError(f"x: expected [rows, width], got {x.shape}")
    if peers.addresses.shape != (2 * peers.size,):
        got = peers.addresses.shape
        raise ValueError(f"addresses: expected [{2 * peers.size}], two words a device, got {got}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual: expected {x.shape}, got {residual.shape}")
    if gain is not None and gain.shape != x.shape[1:]:
        raise ValueError(f"gain: expected {x.shape[1:]}, got {gain.shape}")
