"""The arrays of a prefill call, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxspec.decode.slots import PromptRows
from jaxspec.drafts.drafter import PromptChunk
from jaxspec.engine.request import slot_of
from jaxspec.engine.scheduler import Chunk

Placed = tuple[Chunk, int]  # the chunk that a tile belongs to, and the offset of its tokens there


def in_tiles(chunks: Sequence[Chunk], prefill_tile: int) -> tuple[list[Placed], list[range]]:
    """Return the tiles of these chunks in order, and the range of tiles that each chunk has."""
    placed: list[Placed] = []
    rows: list[range] = []
    for chunk in chunks:
        first = len(placed)
        placed += [(chunk, offset) for offset in range(0, len(chunk.token_ids), prefill_tile)]
        rows.append(range(first, len(placed)))
    return placed, rows


@dataclass(frozen=True)
class PrefillTiles:
    """One call of prefill: NumPy arrays with a row per tile, a few tokens of one request.

    slots:             int32 [prompts], the slot of each prompt that ends in the call; out of range
                       where there is none
    ending:            int32 [prompts], the tile that ends it; out of range likewise
    block_tables:      as jaxspec.decode.prefill takes them, a row per tile
    tokens:            int32 [tiles, prefill_tile]
    start:             int32 [tiles], position of the first token
    num_tokens:        int32 [tiles], tokens that are real; 0 for an idle tile
    next_prompt_token: int32 [tiles], the known token after the tile, -1 where the prompt ends
    rows:              a row for each tile, that of its request
    """

    slots: np.ndarray
    ending: np.ndarray
    block_tables: Any
    tokens: np.ndarray
    start: np.ndarray
    num_tokens: np.ndarray
    next_prompt_token: np.ndarray
    rows: PromptRows

    @property
    def chunk(self) -> PromptChunk:
        """The tiles as prefill takes them; it reads NumPy arrays as it reads JAX's."""
        arrays: Any = (self.tokens, self.start, self.num_tokens, self.next_prompt_token)
        return PromptChunk(*arrays)

    @classmethod
    def idle(
        cls,
        prefill_tile: int,
        num_slots: int,
        max_ending: int,
        block_tables: Any,
        rows: PromptRows,
    ) -> PrefillTiles:
        """Return tiles that hold no request; `fill` writes those that do.

        num_slots: of the batch; max_ending: prompts that may end in the call
        """
        (num_tiles,) = rows.next_token.shape

        def column(value: int) -> np.ndarray:
            return np.full(num_tiles, value, np.int32)

        return cls(
            np.full(max_ending, num_slots, np.int32),
            np.full(max_ending, num_tiles, np.int32),
            block_tables,
            np.zeros((num_tiles, prefill_tile), np.int32),
            column(0),
            column(0),
            column(-1),
            rows,
        )

    def fill(self, placed: Sequence[Placed]) -> None:
        """Write the tokens of these tiles, which are the first ones of the call."""
        ended, tile = 0, self.tokens.shape[1]
        for row, (chunk, offset) in enumerate(placed):
            end = offset + tile
            part = chunk.token_ids[offset:end]
            self.tokens[row, : len(part)] = part
            self.start[row], self.num_tokens[row] = chunk.start + offset, len(part)
            is_last = end >= len(chunk.token_ids)
            self.next_prompt_token[row] = chunk.next_token if is_last else chunk.token_ids[end]
            if is_last and chunk.ends:
                self.slots[ended], self.ending[ended] = slot_of(chunk.request), row
                ended += 1
