"""Calls of Mosaic GPU that several kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import REGISTERS, interpreting
from pallas_kernels.types import Ref

if TYPE_CHECKING:
    from jax._src.pallas.mosaic_gpu.core import SomeLayout as Layout


def load(ref: Ref, layout: Layout, *, optimized: bool = True) -> jax.Array:
    """Load a whole ref in this layout.

    optimized: refuse a layout whose loads from shared memory have bank conflicts.
    """
    # jax 0.10 has one more argument, an index.
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyright: ignore[reportCallIssue]


def store(ref: Ref, value: jax.Array) -> None:
    """Store a value in a whole ref, also with bank conflicts or in parts of cache lines.

    From jax 0.12, `ref[...] = value` refuses both.
    """
    if jax.__version_info__ < (0, 12) or interpreting():
        ref[...] = value
    else:
        plgpu.store(ref, value, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True)
class RegisterShares:
    """A block's registers, divided among warpgroups that compute and a last one that copies.

    warpgroups: number of those that compute
    computing:  registers of a thread of each of them
    copying:    registers of a thread of the last one

    All warpgroups start with equal shares. One that takes more waits until others have given back
    enough. Shares that add up to more than the block has would make it wait for ever, so they are
    refused.
    """

    warpgroups: int
    computing: int
    copying: int

    def __post_init__(self) -> None:
        count = self.warpgroups + 1
        existing = count * (REGISTERS // (128 * count) // 8 * 8)
        needed = self.warpgroups * self.computing + self.copying
        if needed > existing:
            expected = f"at most {existing} for threads of {count} warpgroups, one of each"
            raise ValueError(f"registers: expected {expected}, got {needed}")

    def take(self) -> None:
        """Raise a computing warpgroup's registers to its share."""
        plgpu.set_max_registers(self.computing, action="increase")

    def give_back(self) -> None:
        """Lower the copying warpgroup's registers to its share."""
        plgpu.set_max_registers(self.copying, action="decrease")
