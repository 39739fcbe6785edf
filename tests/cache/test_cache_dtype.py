"""Caches in another dtype than the weights: every array of them keeps it through prefill and
rounds, and speculation still gives the text of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, EngineConfig, SamplingParams, SpeculativeConfig, drafts, models
from jaxspec.cache.arrays import cache_specs, own_cache_dtype
from jaxspec.cache.pool_sizes import block_bytes
from jaxspec.config import REFERENCE_OPS, ConfigError, RoundConfig
from jaxspec.config.quantization import Quantization
from jaxspec.decode import prefill, round
from jaxspec.decode.state import DecodeState, init_state
from jaxspec.drafts import MtpConfig
from jaxspec.drafts.draft_model import drafts_for
from jaxspec.drafts.drafter import PromptChunk
from jaxspec.layers.params import Params, init_random
from jaxspec.loading.binding import bind_draft
from tests.support.families import PAIRS, draft_config, family_model, target_config
from tests.support.tiny import Model, agreeing_model, random_prompts, sampling_state

FLOAT32, BFLOAT16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)


def dtypes_of(tree: Any) -> list[jnp.dtype]:
    return [array.dtype for array in jax.tree.leaves(tree)]


# --- programs, traced


def shapes_of_params(specs: Params, dtype: jnp.dtype) -> Params:
    return jax.eval_shape(lambda key: init_random(specs, key, dtype), jax.random.key(0))


def traced_round(
    pair: tuple[str, str], dtype: jnp.dtype, cache_dtype: jnp.dtype
) -> tuple[RoundConfig, DecodeState, DecodeState, DecodeState]:
    """A pair's round config, and its state before and after prefill and after a round."""
    target = target_config(pair[0])
    draft = draft_config(pair[1], target)
    params = shapes_of_params(models.family(target).param_specs(target), dtype)
    own = shapes_of_params(drafts.family(draft).param_specs(draft), dtype)
    cfg = RoundConfig.for_models(
        target,
        draft,
        ops=REFERENCE_OPS,
        block_size=4,
        max_model_len=16,
        num_speculative_tokens=2,
    )
    both = {"target": params, "draft": bind_draft(draft, own, params, None)}
    sampling = jax.tree.map(jnp.asarray, sampling_state([0]))
    blocks = (4,) * len(cfg.cache_groups)
    start = partial(init_state, cfg, sampling, num_blocks=blocks, dtype=dtype)
    limits = jnp.full(1, 9, jnp.int32), jnp.full((1, 1), -1, jnp.int32)
    state = jax.eval_shape(lambda: start(*limits, cache_dtype=cache_dtype))
    tables = (jnp.zeros((1, 4), jnp.int32),) * len(blocks)
    ints = jnp.ones(1, jnp.int32)
    chunk = PromptChunk(jnp.ones((1, 4), jnp.int32), ints, ints, ints)
    _, filled = jax.eval_shape(lambda p, s: prefill.prefill(cfg, p, s, tables, chunk), both, state)
    _, after = jax.eval_shape(lambda p, s: round.decode_round(cfg, p, s, tables), both, filled)
    return cfg, state, filled, after


@pytest.mark.parametrize(
    ("pair", "dtype", "cache_dtype"),
    [(pair, FLOAT32, BFLOAT16) for pair in PAIRS]
    + [
        (pair, BFLOAT16, FLOAT32)
        for pair in PAIRS
        if pair in (("gpt_oss", "eagle3"), ("glm4_moe_lite", "mtp"), ("deepseek_v4", "mtp"))
    ],
    ids=str,
)
def test_every_family_keeps_its_caches_in_their_dtype(
    pair: tuple[str, str], dtype: jnp.dtype, cache_dtype: jnp.dtype
) -> None:
    """JAX promotes strictly here, so a product of operands of two dtypes would be an error."""
    cfg, *states = traced_round(pair, dtype, cache_dtype)
    for model, caches in (
        (cfg.target, lambda state: state.target_caches),
        (cfg.draft, lambda state: state.draft.caches),
    ):
        specs = cache_specs(model.attention, (4,) * model.num_layers, 4, cache_dtype)
        assert cache_dtype in dtypes_of(specs)
        for state in states:
            assert dtypes_of(caches(state)) == dtypes_of(specs)
    assert {state.draft.pending_hidden.dtype for state in states} == {dtype}


