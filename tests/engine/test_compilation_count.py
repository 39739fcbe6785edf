"""One compilation per shape bucket, and none after warm-up."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, SamplingParams, SpeculativeConfig
from jaxspec.config import ConfigError, EngineConfig
from jaxspec.decode import several_rounds as rounds
from jaxspec.engine import round_configs
from jaxspec.sampling.rows import features_of
from tests.support.compilations import counting_compilations
from tests.support.slow import slow
from tests.support.tiny import VOCAB, Model, agreeing_model, random_prompts
from tests.support.toys import ToyDraft, ToyTarget

LENGTHS, K = (5, 9, 1), 3


def engine(model: Model, rule: str = "probabilistic", **changes: Any) -> LLM:
    values: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4, "block_size": 16}
    config = EngineConfig(**(values | changes))
    speculative = SpeculativeConfig(
        method=model.draft.method, num_speculative_tokens=K, rejection_sample_method=rule
    )
    return LLM(
        (model.target, model.params["target"]),
        (model.draft, model.params["draft"]),
        speculative,
        config=config,
    )


@pytest.mark.usefixtures("toy_families")
@pytest.mark.parametrize(
    ("speculative", "per_step", "is_large", "names_kinds"),
    [
        slow(True, 1, False, False),
        pytest.param(True, 1, True, True, marks=pytest.mark.once),
        slow(True, 1, True, False),
        (True, 3, False, False),
        slow(False, 1, False, False),
    ],
)
def test_nothing_compiles_after_warm_up(
    speculative: bool,
    per_step: int,
    is_large: bool,
    names_kinds: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other prompts, lengths, batch sizes, seeds, and mixtures of greedy, sampled and truncated
    requests. is_large: the rows decide whether a round is CUDA graphs."""
    if is_large:
        monkeypatch.setattr(round_configs, "GRAPHS_LAUNCH_EARLY", False)
        monkeypatch.setattr(round_configs, "GRAPHS_BELOW_BYTES", 0)
        monkeypatch.setattr(round_configs, "GRAPHS_BELOW_BYTES_A_LAYER", 0)
        monkeypatch.setattr(
            round_configs, "GRAPHS_ABOVE_ROWS", 4
        )  # two rows a request: batches of 1 without, of 3 with them
    table = {
        "table": jnp.asarray(np.random.default_rng(0).normal(size=(VOCAB, VOCAB)), jnp.float32)
    }
    llm = LLM(
        (ToyTarget(VOCAB), table),
        (ToyDraft(VOCAB), table) if speculative else None,
        SpeculativeConfig(method="eagle", num_speculative_tokens=1) if speculative else None,
        config=EngineConfig(
            max_model_len=(131 if is_large else 130)
            if speculative
            else 60,  # programs of each case's own
            max_num_seqs=3,
            block_size=16,
            batch_buckets=(1, 3),
            max_num_batched_tokens=16,
            rounds_per_step=per_step,
        ),
    )
    kinds = [
        SamplingParams(0.0),
        SamplingParams(1.0, seed=1),
        SamplingParams(0.9, top_k=5, top_p=0.9, seed=2, stop_token_ids=(3,)),
    ]
    with counting_compilations() as compiled:
        llm.warmup(sampling_params=kinds if names_kinds else None)
    assert any("decode_rounds)" in name for name in compiled) == (per_step > 1)
    assert any("decode_round_" in name for name in compiled) == (per_step == 1)
    with counting_compilations() as compiled:
        for seed, lengths in enumerate(
            [
                (3,),
                (5, 9),
                (1, 58, 7),
                (41,),
                (33, 34, 35, 36),
                *([(115,), (129, 2)] if speculative else []),
            ]
        ):
            for mixture in (kinds[:1] * 4, [*kinds, kinds[0]], kinds[1:2] * 4):
                llm.generate(random_prompts(lengths, seed), mixture[: len(lengths)])
    assert not compiled


@pytest.mark.usefixtures("toy_families")
def test_nothing_compiles_when_requests_bring_features_and_batches_shrink() -> None:
    table = {
        "table": jnp.asarray(np.random.default_rng(0).normal(size=(VOCAB, VOCAB)), jnp.float32)
    }
    config = EngineConfig(
        max_model_len=40, max_num_seqs=2, block_size=16, max_num_batched_tokens=32
    )
    llm = LLM((ToyTarget(VOCAB), table), config=config)
    kinds = [SamplingParams(0.0), SamplingParams(0.0, presence_penalty=1.0, min_tokens=1)]
    llm.warmup(sampling_params=kinds)
    with counting_compilations() as compiled:
        for mixture in ([kinds[0]] * 2, [kinds[1]] * 2, kinds, kinds[::-1]):
            llm.generate(
                random_prompts((3, 5)),
                [replace(p, max_tokens=n) for p, n in zip(mixture, (3, 8), strict=True)],
            )
    assert not compiled


