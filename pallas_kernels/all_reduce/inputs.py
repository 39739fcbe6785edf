"""What an all-reduce reads early, and the checks of its inputs."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from pallas_kernels.peers import Peers, check_addresses


@dataclass(frozen=True)
class Span:
    """Bytes of an array: `size` of them from `start` on, both multiples of 4096."""

    start: int
    size: int


# Arrays that the next kernel reads, each with what it reads first.
EarlyReads = tuple[tuple[jax.Array, tuple[Span, ...]], ...]


def check(x: jax.Array, peers: Peers, residual: jax.Array | None, gain: jax.Array | None) -> None:
    """Raise ValueError for shapes that do not fit together."""
    if x.ndim != 2:
        raise ValueError(f"x: expected [rows, width], got {x.shape}")
    check_addresses(peers)
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual: expected {x.shape}, got {residual.shape}")
    if gain is not None and gain.shape != x.shape[1:]:
        raise ValueError(f"gain: expected {x.shape[1:]}, got {gain.shape}")
