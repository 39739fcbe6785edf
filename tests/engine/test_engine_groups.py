"""The engine over several KV-cache groups, each with a pool far too small: every request has the
text that it has alone, nothing compiles while decoding, and all blocks of all groups come back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec import (
    LLM,
    ConfigError,
    EngineConfig,
    RequestOutput,
    SamplingParams,
    SpeculativeConfig,
)
from jaxspec.cache.block_pool import BlockPool
from jaxspec.cache.pool_sizes import demand, steps_ahead
from tests.support.compilations import counting_compilations
from tests.support.families import family_model
from tests.support.tiny import VOCAB, Model

pytestmark = pytest.mark.once

LIMIT, SIZE, K, ROOM = 96, 4, 3, 200
KINDS = [SamplingParams(0.0), SamplingParams(1.0)]
# Target, method, the draft's own window, and what the groups see of the past.
PAIRS = {
    "gpt_oss": ("eagle", 7, [{}, {"window": 5}, {"window": 7}]),
    "llama4_text": ("eagle_llama4", None, [{}, {"chunk": 5}]),
    "glm4_moe_lite": ("mtp", None, [{}]),
    "deepseek_v4": ("mtp", None, [{}, {"window": 5}]),
}


def make(
    model: Model, num_blocks: int | tuple[int, ...], *, draft: bool = True, **config: Any
) -> LLM:
    values = {
        "max_model_len": LIMIT,
        "max_num_seqs": 4,
        "block_size": SIZE,
        "batch_buckets": (4,),
        "max_num_batched_tokens": 32,
    }
    method = str(model.draft.method).split("_")[0]
    return LLM(
        (model.target, model.params["target"]),
        (model.draft, model.params["draft"]) if draft else None,
        SpeculativeConfig(method=method, num_speculative_tokens=K) if draft else None,
        config=EngineConfig(num_gpu_blocks_override=num_blocks, **(values | config)),
    )


@dataclass
class Engines:
    """small: pools in which one request of the largest size just fits. roomy: nobody is preempted,
    nothing is shared, and blocks are not given out again soon. Both have caches of the same shapes,
    and so the same programs: those that were compiled."""

    model: Model
    small: LLM
    roomy: LLM
    compiled: list[str]
    least: tuple[int, ...]

    @cached_property
    def alone(self) -> list[RequestOutput]:
        """Each of the requests by itself, in the roomy engine."""
        outputs = [
            self.roomy.generate([prompt], one)[0] for prompt, one in zip(*REQUESTS, strict=True)
        ]
        assert self.roomy.scheduling.num_preemptions == 0 == self.roomy.scheduling.num_prefix_hits
        assert all_free(self.roomy)
        return outputs


ROUNDS = {"gpt_oss": (1, 2), "llama4_text": (1, 2)}  # a step; of the others one
USUAL = [("gpt_oss", 2), ("llama4_text", 1), ("glm4_moe_lite", 1)]
FAMILIES = [
    pytest.param(
        (f, rounds), marks=[pytest.mark.slow] * ((f, rounds) not in USUAL), id=f"{f}-{rounds}"
    )
    for f in PAIRS
    for rounds in ROUNDS.get(f, (1,))
]
SEVERAL: list[Any] = [p for p in FAMILIES if len(PAIRS[p.values[0][0]][2]) > 1]  # type: ignore
of_several_groups = pytest.mark.parametrize("engines", SEVERAL, indirect=True)
in_flight = pytest.mark.parametrize(
    "ahead", [False, True]
)  # True: as on a GPU, programs are launched before a result is read


@pytest.fixture(scope="module", params=FAMILIES)
def engines(request: pytest.FixtureRequest) -> Iterator[Engines]:
    family, rounds = request.param
    method, window, sights = PAIRS[family]
    model = family_model(family, method, window=window)
    roomy = make(model, (ROOM,) * len(sights), enable_prefix_caching=False)
    groups = roomy.runner.configs.cache_groups
    assert [{k: v for k in ("window", "chunk") if (v := getattr(g, k))} for g in groups] == sights
    least = tuple(
        demand(g, max_model_len=LIMIT, head_room=K + 1, max_chunk=32, rounds_per_step=rounds).least
        for g in groups
    )
    small = make(model, (ROOM,) * len(sights), rounds_per_step=rounds)
    for blocks, count in zip(small.engine.scheduler.groups, least, strict=True):
        blocks.pool = BlockPool(count)
    jax.clear_caches()  # a worker of pytest may make these engines twice
    with counting_compilations() as compiled:
        small.warmup(sampling_params=KINDS)
    yield Engines(model, small, roomy, compiled, least)


def all_free(llm: LLM) -> bool:
    free = all(g.pool.num_free == g.pool.num_blocks for g in llm.engine.scheduler.groups)
    return free and not llm.engine.has_requests


def random_requests(count: int, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Lengths and parameters at random; half of the prompts start alike, longer than every
    window."""
    rng = np.random.default_rng(seed)
    begin = rng.integers(0, VOCAB, 50).tolist()
    prompts, params = [], []
    for i in range(count):
        own = rng.integers(0, VOCAB, rng.integers(1, 20)).tolist()
        prompts.append(begin[: rng.integers(10, 50)] + own if i % 2 else own)
        limit = int(rng.integers(1, 60 if i % 3 else 12))
        params.append(
            SamplingParams(
                float(rng.choice([0.0, 1.0])),
                seed=int(rng.integers(2**40)),
                max_tokens=limit,
                stop_token_ids=tuple(rng.integers(0, VOCAB, int(i % 4 == 0)).tolist()),
            )
        )
    return prompts, params


