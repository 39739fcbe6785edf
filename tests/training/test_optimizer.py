"""The optimiser sees each projection by itself, though the masters hold them joined."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafts import eagle3
from jaxspec.training.config import TrainConfig
from jaxspec.training.optimizer import optimizer
from tests.training.conftest import Pair


@pytest.mark.usefixtures("standard_promotion")
def test_muon_treats_query_key_and_value_as_three_matrices(pair: Pair) -> None:
    """An update of Muon has orthogonal directions, so their singular values are equal."""
    gradient = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(x.size), x.shape, x.dtype), pair.draft
    )
    muon = optimizer(
        TrainConfig(optimizer="muon", weight_decay=0.0), eagle3.param_specs(pair.draft_cfg)
    )
    updates, _ = jax.jit(muon.update)(gradient, muon.init(pair.draft), pair.draft)
    joined = np.asarray(updates["layers"][0]["self_attn"]["qkv_proj"].values)
    attention = pair.draft_cfg.attention
    sizes = np.array([attention.num_heads, attention.num_kv_heads]) * attention.head_dim
    for part in np.split(joined, [sizes[0], sizes.sum()], axis=1):
        values = np.linalg.svd(part, compute_uv=False)
        assert values.max() < 1.8 * values.min(), values
    whole = np.linalg.svd(joined, compute_uv=False)
    assert whole.max() > 1.8 * whole.min()  # taken as one matrix they would be equal here
    assert updates["lm_head"].values.shape == pair.draft["lm_head"].values.shape
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(updates))
