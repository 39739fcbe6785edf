"""Totals are the same counted at once and request by request."""

from __future__ import annotations

from jaxspec.cache.group_blocks import RequestBlocks
from jaxspec.engine.request import Request
from jaxspec.engine.totals import Totals
from jaxspec.sampling.params import SamplingParams

TILE = 8


def request(
    prompt: int, *, prefilled: int = 0, pages: int = 0, drafts: int = 3, runs: bool = False
) -> Request:
    made = Request([1] * prompt, SamplingParams(), 9, draft_limit=drafts)
    made.blocks = [RequestBlocks(0, list(range(pages)))]
    made.num_prefilled, made.num_cached = prefilled, prompt if runs else 0
    return made


def test_totals_count_requests_pages_drafts_and_tiles_of_prefill() -> None:
    requests = [
        request(30, prefilled=30, pages=5, runs=True),
        request(17, prefilled=8, pages=3, drafts=1),  # nine tokens are left: two tiles
        request(8, pages=1, drafts=2),
    ]
    totals = Totals.of(requests, TILE)
    assert totals == Totals(TILE, count=3, most_pages=5, fewest_drafts=1, prefill_tiles=3)
    grown = Totals(TILE)
    for each in requests:
        grown.add(each)
    assert grown == totals

    totals.expect(request(99, drafts=0))
    assert totals == Totals(TILE, count=4, most_pages=5, fewest_drafts=0, prefill_tiles=3)
    assert Totals.of([], TILE).fewest_drafts is None
    assert [totals.tiles_of(n) for n in (1, 8, 9)] == [1, 1, 2]
