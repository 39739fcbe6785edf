"""Warm-up: find the programs that requests will need, and compile them before any request runs."""

from __future__ import annotations

from collections.abc import Sequence

from jaxspec.config import SamplingFeatures
from jaxspec.engine.buckets import Shapes
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.engine.runner import ModelRunner
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.rows import features_of


def shapes_up_to(
    runner: ModelRunner, batch_sizes: Sequence[int] | None, lengths: Sequence[int] | None
) -> Shapes:
    """Return the shapes of any requests up to these sizes.

    batch_sizes: how many run together; None: what the engine allows
    lengths: their tokens with the prompt; None: what the engine allows
    """
    config = runner.config
    assert config.batch_buckets is not None
    longest = min(config.max_model_len, max(lengths or [config.max_model_len]))
    most = max(batch_sizes or config.batch_buckets)
    return Shapes(
        _batches(runner, most),
        # A text grows through the smaller ones.
        runner.buckets.every_pages(1, longest + runner.num_speculative_tokens + 1),
        runner.buckets.every_tiles(
            1, -(-longest // runner.prefill_tile) * min(most, config.max_num_seqs)
        ),
    )


def shapes_of(runner: ModelRunner, requests: Sequence[Request]) -> Shapes:
    """Return the shapes of just these requests, run together."""
    running = min(len(requests), runner.config.max_num_seqs)
    prompt_tokens = sorted(len(r.prompt_token_ids) for r in requests)
    tokens = sorted(len(r.prompt_token_ids) + r.max_tokens for r in requests)
    # A preempted request is prefilled anew, with the tokens that it has generated.
    again = _may_preempt(runner, tokens[-running:])
    in_tiles = [-(-n // runner.prefill_tile) for n in (tokens if again else prompt_tokens)]
    most = sum(in_tiles[-running:])
    # A cached prefix, or a call that ends inside a prompt, can leave fewer tokens to prefill than
    # the shortest prompt has.
    is_cut = runner.config.enable_prefix_caching or again or most > runner.buckets.max_tiles
    return Shapes(
        _batches(runner, running),
        runner.buckets.every_pages(
            prompt_tokens[0], tokens[-1] + runner.num_speculative_tokens + 1
        ),
        runner.buckets.every_tiles(1 if is_cut else in_tiles[0], most),
    )


def compile_ahead(engine: Engine, kinds: Sequence[SamplingParams], shapes: Shapes) -> int:
    """Compile every mixture of these kinds of request in these shapes.

    Return the number of programs.
    """
    mixtures: dict[SamplingFeatures, None] = {}
    for features in dict.fromkeys(features_of([params]) for params in kinds):
        mixtures |= dict.fromkeys([features, *(features | others for others in mixtures)])
    speculative = engine.runner.speculative
    limited = speculative is not None and (
        speculative.draft_max_model_len is not None
        or any(p.num_speculative_tokens is not None for p in kinds)
    )
    limited &= not engine.runner.configs.always_limits_drafts  # all programs do
    return sum(
        engine.warm(mixtures, params=kinds, shapes=shapes, limits_drafts=limit)
        for limit in ([False, True] if limited else [False])
    )


def _batches(runner: ModelRunner, most: int) -> list[int]:
    """Return the buckets that `most` requests go through as they come and end."""
    buckets = runner.config.batch_buckets
    assert buckets is not None
    return [b for i, b in enumerate(buckets) if i == 0 or buckets[i - 1] < most]


def _may_preempt(runner: ModelRunner, tokens: Sequence[int]) -> bool:
    """Return whether requests of so many tokens each may hold more blocks than there are."""
    lengths = [min(n + runner.num_speculative_tokens, runner.config.max_model_len) for n in tokens]
    return any(
        sum(runner.memory.demand(group, n).least for n in lengths) > blocks
        for group, blocks in zip(runner.configs.cache_groups, runner.memory.num_blocks, strict=True)
    )
