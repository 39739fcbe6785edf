"""Rejection sampling on Hopper: the logits stream once, in pieces of the vocabulary whose size never depends on the batch.

One warpgroup reduces one piece of one row in registers and writes a partial result; a block per request combines the partials. Launches:

  greedy, strict            argmax of every row; match the drafts
  probabilistic, block      log-sum-exps of every row; judge the drafts; argmax of the one row that is drawn from; emit
  block with draft logits   two more after the first: the drafts' joint probabilities, then the residual mass of the inner rows
  synthetic, K = 0          argmax of the one row that is drawn from; emit

Nothing of size [B, K, V] is written. q at the target's ids is a gather from the draft's row inside the kernel. Every kernel lets the next
one launch early and waits for the one before it (programmatic dependent launch). Sources of the rules: ``reference.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref

from pallas_kernels.hopper import interpreting
from pallas_kernels.pieces import LANES, Pieces, combine_maximum, cut, load_lanes, store_maximum, used_lanes

LOG2_E = 1.4426950408889634
LARGEST = float(jnp.finfo(jnp.float32).max)
# What the draw has to do for a request, in column MODE of `decided`; the other columns are num_accepted and the token if it is known.
ACCEPTED, MODE, TOKEN, DECIDED = 0, 1, 2, 4
KNOWN, PLAIN, RESIDUAL = 0, 1, 2


@dataclass(frozen=True)
class Tuning:
    """Piece sizes in tokens, multiples of 512: of the pass over all rows, and of the passes that also read noise or q.

    A piece's size decides the order of a row's sums, so it may follow the vocabulary but never the batch.
    """

    stream: int = 4096
    draw: int = 2048


DEFAULT = Tuning()


def unsupported(target_logits: jax.Array, draft_logits: jax.Array | None = None, tuning: Tuning = DEFAULT) -> str | None:
    """Why the kernels cannot take these arguments of the op, None if they can. Values are not read: ShapeDtypeStructs will do."""
    vocabs = {"target": target_logits.shape[-1]} | ({} if draft_logits is None else {"draft": draft_logits.shape[-1]})
    size = min(tuning.stream, tuning.draw)
    for name, vocab in vocabs.items():
        if vocab < LANES or cut(vocab, size).count > LANES:
            return f"expected a {name} vocabulary of {LANES} to {LANES * size} tokens, got {vocab}"
    return None


def rejection_sample(
    target_logits: jax.Array,
    draft_tokens: jax.Array,
    draft_logits: jax.Array | None,
    target_to_draft: jax.Array | None,
    greedy: jax.Array,
    uniforms: jax.Array | None,
    recover_noise: jax.Array | None,
    sample_noise: jax.Array | None,
    acceptance_rates: jax.Array | None,
    active: jax.Array,
    temperature: jax.Array | None = None,
    *,
    rule: str,
    sampled: bool,
    tuning: Tuning = DEFAULT,
) -> tuple[jax.Array, jax.Array]:
    """The public op's arguments and results; see ``pallas_kernels.rejection_sampling.rejection_sample``."""
    batch, rows, vocab = target_logits.shape
    num_drafts = rows - 1
    if batch == 0:
        return jnp.zeros((0, rows), jnp.int32), jnp.zeros(0, jnp.int32)
    problem = Problem(batch, num_drafts, rule, sampled, cut(vocab, tuning.stream), cut(vocab, tuning.draw))
    arrays: dict[str, jax.Array | None] = {"target": target_logits.reshape(batch * rows, vocab), "active": active}
    if num_drafts:
        arrays |= {"tokens": draft_tokens.reshape(-1)}
    if sampled:
        arrays |= {"greedy": greedy, "temperature": temperature}
    if rule == "strict" or (not sampled and rule != "synthetic"):
        noise = None if sample_noise is None or not sampled else sample_noise.reshape(batch * rows, vocab)
        return _match(problem, arrays | _row_maxima(problem, arrays | {"noise": noise}))
    if num_drafts and uniforms is not None:
        arrays |= {"uniforms": uniforms.reshape(-1), "rates": acceptance_rates}
    if sampled:
        arrays |= {"noise": recover_noise}
    if num_drafts and rule != "synthetic":
        if draft_logits is not None:
            width = draft_logits.shape[-1]
            problem = replace(problem, draft_stream=cut(width, tuning.stream))
            arrays |= {"draft": draft_logits.reshape(batch * num_drafts, width), "to_draft": target_to_draft}
        judged = arrays | _row_sums(problem, arrays)
        if rule == "block" and draft_logits is not None and num_drafts > 1:
            judged |= _mass(problem, arrays | _prefixes(problem, judged))
        arrays |= _judge(problem, judged)
    return _emit(problem, arrays | _draw(problem, arrays))


