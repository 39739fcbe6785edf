"""Calls of Mosaic GPU that several kernels share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import interpreting
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