@pytest.mark.usefixtures("toy_families")
def test_nothing_compiles_after_warmup_for_where_the_prefix_cache_shortens_prompts() -> None:
    table = {
        "table": jnp.asarray(np.random.default_rng(0).normal(size=(VOCAB, VOCAB)), jnp.float32)
    }
    config = EngineConfig(
        max_model_len=128, max_num_seqs=1, block_size=16, max_num_batched_tokens=128
    )
    llm = LLM((ToyTarget(VOCAB), table), config=config)
    prompts, params = [[*range(8, 24)] * 5 + [t] for t in (1, 2)], SamplingParams(0.0, max_tokens=3)
    llm.warmup_for(prompts, params)
    with counting_compilations() as compiled:
        llm.generate(prompts, params)
    assert not compiled and llm.scheduling.num_prefix_hits == 80


@pytest.mark.usefixtures("toy_families")
@pytest.mark.parametrize(
    ("lengths", "max_tokens", "limit", "per_step"),
    [((20, 20), 150, 192, 1), ((20, 20), 150, 208, 4), ((150,), 2, 160, 1)],
    ids=["preempted", "preempted, 4 rounds a step", "cut"],
)
def test_nothing_compiles_after_warmup_for_where_prefill_calls_are_larger_or_smaller_than_prompts(
    lengths: tuple[int, ...], max_tokens: int, limit: int, per_step: int
) -> None:
    """A preempted request is prefilled with all that it has generated; of a prompt of five tiles
    and calls of four one is left."""
    table = {
        "table": jnp.asarray(np.random.default_rng(0).normal(size=(VOCAB, VOCAB)), jnp.float32)
    }
    config = EngineConfig(
        max_model_len=limit,  # each case has shapes, and with them programs, of its own
        max_num_seqs=2,
        batch_buckets=(2,),
        block_size=16,
        max_num_batched_tokens=128,
        enable_prefix_caching=False,
        num_gpu_blocks_override=13,
        rounds_per_step=per_step,
    )
    llm = LLM((ToyTarget(VOCAB), table), config=config)
    prompts, params = random_prompts(lengths), SamplingParams(0.0, max_tokens=max_tokens)
    llm.warmup_for(prompts, params)
    with counting_compilations() as compiled:
        llm.generate(prompts, params)
    assert not compiled and (llm.scheduling.num_preemptions > 0) == (len(lengths) > 1)


@pytest.mark.parametrize("compilation", ["round", "step"])
def test_one_compilation_for_each_bucket(compilation: str) -> None:
    """A first batch compiles its programs once however many rounds it runs; another batch of the
    same bucket compiles nothing."""
    llm = engine(
        agreeing_model("eagle"),
        compilation=compilation,
        max_model_len={"round": 48, "step": 56}[compilation],
        batch_buckets=(2, 4),
    )
    greedy = SamplingParams(0.0, max_tokens=12)
    with counting_compilations() as compiled:
        llm.generate(random_prompts((5, 9)), greedy)
        llm.generate(
            random_prompts((5,)), greedy
        )  # one request runs in the bucket of two, and is prefilled in that of one tile
    rounds = [name for name in compiled if re.search(r"round|step|verify_and_commit", name)]
    assert len(rounds) == len(set(rounds)) == {"round": 1, "step": 3}[compilation], compiled
    assert len([name for name in compiled if "prefill" in name]) == 2
    with counting_compilations() as compiled:
        llm.generate(random_prompts((7,), seed=1), greedy)
        llm.generate(random_prompts((2, 11), seed=2), SamplingParams(0.0, max_tokens=30))
    assert not compiled
    with counting_compilations() as compiled:
        llm.generate(random_prompts((7, 8, 9), seed=1), greedy)
    assert len(
        [name for name in compiled if re.search(r"round|step|verify_and_commit", name)]
    ) == len(rounds), "a new bucket"


def test_batch_invariant_programs_have_one_shape_whatever_runs() -> None:
    """Then a product's rows, and with them its bits, are the same for a request alone and among
    others."""
    llm = engine(
        agreeing_model("eagle"), batch_invariant=True, max_num_batched_tokens=128, max_model_len=40
    )
    assert llm.config.batch_buckets == (4,)
    greedy = SamplingParams(0.0, max_tokens=6)
    with counting_compilations() as compiled:
        llm.generate(random_prompts((5,)), greedy)
    assert len([name for name in compiled if re.search(r"decode_round|prefill", name)]) == 2, (
        compiled
    )
    with counting_compilations() as compiled:
        llm.generate(random_prompts((7, 20, 30, 2), seed=1), greedy)
    assert not compiled
    with pytest.raises(
        ConfigError,
        match=r"batch_buckets: expected one batch size with batch_invariant, got \(2, 4\)",
    ):
        EngineConfig(max_num_seqs=4, batch_buckets=(2, 4), batch_invariant=True)