@dataclass(frozen=True)
class Problem:
    """What is static about one call: requests, drafts of each, and how rows are cut (rows of all requests lie below each other)."""

    batch: int
    num_drafts: int
    rule: str
    sampled: bool
    stream: Pieces
    draw: Pieces
    draft_stream: Pieces | None = None  # None: one-hot drafts

    @property
    def rows(self) -> int:
        return self.num_drafts + 1


class Refs(SimpleNamespace):
    """A kernel's inputs and outputs by name; an input that the call lacks is None."""

    def __getattr__(self, name: str) -> Any:
        return None


def _launch(
    body: Callable[[Refs, jax.Array], None],
    grid: int,
    inputs: dict[str, jax.Array | None],
    outputs: dict[str, jax.ShapeDtypeStruct],
    approximate: bool = False,
) -> dict[str, jax.Array]:
    """Run body(refs, block) for every block of the grid, one warpgroup each."""
    present = {name: array for name, array in inputs.items() if array is not None}
    overlapped = not interpreting()  # the interpreter does not know dependent launches

    def kernel(*refs: Any) -> None:
        if overlapped:
            plgpu.griddepcontrol_launch_dependents()
            plgpu.griddepcontrol_wait()
        body(Refs(**dict(zip([*present, *outputs], refs, strict=True))), lax.axis_index("block"))

    results = plgpu.kernel(
        kernel,
        out_type=tuple(outputs.values()),
        grid=(grid,),
        grid_names=("block",),
        kernel_name=body.__name__.strip("_"),
        compiler_params=plgpu.CompilerParams(
            approx_math=approximate,
            unsafe_no_auto_barriers=True,  # no memory is both read and written by a kernel
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(*present.values())
    return dict(zip(outputs, results, strict=True))


# ---- partial results of one piece


def _divisor(refs: Refs, request: jax.Array) -> jax.Array | None:
    return None if refs.temperature is None else jnp.where(refs.greedy[request], 1.0, refs.temperature[request])


def _scaled(logits: jax.Array, divisor: jax.Array | None) -> jax.Array:
    """Over temperature, then NaN to -inf and +inf to the largest float, as in the reference."""
    logits = logits if divisor is None else logits / divisor
    return jnp.where(logits == logits, jnp.minimum(logits, LARGEST), -jnp.inf)


def _store_sum(
    logits: jax.Array, divisor: jax.Array | None, pieces: Pieces, best_ref: Any, sum_ref: Any, row: jax.Array, piece: jax.Array
) -> None:
    """Maximum m of the plain logits, and the sum of exp((x - m) / temperature), without what the piece before holds."""
    fresh = pieces.indices(piece) >= piece * pieces.size
    logits = jnp.where(fresh & (logits == logits), jnp.minimum(logits, LARGEST), -jnp.inf)
    best = jnp.max(logits)
    scale = LOG2_E if divisor is None else LOG2_E / divisor
    best_ref[row, piece] = best
    sum_ref[row, piece] = jnp.sum(lax.exp2((logits - jnp.where(best > -jnp.inf, best, 0.0)) * scale))


def _partials(rows: int, *dtypes: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((rows, LANES), dtype) for dtype in dtypes]


def _row_maxima(problem: Problem, inputs: dict[str, jax.Array | None]) -> dict[str, jax.Array]:
    """best, index [B (K+1), LANES]: the argmax of each piece of every target row, noise added where the request is sampled."""
    pieces = problem.stream

    def row_maxima(refs: Refs, block: jax.Array) -> None:
        row, piece = block // pieces.count, block % pieces.count
        request = row // problem.rows

        @pl.when(refs.active[request])
        def _() -> None:
            logits = pieces.load(refs.target.at[row], piece)
            store = partial(store_maximum, indices=pieces.indices(piece), best_ref=refs.best, index_ref=refs.index, row=row, piece=piece)
            if not problem.sampled:
                store(logits)
                return
            greedy = refs.greedy[request]
            pl.when(greedy)(lambda: store(logits))

            @pl.when(jnp.logical_not(greedy))
            def _() -> None:
                store(_scaled(logits, _divisor(refs, request)) + pieces.load(refs.noise.at[row], piece))

    rows = problem.batch * problem.rows
    best, index = _partials(rows, jnp.float32, jnp.int32)
    return _launch(row_maxima, rows * pieces.count, inputs, {"best": best, "index": index})


def _row_sums(problem: Problem, inputs: dict[str, jax.Array | None]) -> dict[str, jax.Array]:
    """best, sum [B (K+1), LANES] of the target's rows and draft_best, draft_sum [B K, LANES] of the draft's; index for greedy requests."""
    rows, draft_rows = problem.batch * problem.rows, problem.batch * problem.num_drafts
    target_blocks = rows * problem.stream.count

    def target(refs: Refs, block: jax.Array) -> None:
        pieces = problem.stream
        row, piece = block // pieces.count, block % pieces.count
        request = row // problem.rows

        @pl.when(refs.active[request])
        def _() -> None:
            logits = pieces.load(refs.target.at[row], piece)
            greedy = refs.greedy[request]

            @pl.when(greedy)
            def _() -> None:
                store_maximum(logits, pieces.indices(piece), refs.best, refs.index, row, piece)

            @pl.when(jnp.logical_not(greedy))
            def _() -> None:
                _store_sum(logits, _divisor(refs, request), pieces, refs.best, refs.sum, row, piece)

    def draft(pieces: Pieces, refs: Refs, block: jax.Array) -> None:
        row, piece = block // pieces.count, block % pieces.count
        request = row // problem.num_drafts

        @pl.when(refs.active[request] & jnp.logical_not(refs.greedy[request]))
        def _() -> None:
            logits = pieces.load(refs.draft.at[row], piece)
            _store_sum(logits, _divisor(refs, request), pieces, refs.draft_best, refs.draft_sum, row, piece)

    def row_sums(refs: Refs, block: jax.Array) -> None:
        if problem.draft_stream is None:
            target(refs, block)
        else:
            pl.when(block < target_blocks)(partial(target, refs, block))
            pl.when(block >= target_blocks)(partial(draft, problem.draft_stream, refs, block - target_blocks))

    best, total, index = _partials(rows, jnp.float32, jnp.float32, jnp.int32)
    outputs = {"best": best, "sum": total, "index": index}
    blocks = target_blocks
    if problem.draft_stream is not None:
        outputs["draft_best"], outputs["draft_sum"] = _partials(draft_rows, jnp.float32, jnp.float32)
        blocks += draft_rows * problem.draft_stream.count
    return _launch(row_sums, blocks, inputs, outputs, approximate=True)


# ---- combining a row's partial results


def _combine_sum(best_ref: Any, sum_ref: Any, row: jax.Array, count: int, divisor: jax.Array | None) -> jax.Array:
    """log-sum-exp of a row over its temperature; 0 for a row that is all -inf, so that subtracting it leaves -inf and not NaN."""
    best, total, used = load_lanes(best_ref, row), load_lanes(sum_ref, row), used_lanes(count)
    best = jnp.where(used, best, -jnp.inf)
    highest = jnp.max(best)
    shift = jnp.where(highest > -jnp.inf, highest, 0.0)
    exponent, top = best - shift, shift
    if divisor is not None:
        exponent, top = exponent / divisor, jnp.minimum(shift / divisor, LARGEST)
    total = jnp.sum(jnp.where(used, total, 0.0) * jnp.exp(exponent))
    return jnp.where(highest > -jnp.inf, top + jnp.log(total), 0.0)


def _expm1(x: jax.Array) -> jax.Array:
    """e^x - 1 for x <= 0, to float32's last digits also where e^x is close to 1."""
    series = jnp.ones_like(x)
    for n in range(9, 1, -1):
        series = 1.0 + series * x * (1.0 / n)
    return jnp.where(x > -0.5, x * series, jnp.exp(x) - 1.0)


def _count_leading(accepted: list[jax.Array]) -> jax.Array:
    count, running = jnp.int32(0), jnp.bool_(True)
    for flag in accepted:
        running = running & flag
        count = count + running.astype(jnp.int32)
    return count


def _pick(values: list[jax.Array], index: jax.Array) -> jax.Array:
    """values[index] of scalars in registers."""
    picked = values[0]
    for i, value in enumerate(values[1:], 1):
        picked = jnp.where(index == i, value, picked)
    return picked


def _store_output(problem: Problem, refs: Refs, request: jax.Array, num_accepted: jax.Array, token: jax.Array) -> None:
    """The accepted drafts, then the token, then -1; nothing for a padding row."""
    active = refs.active[request]
    for i in range(problem.rows):
        value = jnp.where(num_accepted == i, token, -1)
        if i < problem.num_drafts:
            value = jnp.where(num_accepted > i, refs.tokens[request * problem.num_drafts + i], value)
        refs.output[request, i] = jnp.where(active, value, -1)
    refs.num_sampled[request] = jnp.where(active, num_accepted + 1, 0)


def _results(problem: Problem) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        "output": jax.ShapeDtypeStruct((problem.batch, problem.rows), jnp.int32),
        "num_sampled": jax.ShapeDtypeStruct((problem.batch,), jnp.int32),
    }


def _match_target(problem: Problem, refs: Refs, request: jax.Array) -> tuple[jax.Array, jax.Array]:
    """num_accepted and the token after: drafts are kept while they equal the row's argmax."""
    maxima = [combine_maximum(refs.best, refs.index, request * problem.rows + i, problem.stream.count)[1] for i in range(problem.rows)]
    drafts = [refs.tokens[request * problem.num_drafts + i] for i in range(problem.num_drafts)]
    num_accepted = _count_leading([draft == token for draft, token in zip(drafts, maxima, strict=False)])
    return num_accepted, _pick(maxima, num_accepted)


def _match(problem: Problem, inputs: dict[str, jax.Array | None]) -> tuple[jax.Array, jax.Array]:
    """Strict and greedy requests, from every row's partial argmax to the output."""

    def match(refs: Refs, request: jax.Array) -> None:
        _store_output(problem, refs, request, *_match_target(problem, refs, request))

    results = _launch(match, problem.batch, inputs, _results(problem))
    return results["output"], results["num_sampled"]


# ---- judging sampled requests


@dataclass(frozen=True)
class Scores:
    """Of one request, scalars per draft: see reference.DraftScores; log_joint is log P_i of K+1 prefixes (block), else zeros."""

    valid: list[jax.Array]
    log_p: list[jax.Array]
    log_q: list[jax.Array]
    target_lse: list[jax.Array]
    draft_lse: list[jax.Array]
    log_joint: list[jax.Array]


def _score(problem: Problem, refs: Refs, request: jax.Array) -> Scores:
    K, vocab = problem.num_drafts, problem.stream.vocab
    divisor = _divisor(refs, request)
    valid, logits, draft_logits = [], [], []
    for i in range(K):  # the dependent reads first, all drafts' at once: each is a trip to memory
        draft = refs.tokens[request * K + i]
        inside = (draft >= 0) & (draft < vocab)
        draft = jnp.where(inside, draft, 0)
        logits.append(_scaled(refs.target[request * problem.rows + i, draft], divisor))
        if problem.draft_stream is not None:
            own = draft if refs.to_draft is None else refs.to_draft[draft]
            inside = inside & (own >= 0)
            own = jnp.minimum(jnp.maximum(own, 0), problem.draft_stream.vocab - 1)
            draft_logits.append(_scaled(refs.draft[request * K + i, own], divisor))
        valid.append(inside)
    count = problem.stream.count
    target_lse = [_combine_sum(refs.best, refs.sum, request * problem.rows + i, count, divisor) for i in range(K + 1)]
    log_p = [x - lse for x, lse in zip(logits, target_lse, strict=False)]
    log_q, draft_lse = [jnp.float32(0.0)] * K, [jnp.float32(0.0)] * K
    if problem.draft_stream is not None:
        count = problem.draft_stream.count
        draft_lse = [_combine_sum(refs.draft_best, refs.draft_sum, request * K + i, count, divisor) for i in range(K)]
        log_q = [x - lse for x, lse in zip(draft_logits, draft_lse, strict=True)]
        valid = [v & (q > -jnp.inf) for v, q in zip(valid, log_q, strict=True)]
        log_q = [jnp.where(v, q, 0.0) for v, q in zip(valid, log_q, strict=True)]
    log_joint = [jnp.float32(0.0)] * (K + 1)
    if problem.rule == "block":
        for i in range(K):
            log_joint[i + 1] = jnp.minimum(log_joint[i] + jnp.where(valid[i], log_p[i] - log_q[i], 0.0), 0.0)
    return Scores(valid, log_p, log_q, target_lse, draft_lse, log_joint)


def _block(problem: Problem, refs: Refs, request: jax.Array, scores: Scores, uniforms: list[jax.Array]) -> jax.Array:
    """How many drafts block verification keeps; see reference._block."""
    K = problem.num_drafts
    num_valid = _count_leading(scores.valid)
    num_kept = jnp.int32(0)
    for length in range(1, K + 1):
        log_joint = scores.log_joint[length]
        keep = jnp.exp(log_joint)
        if length < K:
            if refs.mass is None:
                remaining = keep * -_expm1(jnp.minimum(scores.log_p[length], 0.0))
            else:
                remaining = jnp.sum(jnp.where(used_lanes(problem.draw.count), load_lanes(refs.mass, request * (K - 1) + length - 1), 0.0))
            denominator = remaining - _expm1(log_joint)
            inner = jnp.where(denominator > 0, remaining / jnp.where(denominator > 0, denominator, 1.0), 1.0)
            keep = jnp.where(num_valid == length, keep, inner)
        num_kept = jnp.where((length <= num_valid) & (uniforms[length - 1] < keep), length, num_kept)
    return num_kept


def _judge(problem: Problem, inputs: dict[str, jax.Array | None]) -> dict[str, jax.Array]:
    """decided i32 [B, DECIDED], and at the row to draw from: target_lse, draft_lse, log_joint f32 [B]."""
    K = problem.num_drafts

    def judge(refs: Refs, request: jax.Array) -> None:
        greedy = refs.greedy[request]

        def decide(num_accepted: jax.Array, mode: jax.Array, token: jax.Array) -> None:
            for column, value in ((ACCEPTED, num_accepted), (MODE, mode), (TOKEN, token)):
                refs.decided[request, column] = value

        @pl.when(greedy)
        def _() -> None:
            num_accepted, token = _match_target(problem, refs, request)
            decide(num_accepted, jnp.int32(KNOWN), token)

        @pl.when(jnp.logical_not(greedy))
        def _() -> None:
            uniforms = [refs.uniforms[request * K + i] for i in range(K)]
            scores = _score(problem, refs, request)
            if problem.rule == "block":
                num_kept = _block(problem, refs, request, scores, uniforms)
            else:
                kept = [scores.valid[i] & (scores.log_p[i] > jnp.log(uniforms[i]) + scores.log_q[i]) for i in range(K)]
                num_kept = _count_leading(kept)
            rejected = (num_kept < K) & _pick(scores.valid, jnp.minimum(num_kept, K - 1))
            decide(num_kept, jnp.where(rejected, RESIDUAL, PLAIN), jnp.int32(0))
            refs.target_lse[request] = _pick(scores.target_lse, num_kept)
            refs.draft_lse[request] = _pick(scores.draft_lse, num_kept)  # the bonus row's is not used
            refs.log_joint[request] = _pick(scores.log_joint, num_kept)

    scalar = jax.ShapeDtypeStruct((problem.batch,), jnp.float32)
    decided = jax.ShapeDtypeStruct((problem.batch, DECIDED), jnp.int32)
    outputs = {"decided": decided, "target_lse": scalar, "draft_lse": scalar, "log_joint": scalar}
    return _launch(judge, problem.batch, inputs, outputs)


def _prefixes(problem: Problem, inputs: dict[str, jax.Array | None]) -> dict[str, jax.Array]:
    """What the inner rows 1 .. K-1 of block verification need for their residual mass: target_lse, draft_lse, log_joint f32 [B (K-1)]."""
    inner = problem.num_drafts - 1

    def prefixes(refs: Refs, request: jax.Array) -> None:
        @pl.when(refs.active[request] & jnp.logical_not(refs.greedy[request]))
        def _() -> None:
            scores = _score(problem, refs, request)
            for i in range(inner):
                refs.target_lse[request * inner + i] = scores.target_lse[i + 1]
                refs.draft_lse[request * inner + i] = scores.draft_lse[i + 1]
                refs.log_joint[request * inner + i] = scores.log_joint[i + 1]

    scalar = jax.ShapeDtypeStruct((problem.batch * inner,), jnp.float32)
    return _launch(prefixes, problem.batch, inputs, {"target_lse": scalar, "draft_lse": scalar, "log_joint": scalar})


def _gather(pieces: Pieces, row_ref: Any, indices: jax.Array) -> jax.Array:
    """row_ref[indices] for a piece of indices: each thread reads its own from device memory (Pallas has no such read)."""
    if interpreting():
        return jnp.take(row_ref[...], indices)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), pieces.layout),
        return_type=plgpu.ShapeDtypeStruct((pieces.size,), jnp.float32, layout=pieces.layout),
    )
    def gather(_: Any, ref: Any, index: Any) -> Any:
        return index.foreach(lambda i, _: memref.load(ref, [arith.index_cast(ir.IndexType.get(), i)]), create_array=True)

    read: Any = gather
    return read(row_ref, indices)


