"""The mailboxes of the all-reduce kernel: one set for each group of devices of this process."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.config import RoundConfig
from pallas_kernels.all_reduce import mailbox


class Mailboxes(NamedTuple):
    """Memory that the devices of a mesh write to each other.

    memory:    the mailboxes; it must outlive the programs that hold their addresses
    addresses: uint32 [2 * devices], on each device; see Group
    """

    memory: jax.Array
    addresses: jax.Array


@cache
def mailboxes_of(mesh: Mesh) -> Mailboxes:
    """Return the mailboxes of a mesh; the first call makes them."""
    memory, addresses = mailbox.make_mailboxes(tuple(mesh.devices.flat))
    everywhere = NamedSharding(mesh, PartitionSpec())
    return Mailboxes(memory, jax.device_put(addresses, everywhere))


def addresses_of(cfg: RoundConfig) -> jax.Array | None:
    """Return the addresses that a round's programs take; None where no kernel reads them."""
    mesh = cfg.placement.mesh
    if not isinstance(mesh, Mesh) or cfg.ops.all_reduce == "reference":
        return None
    return mailboxes_of(mesh).addresses


def silent_rank(cfg: RoundConfig) -> str | None:
    """Return which device did not answer another one, as one sentence; None while all do."""
    mesh = cfg.placement.mesh
    if not isinstance(mesh, Mesh) or cfg.ops.all_reduce == "reference":
        return None
    return mailbox.mailbox_error(mailboxes_of(mesh).memory)


def forget_mailboxes() -> None:
    """Make new mailboxes at the next use: after an error, the old ones answer no exchange."""
    mailboxes_of.cache_clear()
