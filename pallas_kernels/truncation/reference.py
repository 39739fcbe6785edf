"""The jnp specification of truncation: two radix searches over the bit patterns of the logits.

Each takes a fixed number of passes. As unsigned integers, floats with their bits suitably flipped
are ordered like the floats. The k-th largest is then the largest pattern t for which at least k
tokens are >= t. The last token inside top-p is the largest t for which the tokens >= t hold a share
top_p of the mass that top-k left. Either is found digit by digit from the top; the answer is exact,
a token's own bits. Every pass reads the row once.

Of rows that are cut over devices, each pass exchanges its sums: 18 exchanges on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.vocab_shards import VocabShards, add_in_order

BITS = 32
COLUMNS = 64


def truncate(
    logits: jax.Array, top_k: jax.Array, top_p: jax.Array, shards: VocabShards
) -> jax.Array:
    """Run the op; see pallas_kernels.truncation.truncate."""
    vocab = shards.total(logits.shape[-1])
    keys = _ordered(logits)
    highest = shards.maximum(jnp.max(keys, axis=-1))
    needed = jnp.where((top_k <= 0) | (top_k > vocab), vocab, top_k)[:, None]
    kth = _search(keys, jnp.ones((), jnp.int32), jnp.broadcast_to(needed, highest.shape), shards)

    weights = jnp.exp(logits - _likeliest(logits, highest, shards))
    # NaN, and rows that are all -inf, weigh nothing.
    weights = jnp.where((keys >= kth[..., None]) & (weights > 0), weights, 0.0)
    needed = top_p[:, None] * shards.add(jnp.sum(weights, axis=-1))
    # At 1, rounding of the mass must not drop anything.
    last = jnp.where(top_p[:, None] < 1.0, _search(keys, weights, needed, shards), 0)
    threshold = jnp.minimum(jnp.maximum(kth, last), highest)
    return jnp.where(keys >= threshold[..., None], logits, -jnp.inf)


def _ordered(logits: jax.Array) -> jax.Array:
    """Return unsigned integers in the order of the logits; NaN as -inf, and -0 as 0."""
    logits = jnp.where(jnp.isnan(logits), -jnp.inf, jnp.where(logits == 0.0, 0.0, logits))
    bits = lax.bitcast_convert_type(logits, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _likeliest(logits: jax.Array, highest: jax.Array, shards: VocabShards) -> jax.Array:
    """Return the largest logit of each row, [batch, rows, 1], whose ordered bits are `highest`."""
    if shards.is_whole:
        return jnp.max(jnp.where(jnp.isnan(logits), -jnp.inf, logits), axis=-1, keepdims=True)
    bits = jnp.where(highest >> 31 == 1, highest ^ jnp.uint32(1 << 31), ~highest)
    return lax.bitcast_convert_type(bits, jnp.float32)[..., None]


def _search(
    keys: jax.Array, weights: jax.Array, needed: jax.Array, shards: VocabShards
) -> jax.Array:
    """Return the largest t, uint32 [batch, rows], whose tokens keys >= t weigh at least `needed`.

    0 if none does.

    One bit a pass on a CPU, where comparisons cost most; four on a GPU, where reading the row does.
    """

    def search(bits: int, add_up: Callable[[list[jax.Array]], list[jax.Array]]) -> jax.Array:
        def step(i: jax.Array, prefix: jax.Array) -> jax.Array:
            shift = jnp.uint32(BITS - bits * (i + 1))
            candidates = [prefix + (jnp.uint32(digit) << shift) for digit in range(1, 1 << bits)]
            totals = add_up([jnp.where(keys >= t[..., None], weights, 0) for t in candidates])
            if not shards.is_whole:
                totals = [add_in_order(parts) for parts in shards.gather(totals)]
            # True up to some digit, false after it.
            reached = [(total >= needed).astype(jnp.uint32) for total in totals]
            return prefix + (sum(reached[1:], reached[0]) << shift)

        return lax.fori_loop(0, BITS // bits, step, jnp.zeros(needed.shape, jnp.uint32))

    return lax.platform_dependent(
        cpu=lambda: search(1, _add_in_columns), default=lambda: search(4, _add_at_once)
    )


def _add_in_columns(values: list[jax.Array]) -> list[jax.Array]:
    """Return sums over the vocabulary in interleaved columns: one chain would wait at each sum."""
    padded = [jnp.pad(v, [(0, 0), (0, 0), (0, -v.shape[-1] % COLUMNS)]) for v in values]
    return [v.reshape(*v.shape[:2], -1, COLUMNS).sum(axis=2).sum(axis=2) for v in padded]


def _add_at_once(values: list[jax.Array]) -> list[jax.Array]:
    """Return sums over the vocabulary as one reduction of several arrays, read once by XLA."""
    zeros = (jnp.zeros((), values[0].dtype),) * len(values)
    return list(
        lax.reduce(
            tuple(values), zeros, lambda x, y: tuple(a + b for a, b in zip(x, y, strict=True)), (2,)
        )
    )
