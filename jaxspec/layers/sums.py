"""Sums over the devices of a group: the end of each product that is cut along its depth."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxspec.config import Ops
from jaxspec.layers.log_once import log_once
from jaxspec.layers.norms import Norm
from jaxspec.layers.params import Weight
from jaxspec.parallel.group import Group
from pallas_kernels import all_reduce as all_reduce_op
from pallas_kernels import matmul as matmul_op

FEW_ROWS = 64  # rows of a round whose partial sums are exchanged in float32
# Of the next product's weights. An exchange ends when it has read them.
EARLY_BYTES = 10 << 20


def partial_dtype(x: jax.Array, ops: Ops) -> jnp.dtype:
    """Return the dtype of the partial sums of a product of x [..., rows, depth].

    Few rows of a round keep the products' accumulators. Many rows are rounded first: an exchange of
    half the bytes. Prefill rounds any number of rows: a prompt's bits shall not depend on the
    prompts beside it.
    """
    few = math.prod(x.shape[:-1]) <= FEW_ROWS and not ops.is_prefill
    return jnp.dtype(jnp.float32) if ops.layers.size > 1 and few else x.dtype


def sum_of_devices(x: jax.Array, group: Group, ops: Ops) -> jax.Array:
    """Return the sum of the devices' x [..., width]; x itself on one device."""
    if group.size == 1:
        return x
    flat = x.reshape(-1, x.shape[-1])
    peers, implementation = _peers(flat, group, ops)
    summed = all_reduce_op.all_reduce(flat, peers, implementation=implementation)
    assert not isinstance(summed, tuple)  # there is no norm
    return summed.reshape(x.shape)


def norm_of_sum(norm: Norm, ops: Ops) -> Norm | None:
    """Return a norm that several devices make together with the sum before it; None on one device.

    One device norms the stream when it is read: by experts, and before the head.
    """
    return norm if ops.layers.size > 1 else None


def add_sum(
    residual: jax.Array, x: jax.Array, ops: Ops, next_norm: Norm | None
) -> tuple[jax.Array, jax.Array | None]:
    """Return residual [..., width] plus the sum of the layers' devices' x, in residual's dtype.

    next_norm: the norm that follows; the second result is the normed sum, None without a norm
    """
    shape = residual.shape
    flat = x.reshape(-1, shape[-1])
    peers, implementation = _peers(flat, ops.layers, ops)
    summed = all_reduce_op.all_reduce(
        flat,
        peers,
        residual=residual.reshape(flat.shape),
        gain=None if next_norm is None else next_norm.gain,
        eps=0.0 if next_norm is None else next_norm.eps,
        early_reads=_early_reads(flat, next_norm, ops),
        implementation=implementation,
    )
    if not isinstance(summed, tuple):
        return summed.reshape(shape), None
    stream, normed = summed
    return stream.reshape(shape), normed.reshape(shape)


def _early_reads(x: jax.Array, next_norm: Norm | None, ops: Ops) -> all_reduce_op.EarlyReads:
    """Return what the product after a norm of x [rows, width] reads first.

    A product of XLA's, and a weight that is not plain, gives none.
    """
    weights = () if next_norm is None else next_norm.weights
    plain = [weight for weight in weights if isinstance(weight, Weight)]
    if ops.matmul == "reference" or not plain or len(plain) < len(weights):
        return ()
    values = tuple(weight.values for weight in plain)
    product = matmul_op.Product(
        jax.ShapeDtypeStruct(x.shape, values[0].dtype),
        values,
        swiglu=len(values) == 2,
        transposed=plain[0].transposed,
    )
    if plain[0].transposed or x.shape[0] > FEW_ROWS or matmul_op.unsupported(product):
        return ()
    return tuple(
        (array, tuple(all_reduce_op.Span(*span) for span in spans))
        for array, spans in zip(values, matmul_op.first_reads(product, EARLY_BYTES), strict=True)
    )


def _peers(x: jax.Array, group: Group, ops: Ops) -> tuple[all_reduce_op.Peers, str]:
    """Return the devices as the op takes them, and its implementation for x [rows, width].

    The kernel serves the few rows of a decode step. XLA's collective serves the other cases, and
    the log says so once, with the reason.
    """
    implementation, addresses = ops.all_reduce, group.addresses
    if implementation != "reference":
        reason = all_reduce_op.unsupported(x.shape[0], x.shape[1], x.dtype, group.size)
        if reason is not None:
            log_once(f"XLA adds the devices' {list(x.shape)}: the kernel {reason}")
            implementation = "reference"
    if addresses is None:
        addresses = jnp.zeros(2 * group.size, jnp.uint32)
    peers = all_reduce_op.Peers(addresses=addresses, axis=group.axis, size=group.size)
    return peers, implementation
