"""A vocabulary cut over devices: what a device holds of it, and reductions over all of it.

Inside jax.shard_map a device holds logits [..., size] of the token ids first_id to
first_id + size - 1. A reduction makes partial results of these tokens, exchanges them, and combines
those of all devices in the devices' order. So each device has the same bits. Nothing of the size of
a row is exchanged, except by `whole_rows`.

An exchange costs a GPU some microseconds whatever it carries, so `gather` takes several arrays.
With addresses it is the kernel of the all_gather op, up to its limits, else XLA's collective.
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass, field
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import all_gather as all_gather_op
from pallas_kernels.types import STATIC

logger = logging.getLogger(__name__)

Tree = TypeVar("Tree")
Indexed = tuple[jax.Array, jax.Array]  # (value, token id)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class VocabShards:
    """How rows of logits are cut over devices. Hashable: the hash leaves out the addresses.

    axis:      mesh axis of the jax.shard_map that runs the code; None: each device has whole rows
    count:     number of contiguous pieces of equal size; piece i is that of the axis' device i
    addresses: the devices' mailboxes (all_reduce.Peers); None: XLA's collectives exchange
    """

    axis: str | None = field(default=None, metadata=STATIC)
    count: int = field(default=1, metadata=STATIC)
    addresses: jax.Array | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.count < 1 or (self.axis is None) != (self.count == 1):
            raise ValueError(
                "VocabShards: expected a mesh axis and at least 2 pieces, or None and 1, "
                f"got {self.axis!r} and {self.count}"
            )

    @property
    def is_whole(self) -> bool:
        """Whether each device has whole rows, so that nothing is exchanged."""
        return self.axis is None

    def total(self, size: int) -> int:
        """Return the size of the vocabulary of which a device has `size` tokens."""
        return size * self.count

    def piece(self, vocab: int) -> int:
        """Return the number of tokens that a device has of a vocabulary."""
        return vocab // self.count

    def first_id(self, size: int) -> jax.Array | int:
        """Return the first token id of the device's own piece of `size` tokens, int32."""
        return 0 if self.axis is None else lax.axis_index(self.axis).astype(jnp.int32) * size

    def ids(self, size: int) -> jax.Array:
        """Return the token ids of the device's own piece, int32 [size]."""
        ids = jnp.arange(size, dtype=jnp.int32)
        return ids if self.is_whole else ids + self.first_id(size)

    def place(self, token_ids: jax.Array, size: int) -> jax.Array:
        """Return the index of token ids in the own piece; `size` for those of other devices.

        Whole rows return the ids as they are, out of range or not.
        """
        if self.is_whole:
            return token_ids
        index = token_ids - self.first_id(size)
        return jnp.where((index >= 0) & (index < size), index, size)

    def own(self, table: jax.Array) -> jax.Array:
        """Return the own piece of an array [vocab] that all devices hold whole."""
        if self.is_whole:
            return table
        size = self.piece(table.shape[0])
        return lax.dynamic_slice_in_dim(table, self.first_id(size), size)

    def gather(self, parts: Tree) -> Tree:
        """Return each array [...] of a pytree as [count, ...], those of all devices: one exchange.

        parts: arrays of dtypes of 4 bytes.
        """
        leaves, structure = jax.tree.flatten(parts)
        words = [lax.bitcast_convert_type(leaf, jnp.int32).reshape(-1) for leaf in leaves]
        gathered = self.gather_words(jnp.concatenate(words))
        found, start = [], 0
        for leaf in leaves:
            end = start + leaf.size
            bits = gathered[:, start:end].reshape(self.count, *leaf.shape)
            found.append(lax.bitcast_convert_type(bits, leaf.dtype))
            start = end
        return jax.tree.unflatten(structure, found)

    def gather_words(self, words: jax.Array) -> jax.Array:
        """Return int32 words [...] as [count, ...], those of all devices."""
        assert self.axis is not None
        if self.addresses is None or not _kernel_takes(math.prod(words.shape), self.count):
            return lax.all_gather(words, self.axis)
        peers = all_gather_op.Peers(addresses=self.addresses, axis=self.axis, size=self.count)
        flat = all_gather_op.all_gather(words.reshape(-1), peers, implementation="mosaic_gpu")
        return flat.reshape(self.count, *words.shape)

    def whole_rows(self, rows: jax.Array) -> jax.Array:
        """Return float32 rows [..., size] as [..., vocab]: an exchange of all that they hold."""
        if self.axis is None:
            return rows
        words = self.gather_words(lax.bitcast_convert_type(rows, jnp.int32))
        # Gathered along another axis than the first, XLA would transpose before and after.
        pieces = jnp.moveaxis(lax.bitcast_convert_type(words, rows.dtype), 0, -2)
        return pieces.reshape(*rows.shape[:-1], -1)

    def maximum(self, partial: jax.Array) -> jax.Array:
        """Return the largest of the devices' values, elementwise."""
        return partial if self.is_whole else jnp.max(self.gather(partial), axis=0)

    def add(self, partial: jax.Array) -> jax.Array:
        """Return the sum of the devices' values, elementwise."""
        return partial if self.is_whole else add_in_order(self.gather(partial))

    def any(self, partial: jax.Array) -> jax.Array:
        """Return whether the value is true on any device, elementwise."""
        if self.is_whole:
            return partial
        return jnp.any(self.gather(partial.astype(jnp.int32)) != 0, axis=0)

    def highest(self, scores: jax.Array) -> Indexed:
        """Return the highest of the own piece of scores [..., size] and its first token id."""
        index = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        return at_index(scores, index), index + self.first_id(scores.shape[-1])

    def argmax(self, scores: jax.Array) -> jax.Array:
        """Return the token id of the highest of scores [..., size], int32; of equal ones the first.

        scores: without NaN.
        """
        if self.is_whole:
            return jnp.argmax(scores, axis=-1).astype(jnp.int32)
        return first_highest(*self.gather(self.highest(scores)))[1]

    def at_token(self, rows: jax.Array, token_ids: jax.Array) -> jax.Array:
        """Return rows [..., size] at token_ids [...]; -inf on each device but a token's own.

        The largest of the devices' values is the row's.
        """
        if self.is_whole:
            return at_index(rows, token_ids)
        size = rows.shape[-1]
        index = self.place(token_ids, size)
        return jnp.where(index < size, at_index(rows, jnp.minimum(index, size - 1)), -jnp.inf)


