"""Warm-up: which programs requests will need, and compiling them before any request runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxspec.config import SamplingFeatures
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.engine.runner import ModelRunner
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.rows import features_of

USUAL = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1),
    SamplingParams(temperature=1, top_p=0.9),
)


@dataclass(frozen=True)
class Shapes:
    """The buckets to compile for. batches: requests that run together; pages: of their block table; tiles: of a prefill call."""

    batches: Sequence[int]
    pages: Sequence[int]
    tiles: Sequence[int]


def shapes_up_to(
    runner: ModelRunner, batch_sizes: Sequence[int] | None, lengths: Sequence[int] | None
) -> Shapes:
    """Of any requests up to these sizes: how many run together, and their tokens with the prompt (None: as the engine allows)."""
    config = runner.config
    assert config.batch_buckets is not None
    longest = min(config.max_model_len, max(lengths or [config.max_model_len]))
    most = max(batch_sizes or config.batch_buckets)
    return Shapes(
        _batches(runner, most),
        runner.buckets.every_pages(
            1, longest + runner.num_speculative_tokens + 1
        ),  # a text grows through the smaller ones
        runner.buckets.every_tiles(
            1, -(-longest // runner.prefill_tile) * min(most, config.max_num_seqs)
        ),
    )


def shapes_of(runner: ModelRunner, requests: Sequence[Request]) -> Shapes:
    """Of just these requests, run together."""
    running = min(len(requests), runner.config.max_num_seqs)
    prompt_tokens = sorted(len(r.prompt_token_ids) for r in requests)
    tokens = sorted(len(r.prompt_token_ids) + r.max_tokens for r in requests)
    again = _may_preempt(
        runner, tokens[-running:]
    )  # who is preempted is prefilled anew, with what he has generated
    in_tiles = [-(-n // runner.prefill_tile) for n in (tokens if again else prompt_tokens)]
    most = sum(in_tiles[-running:])
    # What a prefix of others, or the call before, leaves of a prompt may be less than any prompt.
    is_cut = runner.config.enable_prefix_caching or again or most > runner.buckets.max_tiles
    return Shapes(
        _batches(runner, running),
        runner.buckets.every_pages(
            prompt_tokens[0], tokens[-1] + runner.num_speculative_tokens + 1
        ),
        runner.buckets.every_tiles(1 if is_cut else in_tiles[0], most),
    )


def compile_ahead(engine: Engine, kinds: Sequence[SamplingParams], shapes: Shapes) -> int:
    """Every mixture of these kinds of request, in these shapes; returns the number of programs."""
    mixtures: dict[SamplingFeatures, None] = {}
    for features in dict.fromkeys(features_of([params]) for params in kinds):
        mixtures |= dict.fromkeys([features, *(features | others for others in mixtures)])
    speculative = engine.runner.speculative
    limited = speculative is not None and (
        speculative.draft_max_model_len is not None
        or any(p.num_speculative_tokens is not None for p in kinds)
    )
    return sum(
        engine.warm(
            mixtures,
            params=kinds,
            batches=shapes.batches,
            round_pages=shapes.pages,
            prefills=[(t, p) for t in shapes.tiles for p in shapes.pages],
            limits_drafts=limit,
        )
        for limit in ([False, True] if limited else [False])
    )


def _batches(runner: ModelRunner, most: int) -> list[int]:
    """The buckets that `most` requests go through as they come and end."""
    buckets = runner.config.batch_buckets
    assert buckets is not None
    return [b for i, b in enumerate(buckets) if i == 0 or buckets[i - 1] < most]


def _may_preempt(runner: ModelRunner, tokens: Sequence[int]) -> bool:
    """Whether requests of so many tokens each may hold more blocks than there are."""
    lengths = [min(n + runner.num_speculative_tokens, runner.config.max_model_len) for n in tokens]
    return any(
        sum(runner.demand(group, n).least for n in lengths) > blocks
        for group, blocks in zip(runner.cache_groups, runner.num_blocks, strict=True)
    )
