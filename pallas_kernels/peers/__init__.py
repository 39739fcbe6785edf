"""Parts of the kernels that exchange between devices, and where these devices reach each other.

mailbox.py  the memory of each device that its peers write to
turn.py     one exchange of a block: what it counts and waits for
ptx.py      loads, addresses and comparisons of one thread
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

from pallas_kernels.types import STATIC


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Peers:
    """The devices that exchange, as every one of them sees them inside jax.shard_map.

    addresses: uint32 [2 size], the low and the high word of each rank's mailbox, in rank order;
        make_mailboxes returns it. The reference does not read it
    axis:      name of the mesh axis they lie on
    size:      number of devices on it
    """

    addresses: jax.Array
    axis: str = field(metadata=STATIC)
    size: int = field(metadata=STATIC)


def check_addresses(peers: Peers) -> None:
    """Raise ValueError unless there are two words for each device."""
    if peers.addresses.shape != (2 * peers.size,):
        got = peers.addresses.shape
        raise ValueError(f"addresses: expected [{2 * peers.size}], two words a device, got {got}")
