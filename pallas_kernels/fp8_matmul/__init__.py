"""Products with weights in fp8 (e4m3), of rows that are quantised to fp8 as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels import hopper
from pallas_kernels.fp8_matmul import reference
from pallas_kernels.fp8_matmul.rows import MOST_IN_PARTS, BeforeNorm, RowNorm, Rows, quantise
from pallas_kernels.fp8_matmul.weight import (
    ACTIVATIONS,
    BLOCK,
    DTYPE,
    LARGEST,
    Activation,
    Fp8Weight,
)
from pallas_kernels.implementations import IMPLEMENTATIONS, runs_kernel
from pallas_kernels.matmul import plan
from pallas_kernels.matmul.inputs import Inputs
from pallas_kernels.matmul.plan import Product
from pallas_kernels.types import Shaped

__all__ = [
    "ACTIVATIONS",
    "BLOCK",
    "IMPLEMENTATIONS",
    "LARGEST",
    "Activation",
    "BeforeNorm",
    "Fp8Weight",
    "Inputs",
    "Product",
    "RowNorm",
    "Rows",
    "fp8_matmul",
    "measured_swiglu",
    "product_and_norm",
    "product_for_norm",
    "quantise",
    "quantised_swiglu",
    "quantises_next",
    "shares_norm",
    "takes_largest",
    "takes_norm",
    "unsupported",
]

# cuBLAS multiplies tiles of 16 rows. XLA pads other numbers of rows, and a kernel that reads the
# result then gets a copy of it.
LIBRARY_ROWS = 16
# Most rows whose product comes quantised for the next one. Larger numbers are not measured.
MOST_QUANTISED_NEXT = 256


def fp8_matmul(
    inputs: Inputs[Fp8Weight],
    *,
    norm: RowNorm | None = None,
    largest: jax.Array | None = None,
    scales: jax.Array | None = None,
    implementation: str = "reference",
) -> jax.Array:
    """Return [x @ w for w in weights] side by side, as pallas_kernels.matmul does.

    Rows are quantised as the first weight says (`quantise`); the others have to say the same. Codes
    are multiplied, sums are float32, and the scales of weights and rows multiply them: after the
    product, or after each 128 depths where blocks have scales. The result is cast to out_dtype.
    With squares, so does the factor of the norm that the product before has begun.

    norm:    of x, before it is quantised. A kernel takes it where `takes_norm` says so
    largest: of measured_swiglu, which has made x: the product then need not look for the largest
             magnitudes, which changes no bits. Or of product_for_norm, with squares. Kernels alone
             take it, and not with a norm
    scales:  float32 [rows], of quantised_swiglu or product_and_norm, whose codes inputs.x is: they
             are multiplied as they are

    Raises ValueError for shapes that do not fit together and for inputs that the implementation
    does not support.
    """
    if largest is not None and (norm is not None or implementation == "reference"):
        raise ValueError("largest: expected None with a norm or the reference, got an array")
    if scales is not None and largest is not None:
        raise ValueError("largest: expected None with scales, got an array")
    if not _runs_kernel(inputs, implementation, norm, scales):
        return reference.fp8_matmul(inputs, norm, scales)
    from pallas_kernels.fp8_matmul import mosaic_gpu

    return mosaic_gpu.fp8_matmul(inputs, norm, largest, scales).out


def measured_swiglu(
    inputs: Inputs[Fp8Weight],
    *,
    norm: RowNorm | None = None,
    largest: jax.Array | None = None,
    implementation: str,
) -> tuple[jax.Array, jax.Array]:
    """Return fp8_matmul of gate and up, and the largest magnitudes in it, for the product after it.

    The latter are float32 [pieces of a row, rows or more]. See takes_largest; for norm and largest
    (of the rows), fp8_matmul.

    Raises ValueError as fp8_matmul does, and for what kernels of few rows do not make: a product
    without SwiGLU, more than 64 rows, and the reference.
    """
    runs, rows = _runs_kernel(inputs, implementation, norm), inputs.x.shape[0]
    if not (runs and inputs.swiglu and rows <= plan.MAX_ROWS):
        raise ValueError(
            f"measured_swiglu: expected a kernel, swiglu and at most {plan.MAX_ROWS} rows, "
            f"got implementation {implementation!r}, swiglu {inputs.swiglu} and {rows} rows"
        )
    from pallas_kernels.fp8_matmul import mosaic_gpu

    made = mosaic_gpu.fp8_matmul(inputs, norm, largest, measures=True)
    assert made.largest is not None
    return made.out, made.largest


def product_for_norm(
    inputs: Inputs[Fp8Weight], *, largest: jax.Array | None, implementation: str
) -> BeforeNorm:
    """Return fp8_matmul of inputs with a gain, and what the product after the norm needs.

    largest: see fp8_matmul

    Raises ValueError as fp8_matmul does, and for what kernels of few rows do not make: a product
    without a gain, more than 64 rows, and the reference.
    """
    runs, rows = _runs_kernel(inputs, implementation, gains=True), inputs.x.shape[0]
    if not (runs and inputs.gain is not None and rows <= plan.MAX_ROWS):
        raise ValueError(
            f"product_for_norm: expected a kernel, a gain and at most {plan.MAX_ROWS} rows, got "
            f"implementation {implementation!r}, gain {inputs.gain is not None} and {rows} rows"
        )
    from pallas_kernels.fp8_matmul import mosaic_gpu

    return mosaic_gpu.product_for_norm(inputs, largest)


def quantised_swiglu(
    inputs: Inputs[Fp8Weight],
    *,
    norm: RowNorm | None = None,
    scales: jax.Array | None = None,
    implementation: str = "reference",
) -> Rows:
    """Return fp8_matmul of gate and up, quantised by token for the product after it.

    The kernel rounds gate, up, silu(gate) and the product once each, as that of few rows does. See
    quantises_next; for norm and scales, fp8_matmul.

    Raises ValueError as fp8_matmul does, and for a product without SwiGLU or with a residual.
    """
    if not inputs.swiglu or inputs.residual is not None:
        got = f"swiglu {inputs.swiglu} and residual {inputs.residual is not None}"
        raise ValueError(f"quantised_swiglu: expected swiglu and no residual, got {got}")
    if not _runs_kernel(inputs, implementation, norm, scales, for_next=True):
        return reference.quantised_swiglu(inputs, norm, scales)
    from pallas_kernels.fp8_matmul import mosaic_gpu

    return mosaic_gpu.quantised_swiglu(inputs, norm, scales)


def product_and_norm(
    inputs: Inputs[Fp8Weight],
    next_norm: RowNorm,
    *,
    scales: jax.Array | None = None,
    implementation: str = "reference",
) -> tuple[jax.Array, Rows]:
    """Return fp8_matmul with a residual, and the norm of that, quantised by token.

    The kernel adds up parts of the depth in order. See quantises_next; for scales, fp8_matmul.

    Raises ValueError as fp8_matmul does, and for a product of several weights, without a residual,
    with a bias or with SwiGLU.
    """
    has_residual, has_bias = inputs.residual is not None, inputs.bias is not None
    if inputs.residual is None or has_bias or inputs.swiglu or len(inputs.weights) > 1:
        expected = "one weight, a residual, and neither bias nor swiglu"
        got = f"{len(inputs.weights)}, {has_residual}, {has_bias} and {inputs.swiglu}"
        raise ValueError(f"product_and_norm: expected {expected}, got {got}")
    if next_norm.gain.shape != inputs.residual.shape[1:]:
        raise ValueError(f"gain: expected {inputs.residual.shape[1:]}, got {next_norm.gain.shape}")
    if not _runs_kernel(inputs, implementation, None, scales, for_next=True):
        return reference.product_and_norm(inputs, next_norm, scales)
    from pallas_kernels.fp8_matmul import mosaic_gpu

    return mosaic_gpu.product_and_norm(inputs, next_norm, scales)


def quantises_next(
    rows: int, width: int, weights: Sequence[Fp8Weight], *, swiglu: bool = False
) -> bool:
    """Return whether a product of many rows comes quantised for the next product.

    width:   of its result
    weights: of both products
    swiglu:  quantised_swiglu makes the result; else product_and_norm
    """
    return _not_quantised_next(rows, width, weights, swiglu=swiglu) is None


def _not_quantised_next(
    rows: int, width: int, weights: Sequence[Fp8Weight], *, swiglu: bool
) -> str | None:
    """Return why no kernel quantises a product's result, None if one does."""
    if reason := hopper.too_old():
        return reason
    from pallas_kernels.fp8_matmul import mosaic_gpu

    if not plan.MAX_ROWS < rows <= MOST_QUANTISED_NEXT:
        return f"expected {plan.MAX_ROWS + 1} to {MOST_QUANTISED_NEXT} rows, got {rows}"
    if any(w.activation != "token" or w.scales.ndim != 1 for w in weights):
        return "expected weights by channel and activations by token"
    if not mosaic_gpu.quantises_next(width, swiglu=swiglu):
        return f"expected a result that a kernel quantises, got one of {width} values"
    return None


