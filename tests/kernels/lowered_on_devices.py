"""Run functions of lowered_once on two devices: they embed the export of one device.

python -m tests.kernels.lowered_on_devices prints how often each function was traced.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels import lowered_once as module
from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.types import STATIC

module.PLATFORM = "cpu"
TRACED: list[str] = []


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shards:
    """As VocabShards: an argument that names the axis of an exchange."""

    first: jax.Array
    axis: str = field(metadata=STATIC)


@lowered_once()
def doubled(x: jax.Array) -> jax.Array:
    TRACED.append("doubled")
    return 2 * x


@lowered_once()
def halved(x: jax.Array) -> jax.Array:
    TRACED.append("halved")
    return x / 2


@lowered_once()
def summed(x: jax.Array, shards: Shards) -> jax.Array:
    TRACED.append("summed")
    return lax.psum(x + shards.first, shards.axis)


def main() -> None:
    mesh = Mesh(np.array(jax.devices()), ("model",))
    pieces, whole = PartitionSpec("model"), PartitionSpec()
    spread = partial(jax.shard_map, mesh=mesh, check_vma=False)
    x = np.arange(8.0, dtype=np.float32)

    def both(x: jax.Array, more: Any) -> tuple[jax.Array, jax.Array]:
        return doubled(x) + halved(x) + more, summed(x, Shards(jnp.float32(1), "model"))

    np.testing.assert_array_equal(jax.jit(halved)(x[:4]), x[:4] / 2)  # one device, then both
    for more in (1.0, 2.0):  # two programs
        program = jax.jit(
            spread(partial(both, more=more), in_specs=pieces, out_specs=(pieces, whole))
        )
        own, total = program(x)
        np.testing.assert_array_equal(own, 2 * x + x / 2 + more)
        np.testing.assert_array_equal(total, x[:4] + x[4:] + 2)
    np.testing.assert_array_equal(jax.jit(doubled)(x[:4]), 2 * x[:4])  # both, then one
    print(*map(TRACED.count, ("doubled", "halved")), TRACED.count("summed") > 0)


if __name__ == "__main__":
    main()