def toy(*, speculative: SpeculativeConfig | None = None, **config: Any) -> LLM:
    table = {
        "table": jnp.asarray(np.random.default_rng(0).normal(size=(VOCAB, VOCAB)), jnp.float32)
    }
    return LLM(
        (ToyTarget(VOCAB), table),
        (ToyDraft(VOCAB), table) if speculative else None,
        speculative,
        config=EngineConfig(**config),
    )


@pytest.mark.usefixtures("toy_families")
def test_nothing_compiles_where_few_of_a_batch_generate_and_k_goes_by_their_number() -> None:
    """The others of the bucket are being prefilled, or their last tokens are on the way."""
    spec = SpeculativeConfig(
        method="eagle",
        num_speculative_tokens=2,
        num_speculative_tokens_per_batch_size=[(1, 2, 2), (3, 4, 0)],
    )  # type: ignore[arg-type]
    llm = toy(
        speculative=spec,
        max_model_len=96,
        max_num_seqs=4,
        block_size=16,
        batch_buckets=(2, 4),
        max_num_batched_tokens=32,
    )
    llm.warmup(sampling_params=[SamplingParams(0.0)])
    params = [SamplingParams(0.0, max_tokens=n) for n in (20, 20, 3, 4)]
    with counting_compilations() as compiled:
        llm.generate(random_prompts((2, 5, 90, 80)), params)
    assert not compiled


@pytest.mark.usefixtures("toy_families")
def test_nothing_compiles_while_a_text_grows_through_smaller_buckets_of_pages_than_it_ends_in() -> (
    None
):
    llm = toy(max_model_len=300, max_num_seqs=1, block_size=16, max_num_batched_tokens=32)
    llm.warmup(lengths=[280], sampling_params=[SamplingParams(0.0)])
    with counting_compilations() as compiled:
        llm.generate(random_prompts((5,)), SamplingParams(0.0, max_tokens=275))
    assert not compiled


@pytest.mark.usefixtures("toy_families")
def test_nothing_compiles_after_warmup_for_requests_with_many_stop_tokens_ctrl_c_or_not() -> None:
    llm = toy(max_model_len=44, max_num_seqs=1, block_size=16, max_num_batched_tokens=32)
    params = SamplingParams(0.0, max_tokens=3, stop_token_ids=range(20, 26))
    llm.warmup_for([[1, 2]], params)
    for allowed in (set(), {"jit(_init_state)"}):  # a state of that many columns from the start
        with counting_compilations() as compiled:
            llm.generate([[1, 2]], params)
        assert set(compiled) <= allowed
        llm.engine.reset()


@pytest.mark.usefixtures("toy_families")
def test_kinds_of_request_are_mixed_without_counting_their_subsets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 64 kinds there are 2**64 subsets, of which many need the same features."""
    llm, found = toy(max_model_len=40, max_num_seqs=1, block_size=16), []
    monkeypatch.setattr(llm.engine, "warm", lambda features, **_: found.extend(features) or 0)
    kinds = [
        SamplingParams(t, min_p=p, presence_penalty=q, top_k=k, logit_bias=b, logprobs=n)
        for t in (0.0, 1.0)
        for p in (0, 0.1)
        for q in (0, 1)
        for k in (0, 5)
        for b in ({}, {1: 1.0})
        for n in (None, 1)
    ]
    llm.warmup(sampling_params=kinds)
    mixtures = set(found)
    assert len(found) == len(mixtures) and {features_of([p]) for p in kinds} <= mixtures
    assert all(a | b in mixtures for a in mixtures for b in mixtures) and len(mixtures) <= 2**6


@pytest.mark.usefixtures("toy_families")
def test_ctrl_c_while_compiling_ahead_leaves_a_usable_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program had taken the state, and returned none."""
    llm = toy(max_model_len=40, max_num_seqs=2, block_size=16)
    expected = llm.generate([[1, 2], [3]], SamplingParams(0.0, max_tokens=5))
    run = rounds.run_rounds

    def interrupted(*args: Any) -> Any:
        run(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.runner.resident, "round_program", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.warmup(sampling_params=[SamplingParams(0.0)])
    again = llm.generate([[1, 2], [3]], SamplingParams(0.0, max_tokens=5))
    assert [o.token_ids for o in again] == [o.token_ids for o in expected]
