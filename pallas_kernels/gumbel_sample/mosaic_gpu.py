"""Gumbel-max on Hopper in two launches, where XLA takes five; no array of a row's size is written.

A warpgroup draws the noise of some pieces of a row in registers, adds it to the logits over the
temperature, and keeps the highest score. A second kernel takes the first of a row's highest
scores. A single launch would need a cluster for each row, whose eight multiprocessors would hash
the noise of 32,000 tokens for microseconds. An argmax has no order of summation, so the division
of a row may depend on the number of rows.

Of rows that are cut over devices, the second kernel takes the first of the own piece's scores. They
are exchanged, and XLA compares one score of each device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import noise, register_noise
from pallas_kernels.gumbel_sample.inputs import Inputs
from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.pieces import LANES, Pieces, combine_maximum, cut, store_maximum
from pallas_kernels.row_maximum import first_of_highest
from pallas_kernels.types import Ref
from pallas_kernels.vocab_shards import first_highest
from pallas_kernels.warpgroup_kernel import launch

Score = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # of piece, logits, indices


@dataclass(frozen=True)
class Tuning:
    """Static choices that change no bits.

    piece: tokens that a warpgroup holds in its registers, a multiple of 128. blocks: approximate
    number of blocks if there are rows enough: eight for each of 132 multiprocessors.
    """

    piece: int = 256
    blocks: int = 1056


def unsupported(vocab: int) -> str | None:
    """Return why this kernel cannot run, None if it can."""
    return f"expected at least {LANES} logits a row, got {vocab}" if vocab < LANES else None


def shares(pieces: Pieces, rows: int, blocks: int) -> tuple[int, int]:
    """Return (blocks of a row, at most LANES; pieces of a block).

    The last block may repeat the row's last piece.
    """
    fewest = max(-(-pieces.count // LANES), rows * pieces.count // blocks, 1)
    count = -(-pieces.count // fewest)
    return count, -(-pieces.count // count)


# Compiled as a function of its own, so that layers and programs share one kernel.
@lowered_once(static_argnames="tuning")
def gumbel_sample(inputs: Inputs, *, tuning: Tuning | None = None) -> jax.Array:
    """Run the op; see pallas_kernels.gumbel_sample.gumbel_sample."""
    tuning = tuning or Tuning()
    rows, vocab = inputs.rows, inputs.vocab
    pieces = cut(vocab, tuning.piece)
    count, share = shares(pieces, rows, tuning.blocks)
    shards = inputs.shards

    def draw(
        logits_ref: Ref,
        temperature_ref: Ref,
        keys_ref: Ref,
        position_ref: Ref,
        offset_ref: Ref,
        ids_ref: Ref | None,
        first_ref: Ref | None,
        best_ref: Ref,
        index_ref: Ref,
    ) -> None:
        block = lax.axis_index("block")
        row, part = block // count, block % count
        heat = temperature_ref[row]
        row_logits = logits_ref.at[row]
        first_id = None if first_ref is None else first_ref[0]

        def search(score: Score) -> None:
            """Store the part's highest score and its index."""

            def step(
                i: jax.Array, best: tuple[jax.Array, jax.Array]
            ) -> tuple[jax.Array, jax.Array]:
                piece = part * share + i
                values = pieces.load(row_logits, piece)
                values, ids = score(piece, values, pieces.indices(piece)), pieces.indices(piece)
                # Of a thread's equal scores the first stays; NaN is never higher.
                higher = values > best[0]
                return jnp.where(higher, values, best[0]), jnp.where(higher, ids, best[1])

            lowest = plgpu.layout_cast(
                jnp.full((pieces.size,), -jnp.inf, jnp.float32), pieces.layout
            )
            first = pieces.indices(jnp.int32(0))  # the result for a row of -inf
            values, ids = lax.fori_loop(0, share, step, (lowest, first))
            store_maximum(values, ids, best_ref, index_ref, row, part)

        @pl.when(heat == 0.0)
        def _greedy() -> None:
            search(lambda _, values, __: values)

        @pl.when(heat != 0.0)
        def _sampled() -> None:
            key = noise.stream_key(
                (keys_ref[row, 0], keys_ref[row, 1]),
                inputs.stream,
                position_ref[row],
                offset_ref[0],
            )

            def score(piece: jax.Array, values: jax.Array, ids: jax.Array) -> jax.Array:
                if ids_ref is not None:
                    ids = pieces.load(ids_ref, piece, first_id)
                elif first_id is not None:
                    ids = ids + first_id
                gumbel = register_noise.gumbel(pieces.layout, key, ids)
                return register_noise.noisy(values, heat, gumbel)

            search(score)

    def combine_piece(best_ref: Ref, index_ref: Ref, first_ref: Ref, words_ref: Ref) -> None:
        row = lax.axis_index("block")
        value, index = combine_maximum(best_ref, index_ref, row, count)
        words_ref[row, 0] = lax.bitcast_convert_type(value, jnp.int32)
        words_ref[row, 1] = index + first_ref[0]

    first = None if shards.is_whole else jnp.full(1, shards.first_id(vocab), jnp.int32)
    operands = (
        inputs.logits,
        inputs.temperature,
        inputs.keys,
        inputs.position,
        inputs.offset.reshape(1),
        inputs.token_ids,
        first,
    )
    types = [jax.ShapeDtypeStruct((rows, LANES), dtype) for dtype in (jnp.float32, jnp.int32)]
    best, index = launch("gumbel_draw", draw, rows * count, operands, types)
    if shards.is_whole:
        return first_of_highest(best, index, count, rows=rows, name="gumbel_combine")
    types = [jax.ShapeDtypeStruct((rows, 2), jnp.int32)]
    (words,) = launch("gumbel_combine_piece", combine_piece, rows, (best, index, first), types)
    words = shards.gather_words(words)
    values = lax.bitcast_convert_type(words[..., 0], jnp.float32)
    return first_highest(values, words[..., 1])[1]
