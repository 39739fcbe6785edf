"""Parameter tables: what a family's pytree of weights holds, and what each array is called in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Params = Any  # a pytree (dicts and lists) of arrays


@dataclass(frozen=True)
class ParamSpec:
    """One weight. A family's ``param_specs(cfg)`` returns a pytree of these with the structure of its params.

    name: the tensor's name in a Hugging Face checkpoint.
    shape: our shape; a matrix is [in, out], the transpose of the checkpoint's [out, in] (``transpose=True``).
    axes: a logical axis name per dimension ("vocab", "embed", "heads", "kv_heads", "mlp" or None), for sharding.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    transpose: bool = False

    @property
    def checkpoint_shape(self) -> tuple[int, ...]:
        """The shape of the tensor in the checkpoint file."""
        return self.shape[::-1] if self.transpose else self.shape


def matrix(name: str, rows_in: int, rows_out: int, axes: tuple[str | None, str | None]) -> ParamSpec:
    """A projection [in, out], stored [out, in] in the checkpoint as torch's Linear does."""
    return ParamSpec(name, (rows_in, rows_out), axes, transpose=True)


def vector(name: str, size: int, axis: str | None = None) -> ParamSpec:
    """A bias or a norm's weight."""
    return ParamSpec(name, (size,), (axis,))


def init_random(specs: Params, key: jax.Array, dtype: jnp.dtype, scale: float | None = None) -> Params:
    """Random weights of the right shapes: matrices N(0, scale or 1/sqrt(fan_in)), vectors 1 + N(0, 0.1).

    For tests and benchmarks (never zeros: zeros hide wrong indexing), and the start of training.
    """
    leaves, treedef = jax.tree.flatten(specs)

    def draw(spec: ParamSpec, key: jax.Array) -> jax.Array:
        noise = jax.random.normal(key, spec.shape, jnp.float32)
        if len(spec.shape) == 1:
            bias = spec.name.endswith("bias")
            return ((0.0 if bias else 1.0) + 0.1 * noise).astype(dtype)
        fan_in = spec.shape[0] if spec.transpose else spec.shape[-1]
        return (noise * (scale or fan_in**-0.5)).astype(dtype)

    return treedef.unflatten(draw(s, k) for s, k in zip(leaves, jax.random.split(key, len(leaves)), strict=True))
