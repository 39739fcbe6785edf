"""Compare the reference of the all-reduce with numpy on the devices of this process, in rank order.

python -m tests.kernels.all_reduce_on_devices; XLA_FLAGS says how many devices.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.all_reduce import Peers, all_reduce
from pallas_kernels.all_reduce.shapes import Shape, make_inputs

AXIS, EPS = "model", 1e-5
SIZE = len(jax.devices())
MESH = Mesh(np.array(jax.devices()), (AXIS,))
EACH, ALL = PartitionSpec(AXIS), PartitionSpec()


def reduced(x: jax.Array, **arrays: jax.Array) -> list[np.ndarray]:
    """Return each result as [devices, rows, width] float32."""

    def local(addresses: jax.Array, x: jax.Array, arrays: dict[str, Any]) -> list[jax.Array]:
        peers = Peers(addresses=addresses, axis=AXIS, size=SIZE)
        found = all_reduce(x[0], peers, **arrays, eps=EPS, implementation="reference")
        return [result[None] for result in jax.tree.leaves(found)]

    call = jax.shard_map(
        local, mesh=MESH, in_specs=(ALL, EACH, ALL), out_specs=EACH, check_vma=False
    )
    found = jax.jit(call)(jnp.zeros(2 * SIZE, jnp.uint32), x, arrays)
    assert all(result.dtype == arrays.get("residual", x).dtype for result in found)
    return [np.asarray(result.astype(jnp.float32)) for result in found]


def bfloat16(values: np.ndarray) -> np.ndarray:
    return values.astype(jnp.bfloat16).astype(np.float32)


def in_rank_order(x: jax.Array) -> np.ndarray:
    first, *others = np.asarray(x.astype(jnp.float32))
    for share in others:
        first = first + share
    return first


def check_sum(dtype: jnp.dtype) -> None:
    """Shares of 2^24, 1, -2^24 and 1: each order of them has a sum of its own in float32."""
    x = jnp.array([2.0**24, 1.0, -(2.0**24), 1.0][:SIZE], dtype)
    x = jnp.broadcast_to(x[:, None, None], (SIZE, 3, 256))
    (found,) = reduced(x)
    expected = np.asarray(jnp.asarray(in_rank_order(x)).astype(dtype).astype(jnp.float32))
    np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))


def check_norms(dtype: jnp.dtype) -> None:
    made = make_inputs(Shape(5, 256, dtype), SIZE, seed=1)
    found, normed = reduced(made["x"], residual=made["residual"], gain=made["gain"])
    residual, gain = (np.asarray(made[name].astype(jnp.float32)) for name in ("residual", "gain"))
    expected = bfloat16(residual + bfloat16(in_rank_order(made["x"])))
    np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))
    assert (expected != bfloat16(residual + in_rank_order(made["x"]))).any()  # two roundings
    scale = 1 / np.sqrt(np.mean(expected.astype(np.float64) ** 2, axis=1, keepdims=True) + EPS)
    # Two roundings to bfloat16, half a unit in the last place (2^-8) each.
    np.testing.assert_allclose(
        normed, np.broadcast_to(expected * scale * gain, normed.shape), rtol=2 * 2.0**-8 * 1.01
    )


def check_rounded_share(dtype: jnp.dtype) -> None:
    """XLA adds in float32. A share is rounded for its own device as for the others."""
    rng = np.random.default_rng(2)
    parts = jnp.asarray(rng.normal(size=(SIZE, 2, 8, 256)), dtype)

    def local(parts: jax.Array) -> jax.Array:
        peers = Peers(addresses=jnp.zeros(2 * SIZE, jnp.uint32), axis=AXIS, size=SIZE)
        return all_reduce(parts[0, 0] + parts[0, 1], peers, implementation="reference")[None]

    call = jax.shard_map(local, mesh=MESH, in_specs=EACH, out_specs=EACH, check_vma=False)
    found = np.asarray(jax.jit(call)(parts).astype(jnp.float32))
    np.testing.assert_array_equal(found, np.broadcast_to(found[:1], found.shape))


for check in (check_sum, check_norms, check_rounded_share):
    for each in map(partial(jnp.dtype), (jnp.bfloat16, jnp.float32)):
        check(each)
print(f"equal on {SIZE} devices")