def _draft_at_target(problem: Problem, refs: Refs, row: jax.Array, piece: jax.Array, divisor: jax.Array | None) -> jax.Array:
    """The draft's logits of a row at a piece of the target's ids, -inf where the draft has no such token."""
    pieces = problem.draw
    if refs.to_draft is None:
        return _scaled(pieces.load(refs.draft.at[row], piece), divisor)
    assert problem.draft_stream is not None
    own = pieces.load(refs.to_draft, piece)
    gathered = _gather(pieces, refs.draft.at[row], jnp.minimum(jnp.maximum(own, 0), problem.draft_stream.vocab - 1))
    return jnp.where(own >= 0, _scaled(gathered, divisor), -jnp.inf)


def _mass(problem: Problem, inputs: dict[str, jax.Array | None]) -> dict[str, jax.Array]:
    """mass [B (K-1), LANES]: sum over a piece of max(P_i p - q, 0) at the inner rows (2403.10444, algorithm 2)."""
    pieces, inner = problem.draw, problem.num_drafts - 1

    def mass(refs: Refs, block: jax.Array) -> None:
        row, piece = block // pieces.count, block % pieces.count
        request, i = row // inner, row % inner + 1

        @pl.when(refs.active[request] & jnp.logical_not(refs.greedy[request]))
        def _() -> None:
            divisor = _divisor(refs, request)
            log_p = _scaled(pieces.load(refs.target.at[request * problem.rows + i], piece), divisor) - refs.target_lse[row]
            log_q = _draft_at_target(problem, refs, request * problem.num_drafts + i, piece, divisor) - refs.draft_lse[row]
            exceeding = jnp.maximum(jnp.exp(refs.log_joint[row] + log_p) - jnp.exp(log_q), 0.0)
            fresh = pieces.indices(piece) >= piece * pieces.size
            refs.mass[row, piece] = jnp.sum(jnp.where(fresh, exceeding, 0.0))

    rows = problem.batch * inner
    return _launch(mass, rows * pieces.count, inputs, {"mass": _partials(rows, jnp.float32)[0]}, approximate=True)


