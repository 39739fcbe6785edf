"""Checkpoint tensors -> a pytree of jax arrays, strictly.

A tensor that is missing, unexpected or misshapen is an error that names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import ConfigError
from jaxspec.layers.params import JoinedSpec, Params, ParamSpec, is_spec
from jaxspec.layers.quantized.table import QuantizedSpec
from jaxspec.loading.checkpoint import LazyTensor
from jaxspec.loading.weight_checks import check_kind, check_weight
from jaxspec.parallel.axes import ONCE
from jaxspec.parallel.layout import ONE_DEVICE_LAYOUT, Layout

SHOWN = 5  # names listed in a message


def ignore_nothing(name: str) -> bool:
    return False


def check_shapes(
    specs: Params,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    ignore: Callable[[str], bool] = ignore_nothing,
    source: str = "checkpoint",
) -> None:
    """Compare a parameter table with the names and shapes of a checkpoint; read no weights.

    ignore: names that the checkpoint may have and the table lacks (a tied lm_head, rotary tables).
        It never excuses a missing one.

    ConfigError names each difference.
    """
    wanted = {
        name: shape
        for spec in jax.tree.leaves(specs, is_leaf=is_spec)
        for name, shape in spec.tensors.items()
    }
    missing = [name for name in wanted if name not in shapes]
    extra = [name for name in shapes if name not in wanted and not ignore(name)]
    misshapen = [
        f"{name} (expected {shape}, got {tuple(shapes[name])})"
        for name, shape in wanted.items()
        if name in shapes and tuple(shapes[name]) != shape
    ]
    problems = [
        _listed(*p)
        for p in (("missing", missing), ("unexpected", extra), ("misshapen", misshapen))
        if p[1]
    ]
    if problems:
        raise ConfigError(
            f"{source}: expected {len(wanted)} tensors by its config, got {len(shapes)}: "
            + "; ".join(problems)
        )


def load_params(
    specs: Params,
    tensors: Mapping[str, LazyTensor],
    dtype: jnp.dtype | type | str,
    layout: Layout = ONE_DEVICE_LAYOUT,
    *,
    ignore: Callable[[str], bool] = ignore_nothing,
    source: str = "checkpoint",
) -> Params:
    """Read every tensor of the table, checked as in check_shapes, and place it by layout.

    Floats are cast to ``dtype``, and matrices transposed to our [in, out]. Integers become int32,
    jax's default; a value that does not fit is an error. Booleans and uint8 (packed weights) stay.
    Values that cannot be right are errors too (check_weight). One array at a time goes to the
    devices, so that the host never holds the whole model beside it.
    """
    check_shapes(
        specs,
        {name: tensor.shape for name, tensor in tensors.items()},
        ignore=ignore,
        source=source,
    )

    check_cuts(specs, layout, source)
    loaded = 0

    def load(spec: ParamSpec) -> jax.Array:
        nonlocal loaded
        wanted, where = np.dtype(spec.dtype or dtype), f"{source}: {spec.name}"
        read = [tensors[name].read() for name in spec.tensors]
        if isinstance(spec, JoinedSpec):
            read = [
                _cast_part(part, wanted, f"{source}: {name}")
                for name, part in zip(spec.tensors, read, strict=True)
            ]
        array = _cast(spec.assemble(read), wanted, where)
        if array.shape != spec.shape:
            raise ConfigError(f"{where}: expected the shape {spec.shape}, got {array.shape}")
        check_weight(spec, array, wanted, where)
        if isinstance(spec, QuantizedSpec):
            spec.check_zero_scales(array, lambda name: tensors[name].read())
        try:  # waiting bounds the host copies in flight to one
            on_device = jax.block_until_ready(layout.place(array, spec))
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" not in str(e):
                raise
            total = sum(_num_bytes(s, dtype) for s in jax.tree.leaves(specs, is_leaf=is_spec))
            raise ConfigError(
                f"{source}: expected {total / 1e9:.1f} GB of free device memory for its weights, "
                f"got room for {loaded / 1e9:.1f} GB of them; take a smaller target, "
                "dtype bfloat16, or more devices"
            ) from e
        loaded += array.nbytes
        return on_device

    return jax.tree.map(load, specs, is_leaf=is_spec)


def check_cuts(specs: Params, layout: Layout, source: str) -> None:
    """Raise ConfigError unless the devices can share every array of the table evenly."""
    for spec in jax.tree.leaves(specs, is_leaf=is_spec):
        for dim, axis in enumerate(spec.axes):
            unit = (
                spec.uneven_pieces(dim, layout.num_pieces)
                if isinstance(spec, QuantizedSpec)
                else None
            )
            if unit is not None:
                raise ConfigError(
                    f"tensor_parallel_size: expected pieces of whole blocks of {unit} weights "
                    f"along the {axis} axis of {spec.name} in {source}, got {layout.size} devices"
                )
            pieces = [
                (layout.padded_width(width, own), layout.num_pieces(own))
                for width, own in spec.parts_along(dim)
            ]
            if layout.is_cut(axis) and axis != ONCE and any(w % n for w, n in pieces):
                raise ConfigError(
                    f"tensor_parallel_size: expected a divisor of {spec.shape[dim]}, the "
                    f"{axis} axis of {spec.name} in {source}, got {layout.size}"
                )


def _num_bytes(spec: ParamSpec, dtype: jnp.dtype | type | str) -> int:
    return math.prod(spec.shape) * np.dtype(spec.dtype or dtype).itemsize


def _cast(array: np.ndarray, dtype: np.dtype, where: str) -> np.ndarray:
    if jnp.issubdtype(array.dtype, jnp.floating) and jnp.issubdtype(dtype, jnp.floating):
        return array.astype(dtype, copy=False)
    if array.dtype == np.uint8:
        return array
    if jnp.issubdtype(array.dtype, jnp.integer):
        bounds = np.iinfo(np.int32)
        if array.size and not (bounds.min <= array.min() and array.max() <= bounds.max):
            raise ConfigError(
                f"{where}: expected integers that fit int32, "
                f"got values in [{array.min()}, {array.max()}]"
            )
        return array.astype(np.int32, copy=False)
    return array


def _cast_part(array: np.ndarray, dtype: np.dtype, where: str) -> np.ndarray:
    """Cast one of the arrays that are joined.

    NumPy joins integers with floats as floats, and some kinds of floats with none.
    """
    cast = _cast(array, dtype, where)
    check_kind(cast, dtype, where)
    return cast


def _listed(what: str, names: Iterable[str]) -> str:
    names = sorted(names)
    more = ", ..." if len(names) > SHOWN else ""
    return f"{len(names)} {what}: {', '.join(names[:SHOWN])}{more}"
