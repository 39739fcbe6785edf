"""What a decode pass tells its layers about where its rows stand: slots, what each row sees, the rotation's tables."""

from __future__ import annotations

import importlib
from types import ModuleType

import jax
import jax.numpy as jnp

from pallas_kernels import hopper
from pallas_kernels.step_metadata import reference
from pallas_kernels.step_metadata.reference import PAD_SLOT, StepMetadata

__all__ = ["IMPLEMENTATIONS", "PAD_SLOT", "StepMetadata", "step_metadata", "unsupported"]

IMPLEMENTATIONS = ("reference", "mosaic_gpu")


def step_metadata(
    block_table: jax.Array,
    start: jax.Array,
    num_rows: jax.Array,
    step: jax.Array | int = 0,
    *,
    rows: int,
    block_size: int,
    max_model_len: int,
    window: int | None = None,
    group: int | None = None,
    frequencies: tuple[float, ...] | None = None,
    attention_factor: float = 1.0,
    implementation: str = "reference",
) -> StepMetadata:
    """Everything that is a function of a request's block table and of where its rows start; equal in every layer of a pass.

    block_table:      int32 [batch, pages], the blocks that hold a request's tokens in order
    start:            int32 [batch], position of a request's first row, less step
    num_rows:         int32 [batch], how many of its rows are real, at least; 0 for an idle request
    step:             int32 [], added to every start
    rows:             query rows a request
    block_size:       tokens a block
    max_model_len:    no row at this position or past it is written; the same holds for the end of the block table
    window:           keys that a row sees, itself among them; None for all
    group:            query heads a KV head, for `bounds`; None leaves them out
    frequencies:      the rotation's inverse frequencies, rope_dim / 2 of them, in float32's precision; None leaves cos and sin out
    attention_factor: on cos and sin

    Raises ValueError for shapes that do not fit together and for what the implementation does not support, with the reason.
    """
    batch = start.shape[0]
    for name, array, shape in (
        ("block_table", block_table, (batch, block_table.shape[-1])),
        ("start", start, (batch,)),
        ("num_rows", num_rows, (batch,)),
        ("step", jnp.asarray(step, jnp.int32) if isinstance(step, int) else step, ()),
    ):
        if array.shape != shape or array.dtype != jnp.int32:
            raise ValueError(f"{name}: expected int32 {shape}, got {array.dtype} {array.shape}")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: expected one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    sizes = {
        "rows": rows,
        "block_size": block_size,
        "max_model_len": max_model_len,
        "window": window,
    }
    options = sizes | {
        "group": group,
        "frequencies": frequencies,
        "attention_factor": attention_factor,
    }
    if implementation == "reference":
        return reference.step_metadata(block_table, start, num_rows, step, **options)
    if group is None or frequencies is None:
        raise ValueError(
            f"group and frequencies: expected both for implementation {implementation!r}, got {group} and {frequencies}"
        )
    reason = hopper.missing() or unsupported(rows, group, 2 * len(frequencies))
    if reason:
        raise ValueError(f"step_metadata, implementation {implementation!r}: {reason}")
    return _mosaic_gpu().step_metadata(
        block_table, start, num_rows, jnp.asarray(step, jnp.int32), **options
    )


def unsupported(rows: int, group: int, rope_dim: int) -> str | None:
    """Why the Mosaic kernel cannot run, None if it can."""
    return hopper.too_old() or _mosaic_gpu().unsupported(rows, group, rope_dim)


def _mosaic_gpu() -> ModuleType:
    # Imported on use: jax 0.10, the floor on CPU, has another Mosaic.
    return importlib.import_module("pallas_kernels.step_metadata.mosaic_gpu")