# ---- the one token that is drawn


def _decision(problem: Problem, refs: Refs, request: jax.Array) -> tuple[jax.Array, jax.Array]:
    """num_accepted and the mode of the draw: as judged, or by rate alone (synthetic), or 0 where nothing was drafted."""
    if refs.decided is not None:
        num_accepted, mode = refs.decided[request, ACCEPTED], refs.decided[request, MODE]
        return num_accepted, jnp.where(refs.active[request], mode, KNOWN)
    kept = []
    for i in range(problem.num_drafts):
        draft = refs.tokens[request * problem.num_drafts + i]
        inside = (draft >= 0) & (draft < problem.draw.vocab)
        kept.append(inside & (refs.uniforms[request * problem.num_drafts + i] < refs.rates[i]))
    return _count_leading(kept), jnp.where(refs.active[request], PLAIN, KNOWN)


def _draw(problem: Problem, inputs: dict[str, jax.Array | None]) -> dict[str, jax.Array]:
    """best, index [B, LANES]: argmax of a piece of row num_accepted plus noise; residual_best, residual_index of the residual's."""
    pieces = problem.draw
    judged = inputs.get("decided") is not None  # a judged request that is greedy has its token already

    def draw(refs: Refs, block: jax.Array) -> None:
        request, piece = block // pieces.count, block % pieces.count
        num_accepted, mode = _decision(problem, refs, request)
        row = request * problem.rows + num_accepted
        noisy, bare = mode == PLAIN, mode == PLAIN
        if problem.sampled and not judged:
            noisy, bare = noisy & jnp.logical_not(refs.greedy[request]), bare & refs.greedy[request]
        store = partial(store_maximum, indices=pieces.indices(piece), row=request, piece=piece)
        store_plain = partial(store, best_ref=refs.best, index_ref=refs.index)

        def load_both() -> tuple[jax.Array, jax.Array]:
            logits, noise = pieces.load(refs.target.at[row], piece), pieces.load(refs.noise.at[request], piece)
            return _scaled(logits, _divisor(refs, request)), noise

        if not judged:

            @pl.when(bare)
            def _() -> None:
                store_plain(pieces.load(refs.target.at[row], piece))

        if problem.sampled:

            @pl.when(noisy)
            def _() -> None:
                logits, noise = load_both()
                store_plain(logits + noise)

        if judged:

            @pl.when(mode == RESIDUAL)
            def _() -> None:
                logits, noise = load_both()
                residual = _residual(problem, refs, request, num_accepted, piece, logits)
                store_plain(logits + noise)
                store(residual + noise, best_ref=refs.residual_best, index_ref=refs.residual_index)

    names = ["best", "index", "residual_best", "residual_index"]
    outputs = dict(zip(names, 2 * _partials(problem.batch, jnp.float32, jnp.int32), strict=True))
    if not judged:
        outputs = {name: outputs[name] for name in names[:2]}
    return _launch(draw, problem.batch * pieces.count, inputs, outputs, approximate=True)