def shares_norm(rows: int, width: int, weights: Sequence[Fp8Weight]) -> bool:
    """Return whether products of few rows share the norm between them.

    width:   of the rows under the norm
    weights: of the product before it and of those after it

    A shared norm has other bits than a separate one. So the answer is the same for all numbers of
    rows that the kernel for few rows takes.
    """
    if hopper.too_old():
        return False
    from pallas_kernels.fp8_matmul import mosaic_gpu

    return mosaic_gpu.shares_norm(rows, width, weights)


def takes_largest(rows: int, weight: Fp8Weight, implementation: str) -> bool:
    """Return whether a product with this weight takes what measured_swiglu finds in its rows."""
    if implementation == "reference":
        return False
    from pallas_kernels.fp8_matmul import mosaic_gpu

    return mosaic_gpu.takes_largest(rows, weight)


def _runs_kernel(
    inputs: Inputs[Fp8Weight],
    implementation: str,
    norm: RowNorm | None = None,
    scales: jax.Array | None = None,
    *,
    gains: bool = False,
    for_next: bool = False,
) -> bool:
    """Return whether the kernel runs; raise ValueError for inputs that do not fit.

    gains:    whether inputs may have a gain
    for_next: whether the result comes quantised for the next product
    """
    check(inputs, gains=gains)
    _check_scales(inputs, norm, scales)
    if norm is not None and inputs.squares is not None:
        raise ValueError("squares: expected none with a norm, got an array")
    if norm is not None and norm.gain.shape != inputs.x.shape[1:]:
        raise ValueError(f"gain: expected {inputs.x.shape[1:]}, got {norm.gain.shape}")

    def reason() -> str | None:
        if found := hopper.missing() or unsupported(Product.of(inputs)):
            return found
        rows, depth = inputs.x.shape
        if inputs.squares is not None and not shares_norm(rows, depth, inputs.weights):
            expected = f"squares of at most {plan.MAX_ROWS} rows of a multiple of 1024 values"
            return f"expected {expected}, got {rows} of {depth}"
        if for_next:
            product, residual = Product.of(inputs), inputs.residual
            dtypes = [jnp.dtype(product.out_dtype)]
            dtypes += [] if residual is None else [residual.dtype]
            if any(dtype != jnp.bfloat16 for dtype in dtypes):
                got = " and ".join(dtype.name for dtype in dtypes)
                return f"expected a bfloat16 result and residual, got {got}"
            found = _not_quantised_next(rows, product.width, inputs.weights, swiglu=inputs.swiglu)
            if found is not None:
                return found
        return None if norm is None else _not_quantised(inputs.x.shape[1])

    return runs_kernel("fp8_matmul", implementation, reason)


