"""How one product of few rows is divided: blocks, the CTAs and warpgroups that share a tile's depth, and when copies and calls start.

With it goes the order of summation, which depends on the shapes of the weights, on whether they are gate and up, and on whether there are
more than 8 rows, and on nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

MAX_ROWS = 64
MAX_NORM_ROWS = 8  # that share a norm: for 64 rows a kernel of the norm's own is faster
MAX_SMEM = 227 * 1024
NUM_SMS = 132
TILE_N = 64  # output columns a tile: wgmma's M
REDUCTION_BYTES = 1024  # for sums across warps
RESIDENT_BYTES = (
    72 * 1024
)  # an input up to this size stays in shared memory; a wider one streams beside the weights
SPLIT = 2  # CTAs for a tile where tiles are few and deep; 1 for none
RING_DEPTH = 1536  # of a tile that a CTA's rings hold as a whole


@dataclass(frozen=True)
class Tuning:
    """tile_k depth a step (64 or 128), warpgroups that share the depth, stages (at least 2) of each one's ring, most blocks at once
    (they take the tiles in turn). pdl: programmatic dependent launch, which CUDA graphs ignore and the interpreter does not know.

    split: CTAs of a block, a cluster of which each takes a part of the depth; a block then has one tile. calls_next: whether the next
    kernel is called when the last copy is on its way. weights_first: whether the rings fill before this kernel waits for the one before it;
    where that one does not call there is nothing to wait for, and x would only queue behind 22 MB of weights.
    """

    tile_k: int = 128
    warpgroups: int = 2
    stages: int = 6
    blocks: int = NUM_SMS
    pdl: bool = True
    split: int = 1
    calls_next: bool = True
    weights_first: bool = True


def padded_rows(rows: int) -> int:
    """The narrow axis of the product: wgmma takes multiples of 8."""
    return next(p for p in (8, 16, 32, MAX_ROWS) if p >= rows)


def is_resident(rows: int, depth: int) -> bool:
    """Whether all of x stays in shared memory."""
    return padded_rows(rows) * depth * 2 <= RESIDENT_BYTES


def num_pieces(width: int) -> int:
    """Partial sums of squares that a row of this width has: one a tile, in whole wgmma tiles, of which the last may never be written."""
    return -(-width // TILE_N // TILE_N) * TILE_N


def smem_bytes(
    rows: int,
    depth: int,
    tuning: Tuning,
    products: int,
    out_bytes: int,
    residual: bool,
    normed: bool = False,
    norms: bool = False,
) -> int:
    """Shared memory of a CTA, to within the barriers."""
    padded, slots, part_depth = (
        padded_rows(rows),
        tuning.warpgroups * tuning.stages,
        depth // tuning.split,
    )
    x = (
        part_depth * padded * 2
        if is_resident(rows, part_depth)
        else slots * tuning.tile_k * padded * 2
    )
    ring = slots * tuning.tile_k * TILE_N * products * 2
    partial_sums = (tuning.warpgroups * tuning.split - 1) * products * TILE_N * padded * 4
    out = TILE_N * padded * (out_bytes + (4 if out_bytes == 4 else 0) + (2 if residual else 0))
    out += (
        1024 if normed and tuning.warpgroups > 1 else 0
    )  # what is small takes 1 KB, where the next piece may start
    out += TILE_N * padded * 2 + 2 * 1024 if norms else 0
    return x + ring + partial_sums + out + (REDUCTION_BYTES if normed or norms else 0) + 1024


def choose_tuning(
    rows: int,
    depth: int,
    widths: tuple[int, ...],
    *,
    swiglu: bool = False,
    out_bytes: int = 2,
    residual: bool = False,
    normed: bool = False,
    norms: bool = False,
) -> Tuning | None:
    """What measured best on an H200 (docs/notes/layer-products.md), with as many stages as fit; None if nothing does.

    tile_k, warpgroups and split set the order of summation. They depend on whether there are at most 8 rows, and on nothing else of
    the rows.
    """
    few = padded_rows(rows) == 8
    tiles = (widths[0] if swiglu else sum(widths)) // TILE_N
    # One SM takes in 62 GB/s: half of them are not enough. A tile that fits into one ring needs no second.
    deep = (
        depth > RING_DEPTH and depth % (128 * 2 * SPLIT) == 0
    )  # the first choice of steps and warpgroups, below, stays the same
    split = SPLIT if deep and not swiglu and tiles * SPLIT <= NUM_SMS else 1
    # Gate and up call down, the head the sampler (a product with a bias is float32 too, but XLA's sum after it is not launched early); what
    # follows the others would land on whatever SMs are left. Before a residual sum are attention or gate and up, which call; before the
    # others a norm or such a sum, which do not. Two o, not measured, are otherwise: latent attention's follows a product by head, which
    # does not call, and one with a bias, which has no residual here, follows attention.
    calls_next = swiglu or out_bytes == 4
    # Gate and up of many rows: two blocks an SM, each with half of the shared memory, keep the tensor cores busy.
    blocks_an_sm = 2 if swiglu and not few and not is_resident(rows, depth) else 1
    rounds = -(-tiles // (NUM_SMS * blocks_an_sm))
    for tile_k in (128, 64) if few else (64, 128):
        for warpgroups in (1, 3) if swiglu else (2, 3, 1):
            if depth % (tile_k * warpgroups * split):
                continue
            for stages in (6, 5, 4, 3, 2):
                tuning = Tuning(
                    tile_k,
                    warpgroups,
                    stages,
                    -(-tiles // rounds),
                    split=split,
                    calls_next=calls_next,
                    weights_first=residual,
                )
                needed = smem_bytes(
                    rows, depth, tuning, 2 if swiglu else 1, out_bytes, residual, normed, norms
                )
                if needed <= MAX_SMEM // blocks_an_sm:
                    return tuning
    return None


def unsupported(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    *,
    residual: bool = False,
    swiglu: bool = False,
    transposed: bool = False,
    normed: bool = False,
    norms: bool = False,
    out_dtype: Any = jnp.bfloat16,
) -> str | None:
    """Why this kernel cannot make this product, None if it can. Takes anything with a shape and a dtype. normed: x comes with its squares;
    norms: the result is to have its own, and a gain."""
    rows, depth = x.shape
    widths = tuple(w.shape[0 if transposed else 1] for w in weights)
    if any(a.dtype != jnp.bfloat16 for a in (x, *weights)):
        return f"expected bfloat16 operands, got {x.dtype} and {weights[0].dtype}"
    if not 1 <= rows <= MAX_ROWS or (rows > 8 and rows % 8):
        return f"expected 1 to 8 rows, or a multiple of 8 up to {MAX_ROWS}, got {rows}"
    if depth % 64 or any(n % TILE_N for n in widths):
        return f"expected a depth and widths that are multiples of 64, got {depth} and {widths}"
    if (norms or normed) and rows > MAX_NORM_ROWS:
        return f"expected at most {MAX_NORM_ROWS} rows that share a norm, got {rows}"
    if norms and (swiglu or len(weights) > 1 or out_dtype != jnp.bfloat16):
        return f"expected one weight and a bfloat16 result without swiglu where it gets a gain, got {len(weights)}, {out_dtype}, {swiglu}"
    options: dict[str, Any] = {
        "swiglu": swiglu,
        "residual": residual,
        "normed": normed,
        "norms": norms,
    }
    if (
        choose_tuning(rows, depth, widths, out_bytes=jnp.dtype(out_dtype).itemsize, **options)
        is None
    ):
        return f"expected a ring of two stages to fit into {MAX_SMEM} bytes of shared memory, got {rows} rows of {depth}"
    return None