def _residual(problem: Problem, refs: Refs, request: jax.Array, num_accepted: jax.Array, piece: jax.Array, logits: jax.Array) -> jax.Array:
    """log max(P p - q, 0) over a piece of row num_accepted, whose draft was rejected; see reference._residual."""
    rejected = request * problem.num_drafts + num_accepted
    if problem.draft_stream is None:
        return jnp.where(problem.draw.indices(piece) == refs.tokens[rejected], -jnp.inf, logits)
    log_p = logits - refs.target_lse[request] + refs.log_joint[request]
    log_q = _draft_at_target(problem, refs, rejected, piece, _divisor(refs, request)) - refs.draft_lse[request]
    return jnp.where(log_p > log_q, log_p + jnp.log(-_expm1(log_q - log_p)), -jnp.inf)


def _emit(problem: Problem, inputs: dict[str, jax.Array | None]) -> tuple[jax.Array, jax.Array]:
    """Choose among the pieces' winners; the residual's where it has mass, else the plain target's."""
    count = problem.draw.count

    def emit(refs: Refs, request: jax.Array) -> None:
        num_accepted, mode = _decision(problem, refs, request)
        _, token = combine_maximum(refs.best, refs.index, request, count)
        if refs.decided is not None:
            highest, residual = combine_maximum(refs.residual_best, refs.residual_index, request, count)
            token = jnp.where((mode == RESIDUAL) & (highest > -jnp.inf), residual, token)
            token = jnp.where(mode == KNOWN, refs.decided[request, TOKEN], token)
        _store_output(problem, refs, request, num_accepted, token)

    results = _launch(emit, problem.batch, inputs, _results(problem))
    return results["output"], results["num_sampled"]
