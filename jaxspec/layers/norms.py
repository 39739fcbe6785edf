"""RMS norms."""

from __future__ import annotations

import jax
from flax import struct

from jaxspec.config import Ops
from jaxspec.layers.params import AnyWeight
from pallas_kernels.rms_norm import rms_norm as rms_norm_op


@struct.dataclass
class Norm:
    """The RMS norm before a projection.

    gain:    [D]
    eps:     epsilon under the root, static
    weights: of the projection; two are gate and up; () if they are not known. A product with such
             weights before the norm may share it. Several devices begin to read them while they
             exchange
    """

    gain: jax.Array
    eps: float = struct.field(pytree_node=False)
    weights: tuple[AnyWeight, ...] = ()


def rms_norm(x: jax.Array, gain: jax.Array, eps: float, ops: Ops) -> jax.Array:
    """Normalise the last axis of x [..., width] by the rms_norm op."""
    flat = x.reshape(-1, x.shape[-1])
    return rms_norm_op(flat, gain, eps=eps, implementation=ops.rms_norm).reshape(x.shape)
