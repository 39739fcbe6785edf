"""The sum of all devices' partial products, with the residual sum and the norm that follow it."""

from __future__ import annotations

from typing import overload

import jax
from jax.typing import DTypeLike

from pallas_kernels import hopper
from pallas_kernels.all_reduce import inputs, reference
from pallas_kernels.all_reduce.inputs import EarlyReads, Span
from pallas_kernels.implementations import IMPLEMENTATIONS, runs_kernel
from pallas_kernels.peers import Peers

__all__ = ["IMPLEMENTATIONS", "EarlyReads", "Peers", "Span", "all_reduce", "unsupported"]


@overload
def all_reduce(
    x: jax.Array,
    peers: Peers,
    *,
    residual: jax.Array | None = None,
    gain: None = None,
    eps: float = 0.0,
    early_reads: EarlyReads = (),
    implementation: str,
) -> jax.Array: ...


@overload
def all_reduce(
    x: jax.Array,
    peers: Peers,
    *,
    residual: jax.Array | None = None,
    gain: jax.Array,
    eps: float,
    early_reads: EarlyReads = (),
    implementation: str,
) -> tuple[jax.Array, jax.Array]: ...


def all_reduce(
    x: jax.Array,
    peers: Peers,
    *,
    residual: jax.Array | None = None,
    gain: jax.Array | None = None,
    eps: float = 0.0,
    early_reads: EarlyReads = (),
    implementation: str,
) -> reference.Result:
    """Return the sum of x over peers.axis; with a gain also the sum's RMS norm: (sum, normed).

    x:        [rows, width], this device's share, bfloat16 or float32. It is sent as it is
    residual: [rows, width], added to the sum; the same on all devices
    gain:     [width], of the norm
    eps:      of the norm
    early_reads: what the kernel reads into L2 meanwhile, for the next one; the reference does not

    Shares are added in float32 and in rank order, so all devices get the same bits. The result has
    residual's dtype, without it x's. As with a product's residual, the sum is rounded to that dtype
    before the residual is added in float32, and once more after it. The norm is that of the
    rms_norm op, of the rounded sum.

    Runs inside jax.shard_map. With "mosaic_gpu", all devices must run the same programs in the
    same order, and an all-reduce must depend on the one before it. A device that does not answer
    is an error that mailbox.mailbox_error reads.

    Raises ValueError for shapes that do not fit together and for inputs that the implementation
    does not support.
    """
    inputs.check(x, peers, residual, gain)

    def reason() -> str | None:
        rows, width = x.shape
        return hopper.missing() or unsupported(rows, width, x.dtype, peers.size)

    if not runs_kernel("all_reduce", implementation, reason):
        return reference.all_reduce(x, peers, residual=residual, gain=gain, eps=eps)
    from pallas_kernels.all_reduce import mosaic_gpu

    return mosaic_gpu.all_reduce(
        x, peers, residual=residual, gain=gain, eps=eps, early_reads=early_reads
    )


def unsupported(rows: int, width: int, dtype: DTypeLike, size: int) -> str | None:
    """Return why the Mosaic kernel cannot run, None if it can.

    rows, width, dtype: of x; size: number of devices.
    """
    if old := hopper.too_old():
        return old
    from pallas_kernels.all_reduce import mosaic_gpu

    return mosaic_gpu.unsupported(rows, width, dtype, size)
