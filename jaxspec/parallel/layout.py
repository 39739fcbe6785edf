"""Layout: which piece of each array of one model a device holds.

A mesh cuts an array along its logical axes. The array of a mesh holds the devices' pieces in their
order, so that jax.sharding can cut it evenly. This order differs from the model's own in two cases.
Arrays side by side (queries, keys and values; gate and up) are cut one by one:
[q_0 | k_0 | v_0 | q_1 | k_1 | v_1]. And a piece that several devices need stands there several
times, such as a KV head of a model with fewer KV heads than devices.

A row's bits must not depend on the number of rows, and only kernels promise that. Those for few
rows take depths and widths that are multiples of GRAIN. Where an axis of PADDED has such a size and
its pieces have not, zeros follow, which add nothing to a row's sum. Three cases have no zeros:
outputs of cut heads, an axis of several sizes, and models with any weight in fp8 or int4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxspec.parallel.axes import ONCE, axes_of
from jaxspec.parallel.mesh import MODEL, Device

Config = TypeVar("Config")
AnyMesh = Mesh | AbstractMesh  # a plan needs no devices
GRAIN = 64  # rows and columns of a weight that a kernel multiplies at a time
PADDED = ("expert_mlp", "head_out", "mlp")  # axes that may have zeros at their end
Parts = Sequence[tuple[int, str | None]]  # (width, logical axis) of arrays side by side


class CutArray(Protocol):
    """The part of a ParamSpec that a layout reads."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def axes(self) -> tuple[str | None, ...]: ...

    def parts_along(self, dim: int) -> Parts: ...


