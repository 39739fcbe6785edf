"""A Markov head's steps on Hopper: two kernels for each op, where separate ops take four or more.

The product is the matmul op's, with its rings, sums and order of summation. So logits have the
bits that the op would write. Two things are different:

- Each block looks up W1's rows itself, while its first tiles of W2 arrive. A copy cannot write a
  single row of a tile that wgmma reads. So rows are copied aside, and go through registers.
- A tile of the base logits is added to each tile of the product. Those of the next tiles are copied
  ahead, as the weights are.

What becomes of a tile of logits differs: `largest` keeps its largest, `drawn` writes it and keeps
the largest sum with the noise. A small kernel compares what the blocks found.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.markov_head.inputs import Inputs
from pallas_kernels.markov_head.mosaic_gpu.best import first_column
from pallas_kernels.markov_head.mosaic_gpu.block import Sources
from pallas_kernels.markov_head.mosaic_gpu.drawn import Drawn
from pallas_kernels.markov_head.mosaic_gpu.largest import Largest
from pallas_kernels.markov_head.mosaic_gpu.launch import launch
from pallas_kernels.matmul.mosaic_gpu.sizes import Operands, Sizes
from pallas_kernels.matmul.plan import (
    MAX_SMEM,
    TILE_N,
    Order,
    Product,
    Tuning,
    choose_tuning,
    is_resident,
    padded_rows,
    smem_bytes,
    unfit_rows,
)
from pallas_kernels.matmul.plan import unsupported as unsupported_product


def unsupported(inputs: Inputs) -> str | None:
    """Return why these kernels cannot run, None if they can."""
    rows, rank = inputs.rows, inputs.rank
    if reason := unfit_rows(rows):  # before product_of pads them; base logits are not padded
        return reason
    product = product_of(inputs)
    if reason := unsupported_product(product):
        return reason
    order = Order.of(product)
    if order is not None and order.split > 1:
        return f"expected a rank that one block sums, got {rank}"
    if tuning_of(product) is None:
        return f"expected W1's rows to fit into shared memory, got {rows} of {rank} numbers"
    return None


def product_of(inputs: Inputs) -> Product:
    """Return the product with W2. Rows are padded, which changes no bits."""
    x = jax.ShapeDtypeStruct((padded_rows(inputs.rows), inputs.rank), inputs.table.dtype)
    return Product(x, (inputs.weight,), out_dtype=jnp.float32)


def tuning_of(product: Product) -> Tuning | None:
    """Return the product's tuning, with as many stages as fit beside the rest; None if none do."""
    tuning = choose_tuning(product)
    if tuning is None or not is_resident(product, product.depth):
        return None
    padded = product.rows
    tile = 4 * TILE_N * padded
    # In place of the product's result: W1's rows; the ring of base logits, or `largest`'s shorter
    # ring and the two tiles that it keeps; and a KB for each group of barriers.
    tiles = max(Largest.slots(padded) + 2, Drawn.slots(padded))
    more = 2 * padded * product.depth + (tiles - 1) * tile + 8 * 1024
    for stages in range(tuning.stages, 1, -1):
        fewer = replace(tuning, stages=stages)
        if smem_bytes(product, fewer) + more <= MAX_SMEM:
            return fewer
    return None


# Compiled as functions of their own, so that programs share one kernel.
@lowered_once(static_argnames="tuning")
def markov_argmax(inputs: Inputs, *, tuning: Tuning | None = None) -> jax.Array:
    """Run the op; see pallas_kernels.markov_head.markov_argmax."""
    sizes, operands, sources = _arguments(inputs, tuning)
    found = launch(sizes, operands, sources, inputs.rows, Largest)
    return first_column(found, sizes, inputs.rows)


@lowered_once(static_argnames="tuning")
def markov_draw(inputs: Inputs, *, tuning: Tuning | None = None) -> tuple[jax.Array, jax.Array]:
    """Run the op; see pallas_kernels.markov_head.markov_draw."""
    sizes, operands, sources = _arguments(inputs, tuning)
    # The array is updated in place: the kernel takes a reference to it.
    base = jax.new_ref(sources.base)
    found = launch(sizes, operands, sources._replace(base=base), inputs.rows, Drawn)
    return jax.freeze(base), first_column(found, sizes, inputs.rows)


def _arguments(
    inputs: Inputs, tuning: Tuning | None
) -> tuple[Sizes, Operands[jax.Array | None], Sources[jax.Array]]:
    product = product_of(inputs)
    tuning = tuning or tuning_of(product)
    assert tuning is not None  # the public ops have checked `unsupported`
    operands = Operands(None, (inputs.weight,), squares=None, bias=None, residual=None, gain=None)
    sources = Sources(
        inputs.base,
        inputs.step.reshape(1),
        inputs.token,
        inputs.table,
        None if inputs.draw is None else inputs.draw.temperature,
        None if inputs.draw is None else inputs.draw.keys,
    )
    return Sizes(product, tuning), operands, sources
