"""Run the sampling kernels in Mosaic's interpreter on pieces of the vocabulary, on two devices.

Arguments are names of cases. The tokens have to be those of the reference on whole rows, and the
same on both devices.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels import gumbel_sample, rejection_sampling
from pallas_kernels.gumbel_sample import shapes as gumbel_shapes
from pallas_kernels.rejection_sampling import shapes as rejection_shapes
from pallas_kernels.rejection_sampling.shapes import Shape
from pallas_kernels.vocab_shards import VocabShards
from tests.kernels.interpreter import interpreted

AXIS, COUNT = "model", 2
REJECTION = {  # two pieces of each device's tokens, the second moved back
    "greedy": Shape(6, 3, 800, None, sampled=False, mixed=True),
    "probabilistic": Shape(6, 3, 800, 520, drawn=True, mixed=True),
    "probabilistic, same vocabulary": Shape(6, 2, 800, 800, mixed=True),
    "probabilistic, one-hot": Shape(40, 1, 512, None, drawn=True, mixed=True),
    "block": Shape(6, 4, 800, 520, "block", drawn=True, mixed=True),
    "block, same vocabulary": Shape(6, 3, 800, 800, "block", mixed=True),
    "block, one draft": Shape(6, 1, 800, 256, "block", mixed=True),
    "synthetic": Shape(6, 3, 800, None, "synthetic", drawn=True, mixed=True),
    "plain": Shape(6, 0, 800, None, drawn=True, mixed=True),
}
GUMBEL = {
    "target": gumbel_shapes.Shape(6, 1554, mixed=True),
    "draft": gumbel_shapes.Shape(6, 1024, 1777, mixed=True),
}


def cut(inputs: Any) -> Any:
    """The specs of an op's inputs: logits and noise that are numbers lie in pieces."""
    specs = jax.tree.map(lambda _: PartitionSpec(), inputs)
    pieces = {}
    for name in ("logits", "target_logits", "draft_logits", "recover_noise"):
        array = getattr(inputs, name, None)
        if isinstance(array, jax.Array | jax.ShapeDtypeStruct):
            pieces[name] = PartitionSpec(*(None,) * (array.ndim - 1), AXIS)
    return replace(specs, **pieces)


def on_devices(op: Callable[..., Any], inputs: Any) -> Any:
    """The op's results [COUNT, ...] by its kernels."""
    shards = VocabShards(AXIS, COUNT)

    def on_device(inputs: Any) -> Any:
        found = op(replace(inputs, shards=shards), implementation="mosaic_gpu")
        return jax.tree.map(lambda x: x[None], found)

    mesh = Mesh(np.array(jax.devices()[:COUNT]), (AXIS,))
    program = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(cut(inputs),),
        out_specs=PartitionSpec(AXIS),
        check_vma=False,
    )
    with interpreted():
        return jax.tree.map(np.asarray, jax.jit(program)(inputs))


def check(name: str, op: Callable[..., Any], inputs: Any) -> None:
    inputs = jax.tree.map(jnp.asarray, inputs)
    wanted = jax.tree.leaves(jax.jit(op)(inputs))
    for found, expected in zip(jax.tree.leaves(on_devices(op, inputs)), wanted, strict=True):
        for device in found:
            np.testing.assert_array_equal(device, expected, err_msg=name)
    print(name, flush=True)


def main(names: list[str]) -> None:
    for name in names:
        if name in GUMBEL:
            inputs = gumbel_shapes.make_inputs(GUMBEL[name], seed=1)
            check(name, gumbel_sample.gumbel_sample, inputs)
        else:
            inputs = rejection_shapes.make_inputs(REJECTION[name], seed=1)
            check(name, rejection_sampling.rejection_sample, inputs)


if __name__ == "__main__":
    main(sys.argv[1:])
