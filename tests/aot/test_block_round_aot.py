"""A round with a DSpark head of Qwen3-8B's dimensions compiled for an H200: one program, caches in
place, a loop of few launches."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import replace

import pytest

from jaxspec.config import Ops, RoundConfig
from jaxspec.drafts import DSparkConfig
from jaxspec.tools.benchmark.dimensions import MODELS
from tests.aot.test_round_aot import GROUP, PAGES
from tests.support import h200
from tests.support.h200_round import COPIES_ON_STREAMS, Compiled, body_of, compile_round

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(h200.unavailable() is not None, reason=str(h200.unavailable())),
]

BATCH, K = 4, 7
# The kernel that finds the best score of each block, the best of all, the token's column, and the
# loop's counter.
LAUNCHES_OF_A_DRAFT = 4


def configured(num_layers: int, sampled: bool = True) -> RoundConfig:
    dimensions = MODELS["qwen3-8b"]
    target = replace(dimensions.target, num_layers=3)
    draft = DSparkConfig(
        target_hidden_size=target.hidden_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        attention=target.attention,
        rms_norm_eps=target.rms_norm_eps,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        aux_layers=(0, 1, 2),
        draft_block_size=K,
        mask_token_id=7,
        sample_from_anchor=True,
        windows=(None,) * num_layers,
        causal=(False,) * num_layers,
        markov_rank=256,
        has_confidence=True,
        confidence_reads_token=True,
    )
    return RoundConfig(
        target=target,
        target_groups=(GROUP,),
        draft=draft,
        draft_groups=(GROUP,),
        num_speculative_tokens=K,
        rule="probabilistic",
        sampled=sampled,
        ops=Ops(**dict.fromkeys(Ops().names(), "mosaic_gpu")),
        cuda_graphs=True,
    )


@functools.cache
def compiled(num_layers: int, batch: int, sampled: bool = True) -> Compiled:
    return compile_round(configured(num_layers, sampled), batch, PAGES)


def loop_body(case: Compiled, loop: str) -> str:
    """The computation that a `while` line of the HLO runs."""
    name = re.findall(r"body=%([\w.-]+)", loop)[0]
    return case.hlo.split(f"\n%{name} (")[1].split("\n}")[0]


@pytest.fixture
def case() -> Compiled:
    return compiled(2, BATCH)


def test_caches_are_updated_in_place(case: Compiled) -> None:
    shape = (BATCH * PAGES, GROUP.block_size, 8, 128)
    made = re.findall(
        rf"= \(?[^=(]*bf16\[{','.join(map(str, shape))}\][^=]*? "
        r"(?:copy|copy-start|fusion|transpose|scatter|dynamic-update-slice)\(.*",
        case.hlo,
    )
    assert not made
    assert case.aliased >= 2 * (3 + 2) * math.prod(shape) * 2


@pytest.mark.parametrize("batch", [1, BATCH, 64])
def test_the_loop_over_drafts_is_one_while_of_k_trips_of_few_launches(batch: int) -> None:
    """No other array of a step's logits is made, and the kernel does not spill."""
    case = compiled(2, batch)
    loops = [line for line in case.hlo.splitlines() if re.search(r" while\(", line)]
    trips = [n for line in loops for n in re.findall(r'"known_trip_count":{"n":"(\d+)"}', line)]
    assert trips == [str(K)] and len(loops) == 1
    launches = body_of(case.round).launches()
    assert launches.total() == LAUNCHES_OF_A_DRAFT, dict(launches)
    assert f"f32[{batch},151936]" not in loop_body(case, loops[0])
    assert "markov_draw_256x151936" in case.ptxas
    report = h200.stack_and_spills(case.ptxas)
    assert {(spills, loads) for _, spills, loads in report} == {(0, 0)}


@pytest.mark.parametrize("batch", [1, BATCH, 64])
def test_a_greedy_draft_is_four_launches(batch: int) -> None:
    """No logits are written, and nothing spills."""
    case = compiled(2, batch, sampled=False)
    [loop] = [line for line in case.hlo.splitlines() if re.search(r" while\(", line)]
    assert f'"known_trip_count":{{"n":"{K}"}}' in loop
    launches = body_of(case.round).launches()
    assert launches.total() == LAUNCHES_OF_A_DRAFT, dict(launches)
    body = loop_body(case, loop)
    assert f"f32[{batch},{K},151936]" in body and f"f32[{batch},151936]" not in body
    assert "markov_argmax_256x151936" in case.ptxas
    report = h200.stack_and_spills(case.ptxas)
    assert {(spills, loads) for _, spills, loads in report} == {(0, 0)}


@pytest.mark.parametrize("batch", [1, BATCH])
def test_a_round_is_two_cuda_graphs_and_the_launches_of_the_loop(batch: int) -> None:
    """XLA makes no graph of a draft's four kernels. A column of a single request is contiguous, and
    still no copy to an address of the host's."""
    case = compiled(2, batch)
    kinds = [thunk.kind for thunk in case.round.inside]
    assert kinds == ["kCommandBuffer", "kWhile", "kCommandBuffer"]
    kernels = {thunk.kind for thunk in body_of(case.round).inside}
    assert kernels == {"kCustomCall", "kCustomKernel"}
    assert not COPIES_ON_STREAMS & set(case.thunks.launches())


@pytest.mark.parametrize("batch", [1, BATCH])
def test_launches_of_a_draft_layer(batch: int) -> None:
    """Eight as a target layer has, and one that writes the context: its keys and values come from a
    product that all layers share, and are read where they lie. No product pads its rows: four
    blocks of seven rows have an idle row each."""
    more = compiled(3, batch).thunks.launches()
    more.subtract(compiled(2, batch).thunks.launches())
    assert more.total() == 9, dict(more)


def test_corrected_logits_take_the_place_of_the_heads(case: Compiled) -> None:
    """One array of drafts' logits, which nothing fills before the loop."""
    logits = f"f32[{BATCH},{K},151936]"
    [loop] = [line for line in case.hlo.splitlines() if re.search(r" while\(", line)]
    assert loop.split(" while(")[0].count(logits) == 1
    assert not re.findall(rf"= {re.escape(logits)}\S* (?:broadcast|copy)\(", case.hlo)


def test_nothing_calls_the_host_and_no_weight_is_copied(case: Compiled) -> None:
    assert not re.findall(r" (?:sort|topk|infeed|outfeed|send|recv|async-start)\(.*", case.hlo)
    weights = r"bf16\[(?:151936,4096|4096,151936|256,151936|151936,256|4096,4096)\]"
    assert not re.findall(rf"= \(?{weights}\S* (?:copy|fusion|transpose)\(.*", case.hlo)


def test_no_kernel_spills(case: Compiled) -> None:
    report = h200.stack_and_spills(case.ptxas)
    assert report and {(spills, loads) for _, spills, loads in report} == {(0, 0)}
