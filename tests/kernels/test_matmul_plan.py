"""How products of few rows are divided: within an SM's shared memory, in one order of summation for
all numbers of rows, deep ones over a cluster."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.hopper import NUM_SMS
from pallas_kernels.matmul import plan
from pallas_kernels.matmul.shapes import SHAPES, Shape

NAMES = [name for name, shape in SHAPES.items() if shape.rows <= plan.MAX_ROWS]
PRODUCTS = [name for name in NAMES if name.endswith("rows 1")]
SPLIT = {"gpt-oss-20b o", "llama-3-8b o", "llama-3-8b down", "llama-3-8b eagle3 fc"}
# Whether it launches the next kernel early, and whether its weights load before it waits for the
# kernel before.
ORDER = {
    "qkv": (False, False),  # after a norm or a residual sum, which launch nothing early
    "o": (False, True),  # attention launches it early
    "gate_up": (True, False),
    "down": (False, True),  # gate and up launch it early
    "fc": (False, False),
    "head": (True, False),  # it launches the sampler early
}


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def chosen(shape: Shape, rows: int, norm: bool = False) -> tuple[plan.Tuning, int]:
    """The tuning and its bytes of shared memory. norm: a residual sum has one after it, any other
    bfloat16 product one before it."""
    product = plan.Product(
        struct(rows, shape.depth),
        tuple(struct(shape.depth, width) for width in shape.widths),
        residual=shape.residual,
        normed=norm and not shape.residual,
        norms=norm and shape.residual,
        swiglu=shape.swiglu,
        out_dtype=shape.out_dtype,
    )
    tuning = plan.choose_tuning(product)
    assert tuning is not None
    return tuning, plan.smem_bytes(product, tuning)


@pytest.mark.parametrize("name", PRODUCTS)
def test_tuning_fits_and_the_order_of_sums_does_not_depend_on_the_rows(name: str) -> None:
    shape = SHAPES[name]
    orders = set()
    for rows in (*range(1, 9), *range(16, 65, 8)):
        for norm in (False, True):
            tuning, needed = chosen(shape, rows, norm)
            assert tuning.stages >= 2 and needed <= plan.MAX_SMEM
            orders.add((tuning.stripe_k, tuning.warpgroups, tuning.split))
    assert len(orders) == 1, orders


@pytest.mark.parametrize("name", NAMES)
def test_what_is_split(name: str) -> None:
    """Deep products whose tiles leave half of the SMs idle; each cluster then has one tile."""
    shape = SHAPES[name]
    tuning, _ = chosen(shape, shape.rows)
    assert tuning.split == (2 if name.rpartition(" rows ")[0] in SPLIT else 1)
    if tuning.split > 1:
        assert (
            tuning.blocks == shape.width // plan.TILE_N and tuning.blocks * tuning.split <= NUM_SMS
        )


def test_a_depth_that_two_do_not_share_is_not_split() -> None:
    tuning = plan.choose_tuning(plan.Product(struct(1, 11008), (struct(11008, 4096),)))
    assert tuning is not None and (tuning.warpgroups, tuning.split) == (2, 1)


@pytest.mark.parametrize("name", NAMES)
def test_which_launch_the_next_kernel_early_and_which_load_weights_first(name: str) -> None:
    tuning, _ = chosen(SHAPES[name], SHAPES[name].rows)
    product = name.rpartition(" rows ")[0].split()[-1]
    assert (tuning.launches_next, tuning.weights_first) == ORDER[product]


@pytest.mark.parametrize("most", [1 << 20, 10 << 20, 1 << 30])
def test_what_is_read_first_is_the_beginning_of_each_cta_s_part(most: int) -> None:
    """Gate and up share the bytes; a cluster of two begins at the top and in the middle of qkv."""
    x, wide, joined = struct(4, 4096), struct(4096, 7168), struct(4096, 3072)
    gate_up = plan.first_reads(plan.Product(x, (wide, wide), swiglu=True), most)
    assert gate_up == [((0, min(most // 2, 4096 * 7168 * 2)),)] * 2
    half = 4096 * 3072
    (qkv,) = plan.first_reads(plan.Product(x, (joined,)), most)
    assert qkv == ((0, min(most // 2, half)), (half, min(most // 2, half)))
    ragged = plan.first_reads(plan.Product(struct(4, 576), (struct(576, 448),)), most)
    assert all(value % plan.READ_BYTES == 0 for spans in ragged for span in spans for value in span)
    assert 0 < sum(size for spans in ragged for _, size in spans) <= 576 * 448 * 2
