"""How many tokens and tiles a prefill call has."""

from __future__ import annotations

import pytest

from jaxspec import EngineConfig
from jaxspec.engine.buckets import Buckets
from jaxspec.engine.scheduler import SchedulerConfig


@pytest.mark.parametrize(
    ("tokens", "tile", "tiles"), [(2048, 48, 43), (2048, 32, 64), (1, 48, 1), (96, 48, 2)]
)
def test_a_prefill_call_holds_its_tokens_in_whole_tiles(tokens: int, tile: int, tiles: int) -> None:
    """A prompt of 4,096 tokens takes two calls of 2,048 on a GPU, not a third one of 64."""
    config = EngineConfig(max_num_batched_tokens=tokens)
    buckets = Buckets(config, tile, on_gpu=True)
    settings = SchedulerConfig(
        max_num_seqs=1,
        buckets=(1,),
        max_model_len=8192,
        max_num_batched_tokens=tokens,
        prefill_tile=tile,
        block_size=64,
    )
    assert (buckets.max_tiles, settings.max_chunk) == (tiles, tiles * tile)
    assert max(buckets.every_tiles(1, tiles)) == tiles


def test_each_device_adds_tokens_to_a_prefill_call() -> None:
    for devices, tokens in ((1, 2048), (2, 4096), (8, 16384)):
        config = EngineConfig(tensor_parallel_size=devices, data_parallel_size=3)
        assert config.max_num_batched_tokens == tokens
    given = EngineConfig(tensor_parallel_size=2, max_num_batched_tokens=512)
    assert given.max_num_batched_tokens == 512
