"""Equal layers are traced once, and so is what programs of other sampling features share."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec import models
from jaxspec.config import REFERENCE_OPS, RoundConfig, SamplingFeatures
from jaxspec.decode import programs
from jaxspec.decode import state as decode_state
from jaxspec.layers import decoder_layer
from jaxspec.sampling.rows import StateLayout, Vocabulary, sampling_rows
from pallas_kernels.truncation import reference
from tests.support.families import TARGETS, target_config
from tests.support.h200_round import weights
from tests.support.tiny import VOCAB

PAGES, LAYERS = 2, 12
GREEDY, SAMPLED = SamplingFeatures(sampled=False), SamplingFeatures()
TRUNCATED = SamplingFeatures(processors=frozenset({"truncation"}))
SCORED = SamplingFeatures(processors=frozenset({"truncation"}), logprobs=True)
# The trace of each layer, in families with other loops or other layers. Where a layer makes the
# next norm, the first one differs, whose own norm the embedding makes, and the last one.
ROPES, KINDS = [1, 1, 1, 0], TARGETS["deepseek_v4"]["layer_types"]
TRACES: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({}, "FLLLLLLLLLLE"),
    "qwen3_moe": ({}, "DXXXXXXXXXXE"),  # dense, experts
    "gpt_oss": ({}, "AFWFWFWFWFWE"),  # full, window; no norm comes with its embedding
    "llama4_text": ({"no_rope_layers": 3 * ROPES}, "DXDNDXDNDXDN"),  # dense, experts, no rope
    "deepseek_v3": ({}, "DXXXXXXXXXXX"),
    "deepseek_v4": ({"layer_types": 4 * KINDS}, "TWSHWSHWSHWS"),
}


def traced_round(
    model_type: str, features: SamplingFeatures, batch: int, **changes: Any
) -> list[Any]:
    """The operations of a plain round, by shapes alone; changes: of the target's config.json."""
    target = target_config(model_type, num_hidden_layers=LAYERS, **changes)
    cfg = RoundConfig.for_models(target, ops=REFERENCE_OPS, block_size=4, max_model_len=8)
    cfg = cfg.with_features(features)
    params = {"target": weights(models.family(target).param_specs(target)), "draft": {}}
    groups = len(cfg.cache_groups)
    init = partial(
        decode_state.init_state,
        cfg,
        num_blocks=(batch * PAGES,) * groups,
        dtype=jnp.bfloat16,
        cache_dtype=jnp.bfloat16,
    )
    rows = sampling_rows(StateLayout(Vocabulary(VOCAB)).full(features), [], batch=batch)
    ints = jax.ShapeDtypeStruct((batch,), jnp.int32)
    state = jax.eval_shape(init, rows, ints, jax.ShapeDtypeStruct((batch, 1), jnp.int32))
    tables = (jax.ShapeDtypeStruct((batch, PAGES), jnp.int32),) * groups
    jitted = jax.jit(programs.decode_round_in_place, static_argnums=0)
    return jitted.trace(cfg, params, *programs.split_donated(state), tables).jaxpr.eqns


@pytest.mark.parametrize("model_type", TRACES)
def test_equal_layers_are_traced_once(model_type: str) -> None:
    changes, expected = TRACES[model_type]
    names = ("dense_layer", "decoder_layer", "_layer", "_sparse_layer")
    eqns = traced_round(model_type, GREEDY, 3, **changes)
    calls = [eqn.params["jaxpr"] for eqn in eqns if eqn.params.get("name") in names]
    assert [calls.index(call) for call in calls] == [expected.index(kind) for kind in expected]


def test_programs_of_other_sampling_features_share_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers, and of what changes logits; the batch is no other test's."""
    traced: list[str] = []

    def count(module: Any, name: str) -> None:
        function = getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            traced.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)

    count(decoder_layer, "add_attention")
    count(reference, "truncate")
    for features, expected in (
        (GREEDY, ["add_attention"] * 3),
        (SAMPLED, []),
        (TRUNCATED, ["truncate"]),
        (SCORED, []),
    ):
        traced.clear()
        traced_round("llama", features, 13)
        assert traced == expected
