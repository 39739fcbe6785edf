"""The mailboxes of the all-reduce kernel: one set for each group of devices of this process.

Engines on the same devices share a set. The kernel counts exchanges by block, so all devices have
to run the exchanges of all programs in one order: `launching` keeps threads from mixing theirs.
"""

from __future__ import annotations

import contextlib
import threading
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.config import RoundConfig
from pallas_kernels.peers import mailbox


class Mailboxes(NamedTuple):
    """Memory that the devices of a mesh write to each other.

    memory:    the mailboxes; it must outlive the programs that hold their addresses
    addresses: uint32 [2 * devices], on each device; see Group
    """

    memory: jax.Array
    addresses: jax.Array


_LAUNCHES = threading.Lock()
_MAKING = threading.Lock()
_mailboxes: dict[Mesh, Mailboxes] = {}
_failures: dict[Mesh, list[str]] = {}  # the sentence of each error, in their order


def launching(cfg: RoundConfig) -> contextlib.AbstractContextManager[object]:
    """Return a context in which no other thread launches a program of several devices."""
    return contextlib.nullcontext() if cfg.placement.size == 1 else _LAUNCHES


def mailboxes_of(mesh: Mesh) -> Mailboxes:
    """Return the mailboxes of a mesh; the first call makes them."""
    with _MAKING:
        if mesh not in _mailboxes:
            memory, addresses = mailbox.make_mailboxes(tuple(mesh.devices.flat))
            everywhere = NamedSharding(mesh, PartitionSpec())
            _mailboxes[mesh] = Mailboxes(memory, jax.device_put(addresses, everywhere))
        return _mailboxes[mesh]


def given_addresses(cfg: RoundConfig) -> dict[str, jax.Array]:
    """Return the keyword `addresses` of a round's programs, or none where no kernel reads them."""
    mesh = _mesh_of_kernel(cfg)
    return {} if mesh is None else {"addresses": mailboxes_of(mesh).addresses}


def num_failures(cfg: RoundConfig) -> int:
    """Return the number of errors that silent_rank has found on these devices."""
    mesh = _mesh_of_kernel(cfg)
    return 0 if mesh is None else len(_failures.get(mesh, ()))


def silent_rank(cfg: RoundConfig, seen: int) -> str | None:
    """Return which device did not answer another one, as one sentence; None while all do.

    seen: num_failures when the engine's state was made. An error since then may have been found by
        another engine on these devices, and results of both have no meaning.

    After an error the mailboxes answer no exchange, so the next program gets new ones. The old ones
    are freed once no program that writes to them is in flight.
    """
    mesh = _mesh_of_kernel(cfg)
    if mesh is None:
        return None
    memory = mailboxes_of(mesh).memory
    reason = mailbox.mailbox_error(memory)
    if reason is not None:
        with _LAUNCHES, _MAKING:  # no program is between the read of its addresses and its launch
            if mesh in _mailboxes and _mailboxes[mesh].memory is memory:
                del _mailboxes[mesh]
                _failures.setdefault(mesh, []).append(reason)
        mailbox.mailbox_error(memory)  # waits for the programs that were launched
    return next(iter(_failures.get(mesh, [])[seen:]), None)


def _mesh_of_kernel(cfg: RoundConfig) -> Mesh | None:
    """Return the devices that the all-reduce kernel serves; None where it does not run."""
    mesh = cfg.placement.mesh
    return mesh if isinstance(mesh, Mesh) and cfg.ops.all_reduce != "reference" else None