@dataclass(frozen=True)
class Layout:
    """The pieces of one model's arrays.

    mesh:   the devices; None for the default device. Its arrays stay uncommitted, as jnp's are,
            because jit compiles a program again when an argument becomes committed to a device.
    pieces: logical axis and number of different pieces, for each axis that is cut
    padded: logical axis, its size in the model, and its size with zeros at the end, for each axis
            that has such zeros
    """

    mesh: AnyMesh | None = None
    pieces: tuple[tuple[str, int], ...] = ()
    padded: tuple[tuple[str, int, int], ...] = ()

    @classmethod
    def of(cls, config: Any, mesh: AnyMesh | None, *, expert_parallel: bool = False) -> Layout:
        """Return the layout of a model's arrays on a mesh.

        Heads that the devices cannot share evenly stay whole, and every device attends with all of
        them. The projection after attention is cut all the same.

        expert_parallel: each device holds whole experts, instead of a piece of every expert
        """
        if mesh is None:
            return cls()
        size, sizes = mesh.size, _sizes(config)
        pieces = dict.fromkeys(("vocab", "head_out", "mlp"), size)
        pieces |= {"experts": size} if expert_parallel else {"expert_mlp": size, ONCE: size}
        kv_heads = sizes.get("kv_heads", [])
        of_kv = {size if n % size == 0 else n for n in kv_heads if n % size == 0 or size % n == 0}
        fit = all(n % size == 0 or size % n == 0 for n in kv_heads) and len(of_kv) <= 1
        if fit and all(n % size == 0 for n in sizes.get("heads", [])):
            pieces |= {"heads": size, "kv_heads": min(of_kv, default=size)}
        # Outputs of cut heads are pieces of whole heads, which cannot be longer.
        axes = [a for a in PADDED if a in pieces and not (a == "head_out" and "heads" in pieces)]
        # The blocks of fp8 and int4 scales say where such weights may be cut.
        padded = () if _is_quantised(config) else _padded(axes, sizes, size)
        return cls(mesh, tuple(sorted(pieces.items())), padded)

    @classmethod
    def replicated(cls, mesh: AnyMesh | None) -> Layout:
        """Return the layout of a draft whose layers every device runs whole.

        Its embedding and head are cut all the same: they may be the target's.
        """
        return cls() if mesh is None else cls(mesh, (("vocab", mesh.size),))

    @property
    def size(self) -> int:
        """Number of devices."""
        return 1 if self.mesh is None else self.mesh.size

    def num_pieces(self, axis: str | None) -> int:
        """Return the number of different pieces of a logical axis, 1 if it is whole."""
        return dict(self.pieces).get(axis or "", 1)

    def is_cut(self, axis: str | None) -> bool:
        """Return whether a device holds a piece of this axis only."""
        return self.num_pieces(axis) > 1

    @property
    def without_zeros(self) -> Layout:
        """The layout without the zeros at an axis' end, which no product needs."""
        return replace(self, padded=())

    def padded_width(self, width: int, axis: str | None) -> int:
        """Return the width, in any unit, of an array along a logical axis with its zeros."""
        for name, size, padded in self.padded:
            if name == axis:
                assert width * padded % size == 0, (width, axis)
                return width * padded // size
        return width

    def piece_width(self, width: int, axis: str | None) -> int:
        """Return the width of a device's piece of an array along a logical axis."""
        return self.padded_width(width, axis) // self.num_pieces(axis)

    def partition(self, axes: Sequence[str | None]) -> PartitionSpec:
        """Return how the mesh cuts an array with these logical axes."""
        return PartitionSpec(*(MODEL if self.is_cut(axis) else None for axis in axes))

    def sharding(self, axes: Sequence[str | None]) -> NamedSharding | None:
        """Return the placement of an array with these logical axes; None for the default device."""
        return None if self.mesh is None else NamedSharding(self.mesh, self.partition(axes))

    def piece_of(self, spec: CutArray) -> tuple[int, ...]:
        """Return the shape of the piece of an array that a device holds."""

        def size(dim: int) -> int:
            if not self.is_cut(spec.axes[dim]) or spec.axes[dim] == ONCE:
                return spec.shape[dim]
            return sum(self.piece_width(width, axis) for width, axis in spec.parts_along(dim))

        return tuple(map(size, range(len(spec.shape))))

    def shape_of(self, spec: CutArray) -> tuple[int, ...]:
        """Return the shape of an array on all devices together, copies of pieces included."""
        pieces = zip(self.piece_of(spec), spec.axes, strict=True)
        return tuple(n * self.size if self.is_cut(axis) else n for n, axis in pieces)

    def on_device(self, config: Config) -> Config:
        """Return a model's config as one device sees it: its sizes are those of the pieces."""
        if self.size == 1:
            return config
        changes: dict[str, Any] = {}
        for each in fields(config):  # type: ignore[arg-type]
            value, axis = getattr(config, each.name), axes_of(config).get(each.name)
            if axis is not None:
                changes[each.name] = self.piece_width(value, axis)
            elif is_dataclass(value):
                changes[each.name] = self.on_device(value)
        return replace(config, **changes)  # type: ignore[type-var]

    def place(self, array: Any, spec: CutArray) -> jax.Array:
        """Put an array, as one device would hold it, on the devices.

        The copy may still be under way.
        """
        if self.mesh is None:
            return jax.device_put(array)
        for dim, axis in enumerate(spec.axes):
            if self.is_cut(axis):
                array = self.in_device_order(np.asarray(array), dim, spec.parts_along(dim))
        return put(array, NamedSharding(self.mesh, self.partition(spec.axes)))

    def in_device_order(self, array: np.ndarray, dim: int, parts: Parts) -> np.ndarray:
        """Return an array with the pieces of `parts`, along an axis, in the devices' order."""
        if parts[0][1] == ONCE:
            others = np.zeros_like(array)
            return np.concatenate([array, *[others] * (self.size - 1)], axis=dim)
        split = np.split(array, np.cumsum([width for width, _ in parts])[:-1], axis=dim)
        pieces = [
            self._pieces(part, dim, axis) for part, (_, axis) in zip(split, parts, strict=True)
        ]
        ordered = [
            of_part[device * len(of_part) // self.size]
            for device in range(self.size)
            for of_part in pieces
        ]
        blocks = [block for piece in ordered for block in piece]
        if len(parts) == 1 and len(blocks) == len(pieces[0]):
            return array
        return np.concatenate(blocks, axis=dim)

    def _pieces(self, array: np.ndarray, dim: int, axis: str | None) -> list[list[np.ndarray]]:
        """Return the pieces of an array along a logical axis, as views of it.

        A piece is a list of blocks side by side: zeros follow where the array ends.
        """
        width = self.piece_width(array.shape[dim], axis)
        pieces = np.split(array, range(width, width * self.num_pieces(axis), width), axis=dim)

        def with_zeros(piece: np.ndarray) -> list[np.ndarray]:
            shape = list(piece.shape)
            shape[dim] = width - shape[dim]
            return [piece, np.zeros(shape, piece.dtype)] if shape[dim] else [piece]

        return [with_zeros(piece) for piece in pieces]


ONE_DEVICE_LAYOUT = Layout()


def put(array: Any, sharding: NamedSharding | None) -> jax.Array:
    """Copy an array, which every process has whole, to devices; None: to the default device.

    device_put would compare the copies of several processes, which takes a collective.
    """
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    whole = np.asarray(array)
    return jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)


