"""EAGLE-1's training-time test against propose, which it has to predict."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.arrays import init_cache
from jaxspec.cache.metadata import build_metadata
from jaxspec.config import REFERENCE_OPS, RopeConfig, RoundConfig
from jaxspec.drafts import eagle
from jaxspec.drafts.autoregressive import DraftInputs, propose
from jaxspec.layers.context import Pass
from jaxspec.layers.params import init_random
from jaxspec.loading.binding import bind_draft
from jaxspec.sampling.state import SamplingState
from jaxspec.training.eagle import forward_steps
from jaxspec.training.heads import eagle_config
from tests.training.conftest import VOCAB, make_pair

ROWS, STEPS, TOLERANCE = 11, 4, 2e-5  # float32: another order of the same sums


@pytest.mark.parametrize("row", [0, 5])
@pytest.mark.parametrize(
    "changes",
    [{}, {"fc_bias": True, "num_layers": 2}, {"sliding_window": 3}],
    ids=["plain", "bias-2-layers", "window"],
)
def test_step_logits_equal_those_that_propose_writes(changes: dict[str, object], row: int) -> None:
    pair = make_pair(1)
    cfg = dataclasses.replace(eagle_config(pair.target_cfg), **changes)
    cfg = dataclasses.replace(
        cfg, attention=dataclasses.replace(cfg.attention, rope=RopeConfig(3e4))
    )
    bound = bind_draft(
        cfg,
        init_random(eagle.param_specs(cfg), jax.random.key(1), jnp.dtype(jnp.float32)),
        pair.target,
        None,
    )
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, VOCAB, (1, ROWS)), jnp.int32)
    hidden = jnp.asarray(rng.normal(size=(1, ROWS, 32)), jnp.float32)
    groups = cfg.cache_groups(4, 32)
    block_tables = (jnp.asarray([[3, 1, 5, 0, 2, 4]], jnp.int32),)
    caches = init_cache(cfg.attention, (6,) * cfg.num_layers, 4, jnp.dtype(jnp.float32))
    if row:  # the target has seen positions 0 .. row; all but the last are in the draft's cache
        metadata = build_metadata(
            groups,
            block_tables,
            jnp.zeros(1, jnp.int32),
            jnp.asarray([row], jnp.int32),
            row,
            attention=cfg.attention,
            ops=REFERENCE_OPS,
        )
        pass_ = Pass(metadata, REFERENCE_OPS)
        caches = eagle.forward(
            bound, cfg, tokens[:, 1 : row + 1], hidden[:, :row], pass_, caches
        ).caches
    pending = jnp.zeros((1, STEPS + 1), jnp.int32).at[0, 0].set(tokens[0, row + 1])
    pending_hidden = jnp.zeros((1, STEPS + 1, 32), jnp.float32).at[0, 0].set(hidden[0, row])
    sampling = SamplingState(jnp.full((1, 2), 7, jnp.uint32), jnp.ones(1))
    inputs = DraftInputs(
        jnp.asarray([row + 1], jnp.int32),
        pending,
        pending_hidden,
        jnp.ones(1, jnp.int32),
        block_tables,
        sampling,
    )
    round_cfg = RoundConfig(
        target=pair.target_cfg,
        target_groups=groups,
        ops=REFERENCE_OPS,
        draft=cfg,
        draft_groups=groups,
        num_speculative_tokens=STEPS,
        rule="probabilistic",
    )
    proposal = propose(round_cfg, bound, inputs, caches).proposal
    assert proposal.draft_logits is not None
    forced = tokens.at[0, row + 2 : row + 2 + STEPS].set(proposal.draft_tokens[0])
    outputs = jax.jit(forward_steps, static_argnums=(1, 4))(bound, cfg, forced, hidden, STEPS)
    for step, feature in enumerate(outputs):
        ours = eagle.logits(bound, cfg, feature, REFERENCE_OPS)[0, row]
        np.testing.assert_allclose(
            ours,
            proposal.draft_logits[0, step],
            atol=TOLERANCE,
            rtol=TOLERANCE,
            err_msg=f"step {step}",
        )
    assert (
        len({int(t) for t in proposal.draft_tokens[0]}) > 1
    )  # equal drafts could hide a wrong shift
