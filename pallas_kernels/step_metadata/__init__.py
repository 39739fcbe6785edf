"""The attention metadata of a pass: positions, cache slots, visible keys, rotation tables."""

from __future__ import annotations

from pallas_kernels import hopper
from pallas_kernels.implementations import IMPLEMENTATIONS, runs_kernel
from pallas_kernels.step_metadata import reference
from pallas_kernels.step_metadata.inputs import Inputs
from pallas_kernels.step_metadata.reference import PAD_SLOT, StepMetadata, last_keys

__all__ = [
    "IMPLEMENTATIONS",
    "PAD_SLOT",
    "Inputs",
    "StepMetadata",
    "last_keys",
    "step_metadata",
    "unsupported",
]


def step_metadata(inputs: Inputs, *, implementation: str = "reference") -> StepMetadata:
    """Return what follows from the requests' block tables and first positions.

    It is equal in every layer of a pass. Raises ValueError for shapes that do not fit together and
    for inputs that the implementation does not support.
    """
    inputs.check()

    def reason() -> str | None:
        queries_per_kv, frequencies = inputs.queries_per_kv, inputs.frequencies
        if queries_per_kv is None or frequencies is None:
            got = f"{queries_per_kv} and {frequencies}"
            return f"queries_per_kv and frequencies: expected both, got {got}"
        return hopper.missing() or unsupported(inputs.rows, queries_per_kv, 2 * len(frequencies))

    if not runs_kernel("step_metadata", implementation, reason):
        return reference.step_metadata(inputs)
    from pallas_kernels.step_metadata import mosaic_gpu

    return mosaic_gpu.step_metadata(inputs)


def unsupported(rows: int, queries_per_kv: int, rope_dim: int) -> str | None:
    """Return why the Mosaic kernel cannot run, None if it can."""
    if old := hopper.too_old():
        return old
    from pallas_kernels.step_metadata import mosaic_gpu

    return mosaic_gpu.unsupported(rows, queries_per_kv, rope_dim)
