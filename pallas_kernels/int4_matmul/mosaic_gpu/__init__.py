"""Products of few rows with int4 weights on Hopper: decoded in registers, multiplied by mma.sync.

Units stream through the rings of pallas_kernels/matmul. A code becomes a bfloat16 number in two
operations on a pair: its four bits below the exponent of 128, less 128 and the zero. That is exact.
The scale of a group multiplies float32 sums. So a weight is never rounded.

Up to 256 rows are multiplied 64 at a time: XLA dequantises the weights first, which takes longer
(docs/notes/fp8-int4-products.md). In order, as in prefill by default, a kernel dequantises them for
any number of rows above 64.

The order of summation depends on the weights alone: on their shapes and on the group (plan.py).

    plan.py         how a product is divided
    units.py        units in shared memory, decoded and multiplied by a warp
    product.py      the product
    decode.py       a matrix as a bfloat16 array
"""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.int4_matmul.mosaic_gpu.product import multiply
from pallas_kernels.int4_matmul.weight import Int4Weight
from pallas_kernels.matmul.inputs import Inputs
from pallas_kernels.matmul.plan import MAX_ROWS
from pallas_kernels.matmul.reference import Result


def int4_matmul(inputs: Inputs[Int4Weight]) -> Result:
    """Run the op; see pallas_kernels.int4_matmul.int4_matmul."""
    count = inputs.x.shape[0]
    if count <= MAX_ROWS:
        return multiply(inputs)
    starts = range(0, count, MAX_ROWS)
    parts = [multiply(inputs.take_rows(i, i + MAX_ROWS)) for i in starts]
    if inputs.gain is None:
        return jnp.concatenate(parts)
    out, scaled, squares = zip(*parts, strict=True)
    return jnp.concatenate(out), jnp.concatenate(scaled), jnp.concatenate(squares, axis=1)
