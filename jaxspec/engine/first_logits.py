"""A look at the first logits of an engine: weights may be finite and still overflow."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.config import ConfigError
from jaxspec.decode.verify import Verification
from jaxspec.layers.params import Fp8Weight, Int4Weight, Params

LARGEST_FP8, LARGEST_INT4 = 448.0, 15.0


def check_first_logits(verification: Verification, target: Params) -> None:
    """Raise ConfigError if the logits of a prefill overflowed, naming the largest weight.

    Without the check every token would be 0, for NaN logits count as -inf.
    """
    if verification.overflowed is None or not verification.overflowed.any():
        return
    name, size = largest_weight(target)
    raise ConfigError(
        "target: expected finite logits, got NaN or infinity for the first prompt; its largest "
        f"weight is {size:.3g} in {name}"
    )


def largest_weight(params: Params) -> tuple[str, float]:
    """Return the path of the array with the largest magnitude, and that magnitude."""
    found = {
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".values"): _size(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_quantised)
        if _is_quantised(leaf) or jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    return max(found.items(), key=lambda item: item[1])


def _is_quantised(leaf: object) -> bool:
    return isinstance(leaf, Fp8Weight | Int4Weight)


def _size(leaf: Any) -> float:
    """Return the largest magnitude of an array, or what codes of a quantised weight may reach."""
    if isinstance(leaf, Fp8Weight):
        return LARGEST_FP8 * _size(leaf.scales)
    if isinstance(leaf, Int4Weight):
        return LARGEST_INT4 * _size(leaf.scales)
    return float(max(jnp.abs(piece.data).max() for piece in leaf.addressable_shards))
