"""A token's embedding and its RMS norm, with which a pass of a target or a draft begins."""

from __future__ import annotations

import jax

from pallas_kernels import hopper
from pallas_kernels.embed_norm import reference
from pallas_kernels.embed_norm.inputs import Inputs
from pallas_kernels.implementations import IMPLEMENTATIONS, runs_kernel
from pallas_kernels.rms_norm import unsupported

__all__ = ["IMPLEMENTATIONS", "Inputs", "embed_norm"]


def embed_norm(inputs: Inputs, *, implementation: str = "reference") -> tuple[jax.Array, jax.Array]:
    """Return (residual, normed): what the first layer adds to, and what it reads.

    The norms are those of the rms_norm op, to the bit. Without `hidden` (a target), residual
    [rows, width] is the embedding and normed [rows, width] its norm. With `hidden` (an EAGLE-3
    head), residual [rows, width] is the hidden state, normed or not, and normed [rows, 2 width]
    is the normed embedding, then the normed hidden state.

    Results have hidden's dtype, or without it the table's. Raises ValueError for shapes that do
    not fit together and for inputs that the implementation does not support.
    """
    inputs.check()
    if not runs_kernel("embed_norm", implementation, lambda: _unsupported(inputs)):
        return reference.embed_norm(inputs)
    from pallas_kernels.embed_norm import mosaic_gpu

    return mosaic_gpu.embed_norm(inputs, pdl=not hopper.interpreting())


def _unsupported(inputs: Inputs) -> str | None:
    normed = [x for x in (inputs.table, inputs.hidden) if x is not None]
    reasons = (unsupported(x.shape[1], x.dtype) for x in normed)
    return hopper.missing() or next(filter(None, reasons), None)
