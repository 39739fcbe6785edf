"""The experts of a decode step on Hopper: each expert that some row chose is read once.

Two launches of one kernel: gate and up with the activation, then down. It is the product of
pallas_kernels.matmul (TMA ring, wgmma on W^T x^T, whose narrow axis is the rows) over a list of
blocks: an expert with up to 32 of its rows. A CTA takes (block, 64 columns) items in turn. Its
ring runs on from one item into the next, so that neither the number of experts hit nor their sizes
leave it idle.

With up to FEW_ROWS rows every block takes all rows: nothing is sorted, and each CTA makes the list
from the chosen ids. If there are more, XLA gathers the rows of each expert, padded to 8, 16 or 32.
An expert with more than 32 rows has several blocks, next to each other in time: the second one
finds the weights in the L2 cache.

Weights in MXFP4 and int4 are decoded in registers and multiplied by mma.sync, whose sums have
wgmma's bits. Weights in fp8 multiply rows in fp8. With blocks of scales, the launch of gate and up
quantises its result, 128 columns at a time; with a scale for a row, XLA does it between the two.

One accumulator runs through the whole depth, and a row's experts are summed in the order of its
ids. So a row's bits depend on the row alone.

    blocks.py      the blocks of many rows, made by XLA
    grouped.py     the kernel
    fp8.py         weights in fp8: sums of codes, scales, the result in fp8
    tuning.py      its static choices
    units.py       weights in MXFP4, decoded by the threads that multiply
    dequantise.py  weights in MXFP4 as plain arrays, for more rows
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.fp8_matmul import rows as plain
from pallas_kernels.fp8_matmul.mosaic_gpu.quantise import quantise, takes
from pallas_kernels.fp8_matmul.rows import Rows
from pallas_kernels.fp8_matmul.weight import BLOCK as FP8_BLOCK
from pallas_kernels.fp8_matmul.weight import Fp8Weight
from pallas_kernels.int4_matmul.mosaic_gpu.plan import SCALE_DTYPES, sum_depth
from pallas_kernels.int4_matmul.weight import DEPTHS, Int4Weight
from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.moe import MAX_ROWS
from pallas_kernels.moe.inputs import Inputs
from pallas_kernels.moe.mosaic_gpu.blocks import (
    SIZES,
    num_blocks,
    num_places,
    padded_table,
    plan_blocks,
)
from pallas_kernels.moe.mosaic_gpu.grouped import Activation, Table, multiply_blocks
from pallas_kernels.moe.mosaic_gpu.tuning import (
    FEW_ROWS,
    MAX_SMEM,
    Tuning,
    choose_packed_tuning,
    choose_tuning,
    smem_bytes,
)
from pallas_kernels.moe.mxfp4 import Mxfp4Weight
from pallas_kernels.moe.stored import Codes
from pallas_kernels.types import Shaped

__all__ = [
    "FEW_ROWS",
    "MAX_SMEM",
    "SIZES",
    "Plan",
    "Tuning",
    "choose_packed_tuning",
    "choose_tuning",
    "experts",
    "hidden",
    "num_blocks",
    "num_places",
    "plan_blocks",
    "plan_of",
    "smem_bytes",
    "unsupported",
]

MAX_EXPERTS = 1024


def unsupported(
    rows: int,
    top_k: int,
    gate_up: Shaped | Mxfp4Weight | Codes,
    down: Shaped | Mxfp4Weight | Codes,
    dtype: DTypeLike,
) -> str | None:
    """Return why the kernel cannot run, None if it can. rows, dtype: of x."""
    count, size, depth = down.shape
    if isinstance(gate_up, Codes) or isinstance(down, Codes):
        if reason := _unfit(gate_up, down, dtype):
            return reason
    elif any(d != jnp.bfloat16 for d in (dtype, gate_up.dtype, down.dtype)):
        got = f"{jnp.dtype(dtype).name}, {gate_up.dtype} and {down.dtype}"
        return f"expected bfloat16 operands, got {got}"
    if not 1 <= rows <= MAX_ROWS:
        return f"expected 1 to {MAX_ROWS} rows, got {rows}"
    if not 1 <= top_k <= count <= MAX_EXPERTS:
        return (
            f"expected at most {MAX_EXPERTS} experts, and a row to choose 1 up to all of them, "
            f"got {top_k} of {count}"
        )
    if depth % 64 or size % 64:
        expected = "a hidden and an intermediate size that are multiples of 64"
        return f"expected {expected}, got {depth} and {size}"
    return None


def _unfit(gate_up: object, down: object, dtype: DTypeLike) -> str | None:
    """Return why the kernel does not take experts of which some are codes."""
    if dtype != jnp.bfloat16:
        return f"expected bfloat16 rows, got {jnp.dtype(dtype).name}"
    both = gate_up, down
    if isinstance(gate_up, Fp8Weight) and isinstance(down, Fp8Weight):
        kinds = {(w.activation, w.has_blocks) for w in (gate_up, down)}
        if not kinds <= {("token", False)} and not kinds <= {("block", True)}:
            return "expected scales of columns with tokens', or of blocks with blocks'"
        if any(n % FP8_BLOCK for n in down.shape[1:]):
            expected = f"a hidden and an intermediate size that are multiples of {FP8_BLOCK}"
            return f"expected {expected}, got {down.shape[2]} and {down.shape[1]}"
        return None
    if not (isinstance(gate_up, Int4Weight) and isinstance(down, Int4Weight)):
        return f"expected gate_up and down of one form, got {[type(w).__name__ for w in both]}"
    for weight in (gate_up, down):
        if weight.group % DEPTHS or weight.scales.dtype not in SCALE_DTYPES:
            got = f"{weight.group} with {weight.scales.dtype} scales"
            return f"expected groups that are multiples of {DEPTHS} with float scales, got {got}"
        if weight.depth % sum_depth(weight):
            return f"expected depths in whole groups of {weight.group}, got {weight.depth}"
    return None


class Plan(NamedTuple):
    """Rows of each expert, as the kernels find them.

    blocks: of both launches
    rows:   what gate and up multiply
    place:  int32 [rows, columns of ids], the place of a row's k-th expert among the results
    local:  bool [rows, top_k], which experts are here; None for all
    """

    blocks: Table
    rows: jax.Array | Rows
    place: jax.Array
    local: jax.Array | None


# Compiled as a function of its own, so that layers and programs share the kernels.
@lowered_once(static_argnames="tunings")
def experts(inputs: Inputs, *, tunings: tuple[Tuning, Tuning] | None = None) -> jax.Array:
    """Run the op; see pallas_kernels.moe.experts. tunings: of gate and up, and of down."""
    first, second = tunings or (None, None)
    plan = plan_of(inputs)
    inner = hidden(inputs, plan, first)
    out = multiply_blocks(inner, plan.blocks, inputs.down, inputs.down_bias, None, second)
    assert not isinstance(out, Rows)
    total = jnp.zeros(inputs.x.shape, jnp.float32)
    for k in range(inputs.top_k):  # unrolled: one order of summation, one kernel
        weight = inputs.weights[:, k, None]
        chosen = out[plan.place[:, k]].astype(jnp.float32)
        if plan.local is not None:  # rows of no block are not written: they may be NaN
            chosen = jnp.where(plan.local[:, k, None], chosen, 0.0)
        total += weight * chosen
    return total.astype(inputs.x.dtype)


def plan_of(inputs: Inputs) -> Plan:
    """Return the rows as the kernels take them, and their places among the results."""
    x, ids, top_k = inputs.x, inputs.ids, inputs.top_k
    rows, count, columns = x.shape[0], inputs.down.shape[0], ids.shape[1]
    few = rows <= FEW_ROWS
    local = None
    if inputs.first_expert is not None:
        ids = ids - inputs.first_expert
        local = (ids >= 0) & (ids < count)
        ids = jnp.where(local, ids, count)
        local = local[:, :top_k]
    operand = _quantised(x, inputs.gate_up) if isinstance(inputs.gate_up, Fp8Weight) else x
    if few:
        table = padded_table(ids.reshape(-1))
        place, gathered = ids * FEW_ROWS + jnp.arange(rows)[:, None], operand
        if isinstance(gathered, Rows):
            gathered = _padded(gathered)
    else:
        table, place, row_at = plan_blocks(ids[:, :top_k], count, local=local)
        gathered = _at(operand, row_at) if isinstance(operand, Rows) else operand[row_at]
    return Plan(Table(table, few, rows, top_k, columns, local is not None), gathered, place, local)


def hidden(inputs: Inputs, plan: Plan, tuning: Tuning | None = None) -> jax.Array | Rows:
    """Return the activation's results [places, size], as down multiplies them."""
    activation = Activation(inputs.gate, inputs.alpha, inputs.limit)
    weight, bias = inputs.gate_up, inputs.gate_up_bias
    inner = multiply_blocks(plan.rows, plan.blocks, weight, bias, activation, tuning)
    if isinstance(inputs.down, Fp8Weight) and not isinstance(inner, Rows):
        return plain.quantise(inner, inputs.down.activation)
    return inner


def _quantised(x: jax.Array, weight: Fp8Weight) -> Rows:
    """Return rows in fp8, by the kernel where it takes their depth."""
    if takes(x.shape[1]):
        return quantise(x, weight.activation, None)
    return plain.quantise(x, weight.activation)


def _padded(rows: Rows) -> Rows:
    """Return rows with scales for FEW_ROWS of them, which the kernel reads."""
    missing = FEW_ROWS - rows.scales.shape[-1]
    if missing <= 0:
        return rows
    widths = ((0, 0),) * (rows.scales.ndim - 1) + ((0, missing),)
    return Rows(rows.codes, jnp.pad(rows.scales, widths))


def _at(rows: Rows, index: jax.Array) -> Rows:
    """Return the rows of an index."""
    return Rows(rows.codes[index], rows.scales[..., index])
