"""The words that devices exchange of rows whose vocabulary is cut over them.

A warpgroup folds partial results of the device's own tokens into a few words. `fold_scores` makes
those of a row in each block, `fold_winners` those of a request's draw. One exchange takes them to
all devices. Kernels read the words of all devices as scalars, and combine them in the devices'
order.
"""

from __future__ import annotations

from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.pieces import combine_maximum, load_lanes, used_lanes
from pallas_kernels.rejection_sampling.mosaic_gpu.launch import (
    DRAFT,
    TARGET,
    Arrays,
    Problem,
    Refs,
    launch,
)
from pallas_kernels.rejection_sampling.mosaic_gpu.temperature import LARGEST, divisor_of, scaled
from pallas_kernels.types import Index, Ref

# Words of a target's row, then of a draft: its target logit, and of draft logits three more.
BEST, SUM, INDEX, ROW_WORDS = 0, 1, 2, 3
TARGET_AT, DRAFT_AT, DRAFT_BEST, DRAFT_SUM = 0, 1, 2, 3
# Words of a draw: the highest score and its token, then of the residual.
WINNER, RESIDUAL_WINNER, WINNER_WORDS = 0, 2, 4


def exchange_scores(problem: Problem, inputs: Arrays) -> Arrays:
    """Return the inputs with `scores`, int32 [devices, B, words]; as they are for whole rows.

    inputs: with the partial results of row_maxima or row_sums.
    """
    if problem.shards.is_whole:
        return inputs
    return inputs | {"scores": problem.shards.gather_words(fold_scores(problem, inputs))}


def fold_scores(problem: Problem, inputs: Arrays) -> jax.Array:
    """Return the words of the own piece of each row, int32 [B, words].

    Words that a request does not need (a greedy one's sums) have no meaning.
    """

    def body(refs: Refs, block: jax.Array) -> None:
        request, i = block // problem.rows, block % problem.rows

        def store(column: Index, value: jax.Array) -> None:
            refs.words[request, column] = _as_word(value)

        def fold_row() -> None:
            divisor = divisor_of(refs, request)
            column = i * ROW_WORDS
            best, index = combine_maximum(refs.best, refs.index, block, problem.sweep.count)
            store(column + BEST, best)
            store(column + INDEX, index + refs.first_ids[TARGET])
            if problem.sampled:
                count = problem.sweep.count
                total = _sum_of_pieces(refs.best, refs.sum, block, count, best, divisor)
                store(column + SUM, total)

        def fold_draft() -> None:
            divisor = divisor_of(refs, request)
            column, draft = _draft_column(problem, i), request * problem.K + i
            token = refs.tokens[draft]
            index = token - refs.first_ids[TARGET]
            vocab = problem.sweep.vocab
            store(column + TARGET_AT, _at(refs.target, block, index, vocab, divisor))
            if problem.draft_sweep is None:
                return
            if refs.to_draft is not None:
                token = refs.to_draft[_inside(token, problem.vocab)]
            index = token - refs.first_ids[DRAFT]
            vocab, count = problem.draft_sweep.vocab, problem.draft_sweep.count
            store(column + DRAFT_AT, _at(refs.draft, draft, index, vocab, divisor))
            best = _best_of_pieces(refs.draft_best, draft, count)
            total = _sum_of_pieces(refs.draft_best, refs.draft_sum, draft, count, best, divisor)
            store(column + DRAFT_BEST, best)
            store(column + DRAFT_SUM, total)

        pl.when(refs.active[request])(fold_row)
        if problem.sampled and problem.K:
            pl.when(refs.active[request] & (i < problem.K))(fold_draft)

    words = jax.ShapeDtypeStruct((problem.batch, _draft_column(problem, problem.K)), jnp.int32)
    blocks = problem.batch * problem.rows
    return launch("fold_scores", body, blocks, inputs, {"words": words})["words"]


def exchange_winners(problem: Problem, inputs: Arrays) -> Arrays:
    """Return the inputs with `winners`, int32 [devices, B, words]; as they are for whole rows.

    inputs: with the partial results of draw.
    """
    if problem.shards.is_whole:
        return inputs
    return inputs | {"winners": problem.shards.gather_words(fold_winners(problem, inputs))}


def fold_winners(problem: Problem, inputs: Arrays) -> jax.Array:
    """Return the highest score of each request's draw and its token, int32 [B, WINNER_WORDS]."""

    def body(refs: Refs, request: jax.Array) -> None:
        pairs = {WINNER: (refs.best, refs.index)}
        if refs.residual_best is not None:
            pairs[RESIDUAL_WINNER] = (refs.residual_best, refs.residual_index)
        for column, (best_ref, index_ref) in pairs.items():
            best, index = combine_maximum(best_ref, index_ref, request, problem.draw.count)
            refs.words[request, column] = _as_word(best)
            refs.words[request, column + 1] = index + refs.first_ids[TARGET]

    words = jax.ShapeDtypeStruct((problem.batch, WINNER_WORDS), jnp.int32)
    return launch("fold_winners", body, problem.batch, inputs, {"words": words})["words"]