def unsupported(product: Product) -> str | None:
    """Return why no Mosaic kernel can make this product, None if one can."""
    if reason := hopper.too_old():
        return reason
    are_codes = product.x.dtype == DTYPE
    if product.x.dtype != jnp.bfloat16 and not are_codes:
        return f"expected bfloat16 rows, got {product.x.dtype}"
    weights = product.weights
    if product.rows > plan.MAX_ROWS and _has_block_rows(product):
        from pallas_kernels.fp8_matmul.mosaic_gpu import block_scales

        reason = block_scales.unsupported(product)
        if reason is None or product.in_order:
            return reason
    if product.rows > plan.MAX_ROWS and not _in_parts(product):  # XLA multiplies them
        return None if are_codes else _not_quantised(product.depth)
    if _in_parts(product) and (reason := plan.unfit_rows(product.rows, MOST_IN_PARTS)):
        return reason
    if len(weights) > 1 and not product.swiglu:
        if product.norms:
            return f"expected one weight with a gain, got {len(weights)}"
        reasons = (unsupported(replace(product, weights=(weight,))) for weight in weights)
        return next((reason for reason in reasons if reason is not None), None)
    from pallas_kernels.fp8_matmul.mosaic_gpu.product import product_of

    return plan.unfit(product_of(product.with_rows(min(product.rows, plan.MAX_ROWS))))


