"""The devices of one engine, and the rules that place an array on them.

A parameter table names the axes of each array ("vocab", "heads", ...). A rule says which of them
are cut over the devices. jax.sharding does the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MODEL = "model"  # the mesh axis of tensor parallelism

# Logical axis -> mesh axis. None: each device holds the whole axis.
MESH_AXIS_OF: dict[str, str | None] = {
    "vocab": MODEL,
    "embed": None,
    "heads": MODEL,
    "kv_heads": MODEL,
    "mlp": MODEL,
    "experts": None,  # each expert is cut by its width
}


@dataclass(frozen=True)
class DeviceMesh:
    """The devices that share the arrays of one engine.

    devices: JAX's; () for the default device. Its arrays stay uncommitted, as jnp's are, because
        jit compiles a program again when an argument becomes committed to a device.
    """

    devices: tuple[object, ...] = ()

    @property
    def size(self) -> int:
        """Number of devices."""
        return max(len(self.devices), 1)

    @cached_property
    def jax_mesh(self) -> Mesh:
        """The mesh as jax.shard_map takes it, of the one axis MODEL."""
        return Mesh(np.array(self.devices or jax.devices()[:1]), (MODEL,))

    def num_shards(self, axis: str | None) -> int:
        """Return the number of pieces that a logical axis is cut into."""
        return self.size if axis is not None and MESH_AXIS_OF[axis] is not None else 1

    def sharding(self, axes: Sequence[str | None]) -> NamedSharding:
        """Return the placement of an array with these logical axes."""
        names = (None if axis is None else MESH_AXIS_OF[axis] for axis in axes)
        return NamedSharding(self.jax_mesh, PartitionSpec(*names))

    def place(self, array: Any, axes: Sequence[str | None]) -> jax.Array:
        """Put an array with these logical axes on the devices; the copy may still be under way."""
        if not self.devices:
            return jax.device_put(array)
        return jax.device_put(array, self.sharding(axes))


DEFAULT_DEVICE = DeviceMesh()
