"""How a product of few rows is divided: blocks, the depth's shares, and when copies start.

The order of summation follows from it. It depends on the shapes of the weights, and on whether
they are gate and up, and on nothing else (`Order`).

When copies and launches start (programmatic dependent launch, PDL):

| product     | kernel before        | launches early | weights first | launches next |
|-------------|----------------------|----------------|---------------|---------------|
| qkv, fc     | norm or residual sum | no             | no            | no            |
| o           | attention            | yes            | yes           | no            |
| gate and up | norm or residual sum | no             | no            | yes (down)    |
| down        | gate and up          | yes            | yes           | no            |
| head        | norm                 | no             | no            | yes (sampler) |
| above 64    | any                  | as above       | yes           | gate and up   |

The last row: more than 64 rows in order, of fp8 in blocks, and of int4.

The rule: weights first before a residual sum; launch the next kernel early after gate and up and
after a float32 result. The kernel after any other product would occupy whatever SMs are left, and
crowd into few GPCs. The o of latent attention follows the rule, unmeasured, though the kernel
before it, head_matmul, does not launch it early. In fp8 all products take their weights first. A
kernel quantises more than eight rows before a product, and more than one under a norm that is not
shared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.hopper import NUM_SMS, WARPS
from pallas_kernels.matmul.inputs import Inputs
from pallas_kernels.types import Shaped

MAX_ROWS = 64
# Widest rows whose norm two products share, whatever their number. With wider ones each block sums
# many squares, which is slower at 64 rows than a kernel for the norm.
MAX_NORM_WIDTH = 1024
MAX_SMEM = 227 * 1024
TILE_N = 64  # output columns of a tile: wgmma's M
PIECE = TILE_N // WARPS  # columns of a tile whose sums a warp has
REDUCTION_BYTES = 1024  # for sums across warps
RESIDENT_BYTES = 72 * 1024  # x up to this size stays in shared memory; a larger one streams
SPLIT = 2  # CTAs for a tile where tiles are few and deep; 1 for none
READ_BYTES = 4096  # see first_reads
RING_BYTES = 3072  # of a tile's depth that a CTA's rings hold as a whole


@dataclass(frozen=True)
class Product:
    """Static description of a product: shapes, dtypes, and what is fused with it.

    x, weights: see Inputs; only shapes and dtypes are read. residual, normed, norms, biased:
    whether the inputs have residual, squares, gain and bias. swiglu, transposed, in_order,
    out_dtype: see Inputs. quantises: whether the kernel makes codes of x. measures: whether each
    piece of the result's rows, or with a gain of the result times the gain, comes with its largest
    magnitude.
    """

    x: Shaped
    weights: tuple[Shaped, ...]
    residual: bool = False
    normed: bool = False
    norms: bool = False
    biased: bool = False
    swiglu: bool = False
    transposed: bool = False
    in_order: bool = False
    out_dtype: DTypeLike = jnp.bfloat16
    quantises: bool = False
    measures: bool = False

    @classmethod
    def of(cls, inputs: Inputs) -> Product:
        return cls(
            inputs.x,
            inputs.weights,
            residual=inputs.residual is not None,
            normed=inputs.squares is not None,
            norms=inputs.gain is not None,
            biased=inputs.bias is not None,
            swiglu=inputs.swiglu,
            transposed=inputs.transposed,
            in_order=inputs.in_order,
            out_dtype=inputs.out_dtype,
        )

    def with_rows(self, rows: int) -> Product:
        """Return the product with another number of rows."""
        return replace(self, x=jax.ShapeDtypeStruct((rows, self.depth), self.x.dtype))

    @property
    def rows(self) -> int:
        return self.x.shape[0]

    @property
    def depth(self) -> int:
        return self.x.shape[1]

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of each weight."""
        return tuple(w.shape[0 if self.transposed else 1] for w in self.weights)

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.widths[0] if self.swiglu else sum(self.widths)

    @property
    def tiles(self) -> int:
        """Tiles of the result."""
        return self.width // TILE_N

    @property
    def accumulators(self) -> int:
        """Sums of a tile: two of gate and up, else one."""
        return 2 if self.swiglu else 1

    @property
    def item_bytes(self) -> int:
        """Bytes of a value of x and of the weights."""
        return self.x.dtype.itemsize

    @property
    def out_bytes(self) -> int:
        return jnp.dtype(self.out_dtype).itemsize

    def kernel_name(self, op: str) -> str:
        """Return a name that says the op, the sizes, and what is fused."""
        fused = ("swiglu", "normed", "biased", "residual", "norms")
        names = (name for name in fused if getattr(self, name))
        return "_".join([f"{op}_{self.depth}x{self.width}", *names])


