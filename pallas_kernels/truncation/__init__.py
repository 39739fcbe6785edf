"""Truncation: keep the tokens of top-k and top-p, without sorting the vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import implementations
from pallas_kernels.truncation import reference
from pallas_kernels.vocab_shards import WHOLE, VocabShards

IMPLEMENTATIONS = ("reference",)


def truncate(
    logits: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    *,
    shards: VocabShards = WHOLE,
    implementation: str = "reference",
) -> jax.Array:
    """Keep the top_k largest logits, then the fewest of those whose mass reaches top_p.

    Others become -inf. Tokens that tie with the last one kept are kept too, as in vLLM and
    transformers for top-k. The likeliest token always stays. NaN becomes -inf. A row's result does
    not depend on the batch.

    logits: float32 [batch, rows, vocab], already over temperature; the own piece of rows that are
            cut over devices
    top_k:  int32 [batch]; 0 or more than vocab is off
    top_p:  float32 [batch]; 1 is off

    Raises ValueError for shapes or dtypes that do not fit.
    """
    implementations.check(implementation, IMPLEMENTATIONS)
    if logits.ndim != 3 or logits.dtype != jnp.float32 or logits.shape[-1] < 1:
        got = f"{logits.dtype} {list(logits.shape)}"
        raise ValueError(f"logits: expected float32 [batch, rows, vocab], got {got}")
    for name, value, dtype in (("top_k", top_k, jnp.int32), ("top_p", top_p, jnp.float32)):
        if value.dtype != dtype or value.shape != logits.shape[:1]:
            expected = f"{jnp.dtype(dtype).name} [{logits.shape[0]}]"
            got = f"{value.dtype} {list(value.shape)}"
            raise ValueError(f"{name}: expected {expected}, got {got}")
    return reference.truncate(logits, top_k, top_p, shards)