# --- the engine

CONFIG = {"max_model_len": 64, "max_num_seqs": 2, "block_size": 4, "max_num_batched_tokens": 16}
GREEDY = [SamplingParams(temperature=0, max_tokens=n) for n in (20, 9, 14)]
PROMPTS = random_prompts((18, 3, 7))
ENGINES = {
    "full attention": ("eagle3", lambda: agreeing_model("eagle3")),
    "latent attention": ("mtp", lambda: family_model("glm4_moe_lite", "mtp")),
}


@cache
def engine(name: str) -> LLM:
    """float32 weights with bfloat16 caches."""
    method, make = ENGINES[name]
    model: Model = make()
    return LLM(
        (model.target, model.params["target"]),
        (model.draft, model.params["draft"]),
        SpeculativeConfig(method=method, num_speculative_tokens=3),
        config=EngineConfig(kv_cache_dtype="bfloat16", **CONFIG),
        dtype=jnp.float32,
    )


@pytest.mark.parametrize("name", ENGINES)
def test_speculation_gives_the_text_of_plain_decoding(name: str) -> None:
    llm = engine(name)
    plain = llm.on_same_weights(speculative=False).generate(PROMPTS, GREEDY)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert llm.metrics.mean_acceptance_length > 1.3
    state = llm.runner.resident.state
    assert set(dtypes_of((state.target_caches, state.draft.caches))) == {BFLOAT16}
    assert set(dtypes_of(llm.params)) == {state.draft.pending_hidden.dtype} == {FLOAT32}


@pytest.mark.parametrize("name", ENGINES)
def test_the_pools_count_the_bytes_of_the_arrays(name: str) -> None:
    runner = engine(name).runner
    caches = runner.resident.state.target_caches, runner.resident.state.draft.caches
    held = sum(array.nbytes for array in jax.tree.leaves(caches))
    assert runner.memory.cache_bytes == held > 0
    wide = block_bytes(runner.configs.greedy, FLOAT32)
    assert [2 * size for size in runner.memory.block_bytes] == list(wide)


# --- fp8


@cache
def fp8_engine() -> LLM:
    return engine("full attention").on_same_weights(kv_cache_dtype="fp8")


def test_speculation_over_fp8_caches_gives_the_text_of_plain_decoding() -> None:
    llm = fp8_engine()
    plain = llm.on_same_weights(speculative=False).generate(PROMPTS, GREEDY)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert llm.metrics.mean_acceptance_length > 1.3
    state = llm.runner.resident.state
    assert set(dtypes_of((state.target_caches, state.draft.caches))) == {jnp.dtype("float8_e4m3fn")}
    wide = block_bytes(llm.runner.configs.greedy, FLOAT32)
    assert [4 * size for size in llm.runner.memory.block_bytes] == list(wide)
    assert "(KV cache float8_e4m3fn)" in llm.describe()


FP8 = jnp.dtype("float8_e4m3fn")


@pytest.mark.parametrize("method", ["mtp", "draft_model"])
@pytest.mark.parametrize(("model_type", "own"), [("mimo", "fp8"), ("glm4_moe_lite", "auto")])
def test_auto_is_what_the_checkpoint_of_a_drafts_weights_says(
    method: str, model_type: str, own: str
) -> None:
    """Latents have no fp8 caches."""
    target: Any = target_config(model_type)
    target = replace(target, quantization=Quantization((), has_fp8_caches=True))
    draft = MtpConfig(target, True) if method == "mtp" else drafts_for(target, target)
    assert own_cache_dtype("auto", draft) == own_cache_dtype("auto", target) == own
    assert own_cache_dtype("bfloat16", draft) == "bfloat16"


