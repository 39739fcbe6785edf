"""Whole rounds of the models with experts compiled for an H200: caches in place, weights not
copied, kernels chosen, whatever the number of rows."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec import drafts, models
from jaxspec.config import Ops, RoundConfig
from jaxspec.decode import round as decode
from jaxspec.decode import state as decode_state
from jaxspec.drafts.families import layered
from jaxspec.layers import op_choice
from jaxspec.layers.log_once import log_once
from jaxspec.sampling.state import SamplingState
from jaxspec.tools.benchmark.dimensions import HYBRID, draft_config
from pallas_kernels import hopper
from tests.support import h200

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(h200.unavailable() is not None, reason=str(h200.unavailable())),
]
BATCH, PAGES, K = 16, 16, 3
EVERY = Ops(**dict.fromkeys(Ops().names(), "mosaic_gpu"))
CASES = {
    "gpt-oss-20b": ("eagle3", EVERY),
    "glm-4.7-flash": ("mtp", EVERY),
    "qwen3-30b-a3b": ("eagle3", EVERY),
}


def configured(model: str, method: str, num_drafts: int = K) -> RoundConfig:
    """Two layers of the real width, one of each kind of attention."""
    target = replace(HYBRID[model].target, num_layers=2)
    if model == "gpt-oss-20b":
        target = replace(target, layer_types=target.layer_types[:2])
    draft = draft_config(replace(HYBRID[model], target=target, aux_layers=(0, 1, 2)), method)
    chosen = op_choice.choose(
        "auto", target, draft, block_size=64, dtype=jnp.bfloat16, cache_dtype=jnp.bfloat16
    )
    return RoundConfig.for_models(
        target,
        draft,
        ops=chosen,
        block_size=64,
        max_model_len=64 * PAGES,
        num_speculative_tokens=num_drafts,
        rule="probabilistic",
    )


def arguments(cfg: RoundConfig, batch: int = BATCH) -> tuple[Any, Any, Any]:
    """params, state and block tables of decode_round, by their shapes alone."""
    struct = jax.ShapeDtypeStruct

    def weights(specs):
        return jax.tree.map(lambda s: struct(s.shape, jnp.dtype(s.dtype or "bfloat16")), specs)

    target = weights(models.family(cfg.target).param_specs(cfg.target))
    shared = {name: target[name] for name in ("embed_tokens", "lm_head")}
    draft = shared | dict(weights(drafts.family(cfg.draft).param_specs(cfg.draft)))
    if layered(cfg.draft).maps_vocabulary:
        draft["draft_to_target"] = struct((layered(cfg.draft).draft_vocab_size,), jnp.int32)
        draft["target_to_draft"] = struct((layered(cfg.draft).vocab_size,), jnp.int32)
    floats = struct((batch,), jnp.float32)
    sampling = SamplingState(struct((batch, 2), jnp.uint32), floats)  # type: ignore[arg-type]
    zeros = jnp.zeros(batch, jnp.int32), jnp.zeros((batch, 4), jnp.int32)
    state = jax.eval_shape(
        lambda s: decode_state.init_state(
            cfg,
            s,
            *zeros,
            (batch * PAGES,) * len(cfg.cache_groups),
            dtype=jnp.bfloat16,
            cache_dtype=jnp.bfloat16,
        ),
        sampling,
    )
    tables = (struct((batch, PAGES), jnp.int32),) * len(cfg.cache_groups)
    return {"target": target, "draft": draft}, state, tables


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "missing", lambda: None)
    monkeypatch.setattr(hopper, "too_old", lambda: None)


@pytest.mark.parametrize(("batch", "num_drafts"), [(1, 8), (3, 3), (13, 4)])
@pytest.mark.parametrize("model", CASES)
def test_a_round_of_any_number_of_rows_lowers(
    model: str, batch: int, num_drafts: int, caplog: pytest.LogCaptureFixture
) -> None:
    """9, 12 and 65 rows: kernels take up to 8, or multiples of 8."""
    cfg = configured(model, CASES[model][0], num_drafts)
    assert cfg.ops == CASES[model][1]
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, "jaxspec.layers"):
        h200.lower_for_h200(decode.decode_round, cfg, *arguments(cfg, batch), static_argnums=0)
    by_xla = [text for text in caplog.messages if text.startswith("XLA")]
    if batch * (num_drafts + 1) > 64:  # products of these are XLA's; router and experts are not
        by_xla = [text for text in by_xla if not text.startswith("XLA multiplies by [")]
    assert not by_xla


@pytest.mark.parametrize("model", CASES)
def test_a_round_compiles_without_copies_of_weights_or_caches(model: str) -> None:
    method, expected = CASES[model]
    cfg = configured(model, method)
    assert cfg.ops == expected
    params, state, tables = arguments(cfg)
    options = dict(cfg.compiler_options)
    compiled = h200.compile_for_h200(
        decode.decode_round,
        cfg,
        params,
        state,
        tables,
        static_argnums=0,
        donate_argnums=2,
        options=options,
    )
    memory = compiled.memory_analysis()
    caches = sum(
        a.size * a.dtype.itemsize
        for a in jax.tree.leaves((state.target_caches, state.draft.caches))
    )
    assert memory.alias_size_in_bytes >= caches
    assert (
        memory.temp_size_in_bytes < 128e6
    )  # logits, and the rows beside each expert; the experts of one layer are 0.9 GB and more
    target: Any = cfg.target
    count, hidden, size = (
        target.moe.num_experts,
        cfg.target.hidden_size,
        target.moe.intermediate_size,
    )
    experts = (
        rf"= \S*\[{count},(?:{hidden},{2 * size}|{size},{hidden})\]\S* "
        r"(?!parameter|get-tuple-element|bitcast)\w"
    )
    assert not re.findall(experts, compiled.as_text())
