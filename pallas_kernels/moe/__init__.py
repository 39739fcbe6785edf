"""The experts of a mixture at a decode step: each row's chosen ones, weighted and summed."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import jax

from pallas_kernels import hopper
from pallas_kernels.moe import reference

IMPLEMENTATIONS = ("reference", "mosaic_gpu")
MAX_ROWS = 256  # that the kernel takes
GATES = ("silu", "clamped", "clamped_silu")


def experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    gate: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    implementation: str = "reference",
) -> jax.Array:
    """sum over k of weights[row, k] * down(act(gate_up(x[row]))) of expert ids[row, k].

    x:            [rows, D]
    ids, weights: int32 [rows, at least top_k] (the columns past top_k are not looked at) and float32 [rows, top_k]; a row names no expert
                  twice
    gate_up:      [experts, D, 2 * intermediate], gate first; gate_up_bias [experts, 2 * intermediate]
    down:         [experts, intermediate, D]; down_bias [experts, D]
    gate:         "silu" (SwiGLU), "clamped" (gpt-oss: gate at most `limit`, up within it, (up + 1) * gate * sigmoid(alpha * gate)), or
                  "clamped_silu" (SwiGLU of halves clamped in the same way)

    Products accumulate in float32; they, with their bias, and the activation are cast to x's dtype. Returns [rows, D] in x's dtype. Raises
    ValueError for shapes that do not fit together and for what the implementation does not support, with the reason.
    """
    count, depth, size = gate_up.shape[0], x.shape[-1], down.shape[1]
    expected = {
        "gate_up": (count, depth, 2 * size),
        "down": (count, size, depth),
        "x": (weights.shape[0], depth),
    }
    expected |= {"gate_up_bias": (count, 2 * size), "down_bias": (count, depth)}
    arrays = {
        "gate_up": gate_up,
        "down": down,
        "x": x,
        "gate_up_bias": gate_up_bias,
        "down_bias": down_bias,
    }
    for name, array in arrays.items():
        if array is not None and array.shape != expected[name]:
            raise ValueError(f"{name}: expected {expected[name]}, got {array.shape}")
    if ids.shape[0] != weights.shape[0] or ids.shape[1] < weights.shape[1]:
        raise ValueError(f"ids: expected {weights.shape} or more columns, got {ids.shape}")
    if gate not in GATES:
        raise ValueError(f"gate: expected one of {', '.join(GATES)}, got {gate!r}")
    options: dict[str, Any] = {
        "gate_up_bias": gate_up_bias,
        "down_bias": down_bias,
        "gate": gate,
        "alpha": alpha,
        "limit": limit,
    }
    if implementation == "reference":
        return reference.experts(x, ids[:, : weights.shape[1]], weights, gate_up, down, **options)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: expected one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    reason = hopper.missing() or unsupported(x.shape[0], weights.shape[1], gate_up, down, x.dtype)
    if reason:
        raise ValueError(f"moe, implementation {implementation!r}: {reason}")
    return _mosaic_gpu().experts(x, ids, weights, gate_up, down, **options)


def unsupported(rows: int, top_k: int, gate_up: Any, down: Any, dtype: Any) -> str | None:
    """Why the Mosaic kernel cannot multiply `rows` rows of this dtype by these weights (by shape and dtype), None if it can."""
    return hopper.too_old() or _mosaic_gpu().unsupported(rows, top_k, gate_up, down, dtype)


def _mosaic_gpu() -> ModuleType:
    # Imported on use: jax 0.10, the floor on CPU, has another Mosaic.
    return importlib.import_module("pallas_kernels.moe.mosaic_gpu")