@dataclass(frozen=True)
class Order:
    """What sets the order of summation, and so the bits of the result.

    stripe_k:   depth of a stripe; stripes of a CTA's depth go to its warpgroups in turn
    warpgroups: of a CTA, whose sums are added in order
    split:      CTAs of a tile, each with an equal part of the depth, whose sums are added in order
    """

    stripe_k: int
    warpgroups: int
    split: int

    @classmethod
    def of(cls, product: Product) -> Order | None:
        """Return the order for all numbers of rows, None if the depth cannot be divided."""
        depth, swiglu = product.depth, product.swiglu
        # One SM reads 62 GB/s: half of the SMs are not enough. A tile that fits into one ring needs
        # no second CTA.
        stripes = _step_depths(product)
        deep = depth > RING_BYTES // product.item_bytes and depth % (stripes[0] * 2 * SPLIT) == 0
        split = SPLIT if deep and not swiglu and product.tiles * SPLIT <= NUM_SMS else 1
        shared = () if swiglu else ((k, warpgroups) for k in stripes for warpgroups in (2, 3))
        for stripe_k, warpgroups in (*shared, *((k, 1) for k in stripes)):
            if depth % (stripe_k * warpgroups * split) == 0:
                return cls(stripe_k, warpgroups, split)
        return None


@dataclass(frozen=True)
class Tuning:
    """Division of a product.

    tile_k:        depth of a step, see _step_depths
    stripe_k:      see Order; one step or two
    warpgroups:    see Order
    stages:        of each warpgroup's ring, at least 2
    blocks:        most blocks at once; they take the tiles in turn
    pdl:           programmatic dependent launch, which CUDA graphs ignore before jax
                   0.12 and the interpreter does not know
    split:         see Order; the CTAs are a cluster, and a block then has one tile
    launches_next: whether the next kernel is launched when the last copy has started
    weights_first: whether the rings fill before this kernel waits for the one before it. If that
                   one does not launch early there is nothing to wait for, and x would only queue
                   behind 22 MB of weights
    """

    tile_k: int = 128
    stripe_k: int = 128
    warpgroups: int = 2
    stages: int = 6
    blocks: int = NUM_SMS
    pdl: bool = True
    split: int = 1
    launches_next: bool = True
    weights_first: bool = True


