"""Parameter tables: the arrays of a family's pytree of weights and their names in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = Any  # a pytree (dicts and lists) of arrays


@dataclass(frozen=True)
class ParamSpec:
    """One weight.

    A family's ``param_specs(cfg)`` returns a pytree of these with the structure of its params.

    name:      the tensor's name in a Hugging Face checkpoint
    shape:     our shape; a matrix is [in, out]
    axes:      a logical axis name per dimension, for sharding: "vocab", "embed", "heads",
               "kv_heads", "mlp", "experts" or None
    transpose: the checkpoint stores the matrix as [out, in]
    dtype:     a fixed dtype ("float32", "uint8"); None for the model's
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    transpose: bool = False
    dtype: str | None = None

    @property
    def checkpoint_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the checkpoint file."""
        return self.shape[::-1] if self.transpose else self.shape

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every checkpoint tensor that the weight is made of."""
        return {self.name: self.checkpoint_shape}

    def assemble(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return our array, made of the arrays of `tensors` in their order."""
        return arrays[0].T if self.transpose else arrays[0]


@dataclass(frozen=True)
class AssembledSpec(ParamSpec):
    """A weight made of several tensors (an expert each), of a part of one, or of a packed one.

    Messages call the weight `name`.

    sources: name and shape of each tensor
    build:   maps the arrays of these tensors, in this order, to our array
    """

    sources: tuple[tuple[str, tuple[int, ...]], ...] = ()
    build: Callable[[Sequence[np.ndarray]], np.ndarray] = np.stack

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        return dict(self.sources)

    def assemble(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return self.build(arrays)


@dataclass(frozen=True)
class IndexSpec(ParamSpec):
    """A table of int32 indices, each in [0, below)."""

    below: int = 1
    dtype: str | None = "int32"


def matrix(
    name: str, rows_in: int, rows_out: int, axes: tuple[str | None, str | None]
) -> ParamSpec:
    """Return a projection [in, out]; the checkpoint stores it [out, in], as torch's Linear does."""
    return ParamSpec(name, (rows_in, rows_out), axes, transpose=True)


def vector(name: str, size: int, axis: str | None = None) -> ParamSpec:
    """Return a vector: a bias or a norm's weight."""
    return ParamSpec(name, (size,), (axis,))


def init_random(
    specs: Params, key: jax.Array, dtype: jnp.dtype, scale: float | None = None
) -> Params:
    """Return random weights of the specs' shapes.

    Matrices are N(0, scale or 1/sqrt(fan_in)), biases N(0, 0.1), other vectors 1 + N(0, 0.1).

    They serve tests, benchmarks and the start of training. Zeros would hide wrong indexing.
    """
    leaves, treedef = jax.tree.flatten(specs)

    def draw(spec: ParamSpec, key: jax.Array) -> jax.Array:
        if spec.dtype == "uint8":  # MXFP4: all codes, and exponents that give weights of about 1/8
            low, high = (122, 125) if spec.name.endswith("scales") else (0, 256)
            return jax.random.randint(key, spec.shape, low, high).astype(jnp.uint8)
        if isinstance(spec, IndexSpec):
            return jax.random.randint(key, spec.shape, 0, spec.below)
        own = spec.dtype or dtype
        noise = jax.random.normal(key, spec.shape, jnp.float32)
        bias = spec.name.endswith("bias")
        if bias or len(spec.shape) == 1:
            return ((0.0 if bias else 1.0) + 0.1 * noise).astype(own)
        fan_in = spec.shape[0] if spec.transpose else spec.shape[-2 if len(spec.shape) > 2 else -1]
        return (noise * (scale or fan_in**-0.5)).astype(own)

    return treedef.unflatten(
        draw(s, k) for s, k in zip(leaves, jax.random.split(key, len(leaves)), strict=True)
    )
