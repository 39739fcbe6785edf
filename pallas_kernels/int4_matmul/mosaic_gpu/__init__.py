"""Products with int4 weights on Hopper, which are decoded in registers.

For up to 64 rows, units stream through the rings of pallas_kernels/matmul. A code becomes a
bfloat16 number in two operations on a pair: its four bits below the exponent of 128, less 128 and
the zero. That is exact. The scale of a group multiplies float32 sums. So a weight is never rounded.
The order of sums depends on the weights alone: on their shapes and on the group (plan.py).

mma.sync multiplies up to 16 rows, and wgmma 17 to 64. On an H200 their sums have the same bits,
which a test checks; the vendor documents it nowhere.

More than 64 rows are multiplied by wgmma too, with weights that are rounded to bfloat16 after their
scales. No registers are left for sums of single groups.

    plan.py         what fits, and how a product of few rows is divided
    units.py        units in shared memory, decoded in registers
    product.py      the product of few rows
    many_rows.py    the product of more than 64 rows
"""

from __future__ import annotations

from pallas_kernels.int4_matmul.mosaic_gpu import many_rows
from pallas_kernels.int4_matmul.mosaic_gpu.product import multiply
from pallas_kernels.int4_matmul.weight import Int4Weight
from pallas_kernels.matmul.inputs import Inputs
from pallas_kernels.matmul.plan import MAX_ROWS
from pallas_kernels.matmul.reference import Result


def int4_matmul(inputs: Inputs[Int4Weight]) -> Result:
    """Run the op; see pallas_kernels.int4_matmul.int4_matmul."""
    if inputs.x.shape[0] > MAX_ROWS:
        return many_rows.multiply(inputs)
    return multiply(inputs)
