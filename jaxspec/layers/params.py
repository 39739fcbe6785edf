"""Parameter tables: the arrays of a family's pytree of weights and their names in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import DTypeLike

from pallas_kernels.fp8_matmul import Fp8Weight
from pallas_kernels.int4_matmul import Int4Weight

Params = Any  # a pytree (dicts, lists and Weights) of arrays


@struct.dataclass
class Weight:
    """A matrix that products multiply by. In a parameter table, its field is a ParamSpec.

    values:     [..., in, out], or [..., out, in] if transposed
    transposed: static; an embedding that serves as the head is [vocab, D]
    """

    values: jax.Array
    transposed: bool = struct.field(pytree_node=False, default=False)

    @property
    def spec(self) -> ParamSpec:
        """The field of an entry in a parameter table."""
        assert isinstance(self.values, ParamSpec)
        return self.values

    @property
    def depth(self) -> int:
        """Size of `in`."""
        return self.values.shape[-1 if self.transposed else -2]

    def to_array(self, dtype: DTypeLike) -> jax.Array:
        """Return the matrix as [..., in, out], for activations of this dtype."""
        return jnp.swapaxes(self.values, -1, -2) if self.transposed else self.values


# What products multiply by. Weights of one product are of the same type.
AnyWeight: TypeAlias = Weight | Fp8Weight | Int4Weight


@dataclass(frozen=True)
class ParamSpec:
    """One array.

    A family's ``param_specs(cfg)`` returns a pytree of these with the structure of its params.

    name:      the tensor's name in a Hugging Face checkpoint
    shape:     our shape; a matrix is [in, out]
    axes:      a logical axis name per dimension, by which a mesh cuts the array
               (jaxspec/parallel/axes.py)
    transpose: the checkpoint stores the matrix as [out, in]
    dtype:     a fixed dtype ("float32", "int32"); None for the model's
    side_by_side: arrays of one width that stand side by side, such as gate and up; where a mesh
               cuts their width, it cuts each of them
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    transpose: bool = False
    dtype: str | None = None
    side_by_side: int = 1

    @property
    def checkpoint_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the checkpoint file."""
        return self.shape[::-1] if self.transpose else self.shape

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every checkpoint tensor that the weight is made of."""
        return {self.name: self.checkpoint_shape}

    def parts_along(self, dim: int) -> list[tuple[int, str | None]]:
        """Return width and logical axis of each array that stands beside others along an axis."""
        count = 1 if self.axes[dim] == "experts" else self.side_by_side
        return [(self.shape[dim] // count, self.axes[dim])] * count

    def assemble(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return our array, made of the arrays of `tensors` in their order."""
        return arrays[0].T if self.transpose else arrays[0]

    def draw(self, key: jax.Array, dtype: DTypeLike, scale: float | None) -> jax.Array:
        """Return random numbers in our shape; see init_random."""
        own = self.dtype or dtype
        noise = jax.random.normal(key, self.shape, jnp.float32)
        bias = self.name.endswith("bias")
        if bias or len(self.shape) == 1:
            return ((0.0 if bias else 1.0) + 0.1 * noise).astype(own)
        fan_in = self.shape[0] if self.transpose else self.shape[-2 if len(self.shape) > 2 else -1]
        return (noise * (scale or fan_in**-0.5)).astype(own)


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
class CutSpec(ParamSpec):
    """The first entries, along every axis, of an array that the checkpoint has larger.

    whole: the larger array
    """

    whole: ParamSpec = field(default=cast(ParamSpec, None))

    @property
    def checkpoint_shape(self) -> tuple[int, ...]:
        return self.whole.checkpoint_shape

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        return self.whole.tensors

    def assemble(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return self.whole.assemble(arrays)[tuple(slice(size) for size in self.shape)]


@dataclass(frozen=True)
class JoinedSpec(ParamSpec):
    """Projections (or biases) of one input, side by side in one array.

    XLA joins products of one input itself, and then copies their weights together in every pass:
    25 us for a layer of Llama-3-8B on an H200.

    A mesh cuts each part along its last axis (jaxspec.parallel.layout).

    parts: the arrays by themselves, in their order
    """

    parts: tuple[ParamSpec, ...] = ()

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for part in self.parts for name, shape in part.tensors.items()}

    def parts_along(self, dim: int) -> list[tuple[int, str | None]]:
        return [(part.shape[dim], part.axes[dim]) for part in self.parts]

    def assemble(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        left, made = list(arrays), []
        for part in self.parts:
            count = len(part.tensors)
            made.append(part.assemble(left[:count]))
            del left[:count]
        return np.concatenate(made, axis=-1)

    def split(self, array: jax.Array) -> tuple[jax.Array, ...]:
        """Return the parts of an array that one device holds."""
        ends = np.cumsum([part.shape[-1] for part in self.parts])[:-1].tolist()
        return tuple(jnp.split(array, ends, axis=-1))


@dataclass(frozen=True)
class IndexSpec(ParamSpec):
    """A table of int32 indices, each in [0, below)."""

    below: int = 1
    dtype: str | None = "int32"

    def draw(self, key: jax.Array, dtype: DTypeLike, scale: float | None) -> jax.Array:
        return jax.random.randint(key, self.shape, 0, self.below)


def matrix(
    name: str, rows_in: int, rows_out: int, axes: tuple[str | None, str | None]
) -> ParamSpec:
    """Return a matrix [in, out]; the checkpoint stores it [out, in], as torch's Linear does."""
    return ParamSpec(name, (rows_in, rows_out), axes, transpose=True)


def weight(spec: ParamSpec) -> Weight:
    """Return the entry of a Weight in a parameter table."""
    return Weight(cast(Any, spec))


def projection(
    name: str, rows_in: int, rows_out: int, axes: tuple[str | None, str | None]
) -> Weight:
    """Return the Weight of a matrix, for products."""
    return weight(matrix(name, rows_in, rows_out, axes))


def cut(whole: ParamSpec, spec: ParamSpec) -> ParamSpec:
    """Return spec, which is read from the first entries of `whole` where that is larger."""
    if whole.shape == spec.shape:
        return spec
    return CutSpec(
        spec.name,
        spec.shape,
        spec.axes,
        spec.transpose,
        spec.dtype,
        spec.side_by_side,
        whole=whole,
    )


def joined(name: str, parts: Sequence[ParamSpec]) -> JoinedSpec:
    """Return the arrays of parts [..., out] side by side; the axes are those of the first part."""
    shape = (*parts[0].shape[:-1], sum(part.shape[-1] for part in parts))
    return JoinedSpec(name, shape, parts[0].axes, len(shape) == 2, parts=tuple(parts))


def side_by_side(weights: AnyWeight | tuple[AnyWeight, ...]) -> tuple[AnyWeight, ...]:
    """Return the matrices of an entry that joins projections of one input.

    Blocks of fp8 that do not end where a projection ends keep the projections apart.
    """
    return weights if isinstance(weights, tuple) else (weights,)


def separate(specs: Params, params: Params) -> Params:
    """Return params with each joined array as the tuple of its parts."""

    def parts(spec: ParamSpec, array: Any) -> Any:
        return spec.split(array) if isinstance(spec, JoinedSpec) else array

    return jax.tree.map(parts, specs, params, is_leaf=is_spec)


def separate_table(specs: Params) -> Params:
    """Return a parameter table with each JoinedSpec as the tuple of its parts."""

    def parts(spec: ParamSpec) -> Any:
        return spec.parts if isinstance(spec, JoinedSpec) else spec

    return jax.tree.map(parts, specs, is_leaf=is_spec)


def join(specs: Params, params: Params) -> Params:
    """Return what `separate` takes apart, joined again."""

    def whole(spec: ParamSpec, array: Any) -> Any:
        return jnp.concatenate(array, axis=-1) if isinstance(spec, JoinedSpec) else array

    return jax.tree.map(whole, specs, params, is_leaf=is_spec)


def is_spec(x: object) -> bool:
    """Return whether x is a leaf of a parameter table."""
    return isinstance(x, ParamSpec)


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

    return treedef.unflatten(
        spec.draw(k, dtype, scale)
        for spec, k in zip(leaves, jax.random.split(key, len(leaves)), strict=True)
    )
