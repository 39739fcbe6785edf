"""Truncation: keep the tokens that top-k and top-p leave, without sorting the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.truncation import reference

IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {"reference": reference.truncate}


def truncate(
    logits: jax.Array, top_k: jax.Array, top_p: jax.Array, *, implementation: str = "reference"
) -> jax.Array:
    """Keep the top_k largest, then the smallest set of the rest whose mass reaches top_p; others become -inf.

    logits: f32 [batch, rows, vocab], already over temperature; top_k i32 [batch], 0 or more than vocab is off; top_p f32 [batch], 1 is off.
    Tokens that tie with the last one kept are kept too, as vLLM's and transformers' do for top-k. The likeliest token always stays. NaN
    becomes -inf. A row's result does not depend on the batch. Raises ValueError for shapes or dtypes that do not fit.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: expected one of {sorted(IMPLEMENTATIONS)}, got {implementation!r}: truncation has no such kernel"
        )
    if logits.ndim != 3 or logits.dtype != jnp.float32 or logits.shape[-1] < 1:
        raise ValueError(
            f"logits: expected float32 [batch, rows, vocab], got {logits.dtype} {list(logits.shape)}"
        )
    for name, value, dtype in (("top_k", top_k, jnp.int32), ("top_p", top_p, jnp.float32)):
        if value.dtype != dtype or value.shape != logits.shape[:1]:
            raise ValueError(
                f"{name}: expected {jnp.dtype(dtype).name} [{logits.shape[0]}], got {value.dtype} {list(value.shape)}"
            )
    return IMPLEMENTATIONS[implementation](logits, top_k, top_p)
