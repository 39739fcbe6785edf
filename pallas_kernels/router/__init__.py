"""The experts that each row takes, and their weights: the router's product and its best k."""

from __future__ import annotations

import jax
from jax.typing import DTypeLike

from pallas_kernels import hopper
from pallas_kernels.implementations import IMPLEMENTATIONS, runs_kernel
from pallas_kernels.router import reference
from pallas_kernels.router.inputs import KINDS, Inputs

__all__ = ["IMPLEMENTATIONS", "KINDS", "MAX_ROWS", "Inputs", "reference", "route", "unsupported"]

MAX_ROWS = 256  # that the kernel takes


def route(inputs: Inputs, *, implementation: str = "reference") -> tuple[jax.Array, jax.Array]:
    """Return experts int32 [rows, top_k or more] and weights float32 [rows, top_k], best first.

    Columns of the experts past top_k mean nothing. Of equal experts the first is taken. Raises
    ValueError for shapes that do not fit together and for inputs that the implementation does not
    support.
    """
    inputs.check()

    def reason() -> str | None:
        x, router = inputs.x, inputs.router
        return hopper.missing() or unsupported(x.shape[0], router.shape, inputs.top_k, x.dtype)

    if not runs_kernel("router", implementation, reason):
        return reference.route(inputs)
    from pallas_kernels.router import mosaic_gpu

    return mosaic_gpu.route(inputs)


def unsupported(rows: int, router: tuple[int, ...], top_k: int, dtype: DTypeLike) -> str | None:
    """Return why the Mosaic kernel cannot route, None if it can.

    rows, dtype: of x. router: the shape [D, experts] of the router.
    """
    if old := hopper.too_old():
        return old
    from pallas_kernels.router import mosaic_gpu

    return mosaic_gpu.unsupported(rows, router, top_k, dtype)
