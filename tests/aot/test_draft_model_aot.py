"""A round with Qwen3-0.6B's dimensions as the draft of Qwen3-8B's compiled for an H200: one
program, the caches of both in place, a loop of few launches."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import replace
from typing import Any

import pytest

from jaxspec.config import RoundConfig
from jaxspec.drafts import DraftModelConfig
from jaxspec.layers import op_choice
from jaxspec.tools.benchmark.dimensions import MODELS, draft_config
from pallas_kernels import hopper
from tests.aot.test_round_aot import GROUP, PAGES
from tests.support import h200
from tests.support.h200_round import COPIES_ON_STREAMS, Compiled, body_of, compile_round

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(h200.unavailable() is not None, reason=str(h200.unavailable())),
]

BATCH, K = 4, 5
TARGET_LAYERS, DRAFT_LAYERS = 2, 2
# Eight a layer, and seven: counter, metadata, embedding and norm, head, the draw's two, columns.
LAUNCHES_OF_A_STEP = 8 * DRAFT_LAYERS + 7


def configured() -> RoundConfig:
    dimensions = MODELS["qwen3-8b"]
    target = replace(dimensions.target, num_layers=TARGET_LAYERS)
    draft = draft_config(dimensions, "draft_model")
    assert isinstance(draft, DraftModelConfig)
    model: Any = draft.model
    draft = replace(draft, model=replace(model, num_layers=DRAFT_LAYERS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "missing", lambda: None)
        patch.setattr(hopper, "too_old", lambda: None)
        ops = op_choice.choose(
            "mosaic_gpu", target, draft, block_size=64, dtype="bfloat16", cache_dtype="bfloat16"
        )
    return RoundConfig(
        target=target,
        target_groups=(GROUP,),
        draft=draft,
        draft_groups=(GROUP,),
        num_speculative_tokens=K,
        rule="probabilistic",
        sampled=True,
        ops=ops,
        cuda_graphs=True,
    )


@functools.cache
def compiled() -> Compiled:
    return compile_round(configured(), BATCH, PAGES)


def test_a_round_is_one_program_with_the_caches_of_both_in_place() -> None:
    case = compiled()
    shape = (BATCH * PAGES, GROUP.block_size, 8, 128)
    made = re.findall(
        rf"= \(?[^=(]*bf16\[{','.join(map(str, shape))}\][^=]*? "
        r"(?:copy|copy-start|fusion|transpose|scatter|dynamic-update-slice)\(.*",
        case.hlo,
    )
    assert not made
    assert case.aliased >= 2 * (TARGET_LAYERS + DRAFT_LAYERS) * math.prod(shape) * 2
    assert not COPIES_ON_STREAMS & set(case.thunks.launches())
    assert not re.findall(r" (?:sort|topk|infeed|outfeed|send|recv|async-start)\(.*", case.hlo)
    weights = r"bf16\[(?:151936,1024|1024,151936|151936,4096|4096,151936|1024,1024|4096,4096)\]"
    assert not re.findall(rf"= \(?{weights}\S* (?:copy|fusion|transpose)\(.*", case.hlo)


def test_the_draft_steps_are_one_loop_of_few_launches() -> None:
    case = compiled()
    loops = [line for line in case.hlo.splitlines() if re.search(r" while\(", line)]
    trips = [n for line in loops for n in re.findall(r'"known_trip_count":{"n":"(\d+)"}', line)]
    assert trips == [str(K - 1)] and len(loops) == 1
    kinds = [thunk.kind for thunk in case.round.inside]
    assert kinds == ["kCommandBuffer", "kWhile", "kCommandBuffer"]
    launches = body_of(case.round).launches()
    assert launches.total() <= LAUNCHES_OF_A_STEP, dict(launches)


def test_no_kernel_spills() -> None:
    report = h200.stack_and_spills(compiled().ptxas)
    assert report and {(spills, loads) for _, spills, loads in report} == {(0, 0)}
