"""The residual max(P p - q, 0), from which a recovered token is drawn, over a piece of a row.

q at the target's ids is gathered from the draft's row inside the kernel: a draft's logits over the
whole vocabulary are never written.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref

from pallas_kernels.hopper import interpreting
from pallas_kernels.pieces import Pieces
from pallas_kernels.rejection_sampling.mosaic_gpu.launch import Problem, Refs, first_id
from pallas_kernels.rejection_sampling.mosaic_gpu.temperature import divisor_of, scaled
from pallas_kernels.types import Ref


def log_residual(
    problem: Problem,
    refs: Refs,
    request: jax.Array,
    num_accepted: jax.Array,
    piece: jax.Array,
    logits: jax.Array,
) -> jax.Array:
    """Return log max(P p - q, 0) over a piece of row num_accepted, whose draft was rejected.

    See reference._residual.
    """
    rejected = request * problem.K + num_accepted
    if problem.draft_sweep is None:
        ids = problem.draw.indices(piece, first_id(problem, refs))
        return jnp.where(ids == refs.tokens[rejected], -jnp.inf, logits)
    rejected = request if problem.one_draft_row else rejected
    log_p = logits - refs.target_lse[request] + refs.log_joint[request]
    log_q = (
        draft_at_target(problem, refs, rejected, piece, divisor_of(refs, request))
        - refs.draft_lse[request]
    )
    return jnp.where(log_p > log_q, log_p + jnp.log(-expm1(log_q - log_p)), -jnp.inf)


def draft_at_target(
    problem: Problem, refs: Refs, row: jax.Array, piece: jax.Array, divisor: jax.Array | None
) -> jax.Array:
    """Return the draft's logits of a row at a piece of the target's ids, -inf where it has none."""
    pieces = problem.draw
    if refs.to_draft is None:
        return scaled(pieces.load(refs.draft.at[row], piece), divisor)
    own = pieces.load(refs.to_draft, piece, first_id(problem, refs))
    gathered = _gather(
        pieces, refs.draft.at[row], jnp.minimum(jnp.maximum(own, 0), problem.draft_width - 1)
    )
    return jnp.where(own >= 0, scaled(gathered, divisor), -jnp.inf)


def _gather(pieces: Pieces, row_ref: Ref, indices: jax.Array) -> jax.Array:
    """Return row_ref[indices] for a piece of indices.

    Each thread reads its own from device memory: Pallas has no such read.
    """
    if interpreting():
        return jnp.take(row_ref[...], indices)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), pieces.layout),
        return_type=plgpu.ShapeDtypeStruct((pieces.size,), jnp.float32, layout=pieces.layout),
    )
    def gather(_: Any, ref: Any, index: Any) -> Any:
        return index.foreach(
            lambda i, _: memref.load(ref, [arith.index_cast(ir.IndexType.get(), i)]),
            create_array=True,
        )

    read: Any = gather
    return read(row_ref, indices)


def expm1(x: jax.Array) -> jax.Array:
    """Return e^x - 1 for x <= 0, to float32's last digits also where e^x is close to 1."""
    series = jnp.ones_like(x)
    for n in range(9, 1, -1):
        series = 1.0 + series * x * (1.0 / n)
    return jnp.where(x > -0.5, x * series, jnp.exp(x) - 1.0)
