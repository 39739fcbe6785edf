"""How many tokens and tiles a prefill call has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxspec import EngineConfig
from jaxspec.engine.buckets import Buckets
from jaxspec.engine.scheduler import SchedulerConfig


@pytest.mark.parametrize(
    ("tokens", "tile", "devices", "tiles"),
    [
        (2048, 48, 1, 43),
        (2048, 32, 1, 64),
        (1, 48, 1, 1),
        (96, 48, 1, 2),
        (2048, 48, 2, 44),
        (8192, 48, 4, 172),
        (1, 48, 2, 1),
    ],
)
def test_a_prefill_call_holds_its_tokens_in_whole_tiles(
    tokens: int, tile: int, devices: int, tiles: int
) -> None:
    """A prompt of 4,096 tokens takes two calls of 2,048 on a GPU, not a third one of 64. Several
    devices halve large calls, so that the halves have one shape."""
    config = EngineConfig(max_num_batched_tokens=tokens, tensor_parallel_size=devices)
    buckets = Buckets(config, tile, on_gpu=True)
    settings = SchedulerConfig(
        max_num_seqs=1,
        buckets=(1,),
        max_model_len=8192,
        max_tiles=config.prefill_tiles(tile),
        prefill_tile=tile,
        block_size=64,
    )
    assert (buckets.max_tiles, buckets.max_chunk) == (tiles, tiles * tile)
    assert settings.max_chunk == tiles * tile
    assert max(buckets.every_tiles(1, tiles)) == tiles


def test_several_devices_prefill_more_tokens_a_call() -> None:
    one = EngineConfig(data_parallel_size=3)
    assert (one.prefill_tokens, replace(one, tensor_parallel_size=2).prefill_tokens) == (2048, 4096)
    given = EngineConfig(tensor_parallel_size=2, max_num_batched_tokens=512)
    assert given.prefill_tokens == 512
