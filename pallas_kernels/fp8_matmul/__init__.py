"""Products with weights in fp8 (e4m3), of rows that are quantised to fp8 as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels import hopper
from pallas_kernels.fp8_matmul import reference
from pallas_kernels.fp8_matmul.rows import BeforeNorm, RowNorm, Rows, quantise
from pallas_kernels.fp8_matmul.weight import (
    ACTIVATIONS,
    BLOCK,
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
    "product_for_norm",
    "quantise",
    "shares_norm",
    "takes_largest",
    "takes_norm",
    "unsupported",
]


def fp8_matmul(
    inputs: Inputs[Fp8Weight],
    *,
    norm: RowNorm | None = None,
    largest: jax.Array | None = None,
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

    Raises ValueError for shapes that do not fit together and for inputs that the implementation
    does not support.
    """
    if largest is not None and (norm is not None or implementation == "reference"):
        raise ValueError("largest: expected None with a norm or the reference, got an array")
    if not _runs_kernel(inputs, implementation, norm):
        return reference.fp8_matmul(inputs, norm)
    from pallas_kernels.fp8_matmul import mosaic_gpu

    return mosaic_gpu.fp8_matmul(inputs, norm, largest).out


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
    *,
    gains: bool = False,
) -> bool:
    """Return whether the kernel runs; raise ValueError for inputs that do not fit.

    gains: whether inputs may have a gain
    """
    check(inputs, gains=gains)
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
        return None if norm is None else _not_quantised(inputs.x.shape[1])

    return runs_kernel("fp8_matmul", implementation, reason)


def unsupported(product: Product) -> str | None:
    """Return why no Mosaic kernel can make this product, None if one can."""
    if reason := hopper.too_old():
        return reason
    if product.x.dtype != jnp.bfloat16:
        return f"expected bfloat16 rows, got {product.x.dtype}"
    weights = product.weights
    if product.rows > plan.MAX_ROWS and not _in_parts(product):  # XLA multiplies them
        return _not_quantised(product.depth)
    if len(weights) > 1 and not product.swiglu:
        return f"expected one weight, or gate and up with swiglu, got {len(weights)}"
    from pallas_kernels.fp8_matmul.mosaic_gpu.product import product_of

    rows = jax.ShapeDtypeStruct((min(product.rows, plan.MAX_ROWS), product.depth), product.x.dtype)
    return plan.unfit(product_of(replace(product, x=rows)))


def _in_parts(product: Product) -> bool:
    """Return whether more rows than the kernel takes are multiplied in parts."""
    weight = product.weights[0]
    is_block = isinstance(weight, Fp8Weight) and weight.activation == "block"
    return is_block and product.rows <= plan.MOST_IN_PARTS


def takes_norm(x: Shaped, implementation: str) -> bool:
    """Return whether the kernels norm rows x [rows, depth] before they quantise them."""
    if implementation == "reference" or x.dtype != jnp.bfloat16:
        return False
    return _not_quantised(x.shape[1]) is None


def _not_quantised(depth: int) -> str | None:
    """Return why no kernel quantises rows of this depth, None if one does."""
    from pallas_kernels.fp8_matmul.mosaic_gpu.quantise import STEP, takes

    return None if takes(depth) else f"expected rows of a multiple of {STEP} values, got {depth}"


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
        depth, width = weight.shape
        shapes = [(), (width,), (-(-width // BLOCK), -(-depth // BLOCK))]
        if weight.scales.shape not in shapes:
            expected = " or ".join(map(str, shapes))
            raise ValueError(f"scales: expected {expected}, got {weight.scales.shape}")
        is_static = weight.activation == "static"
        if is_static != (weight.activation_scale is not None):
            expected = "a scale" if is_static else "none"
            raise ValueError(
                f"activation_scale: expected {expected} with {weight.activation!r} activations"
            )