def winner(
    problem: Problem, refs: Refs, request: jax.Array, column: int
) -> tuple[jax.Array, jax.Array]:
    """Return the highest score of all devices and its token; of equal scores the first."""
    devices = range(problem.shards.count)
    values = [_as_float(refs.winners[d, request, column]) for d in devices]
    return _first_highest(values, [refs.winners[d, request, column + 1] for d in devices])


def row_argmax(problem: Problem, refs: Refs, request: jax.Array, row: int) -> jax.Array:
    """Return the token of the highest logit of a target's row."""
    devices, column = range(problem.shards.count), row * ROW_WORDS
    values = [_as_float(refs.scores[d, request, column + BEST]) for d in devices]
    return _first_highest(values, [refs.scores[d, request, column + INDEX] for d in devices])[1]


def target_log_sum_exp(
    problem: Problem, refs: Refs, request: jax.Array, row: int, divisor: jax.Array | None
) -> jax.Array:
    """Return the log-sum-exp of a target's row over its temperature, 0 if it is all -inf."""
    return _log_sum_exp(problem, refs, request, row * ROW_WORDS + BEST, divisor)


def draft_log_sum_exp(
    problem: Problem, refs: Refs, request: jax.Array, draft: int, divisor: jax.Array | None
) -> jax.Array:
    """Return the log-sum-exp of a draft's row over its temperature, 0 if it is all -inf."""
    column = _draft_column(problem, draft) + DRAFT_BEST
    return _log_sum_exp(problem, refs, request, column, divisor)


def target_at_draft(problem: Problem, refs: Refs, request: jax.Array, draft: int) -> jax.Array:
    """Return the target's logit of a draft token over the temperature."""
    return _owners(problem, refs, request, _draft_column(problem, draft) + TARGET_AT)


def draft_at_draft(problem: Problem, refs: Refs, request: jax.Array, draft: int) -> jax.Array:
    """Return the draft's own logit of a draft token over the temperature."""
    return _owners(problem, refs, request, _draft_column(problem, draft) + DRAFT_AT)


def _draft_column(problem: Problem, draft: Index) -> Index:
    if not problem.sampled:
        return problem.rows * ROW_WORDS
    return problem.rows * ROW_WORDS + draft * (1 if problem.draft_sweep is None else 4)


def _log_sum_exp(
    problem: Problem, refs: Refs, request: jax.Array, column: Index, divisor: jax.Array | None
) -> jax.Array:
    """Return the log-sum-exp of the devices' maxima, in a column, and sums, in the next."""
    devices = range(problem.shards.count)
    best = [_as_float(refs.scores[d, request, column]) for d in devices]
    highest = reduce(jnp.maximum, best)
    shift = jnp.where(highest > -jnp.inf, highest, 0.0)
    top, total = shift, jnp.float32(0.0)
    if divisor is not None:
        top = jnp.minimum(shift / divisor, LARGEST)
    for d in devices:
        exponent = best[d] - shift
        exponent = exponent if divisor is None else exponent / divisor
        total = total + _as_float(refs.scores[d, request, column + 1]) * jnp.exp(exponent)
    return jnp.where(highest > -jnp.inf, top + jnp.log(total), 0.0)


def _owners(problem: Problem, refs: Refs, request: jax.Array, column: Index) -> jax.Array:
    """Return the value of the device that has the token; it is -inf on the others."""
    devices = range(problem.shards.count)
    return reduce(jnp.maximum, [_as_float(refs.scores[d, request, column]) for d in devices])


def _first_highest(
    values: list[jax.Array], token_ids: list[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    best, token = values[0], token_ids[0]
    for value, other in zip(values[1:], token_ids[1:], strict=True):
        token = jnp.where(value > best, other, token)
        best = jnp.maximum(best, value)
    return best, token


def _inside(index: jax.Array, size: int) -> jax.Array:
    return jnp.minimum(jnp.maximum(index, 0), size - 1)


def _at(
    rows: Ref, row: jax.Array, index: jax.Array, size: int, divisor: jax.Array | None
) -> jax.Array:
    """Return a row's logit at an index over the temperature, -inf for an index out of range."""
    value = scaled(rows[row, _inside(index, size)], divisor)
    return jnp.where((index >= 0) & (index < size), value, -jnp.inf)


def _best_of_pieces(best_ref: Ref, row: jax.Array, count: int) -> jax.Array:
    return jnp.max(jnp.where(used_lanes(count), load_lanes(best_ref, row), -jnp.inf))


def _sum_of_pieces(
    best_ref: Ref,
    sum_ref: Ref,
    row: jax.Array,
    count: int,
    highest: jax.Array,
    divisor: jax.Array | None,
) -> jax.Array:
    """Return the sum of exp((x - highest) / temperature) over the own piece of a row."""
    best, total, used = load_lanes(best_ref, row), load_lanes(sum_ref, row), used_lanes(count)
    exponent = jnp.where(used, best, -jnp.inf) - jnp.where(highest > -jnp.inf, highest, 0.0)
    exponent = exponent if divisor is None else exponent / divisor
    return jnp.sum(jnp.where(used, total, 0.0) * jnp.exp(exponent))


def _as_word(value: jax.Array) -> jax.Array:
    if value.dtype == jnp.int32:
        return value
    return lax.bitcast_convert_type(value, jnp.int32)


def _as_float(word: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(word, jnp.float32)