def _padded(
    axes: Sequence[str], sizes: dict[str, list[int]], count: int
) -> tuple[tuple[str, int, int], ...]:
    """Return Layout.padded of devices that share the axes; an axis of several sizes has no zeros.

    A size of 0 says that a model has no such array.
    """
    found, whole = [], GRAIN * count
    for axis in axes:
        different = {size for size in sizes.get(axis, []) if size}
        if len(different) != 1:
            continue
        (size,) = different
        if size % GRAIN == 0 and size % whole:
            found.append((axis, size, -(-size // whole) * whole))
    return tuple(found)


def _is_quantised(config: Any) -> bool:
    """Return whether a config, or one that it holds, has weights in fp8 or int4."""
    if getattr(getattr(config, "quantization", None), "forms", ()):
        return True
    held = (getattr(config, each.name) for each in fields(config))
    return any(is_dataclass(value) and _is_quantised(value) for value in held)


def _sizes(config: Any) -> dict[str, list[int]]:
    """Return the sizes of each logical axis in a config and in the configs that it holds."""
    found: dict[str, list[int]] = {}
    for name, axis in axes_of(config).items():
        found.setdefault(axis, []).append(getattr(config, name))
    for each in fields(config):
        value = getattr(config, each.name)
        if is_dataclass(value):
            for name, sizes in _sizes(value).items():
                found.setdefault(name, []).extend(sizes)
    return found


def bytes_on_device(tree: Any) -> int:
    """Return the bytes that the arrays of a tree take on one device."""
    return sum(
        math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree)
    )


@dataclass(frozen=True)
class Placement:
    """Where the models of one engine are; a Layout says so of one model.

    The round of one device (RoundConfig.on_device) has no mesh: its models are pieces already.

    mesh:             its devices; None for the default device
    expert_parallel:  each device holds whole experts, instead of a piece of every expert
    replicates_draft: every device runs the draft's layers whole
    """

    mesh: AnyMesh | None = None
    expert_parallel: bool = False
    replicates_draft: bool = False

    @property
    def size(self) -> int:
        """Number of devices."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices, of which each runs the engine's programs."""
        if self.mesh is None:
            return (jax.local_devices()[0],)
        assert isinstance(self.mesh, Mesh)
        return tuple(self.mesh.devices.flat)

    @property
    def spans_processes(self) -> bool:
        """Whether several processes have the devices, so that each runs the same programs."""
        if not isinstance(self.mesh, Mesh):
            return False
        return any(d.process_index != jax.process_index() for d in self.mesh.devices.flat)

    def target(self, config: Any) -> Layout:
        """Return the layout of the target's arrays."""
        return Layout.of(config, self.mesh, expert_parallel=self.expert_parallel)

    def draft(self, config: Any) -> Layout:
        """Return the layout of the draft's arrays."""
        return Layout.replicated(self.mesh) if self.replicates_draft else self.target(config)


ONE_PLACE = Placement()
