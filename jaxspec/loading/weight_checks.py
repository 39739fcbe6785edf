"""Weights that no model can have: of another kind of number, NaN, infinite, or out of a table.

They are read on the host, where each weight is before it goes to the device.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxspec.config import ConfigError
from jaxspec.layers.mxfp4 import LARGEST_NARROW, Mxfp4Spec
from jaxspec.layers.params import CutSpec, IndexSpec, ParamSpec

CHUNK = 1 << 18  # numbers that are read twice while they are in the processor's cache


def check_weight(spec: ParamSpec, array: np.ndarray, dtype: np.dtype, where: str) -> None:
    """Raise ConfigError unless the array can be the weight of this spec.

    array: the weight as it goes to the device
    dtype: the one that it should have
    where: names the weight in the message
    """
    check_kind(array, dtype, where)
    if isinstance(spec, CutSpec):
        spec = spec.whole
    if isinstance(spec, IndexSpec):
        low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
        if low < 0 or high >= spec.below:
            raise ConfigError(
                f"{where}: expected indices in 0..{spec.below - 1}, got {low}..{high}"
            )
    elif jnp.issubdtype(dtype, jnp.floating):
        check_finite(array, where)
    elif isinstance(spec, Mxfp4Spec):
        largest = int(spec.scales(array).max(initial=0))
        if largest > LARGEST_NARROW:
            raise ConfigError(
                f"{where}: expected scales of at most {LARGEST_NARROW}, got {largest}; "
                "mxfp4 'dequantised' takes larger ones"
            )


def check_kind(array: np.ndarray, dtype: np.dtype, where: str) -> None:
    """Raise ConfigError unless the array has this dtype."""
    if array.dtype != dtype:
        is_float = jnp.issubdtype(dtype, jnp.floating)
        wanted = "floating-point numbers" if is_float else f"{dtype} numbers"
        raise ConfigError(f"{where}: expected {wanted}, got {array.dtype}")


def check_finite(array: np.ndarray, where: str) -> None:
    """Raise ConfigError unless all floating-point numbers are finite."""
    if is_finite(array):
        return
    numbers = array.astype(np.float32)
    wrong = "NaN" if np.isnan(numbers).any() else "infinity"
    raise ConfigError(
        f"{where}: expected finite numbers, got {wrong} in "
        f"{np.count_nonzero(~np.isfinite(numbers))} of {array.size} places"
    )


def is_finite(array: np.ndarray) -> bool:
    """Return whether all floating-point numbers of 16 or 32 bits are finite.

    Infinity and NaN are the largest bit patterns of their sign. NumPy compares integers faster than
    it classifies floats: bfloat16 more than ten times.
    """
    width = 8 * array.dtype.itemsize
    infinity = int(np.asarray(np.inf, array.dtype).view(f"uint{width}"))
    flat = array.ravel(order="K")  # a transposed matrix without a copy
    for first in range(0, flat.size, CHUNK):
        chunk = flat[first : first + CHUNK]
        if chunk.view(f"int{width}").max() >= infinity:
            return False
        if chunk.view(f"uint{width}").max() >= infinity + (1 << (width - 1)):
            return False
    return True
