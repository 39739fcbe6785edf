"""Static choices of the grouped product, which change no bits."""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.hopper import NUM_SMS
from pallas_kernels.int4_matmul.mosaic_gpu.plan import groups_of, step_depths
from pallas_kernels.int4_matmul.weight import Int4Weight
from pallas_kernels.moe.mosaic_gpu.blocks import SIZES
from pallas_kernels.moe.mxfp4 import BLOCK, COLUMNS, UNIT

FEW_ROWS = 8
MAX_SMEM = 227 * 1024
TILE_N = 64  # output columns of a tile: wgmma's M


@dataclass(frozen=True)
class Tuning:
    """Static choices that change no bits.

    tile_k: depth of a step, a multiple of 64. stages: of the ring, at least 2. ctas: most CTAs at
    once, one or more for each SM. tiles: of 64 columns of an item, of gate and up of each. pdl:
    programmatic dependent launch, which CUDA graphs ignore before jax 0.12 and the interpreter
    does not know.
    """

    tile_k: int = 64
    stages: int = 4
    ctas: int = NUM_SMS
    tiles: int = 1
    pdl: bool = True


def smem_bytes(tuning: Tuning, products: int, few: bool, *, packed: bool = False) -> int:
    """Return the shared memory of a CTA, to within the barriers and the table."""
    sizes, parts = SIZES[:1] if few else SIZES, products * tuning.tiles
    if packed:
        weights = parts * (TILE_N // COLUMNS) * (tuning.tile_k // BLOCK) * UNIT * 4
    else:
        weights = tuning.tile_k * 2 * parts * TILE_N
    step = weights + tuning.tile_k * 2 * sizes[-1]
    return tuning.stages * step + sum(sizes) * tuning.tiles * TILE_N * 2 + 4096


def choose_tuning(depth: int, products: int, few: bool, ctas_an_sm: int = 1) -> Tuning | None:
    """Return the deepest steps of which four stages fit, else two; None if nothing fits.

    There are as many stages as fit.
    """
    for fewest in (4, 2):
        for tile_k in (256, 192, 128, 64):
            if depth % tile_k:
                continue
            for stages in range(12, fewest - 1, -1):
                tuning = Tuning(tile_k, stages, NUM_SMS * ctas_an_sm)
                if smem_bytes(tuning, products, few) <= MAX_SMEM // ctas_an_sm:
                    return tuning
    return None


def choose_packed_tuning(depth: int, width: int, products: int, few: bool) -> Tuning:
    """Return the tuning of packed experts: several CTAs on an SM, whose warps hide each other.

    width: of the result
    """
    tiles = 1 if few or width < 2 * TILE_N else 2 // products
    ctas_an_sm = 5 if few else 4 - products
    depths = (64, 128, 192) if few or products == 1 else (64, 128, 192, 320)
    tile_k = max(k for k in depths if depth % k == 0)
    for stages in range(12, 1, -1):
        tuning = Tuning(tile_k, stages, NUM_SMS * ctas_an_sm, tiles)
        if smem_bytes(tuning, products, few, packed=True) <= MAX_SMEM // ctas_an_sm:
            return tuning
    raise AssertionError("two stages always fit")


def choose_int4_tuning(weight: Int4Weight, width: int, products: int, few: bool) -> Tuning | None:
    """Return the tuning of int4 experts, as choose_packed_tuning; None if no step fits.

    width: of the result
    """
    depth = weight.shape[-2]
    tiles = 1 if few or width < 2 * TILE_N else 2 // products
    ctas_an_sm = 5 if few else 4 - products
    fitting = [k for k in step_depths(weight) if depth % k == 0]
    for tile_k in fitting:
        if tile_k > 128 and not few:
            continue
        for stages in range(12, 1, -1):
            tuning = Tuning(tile_k, stages, NUM_SMS * ctas_an_sm, tiles)
            if int4_smem_bytes(tuning, weight, products, few) <= MAX_SMEM // ctas_an_sm:
                return tuning
    return None


def int4_smem_bytes(tuning: Tuning, weight: Int4Weight, products: int, few: bool) -> int:
    """Return the shared memory of a CTA, to within the barriers and the table."""
    sizes, parts = SIZES[:1] if few else SIZES, products * tuning.tiles
    groups = max(2, groups_of(weight, tuning.tile_k))
    by_group = weight.scales.dtype.itemsize + (0 if weight.zeros is None else 1)
    weights = parts * (TILE_N * tuning.tile_k // 2 + groups * TILE_N * by_group)
    step = weights + tuning.tile_k * 2 * sizes[-1]
    return tuning.stages * step + sum(sizes) * tuning.tiles * TILE_N * 2 + 4096


def choose_fp8_tuning(
    depth: int, width: int, products: int, few: bool, *, blocks: bool
) -> Tuning | None:
    """Return the tuning of fp8 experts; None if no step fits.

    width:  of the result
    blocks: an item of gate and up has the 128 columns whose results share a scale
    """
    tiles = 2 if width >= 2 * TILE_N and ((blocks and products == 2) or not few) else 1
    ctas_an_sm = 4 // products if few else 2
    for fewest in (3, 2):
        for tile_k in (256, 128):
            if depth % tile_k:
                continue
            for stages in range(8, fewest - 1, -1):
                tuning = Tuning(tile_k, stages, NUM_SMS * ctas_an_sm, tiles)
                if fp8_smem_bytes(tuning, products, few) <= MAX_SMEM // ctas_an_sm:
                    return tuning
    return None


def fp8_smem_bytes(tuning: Tuning, products: int, few: bool) -> int:
    """Return the shared memory of a CTA, to within the barriers and the table."""
    sizes, columns = SIZES[:1] if few else SIZES, tuning.tiles * TILE_N
    step = tuning.tile_k * (products * columns + sizes[-1])
    return tuning.stages * step + sum(sizes) * columns * 3 + 4096
