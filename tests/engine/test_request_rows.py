"""The rows that slots and tiles get of requests."""

from __future__ import annotations

import numpy as np

from jaxspec.config import SamplingFeatures
from jaxspec.decode.slots import ADMISSIONS
from jaxspec.engine.request import Request
from jaxspec.engine.request_rows import RequestRows, admission_rows
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.processors.processor import Vocabulary
from jaxspec.sampling.rows import STOPS, StateLayout

LAYOUT = StateLayout(Vocabulary(32))
ROWS = RequestRows(3, adapts=False, has_fallback=False)


def test_a_preempted_request_goes_on_from_its_last_token_and_a_new_one_from_none() -> None:
    new = Request([1, 2], SamplingParams(0.5), 9, draft_limit=3, seed=7)
    old = Request([3], SamplingParams(0.0), 8, draft_limit=1)
    old.extend([4, 5])
    rows = ROWS.of_prompts([new, old, new], 4, LAYOUT)
    assert np.asarray(rows.next_token).tolist() == [0, 5, 0, 0]
    assert np.asarray(rows.num_generated).tolist() == [0, 2, 0, 0]
    assert np.asarray(rows.max_tokens).tolist() == [9, 8, 9, 0]
    assert np.asarray(rows.draft_limit).tolist() == [3, 1, 3, 0]
    np.testing.assert_array_equal(np.asarray(rows.sampling.temperature)[:3], [0.5, 0.0, 0.5])
    assert rows.acceptance is None and rows.sampling.processors == {}


def test_stop_tokens_fill_the_columns_that_the_state_has() -> None:
    (width,) = LAYOUT.sizes[STOPS]
    few = Request([1], SamplingParams(0.0), 9, stop_token_ids=(6,))
    many = Request([1], SamplingParams(0.0), 9, stop_token_ids=tuple(range(width + 2)))
    stops = np.asarray(ROWS.of_prompts([few, many], 3, LAYOUT).stop_token_ids)
    assert stops[0].tolist() == [6, *[-1] * (width - 1)]
    assert stops[1].tolist() == [*range(width)] and (stops[2] == -1).all()


def test_adaptive_rows_hold_an_estimate_and_a_second_break_even_only_with_a_fallback() -> None:
    for has_fallback in (False, True):
        rows = RequestRows(3, adapts=True, has_fallback=has_fallback).of_prompts([], 2, LAYOUT)
        assert rows.acceptance is not None and rows.acceptance.thresholds.shape == (2, 3)
        assert (rows.acceptance.break_even is not None) == has_fallback


def test_admitted_requests_are_padded_with_slots_out_of_range() -> None:
    layout = LAYOUT.hold(SamplingFeatures(processors=frozenset({"logit_bias"})))
    request = Request([1], SamplingParams(0.0, logit_bias={4: 2.0}), 9)
    request.slot = 1
    at, rows = admission_rows([request], layout, 2)
    assert at.tolist() == [1, *[2] * (ADMISSIONS - 1)]
    bias = np.asarray(rows["logit_bias"])
    assert bias.shape == (ADMISSIONS, 32) and bias[0, 4] == 2.0 and not bias[1:].any()
