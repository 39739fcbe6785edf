"""Chunks of prompts in the tiles of a prefill call, on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxspec.engine.prefill_tiles import PrefillTiles, in_tiles
from jaxspec.engine.request import Request
from jaxspec.engine.request_rows import RequestRows
from jaxspec.engine.scheduler import Chunk
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.processors.processor import Vocabulary
from jaxspec.sampling.rows import StateLayout

ROWS, LAYOUT = RequestRows(3, adapts=False, has_fallback=False), StateLayout(Vocabulary(32))
TILE = 4


def request(prompt: list[int], slot: int) -> Request:
    made = Request(prompt, SamplingParams(0.0), 9)
    made.slot = slot
    return made


def filled(chunks: list[Chunk], size: int) -> tuple[PrefillTiles, list[range]]:
    placed, rows = in_tiles(chunks, TILE)
    new = ROWS.of_prompts([chunk.request for chunk, _ in placed], size, LAYOUT)
    tiles = PrefillTiles.idle(TILE, 8, 3, (), new)
    tiles.fill(placed)
    return tiles, rows


def test_a_chunk_takes_whole_tiles_and_only_its_prompts_last_tile_ends_it() -> None:
    whole, cut = request([*range(1, 7)], 5), request([*range(10, 20)], 2)
    chunks = [Chunk(whole, 0, whole.prompt_token_ids, -1), Chunk(cut, 4, [14, 15, 16, 17], 18)]
    tiles, rows = filled(chunks, 4)
    assert rows == [range(2), range(2, 3)]
    expected: list[list[int]] = [[1, 2, 3, 4], [5, 6, 0, 0], [14, 15, 16, 17], [0] * 4]
    np.testing.assert_array_equal(tiles.tokens, expected)
    assert tiles.start.tolist() == [0, 4, 4, 0] and tiles.num_tokens.tolist() == [4, 2, 4, 0]
    assert tiles.next_prompt_token.tolist() == [5, -1, 18, -1]
    assert tiles.slots.tolist() == [5, 8, 8] and tiles.ending.tolist() == [1, 4, 4]


def test_a_chunk_that_fills_its_last_tile_has_no_empty_one() -> None:
    made = request([*range(1, 9)], 0)
    _, rows = in_tiles([Chunk(made, 0, made.prompt_token_ids, -1)], TILE)
    assert rows == [range(2)]


def test_tiles_without_requests_write_nothing() -> None:
    tiles, rows = filled([], 2)
    arrays: Any = (tiles.num_tokens, tiles.tokens)
    assert rows == [] and not any(x.any() for x in arrays)
    assert (tiles.slots == 8).all() and (tiles.ending == 2).all(), "out of range"
