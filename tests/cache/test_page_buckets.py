"""Requests that end where a bucket of pages ends: the rows that a round verifies past the end never
touch what they attend to."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, EngineConfig, SamplingParams, SpeculativeConfig
from jaxspec.cache.arrays import PAD_SLOT
from jaxspec.cache.metadata import build_metadata
from jaxspec.config import REFERENCE_OPS, CacheGroup
from jaxspec.engine.buckets import Buckets
from tests.support.tiny import ATTENTION, random_prompts, tiny_model

pytestmark = pytest.mark.once

K, BUCKET = 5, 128


def engine(model: Any, speculative: bool, limit: int = 512) -> LLM:
    spec = SpeculativeConfig(method="eagle", num_speculative_tokens=K) if speculative else None
    draft = (model.draft, model.params["draft"]) if speculative else None
    target = (model.target, model.params["target"])
    return LLM(
        target, draft, spec, config=EngineConfig(max_model_len=limit, max_num_seqs=2, block_size=16)
    )


@pytest.mark.parametrize("prompt_len, max_tokens", [(103, 25), (110, 18), (100, 28 - K), (99, 30)])
def test_greedy_text_is_plain_where_a_page_bucket_ends(prompt_len: int, max_tokens: int) -> None:
    model = tiny_model("eagle")
    prompts = random_prompts([prompt_len], seed=3)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    plain, speculative = (
        engine(model, on).generate(prompts, params)[0].token_ids for on in (False, True)
    )
    assert speculative == plain


def test_a_sampled_request_at_the_end_of_its_bucket_does_not_see_a_longer_neighbour() -> None:
    """The neighbour needs a larger bucket of pages, in which the first request's last rounds have
    room past its end."""
    model = tiny_model("eagle")
    llm = engine(model, True)
    short, long = random_prompts([100, 200], seed=4)
    params = [
        SamplingParams(temperature=1.0, seed=1, max_tokens=28, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=40),
    ]
    alone = llm.generate([short], params[0])[0].token_ids
    assert alone == llm.generate([short, long], params)[0].token_ids


def test_rows_past_the_block_table_write_nothing() -> None:
    group = CacheGroup(block_size=64, max_model_len=2048)
    (metadata,) = build_metadata(
        (group,),
        (jnp.asarray([[3, 7]], jnp.int32),),
        jnp.asarray([126], jnp.int32),
        jnp.asarray([4], jnp.int32),
        4,
        attention=ATTENTION,
        ops=REFERENCE_OPS,
    )
    assert np.asarray(metadata.slot_mapping).tolist() == [
        [7 * 64 + 62, 7 * 64 + 63, PAD_SLOT, PAD_SLOT]
    ]
    assert (int(metadata.seq_lens[0]), int(metadata.num_pages[0])) == (BUCKET, 2)


@pytest.mark.parametrize("limit, lengths", [(100, None), (96, [70]), (300, [140, 290])])
def test_warm_up_covers_every_bucket_that_requests_of_these_lengths_can_ask_for(
    limit: int, lengths: list[int] | None, monkeypatch: Any
) -> None:
    llm = engine(tiny_model("eagle"), True, limit)
    warmed: dict[str, Any] = {}
    monkeypatch.setattr(llm.engine, "warm_levels", lambda shapes: warmed.update(shapes=shapes) or 0)
    llm.warmup(lengths=lengths)
    runner, shapes = llm.runner, warmed["shapes"]
    for total in range(min(lengths or [1]), max(lengths or [limit]) + 1):
        blocks = -(-min(total + K + 1, limit) // 16)
        assert runner.buckets.pages(blocks) in shapes.pages
        for running in (1, 2):
            tiles = runner.buckets.tiles(
                min(running * -(-total // runner.prefill_tile), runner.buckets.max_tiles)
            )
            assert tiles in shapes.tiles, (total, running)
    assert list(shapes.batches) == [1, 2]


def test_a_gpus_prefill_call_is_a_third_larger_at_most_and_warm_up_knows_its_sizes() -> None:
    buckets = Buckets(
        EngineConfig(), prefill_tile=48, on_gpu=True
    )  # 43 tiles to the default 2048 tokens
    sizes = buckets.every_tiles(1, 43)
    assert sizes == [3, 4, 6, 8, 12, 16, 24, 32, 43]
    assert [next(s for s in sizes if s >= n) for n in range(1, 44)] == [
        buckets.tiles(n) for n in range(1, 44)
    ]
