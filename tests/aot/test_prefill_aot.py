"""Prefill of one device, compiled for an H200 without one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.aot.test_round_aot import Round, configured
from tests.support import h200
from tests.support.h200_round import COPIES_ON_STREAMS, compile_prefill

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(h200.unavailable() is not None, reason=str(h200.unavailable())),
]

TILES, PAGES = 12, 8  # several pieces of logits, if the prompt is scored


@pytest.mark.parametrize("scores_prompts", [False, True])
def test_contiguous_results_of_a_loop_are_written_by_kernels(scores_prompts: bool) -> None:
    """XLA could copy those of each piece of a scored prompt, on a stream of its own."""
    cfg = configured(Round("llama-3-8b", 3, sampled=True, batch=1))
    cfg = replace(cfg, logprobs=scores_prompts, prompt_logprobs=scores_prompts)
    launches = compile_prefill(cfg, TILES, PAGES).launches()
    assert launches["kCustomKernel"] or launches["kKernel"], launches
    assert not COPIES_ON_STREAMS & set(launches)
