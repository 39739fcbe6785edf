"""A round of 64 requests with 256 flat rows for the target, compiled for an H200: as many launches
as with all rows, and nothing large is copied."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest

from jaxspec.config import RoundConfig
from tests.aot.test_block_round_aot import configured
from tests.aot.test_round_aot import GROUP, PAGES
from tests.support import h200
from tests.support.h200_round import Compiled, body_of, compile_round

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(h200.unavailable() is not None, reason=str(h200.unavailable())),
]

BATCH, ROWS = 64, 256
FLAT = replace(configured(2), max_num_verify_tokens=ROWS, limits_drafts=True)

FEWEST_OF_A_GRAPH = 5  # launches: XLA's xla_gpu_graph_min_graph_size


@functools.cache
def compiled(cfg: RoundConfig) -> Compiled:
    return compile_round(cfg, BATCH, PAGES)


@pytest.fixture
def case() -> Compiled:
    return compiled(FLAT)


def test_the_products_of_the_target_have_the_flat_rows_alone(case: Compiled) -> None:
    def products_of(rows: int) -> list[str]:
        wide = rf"= \(f32\[{rows},{FLAT.target.vocab_size}\][^=]*? custom-call\("
        return re.findall(wide, case.hlo)

    assert len(products_of(ROWS)) == 1
    assert not products_of(BATCH * (FLAT.num_speculative_tokens + 1))


def test_a_layer_has_the_launches_that_it_has_with_all_rows(case: Compiled) -> None:
    """Queries and results find their rows inside the kernels of rotation and attention."""
    every = compiled(replace(FLAT, max_num_verify_tokens=None))
    assert case.thunks.launches().total() <= every.thunks.launches().total() + 4


def test_a_round_is_three_cuda_graphs_and_copies_neither_caches_nor_weights(
    case: Compiled,
) -> None:
    kinds = [thunk.kind for thunk in case.round.inside]
    assert kinds == ["kCommandBuffer", "kWhile", "kCommandBuffer"]
    step = [thunk.kind for thunk in body_of(case.round).inside]
    assert step == ["kCommandBuffer"] or 1 <= len(step) < FEWEST_OF_A_GRAPH, step
    cache = f"{BATCH * PAGES},{GROUP.block_size},8,128"
    large = rf"(?:bf16\[{cache}\]|bf16\[(?:151936,4096|4096,151936|4096,4096)\])"
    made = r"(?:copy|copy-start|fusion|transpose|scatter|dynamic-update-slice)"
    assert not re.findall(rf"= \(?[^=(]*{large}[^=]*? {made}\(.*", case.hlo)


def test_no_kernel_spills(case: Compiled) -> None:
    report = h200.stack_and_spills(case.ptxas)
    assert report and {(spills, loads) for _, spills, loads in report} == {(0, 0)}