def _in_parts(product: Product) -> bool:
    """Return whether more rows than the kernel takes are multiplied in parts."""
    return _has_block_rows(product) and product.rows <= MOST_IN_PARTS


def _has_block_rows(product: Product) -> bool:
    """Return whether each block of a row has a scale."""
    weight = product.weights[0]
    return isinstance(weight, Fp8Weight) and weight.activation == "block"


def takes_norm(x: Shaped, implementation: str) -> bool:
    """Return whether the kernels norm rows x [rows, depth] before they quantise them."""
    if implementation == "reference" or x.dtype != jnp.bfloat16:
        return False
    return _not_quantised(x.shape[1]) is None


def _not_quantised(depth: int) -> str | None:
    """Return why no kernel quantises rows of this depth, None if one does."""
    from pallas_kernels.fp8_matmul.mosaic_gpu.quantise import STEP, takes

    return None if takes(depth) else f"expected rows of a multiple of {STEP} values, got {depth}"


def _check_scales(
    inputs: Inputs[Fp8Weight], norm: RowNorm | None, scales: jax.Array | None
) -> None:
    """Raise ValueError for scales that do not go with x."""
    if (scales is not None) != (inputs.x.dtype == DTYPE):
        got = f"{inputs.x.dtype} and {'none' if scales is None else 'scales'}"
        raise ValueError(f"scales: expected them with rows in fp8 alone, got {got}")
    if scales is None:
        return
    if norm is not None or inputs.squares is not None or inputs.weights[0].activation != "token":
        raise ValueError("scales: expected no norm, and activations by token")
    if scales.shape != inputs.x.shape[:1]:
        raise ValueError(f"scales: expected {inputs.x.shape[:1]}, got {scales.shape}")


def check(inputs: Inputs[Fp8Weight], *, gains: bool = False) -> None:
    """Raise ValueError for weights and inputs that do not fit together."""
    inputs.check()
    if inputs.transposed or (inputs.gain is not None and not gains):
        raise ValueError("fp8_matmul: expected no gain or transposed weights")
    kinds = {weight.activation for weight in inputs.weights}
    if len(kinds) != 1 or not kinds <= set(ACTIVATIONS):
        raise ValueError(
            f"activation: expected one of {', '.join(ACTIVATIONS)} for all weights, "
            f"got {', '.join(sorted(kinds))}"
        )
    if inputs.squares is not None and kinds != {"token"}:
        raise ValueError(f"squares: expected none with {kinds.pop()!r} activations")
    for weight in inputs.weights:
        weight.check_scales()
        is_static = weight.activation == "static"
        if is_static != (weight.activation_scale is not None):
            expected = "a scale" if is_static else "none"
            raise ValueError(
                f"activation_scale: expected {expected} with {weight.activation!r} activations"
            )
