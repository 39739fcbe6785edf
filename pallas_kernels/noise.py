"""Gumbel noise of single tokens, as arithmetic that a kernel and XLA can both fuse.

One hash (threefry2x32, as in jax.random) makes the noise of a token. It is a function of a key and
the token's id alone: a row's neighbours, the vocabulary's size and its pieces do not matter. A
Stream describes the noise of a batch; its reader makes the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.vocab_shards import WHOLE, VocabShards

Key = tuple[jax.Array, jax.Array]
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
Function = Callable[[jax.Array], jax.Array]


@partial(
    jax.tree_util.register_dataclass, data_fields=("keys", "position"), meta_fields=("stream",)
)
@dataclass(frozen=True)
class Stream:
    """Random numbers of a batch's requests, not made yet.

    Each is a function of a request's key, the stream, a position and an offset.

    keys:     uint32 [batch, 2]
    position: int32 [batch]
    stream:   static; numbers of two streams are independent
    """

    keys: jax.Array
    position: jax.Array
    stream: int

    def gumbel(
        self, size: int, offset: jax.Array | int = 0, shards: VocabShards = WHOLE
    ) -> jax.Array:
        """Return standard Gumbel, float32 [batch, size], of the `size` tokens of the own piece.

        The tail is full, where JAX's default form ends at about 16.
        """
        return gumbel(self.key(jnp.asarray(offset, jnp.int32)), shards.ids(size))

    def uniforms(self, size: int) -> jax.Array:
        """Return uniform numbers on [0, 1), float32 [batch, size]: column i has offset i."""
        return uniform(self.key(jnp.arange(size, dtype=jnp.int32)), jnp.uint32(0))

    def key(self, offset: jax.Array) -> Key:
        """Return two words uint32 [batch, 1] of one offset, int32 []; [batch, size] of several."""
        return stream_key(
            (self.keys[:, :1], self.keys[:, 1:]), self.stream, self.position[:, None], offset
        )


def threefry2x32(key: Key, x0: jax.Array, x1: jax.Array) -> Key:
    """Return the hash of two words under a key of two, all uint32 of shapes that broadcast.

    Salmon et al., SC 2011, "Random123".
    """
    words = (*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = x0 + words[0], x1 + words[1]
    for block in range(5):
        for rotation in ROTATIONS[block % 2]:
            x0 = x0 + x1
            x1 = ((x1 << rotation) | (x1 >> (32 - rotation))) ^ x0
        x0 = x0 + words[(block + 1) % 3]
        x1 = x1 + (words[(block + 2) % 3] + jnp.uint32(block + 1))
    return x0, x1


def fold_in(key: Key, data: jax.Array) -> Key:
    """Return jax.random.fold_in of int32 or uint32 data."""
    data = data.astype(jnp.uint32)
    return threefry2x32(key, jnp.zeros_like(data), data)


def stream_key(key: Key, stream: int, position: jax.Array, offset: jax.Array) -> Key:
    """Return the key of a stream at a position and an offset, int32.

    Stream, position and offset are folded into the key one after another.
    """
    for data in (jnp.int32(stream), position, offset):
        key = fold_in(key, data)
    return key


def uniform(key: Key, index: jax.Array) -> jax.Array:
    """Return element `index` (uint32) of jax.random.uniform(key, (n,)), for every n."""
    x0, x1 = threefry2x32(key, jnp.uint32(0), index)
    return unit_interval(x0 ^ x1)


def unit_interval(word: jax.Array) -> jax.Array:
    """Return the upper 23 bits of a uint32 as a float32 in [0, 1), as jax.random.uniform does."""
    return lax.bitcast_convert_type((word >> 9) | jnp.uint32(0x3F800000), jnp.float32) - 1.0


def gumbel(
    key: Key, token_ids: jax.Array, log: Function = jnp.log, log1p: Function = jnp.log1p
) -> jax.Array:
    """Return standard Gumbel of full tail, float32, of token_ids (int32).

    jax.random.gumbel(mode="high") hashes twice and keeps 23 bits of each hash. Here the 46 bits
    are from the two words of one hash.
    """
    high, low = threefry2x32(key, jnp.uint32(0), token_ids.astype(jnp.uint32))
    return to_gumbel(unit_interval(high), unit_interval(low), log, log1p)


def to_gumbel(
    high: jax.Array, low: jax.Array, log: Function = jnp.log, log1p: Function = jnp.log1p
) -> jax.Array:
    """Return standard Gumbel of a uniform number in (0, 1) of 46 bits, in two halves.

    Never above 33, where both halves are 0.
    """
    x = jnp.where(high >= 0.5, high, high + low * 2.0**-23 + 2.0**-47)
    return -log(-log1p(-x))