def first_reads(product: Product, most_bytes: int) -> list[tuple[tuple[int, int], ...]]:
    """Return what the kernel for few rows reads first of each weight, at most so many bytes in all.

    Each is (start, size) in bytes, multiples of READ_BYTES. All blocks begin at the first rows of
    the weights; of a cluster, each CTA at those of its part of the depth.
    """
    order = Order.of(product)
    assert order is not None and not product.transposed
    found = []
    for weight in product.weights:
        part = math.prod(weight.shape) * weight.dtype.itemsize // order.split
        size = min(part, most_bytes // len(product.weights) // order.split)
        size = size // READ_BYTES * READ_BYTES
        starts = (i * part // READ_BYTES * READ_BYTES for i in range(order.split))
        found.append(tuple((start, size) for start in starts))
    return found


def padded_rows(rows: int) -> int:
    """Return the narrow axis of the product: wgmma takes multiples of 8."""
    return next(p for p in (8, 16, 32, MAX_ROWS) if p >= rows)


def is_resident(product: Product, depth: int) -> bool:
    """Return whether a CTA's part of x, of this depth, stays in shared memory."""
    return padded_rows(product.rows) * depth * product.item_bytes <= RESIDENT_BYTES


def _shallow_depths(product: Product) -> tuple[int, ...]:
    """Return the depths of a step of many rows, the best first: 128 bytes, then others."""
    return (64, 128) if product.item_bytes == 2 else (128, 64)


def _step_depths(product: Product) -> tuple[int, ...]:
    """Return the depths of a step, the largest first: 256 bytes, 128, and 64 of fp8."""
    return (128, 64) if product.item_bytes == 2 else (256, 128, 64)


def num_pieces(width: int) -> int:
    """Return the number of pieces of a row of this width; see mosaic_gpu/row_pieces.py.

    It is rounded up to whole wgmma tiles. The last ones may never be written.
    """
    return -(-width // PIECE // TILE_N) * TILE_N


def smem_bytes(product: Product, tuning: Tuning) -> int:
    """Return the shared memory of a CTA, to within the barriers."""
    padded, slots = padded_rows(product.rows), tuning.warpgroups * tuning.stages
    part_depth, products = product.depth // tuning.split, product.accumulators
    size = product.item_bytes
    x = padded * size * (part_depth if is_resident(product, part_depth) else slots * tuning.tile_k)
    ring = slots * tuning.tile_k * TILE_N * products * size
    partial_sums = (tuning.warpgroups * tuning.split - 1) * products * TILE_N * padded * 4
    halves = 4 if product.out_bytes == 4 else 0
    out = TILE_N * padded * (product.out_bytes + halves + (2 if product.residual else 0))
    # Small arrays take 1 KB, where the next one may start.
    out += 1024 if product.normed and tuning.warpgroups > 1 else 0
    out += TILE_N * padded * 2 + 1024 if product.norms else 0
    out += 1024 * product.quantises
    reduction = REDUCTION_BYTES if product.normed else 0
    return x + ring + partial_sums + out + reduction + 1024


def choose_tuning(product: Product) -> Tuning | None:
    """Return the fastest division measured on an H200, None if none fits.

    docs/notes/layer-products.md has the measurements.

    It has as many stages as fit. The order of summation is the same for all numbers of rows; the
    depth of a step, which changes no bits, is not.
    """
    order = Order.of(product)
    if order is None:
        return None
    few = padded_rows(product.rows) == 8
    # Gate and up of many rows: two blocks for each SM, with half of the shared memory each, keep
    # the tensor cores busy.
    crowded = product.swiglu and not few and not is_resident(product, product.depth)
    blocks_an_sm = 2 if crowded else 1
    rounds = -(-product.tiles // (NUM_SMS * blocks_an_sm))
    for tile_k in _step_depths(product) if few else _shallow_depths(product):
        if order.stripe_k % tile_k:
            continue
        for stages in (6, 5, 4, 3, 2):
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
            if smem_bytes(product, tuning) <= MAX_SMEM // blocks_an_sm:
                return tuning
    return None


def unsupported(product: Product) -> str | None:
    """Return why the kernel for few rows cannot make this product, None if it can."""
    x, weights = product.x, product.weights
    if any(a.dtype != jnp.bfloat16 for a in (x, *weights)):
        return f"expected bfloat16 operands, got {x.dtype} and {weights[0].dtype}"
    return unfit(product)


def unfit_rows(rows: int, most: int = MAX_ROWS) -> str | None:
    """Return why the kernels for few rows cannot take this many, None if they can."""
    if not 1 <= rows <= most or (rows > 8 and rows % 8):
        return f"expected 1 to 8 rows, or a multiple of 8 up to {most}, got {rows}"
    return None


def unfit(product: Product) -> str | None:
    """Return which shape of the product does not fit the kernel for few rows, None if all do."""
    weights, rows = product.weights, product.rows
    if reason := unfit_rows(rows):
        return reason
    if product.depth % 64 or any(n % TILE_N for n in product.widths):
        got = f"{product.depth} and {product.widths}"
        return f"expected a depth and widths that are multiples of 64, got {got}"
    if product.norms and (product.swiglu or len(weights) > 1 or product.out_dtype != jnp.bfloat16):
        expected = "one weight and a bfloat16 result without swiglu where it gets a gain"
        return f"expected {expected}, got {len(weights)}, {product.out_dtype}, {product.swiglu}"
    if choose_tuning(product) is None:
        return (
            f"expected a ring of two stages to fit into {MAX_SMEM} bytes of shared memory, "
            f"got {rows} rows of {product.depth}"
        )
    return None