REQUESTS = random_requests(40, seed=1)


def test_a_program_is_compiled_once_for_each_bucket_and_kind(engines: Engines) -> None:
    """Greedy and sampled."""
    several = engines.small.runner.rounds_per_step > 1
    count = {
        name: sum(name in compiled for compiled in engines.compiled)
        for name in ("decode_round_", "decode_rounds)", "prefill_packed)")
    }
    assert (count["decode_round_"], count["decode_rounds)"]) == ((0, 2) if several else (2, 0)), (
        engines.compiled
    )
    assert count["prefill_packed)"] == 2 or several, "with one round a step they are the same"


@in_flight
def test_each_of_many_requests_has_its_own_text_in_pools_far_too_small(
    engines: Engines, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = engines.small
    monkeypatch.setattr(small.engine, "depth", ahead * steps_ahead(small.runner.rounds_per_step))
    small.reset_metrics()
    with counting_compilations() as compiled:
        together = small.generate(*REQUESTS)
    assert not compiled, "nothing compiles while decoding"
    assert (
        small.scheduling.num_preemptions > 0
        and small.scheduling.num_prefix_hits > 0
        and all_free(small)
    )
    for i, (output, expected) in enumerate(zip(together, engines.alone, strict=True)):
        assert (output.token_ids, output.finish_reason) == (
            expected.token_ids,
            expected.finish_reason,
        ), i
    assert small.metrics.mean_acceptance_length > 1.3


@of_several_groups
@in_flight
def test_a_text_as_long_as_can_be_holds_a_window_of_blocks_only(
    engines: Engines, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, rounds, held = engines.small, engines.small.runner.rounds_per_step, []
    depth = ahead * steps_ahead(rounds)
    monkeypatch.setattr(small.engine, "depth", depth)
    (prompt,) = (np.random.default_rng(3).integers(0, VOCAB, 40).tolist(),)

    def note(_: object) -> None:
        held.extend(
            [len(h.blocks) for h in r.blocks]
            for r in small.engine.scheduler.running
            if r.num_generated > 1
        )

    params = SamplingParams(0.0, max_tokens=LIMIT, ignore_eos=True)
    (output,) = small.generate([prompt], params, callback=note)
    assert len(output.token_ids) == LIMIT - 40 and all_free(small)
    assert output.token_ids == engines.roomy.generate([prompt], params)[0].token_ids
    for group, most, least in zip(
        small.runner.configs.cache_groups, np.max(held, axis=0), engines.least, strict=True
    ):
        if group.reach is not None:
            rows = (1 + (depth + 1) * rounds) * (K + 1)
            assert 1 < most <= -(-(group.reach + rows) // SIZE) + 1 and least < LIMIT // SIZE // 2


@of_several_groups
def test_a_pool_too_small_for_one_window_is_named_with_the_numbers(engines: Engines) -> None:
    blocks = (*engines.least[:-1], engines.least[-1] - 1)
    with pytest.raises(
        ConfigError,
        match=(
            rf"KV cache: expected {engines.least[-1]} blocks of 4 tokens "
            r"for (a window of|chunks of) \d"
        ),
    ):
        make(engines.model, blocks, rounds_per_step=engines.small.runner.rounds_per_step)
    assert (
        make(
            engines.model, engines.least, rounds_per_step=engines.small.runner.rounds_per_step
        ).runner.memory.num_blocks
        == engines.least
    )
    with pytest.raises(ConfigError, match="num_gpu_blocks_override: expected a number for each of"):
        make(engines.model, (*engines.least, 9))
