"""A look at the first logits of an engine: weights may be finite and still overflow."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.config import ConfigError
from jaxspec.decode.verify import Verification
from jaxspec.layers.params import Params


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
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".values"): float(
            max(jnp.abs(piece.data).max() for piece in leaf.addressable_shards)
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    return max(found.items(), key=lambda item: item[1])