@cache
def mixed_engine(draft_dtype: str = "bfloat16") -> LLM:
    """A target over fp8 caches, whose layers matter, with a draft that has caches of its own."""
    model = agreeing_model("eagle", disturbance=0.5)
    drafts = SpeculativeConfig(
        method="eagle",
        num_speculative_tokens=3,
        draft_kv_cache_dtype=draft_dtype,  # type: ignore[arg-type]
    )
    return LLM(
        (model.target, model.params["target"]),
        (model.draft, model.params["draft"]),
        drafts,
        config=EngineConfig(kv_cache_dtype="fp8", **CONFIG),
        dtype=jnp.float32,
    )


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, GREEDY[: len(prompts)])]


def test_a_draft_may_keep_another_dtype_than_an_fp8_target() -> None:
    llm = mixed_engine()
    assert tokens_of(llm, PROMPTS) == tokens_of(llm.on_same_weights(speculative=False), PROMPTS)
    assert llm.metrics.mean_acceptance_length > 1.3
    state = llm.runner.resident.state
    assert set(dtypes_of(state.target_caches)) == {FP8}
    assert set(dtypes_of(state.draft.caches)) == {BFLOAT16}
    held = [each.nbytes for each in jax.tree.leaves((state.target_caches, state.draft.caches))]
    assert llm.runner.memory.cache_bytes == sum(held)
    assert "(KV cache float8_e4m3fn, the draft's bfloat16)" in llm.describe()


def codes_of(llm: LLM, length: int) -> list[np.ndarray]:
    """The keys and values of the first request's first tokens, in a cache of its own."""
    caches = jax.tree.leaves(llm.runner.resident.state.target_caches)
    pages = llm.runner.resident.tables._tables[0][0][: -(-length // 4)]
    return [np.asarray(c)[pages].reshape(-1, *c.shape[2:])[:length] for c in caches]


def test_verification_writes_the_codes_of_plain_decoding() -> None:
    """Rows of drafts that are accepted, beside rows that are not."""
    llm = mixed_engine().on_same_weights(enable_prefix_caching=False)
    plain = llm.on_same_weights(speculative=False)
    caches = []
    for each in (llm, plain):
        (tokens,) = tokens_of(each, PROMPTS[:1])
        length = len(PROMPTS[0]) + len(tokens) - 1  # the last token is not cached
        caches.append(codes_of(each, length))
    for speculative, alone in zip(*caches, strict=True):
        assert np.count_nonzero(alone.astype(np.float32)) > alone.size // 2
        np.testing.assert_array_equal(speculative.view(np.uint8), alone.view(np.uint8))


def test_fp8_caches_serve_prefixes_and_requests_that_were_preempted() -> None:
    roomy = mixed_engine().on_same_weights(enable_prefix_caching=False)
    prompts = [PROMPTS[0], PROMPTS[1] + [5] * 14, [*PROMPTS[0][:16], 5], PROMPTS[2]]
    small = mixed_engine().on_same_weights(num_gpu_blocks_override=16)
    params = SamplingParams(temperature=0, max_tokens=24)
    alone = [roomy.generate([prompt], params)[0].token_ids for prompt in prompts]
    found = [output.token_ids for output in small.generate(prompts, params)]
    assert found == alone
    assert small.scheduling.num_preemptions > 0 and small.scheduling.num_prefix_hits > 0


def test_latents_have_no_fp8_cache_of_a_draft() -> None:
    llm = engine("latent attention")
    drafts = replace(llm.speculative, draft_kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match="^draft_kv_cache_dtype: expected auto, bfloat16 or"):
        LLM(
            (llm.target_config, llm.params["target"]),
            (llm.draft_config, llm.params["draft"]),
            drafts,
            config=llm.config,
            dtype=jnp.float32,
        )


def test_latents_have_no_fp8_cache() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype: expected auto, bfloat16 or float32 for"):
        engine("latent attention").on_same_weights(kv_cache_dtype="fp8")


def test_a_description_names_the_caches_dtype_where_it_differs() -> None:
    llm = engine("full attention")
    first, auto = (
        each.describe().splitlines()[0]
        for each in (llm, llm.on_same_weights(kv_cache_dtype="auto"))
    )
    assert ", float32 (KV cache bfloat16) on " in first
    assert ", float32 on " in auto
