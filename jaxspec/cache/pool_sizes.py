"""How many blocks the pool of each KV-cache group has, and the bytes that they take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from jaxspec.cache.arrays import init_cache
from jaxspec.config import CacheGroup, ConfigError, EngineConfig, RoundConfig

PREFILLS_AHEAD = (
    2  # prompts whose next chunks have blocks of a group with a window at the same time
)


def steps_ahead(rounds_per_step: int) -> int:
    """Results on their way while another step is launched, so that the device never waits for Python: two of a round each, however short
    that is; a step of several rounds is made to last longer than the host takes for the next."""
    return 2 if rounds_per_step == 1 else 1


@dataclass(frozen=True)
class PoolDemand:
    """Of one group, in blocks. whole: a text of max_model_len. running: what a request that generates holds at most. prefilling: what one
    that is prefilled holds at most."""

    whole: int
    running: int
    prefilling: int
    has_window: bool

    @property
    def least(self) -> int:
        """Without which a single request of max_model_len cannot run."""
        return max(self.running, self.prefilling)

    def of_requests(self, count: int, *, caching: bool) -> int:
        """What `count` requests and the prompts after them hold of a group with a window; as much again for prefixes that nobody holds."""
        most = count * self.running + PREFILLS_AHEAD * self.prefilling
        return min(2 * most if caching else most, count * self.whole)


def demand(
    group: CacheGroup, *, max_model_len: int, head_room: int, max_chunk: int, rounds_per_step: int
) -> PoolDemand:
    """head_room: rows of a round, K + 1. max_chunk: tokens of a prefill call. rounds_per_step: of one program."""
    # A round's first row is the draft's oldest pending one, K + 1 before the target's at most.
    rows = (1 + (steps_ahead(rounds_per_step) + 1) * rounds_per_step) * head_room
    whole = -(-max_model_len // group.block_size)
    return PoolDemand(
        whole,
        min(whole, most_pages(group, rows)),
        min(whole, most_pages(group, max_chunk)),
        group.reach is not None,
    )


def most_pages(group: CacheGroup, rows: int) -> int:
    """Blocks that a request of any length holds at most for so many rows that follow one another, and for all that they see."""
    seen = group.max_model_len if group.reach is None else group.reach
    return -(-(seen + rows - 1) // group.block_size) + 1


def block_bytes(cfg: RoundConfig, dtype: Any) -> tuple[int, ...]:
    """Of one block of each of cfg.cache_groups, in all layers that it serves, target's and draft's."""
    sizes = [0] * len(cfg.cache_groups)
    of_layer = [(cfg.target, cfg.target.group_of_layer)]
    if cfg.draft is not None:
        pools = cfg.draft_pools
        of_layer.append((cfg.draft, tuple(pools[group] for group in cfg.draft.group_of_layer)))
    for model, pools in of_layer:
        for pool, size in zip(pools, layer_block_bytes(model, cfg.block_size, dtype), strict=True):
            sizes[pool] += size
    return tuple(sizes)


def layer_block_bytes(model: Any, block_size: int, dtype: Any) -> list[int]:
    """Of one block in each layer of a model."""
    caches = jax.eval_shape(
        partial(init_cache, model.attention, (1,) * model.num_layers, block_size, dtype)
    )
    return [
        sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(cache))
        for cache in caches
    ]


def decide_pool_sizes(
    config: EngineConfig,
    groups: Sequence[CacheGroup],
    demands: Sequence[PoolDemand],
    sizes: Sequence[int],
    find_room: Callable[[], tuple[int, str]],
) -> tuple[int, ...]:
    """Blocks of each group: what config overrides, or what fits in (bytes, where the number is from) of find_room. ConfigError if that is
    too little for a request."""
    override, caching = config.num_gpu_blocks_override, config.enable_prefix_caching
    source = f"num_gpu_blocks_override {override}"
    if override is None:
        room, source = find_room()
        found = fit(demands, sizes, room, max_num_seqs=config.max_num_seqs, caching=caching)
    elif isinstance(override, tuple):
        if len(override) != len(groups):
            raise ConfigError(
                f"num_gpu_blocks_override: expected a number for each of {len(groups)} KV-cache groups, got {override}"
            )
        found = override
    else:
        most = [
            d.of_requests(config.max_num_seqs, caching=caching) if d.has_window else override
            for d in demands
        ]
        found = tuple(min(override, n) for n in most)
    for group, wanted, got in zip(groups, demands, found, strict=True):
        if got < wanted.least:
            total = sum(d.least * size for d, size in zip(demands, sizes, strict=True))
            raise ConfigError(
                f"KV cache: expected {wanted.least} blocks of {config.block_size} tokens for {group} ({total / 1e9:.2f} GB in all), what "
                f"one request of max_model_len {config.max_model_len} takes, got {got} from {source}; lower max_model_len or max_num_seqs, "
                "or give more"
            )
    return found


def fit(
    demands: Sequence[PoolDemand],
    sizes: Sequence[int],
    room: int,
    *,
    max_num_seqs: int,
    caching: bool,
) -> tuple[int, ...]:
    """Blocks of each group in `room` bytes, of which one takes sizes[i].

    Groups with a window get what max_num_seqs requests hold of them, which does not grow with the text; the others share what is left, as
    many blocks each, and no more than max_num_seqs requests of max_model_len fill. Where that leaves no request of max_model_len room,
    windows are for fewer requests; where nothing does, some group comes out with fewer blocks than its `least`.
    """
    whole = sum(size for d, size in zip(demands, sizes, strict=True) if not d.has_window)
    for windows in _windows(demands, max_num_seqs, caching=caching):
        left = room - sum(n * size for n, size in zip(windows, sizes, strict=True))
        most = [
            n if d.has_window else d.whole * max_num_seqs
            for d, n in zip(demands, windows, strict=True)
        ]
        found = tuple(
            n if d.has_window or not whole else min(left // whole, n)
            for d, n in zip(demands, most, strict=True)
        )
        if left >= 0 and all(n >= d.least for d, n in zip(demands, found, strict=True)):
            return found
    return (max(0, room) // max(1, sum(sizes)),) * len(demands)


def _windows(
    demands: Sequence[PoolDemand], max_num_seqs: int, *, caching: bool
) -> Iterator[tuple[int, ...]]:
    """Blocks of the groups with a window, 0 of the others: for as many requests as may run, then for fewer and fewer."""
    for count in range(max_num_seqs, 0, -1):
        yield tuple(d.of_requests(count, caching=caching) if d.has_window else 0 for d in demands)
    yield tuple(d.least if d.has_window else 0 for d in demands)
