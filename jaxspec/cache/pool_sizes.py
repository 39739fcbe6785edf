"""The number of blocks of each KV-cache group's pool, and their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
from jax.typing import DTypeLike

from jaxspec.cache.arrays import cache_specs
from jaxspec.config import (
    CacheGroup,
    ConfigError,
    DraftConfig,
    EngineConfig,
    RoundConfig,
    TargetConfig,
)

# Prompts whose next chunks hold blocks of a group with a window at the same time.
PREFILLS_AHEAD = 2


def steps_ahead(rounds_per_step: int) -> int:
    """Return the number of results in flight while another step is launched.

    With enough of them the device never waits for Python. Steps of one round need two, however
    short they are. A step of several rounds lasts longer than the host takes for the next step.
    """
    return 2 if rounds_per_step == 1 else 1


@dataclass(frozen=True)
class PoolDemand:
    """The demand of one KV-cache group, in blocks.

    whole:      blocks of a text of max_model_len
    running:    the most blocks that a generating request holds
    prefilling: the most blocks that a request in prefill holds
    has_window: whether rows see a limited number of tokens (a window or a chunk)
    """

    whole: int
    running: int
    prefilling: int
    has_window: bool

    @property
    def least(self) -> int:
        """The fewest blocks with which a single request of max_model_len can run."""
        return max(self.running, self.prefilling)

    def of_requests(self, count: int, *, caching: bool) -> int:
        """Return the blocks of a group with a window for `count` requests and the next prompts.

        caching: double the number, for cached prefixes that no request holds
        """
        most = count * self.running + PREFILLS_AHEAD * self.prefilling
        return min(2 * most if caching else most, count * self.whole)


def demand(
    group: CacheGroup, *, max_model_len: int, head_room: int, max_chunk: int, rounds_per_step: int
) -> PoolDemand:
    """Return the demand of a KV-cache group.

    head_room:       rows of a round, K + 1
    max_chunk:       tokens of a prefill call
    rounds_per_step: rounds of one program
    """
    # A round's first row is the draft's oldest pending one, at most K + 1 before the target's.
    rows = (1 + (steps_ahead(rounds_per_step) + 1) * rounds_per_step) * head_room
    whole = -(-max_model_len // group.block_size)
    return PoolDemand(
        whole,
        min(whole, most_pages(group, rows)),
        min(whole, most_pages(group, max_chunk)),
        group.reach is not None,
    )


def most_pages(group: CacheGroup, rows: int) -> int:
    """Return the most blocks that a request of any length holds for `rows` consecutive rows.

    They include the blocks of all tokens that these rows see.
    """
    seen = group.max_model_len if group.reach is None else group.reach
    return -(-(seen + rows - 1) // group.block_size) + 1


def block_bytes(cfg: RoundConfig, cache_dtype: DTypeLike) -> tuple[int, ...]:
    """Return the bytes of one block of each of cfg.cache_groups, over all layers that it serves.

    These are layers of the target, whose dtype is cache_dtype, and of the draft, and the text of a
    fallback.
    """
    sizes = [0] * len(cfg.cache_groups)
    of_layer: list[tuple[TargetConfig | DraftConfig, DTypeLike, tuple[int, ...]]] = [
        (cfg.target, cache_dtype, cfg.target.group_of_layer)
    ]
    if cfg.draft is not None:
        pools = tuple(cfg.draft_pools[group] for group in cfg.draft.group_of_layer)
        of_layer.append((cfg.draft, cfg.cache_dtype_of_draft(cache_dtype), pools))
    if cfg.fallback is not None:
        of_layer.append((cfg.fallback, cache_dtype, cfg.fallback_pools))
    for model, dtype, pools in of_layer:
        layers = layer_block_bytes(model, cfg.block_size, dtype)
        for pool, size in zip(pools, layers, strict=True):
            sizes[pool] += size
    return tuple(sizes)


def layer_block_bytes(
    model: TargetConfig | DraftConfig, block_size: int, cache_dtype: DTypeLike
) -> list[int]:
    """Return the bytes of one block in each layer of a model."""
    specs = cache_specs(model.attention, (1,) * model.num_layers, block_size, cache_dtype)
    return [sum(array.nbytes for array in jax.tree.leaves(layer)) for layer in specs]


def decide_pool_sizes(
    config: EngineConfig,
    groups: Sequence[CacheGroup],
    demands: Sequence[PoolDemand],
    sizes: Sequence[int],
    find_room: Callable[[], tuple[int, str]],
) -> tuple[int, ...]:
    """Return the number of blocks of each group.

    It is config's override, or else the number that fits into find_room's bytes.

    find_room: returns (bytes, the source of this number, for messages)

    Raises ConfigError if that is too little for a request.
    """
    override, caching = config.num_gpu_blocks_override, config.enable_prefix_caching
    source = f"num_gpu_blocks_override {override}"
    if override is None:
        room, source = find_room()
        found = fit(demands, sizes, room, max_num_seqs=config.max_num_seqs, caching=caching)
    elif isinstance(override, tuple):
        if len(override) != len(groups):
            raise ConfigError(
                f"num_gpu_blocks_override: expected a number for each of {len(groups)} "
                f"KV-cache groups, got {override}"
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
                f"KV cache: expected {wanted.least} blocks of {config.block_size} tokens for "
                f"{group} ({total / 1e9:.2f} GB in all), what one request of max_model_len "
                f"{config.max_model_len} takes, got {got} from {source}; lower max_model_len or "
                "max_num_seqs, or give more"
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
    """Return the number of blocks of each group that fits into `room` bytes.

    sizes: bytes of one block of each group

    Groups with a window get the blocks that max_num_seqs requests hold, a number that does not grow
    with the text. The other groups share the rest in equal numbers of blocks, at most what
    max_num_seqs requests of max_model_len fill. If a request of max_model_len would not fit, the
    windows are sized for fewer requests. If it never fits, some group gets fewer blocks than its
    `least`.
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
    """Yield the blocks of the groups with a window, and 0 for the others.

    The first numbers are for as many requests as may run, the next ones for fewer and fewer.
    """
    for count in range(max_num_seqs, 0, -1):
        yield tuple(d.of_requests(count, caching=caching) if d.has_window else 0 for d in demands)
    yield tuple(d.least if d.has_window else 0 for d in demands)
