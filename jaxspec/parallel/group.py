"""The devices that share a model, as code inside jax.shard_map sees them."""

from __future__ import annotations

from dataclasses import field

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax


@struct.dataclass
class Group:
    """Devices that run one program, each with its pieces of the arrays.

    Ops has two: the layers' and the vocabulary's. They differ for a draft whose layers are whole on
    each device, while its embedding and head are the target's.

    axis:      the mesh axis; static
    size:      number of devices; static. 1: the whole arrays are on one device
    addresses: uint32 [2 * size], the mailboxes of the all-reduce kernel
               (pallas_kernels.all_reduce); None where XLA's collective serves
    """

    axis: str = struct.field(pytree_node=False, default="")
    size: int = struct.field(pytree_node=False, default=1)
    addresses: jax.Array | None = field(default=None)

    @property
    def rank(self) -> jax.Array:
        """int32 [], the index of this device."""
        return lax.axis_index(self.axis)

    def own_piece(self, x: jax.Array, size: int) -> jax.Array:
        """Return this device's piece of the last axis of x, which every device holds whole.

        The last pieces end in zeros where all pieces together are longer than x. Returns x itself
        if it has just this size: it is the piece, or the other devices' weights are zeros.
        """
        if x.shape[-1] == size:
            return x
        zeros = size * self.size - x.shape[-1]
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, zeros)])
        return lax.dynamic_slice_in_dim(x, self.rank * size, size, axis=-1)


ONE_DEVICE = Group()
