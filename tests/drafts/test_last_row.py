"""A draft that is asked for one row: that row as before, the caches of all rows, and less
arithmetic than for all."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import drafts
from jaxspec.cache.arrays import init_cache
from jaxspec.cache.metadata import build_metadata
from jaxspec.config import REFERENCE_OPS
from jaxspec.drafts.families import layered, step_family
from jaxspec.layers.context import Pass
from jaxspec.layers.products import pick_row
from tests.drafts.test_autoregressive import equations
from tests.support.families import PAIRS, family_model
from tests.support.tiny import METHODS, block_tables, tiny_model

BATCH, ROWS = 3, 4
LAST = np.array([3, 0, 2], np.int32)
MODELS = {method: lambda method=method: tiny_model(method) for method in METHODS}
MODELS |= {
    f"{family}-{method}": lambda pair=(family, method): family_model(*pair)
    for family, method in PAIRS
}


def products(program: Any, *args: Any) -> int:
    """Multiplications of a program's matrix products."""
    found = [
        e for e in equations(jax.make_jaxpr(program)(*args).jaxpr) if "dot" in e.primitive.name
    ]
    return sum(math.prod(e.outvars[0].aval.shape) * e.invars[0].aval.shape[-1] for e in found)


@pytest.mark.parametrize("name", MODELS)
def test_what_nobody_reads_of_a_pass_is_not_made(name: str) -> None:
    model = MODELS[name]()
    cfg = model.round_config(ROWS - 1, sampled=False)
    draft, rng = layered(cfg.draft), np.random.default_rng(0)
    family = step_family(draft)
    tables, num_blocks = block_tables(BATCH, cfg, shuffle_seed=1)
    caches = init_cache(
        draft.attention,
        [num_blocks[cfg.draft_pools[group]] for group in draft.group_of_layer],
        cfg.block_size,
        jnp.float32,
    )
    tokens = jnp.asarray(rng.integers(0, draft.vocab_size, (BATCH, ROWS)), jnp.int32)
    hidden = jnp.asarray(
        rng.normal(size=(BATCH, ROWS, drafts.hidden_width(draft, cfg.target))), jnp.float32
    )
    metadata = build_metadata(
        cfg.draft_groups,
        jax.tree.map(jnp.asarray, cfg.draft_tables(tables)),
        jnp.zeros(BATCH, jnp.int32),
        jnp.asarray(LAST) + 1,
        ROWS,
        attention=draft.attention,
        ops=REFERENCE_OPS,
    )

    def outputs(last_row: jax.Array | None) -> tuple[Any, Any, Any]:
        params = model.params["draft"]
        fused = family.fuse(params, draft, hidden, REFERENCE_OPS)
        pass_ = Pass(metadata, REFERENCE_OPS, last_row=last_row)
        out = family.forward(params, draft, tokens, fused, pass_, caches)
        return out.head_input, out.feedback, out.caches

    whole, row = jax.jit(outputs)(None), jax.jit(outputs)(jnp.asarray(LAST))
    for all_rows, one in zip(whole[:2], row[:2], strict=True):
        assert one.shape == (BATCH, 1, all_rows.shape[2])
        np.testing.assert_allclose(one, pick_row(all_rows, jnp.asarray(LAST)), atol=2e-5, rtol=2e-5)
    jax.tree.map(np.testing.assert_array_equal, whole[2], row[2])
    assert products(outputs, jnp.asarray(LAST)) < 0.8 * products(outputs, None)


def test_pick_row_leaves_what_has_one_row() -> None:
    x = jnp.arange(6).reshape(3, 1, 2)
    assert pick_row(x, jnp.zeros(3, jnp.int32)) is x and pick_row(x, None) is x
    four = jnp.arange(24).reshape(2, 3, 2, 2)
    np.testing.assert_array_equal(
        pick_row(four, jnp.asarray([2, 1])), np.stack([four[0, 2:], four[1, 1:2]])
    )
