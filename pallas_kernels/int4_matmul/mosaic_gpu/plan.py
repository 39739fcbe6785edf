"""What kernels of int4 weights take, and how a product of few rows is divided among blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.int4_matmul.weight import DEPTHS, Int4Weight
from pallas_kernels.matmul.plan import (
    MAX_SMEM,
    NUM_SMS,
    REDUCTION_BYTES,
    SPLIT,
    TILE_N,
    Order,
    Product,
    Tuning,
    is_resident,
    padded_rows,
    unfit_rows,
)

STEP_DEPTHS = (256, 128, 64)
SCALE_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
MOST_SUMS = 64  # for each column; with more of them, the deepest step has no registers left
DEEP = 2048  # a shallower tile needs no second CTA


def plain(product: Product) -> Product:
    """Return the product with plain weights of the same shapes."""
    weights = tuple(jax.ShapeDtypeStruct(w.shape, product.x.dtype) for w in product.weights)
    return Product(
        product.x,
        weights,
        residual=product.residual,
        normed=product.normed,
        norms=product.norms,
        biased=product.biased,
        swiglu=product.swiglu,
        out_dtype=product.out_dtype,
    )


def sum_depth(weight: Int4Weight) -> int:
    """Return the depths of a sum that one scale multiplies."""
    return 128 if weight.group % 128 == 0 else DEPTHS


def step_depths(weight: Int4Weight) -> list[int]:
    """Return the depths that a step may have, the deepest first: groups, or a part of one."""
    fitting = [k for k in STEP_DEPTHS if k % weight.group == 0 or weight.group % k == 0]
    return [k for k in fitting if k >= sum_depth(weight)]


def order_of(product: Product, weight: Int4Weight) -> Order | None:
    """Return the order of summation for all numbers of rows."""
    depth, shallowest = product.depth, sum_depth(weight)
    deep = depth > DEEP and depth % (256 * 2 * SPLIT) == 0
    split = SPLIT if deep and not product.swiglu and product.tiles * SPLIT <= NUM_SMS else 1
    # Two CTAs of an SM, where gate and up have so many tiles, need one warpgroup each.
    has_two_ctas = product.swiglu and product.tiles > NUM_SMS
    for warpgroups in (1,) if has_two_ctas else (2, 3, 1):
        for stripe_k in STEP_DEPTHS:
            if stripe_k >= shallowest and depth % (stripe_k * warpgroups * split) == 0:
                return Order(stripe_k, warpgroups, split)
    return None


def groups_of(weight: Int4Weight, tile_k: int) -> int:
    """Return the number of groups of a step."""
    return max(1, tile_k // weight.group)


def smem_bytes(product: Product, weight: Int4Weight, tuning: Tuning) -> int:
    """Return the shared memory of a CTA, to within the barriers."""
    padded, slots = padded_rows(product.rows), tuning.warpgroups * tuning.stages
    part_depth, products = product.depth // tuning.split, product.accumulators
    x = padded * 2 * (part_depth if is_resident(product, part_depth) else slots * tuning.tile_k)
    groups = max(2, groups_of(weight, tuning.tile_k))
    by_group = weight.scales.dtype.itemsize + (0 if weight.zeros is None else 1)
    step = TILE_N * tuning.tile_k // 2 + groups * TILE_N * by_group
    partial_sums = (tuning.warpgroups * tuning.split - 1) * products * TILE_N * padded * 4
    halves = 4 if product.out_bytes == 4 else 0
    out = TILE_N * padded * (product.out_bytes + halves + (2 if product.residual else 0))
    out += TILE_N * padded * 2 + 1024 if product.norms else 0
    out += (1024 + REDUCTION_BYTES) * product.normed
    return x + slots * products * step + partial_sums + out + 6 * 1024


def choose_tuning(product: Product) -> Tuning | None:
    """Return the division of a product of Int4Weights, None if none fits."""
    weight = product.weights[0]
    assert isinstance(weight, Int4Weight)
    product = plain(product)
    order = order_of(product, weight)
    if order is None:
        return None
    sums = product.accumulators * padded_rows(product.rows)
    # Warps of several CTAs hide each other's latencies where tiles are many.
    most = 2 if product.tiles > NUM_SMS else 1
    for blocks_an_sm in range(most, 0, -1):
        rounds = -(-product.tiles // (NUM_SMS * blocks_an_sm))
        for tile_k in step_depths(weight):
            too_deep = sums > MOST_SUMS and tile_k == STEP_DEPTHS[0]
            if order.stripe_k % tile_k or too_deep:
                continue
            for stages in (8, 6, 5, 4, 3, 2):
                tuning = Tuning(
                    tile_k,
                    order.stripe_k,
                    order.warpgroups,
                    stages,
                    -(-product.tiles // rounds),
                    split=order.split,
                    launches_next=product.swiglu or product.out_bytes == 4,
                    weights_first=product.residual,
                )
                if smem_bytes(product, weight, tuning) <= MAX_SMEM // blocks_an_sm:
                    return tuning
    return None


def unsupported(product: Product) -> str | None:
    """Return why the kernel cannot make this product, None if it can."""
    weights = product.weights
    if reason := unfit(product):
        return reason
    if len(weights) > 1 and not product.swiglu:
        return f"expected one weight, or gate and up with swiglu, got {len(weights)}"
    if product.norms and (product.swiglu or product.out_dtype != jnp.bfloat16):
        got = f"{product.out_dtype}, swiglu {product.swiglu}"
        return f"expected a bfloat16 result without swiglu where it gets a gain, got {got}"
    if reason := unfit_rows(product.rows):
        return reason
    if choose_tuning(product) is None:
        got = f"{product.rows} rows of {product.depth}"
        return f"expected rings that fit into {MAX_SMEM} bytes, got {got}"
    return None


def unfit(product: Product) -> str | None:
    """Return what does not fit kernels of any number of rows, None if all does."""
    weight = product.weights[0]
    assert isinstance(weight, Int4Weight)
    if product.x.dtype != jnp.bfloat16:
        return f"expected bfloat16 rows, got {product.x.dtype}"
    if any(n % TILE_N for n in product.widths):
        return f"expected widths that are multiples of {TILE_N}, got {product.widths}"
    if weight.group % DEPTHS or weight.scales.dtype not in SCALE_DTYPES:
        got = f"{weight.group} with {weight.scales.dtype} scales"
        return f"expected groups that are multiples of {DEPTHS} with float scales, got {got}"
    return None
