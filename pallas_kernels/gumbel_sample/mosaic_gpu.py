"""Gumbel-max on Hopper in two launches, where XLA takes five: nothing of a row's size is written.

A warpgroup draws the noise of some pieces of a row in registers, adds it to the logits over temperature, and keeps the highest score; a
second kernel takes the first of a row's highest. One launch would need a cluster to hold a row, and its eight multiprocessors would hash
the noise of 32,000 tokens for microseconds. An argmax has no order of summation: the cut may follow the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import noise, piece_noise
from pallas_kernels.hopper import interpreting
from pallas_kernels.pieces import LANES, Pieces, combine_maximum, cut, store_maximum


@dataclass(frozen=True)
class Tuning:
    """piece: tokens that a warpgroup has in its registers, a multiple of 128. blocks: about so many of them, eight for each of 132
    multiprocessors, if the rows suffice."""

    piece: int = 256
    blocks: int = 1056


def unsupported(vocab: int) -> str | None:
    """Why this kernel cannot run, None if it can."""
    return f"expected at least {LANES} logits a row, got {vocab}" if vocab < LANES else None


def shares(pieces: Pieces, rows: int, blocks: int) -> tuple[int, int]:
    """Blocks of a row, at most LANES, and pieces of a block: the last block may repeat the row's last piece."""
    fewest = max(-(-pieces.count // LANES), rows * pieces.count // blocks, 1)
    count = -(-pieces.count // fewest)
    return count, -(-pieces.count // count)


# Compiled as a function of its own, so that a round's draft steps share one kernel instead of lowering one each.
@partial(jax.jit, static_argnames=("stream", "tuning"))
def gumbel_sample(
    logits: jax.Array,
    temperature: jax.Array,
    keys: jax.Array,
    position: jax.Array,
    offset: jax.Array,
    token_ids: jax.Array | None,
    *,
    stream: int,
    tuning: Tuning | None = None,
) -> jax.Array:
    """See pallas_kernels.gumbel_sample.gumbel_sample."""
    tuning = tuning or Tuning()
    rows, vocab = logits.shape
    pieces = cut(vocab, tuning.piece)
    count, share = shares(pieces, rows, tuning.blocks)

    def draw(*refs: Any) -> None:
        logits_ref, temperature_ref, keys_ref, position_ref, offset_ref, *rest = refs
        ids_ref, (best_ref, index_ref) = (
            (rest[0], rest[1:]) if token_ids is not None else (None, rest)
        )
        block = lax.axis_index("block")
        row, part = block // count, block % count
        heat = temperature_ref[row]

        def search(score: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]) -> None:
            """Store the part's highest score(piece, logits, ids)."""

            def step(
                i: jax.Array, best: tuple[jax.Array, jax.Array]
            ) -> tuple[jax.Array, jax.Array]:
                piece = part * share + i
                values = pieces.load(logits_ref.at[row], piece)
                values, ids = score(piece, values, pieces.indices(piece)), pieces.indices(piece)
                higher = (
                    values > best[0]
                )  # of a thread's equal scores the first stays; NaN is never higher
                return jnp.where(higher, values, best[0]), jnp.where(higher, ids, best[1])

            lowest = plgpu.layout_cast(
                jnp.full((pieces.size,), -jnp.inf, jnp.float32), pieces.layout
            )
            first = pieces.indices(jnp.int32(0))  # what a row of -inf takes
            values, ids = lax.fori_loop(0, share, step, (lowest, first))
            store_maximum(values, ids, best_ref, index_ref, row, part)

        @pl.when(heat == 0.0)
        def _greedy() -> None:
            search(lambda _, values, __: values)

        @pl.when(heat != 0.0)
        def _sampled() -> None:
            key = noise.stream_key(
                (keys_ref[row, 0], keys_ref[row, 1]), stream, position_ref[row], offset_ref[0]
            )

            def score(piece: jax.Array, values: jax.Array, ids: jax.Array) -> jax.Array:
                ids = ids if ids_ref is None else pieces.load(ids_ref, piece)
                scaled = values / heat
                scaled = jnp.where(
                    scaled == scaled, scaled, -jnp.inf
                )  # as XLA's: nothing fuses the quotient with the sum
                return scaled + piece_noise.gumbel(pieces, key, ids)

            search(score)

    def combine(best_ref: Any, index_ref: Any, token_ref: Any) -> None:
        row = lax.axis_index("block")
        token_ref[row] = combine_maximum(best_ref, index_ref, row, count)[1]

    partial_results = [
        jax.ShapeDtypeStruct((rows, LANES), dtype) for dtype in (jnp.float32, jnp.int32)
    ]
    inputs = (logits, temperature, keys, position, offset.reshape(1))
    parts = _launch(
        draw,
        rows * count,
        inputs if token_ids is None else (*inputs, token_ids),
        tuple(partial_results),
    )
    return _launch(combine, rows, parts, jax.ShapeDtypeStruct((rows,), jnp.int32))


def _launch(
    body: Callable[..., None], grid: int, inputs: tuple[jax.Array, ...], outputs: Any
) -> Any:
    """Run body(*input and output refs) in every block of the grid, one warpgroup each."""
    overlapped = not interpreting()  # the interpreter does not know dependent launches

    def kernel(*refs: Any) -> None:
        if overlapped:
            plgpu.griddepcontrol_wait()
        body(*refs)

    call = plgpu.kernel(
        kernel,
        out_type=outputs,
        grid=(grid,),
        grid_names=("block",),
        kernel_name=f"gumbel_{body.__name__}",
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,  # no memory is both read and written by a kernel
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    return call(*inputs)