WHOLE = VocabShards()


@functools.cache
def _kernel_takes(words: int, count: int) -> bool:
    """Return whether the kernel exchanges so many words; the log says once why not."""
    reason = all_gather_op.unsupported(words, count)
    if reason is not None:
        logger.info("XLA gathers the devices' %d words: the kernel %s", words, reason)
    return reason is None


def add_in_order(parts: jax.Array) -> jax.Array:
    """Return the sum of parts [count, ...] over the first axis, one after another."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def at_index(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Return rows [..., size] at index [...]."""
    return jnp.take_along_axis(rows, index[..., None], axis=-1).squeeze(-1)


def first_highest(values: jax.Array, token_ids: jax.Array) -> Indexed:
    """Return the highest of the devices' values [count, ...] and its id; of equal ones the first.

    Pieces are in the order of their ids, so the first device that has the value has the lowest id.
    """
    best, token = values[0], token_ids[0]
    for value, other in zip(values[1:], token_ids[1:], strict=True):
        token = jnp.where(value > best, other, token)
        best = jnp.maximum(best, value)
    return best, token


def exponential_sum(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the partial log-sum-exp of rows [..., size]: their maximum m and sum of exp(x - m)."""
    best = jnp.max(rows, axis=-1)
    return best, jnp.sum(jnp.exp(rows - _finite(best)[..., None]), axis=-1)


def log_sum_exp(best: jax.Array, total: jax.Array) -> jax.Array:
    """Return the log-sum-exp [...] of the devices' partial results [count, ...].

    -inf for a row of -inf, as jax.nn.logsumexp.
    """
    highest = _finite(jnp.max(best, axis=0))
    # The sum of a piece of -inf is 0, and its factor may be infinite.
    totals = jnp.where(total == 0.0, 0.0, total * jnp.exp(_finite(best) - highest))
    return highest + jnp.log(add_in_order(totals))


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0.0)
