"""Memory that a target and a draft take on a GPU, from their configurations alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.typing import DTypeLike

from jaxspec import drafts, models
from jaxspec.cache.arrays import resolve_cache_dtype, resolve_draft_cache_dtype
from jaxspec.cache.pool_sizes import demand, layer_block_bytes
from jaxspec.config import (
    CacheGroup,
    DraftConfig,
    EngineConfig,
    KVCacheDtype,
    Ops,
    TargetConfig,
)
from jaxspec.decode.several_rounds import rounds_per_step
from jaxspec.drafts.families import layered
from jaxspec.layers.params import Params, is_spec
from jaxspec.loading.weights import check_cuts
from jaxspec.parallel.layout import ONE_DEVICE_LAYOUT, Layout, Placement
from jaxspec.parallel.mesh import MODEL

GIB = 1 << 30
# Bytes of memory by the data sheets.
GPUS = {
    "h200": 141e9,
    "h100": 80e9,
    "a100-80": 80e9,
    "a100-40": 40e9,
    "l40s": 48e9,
    "rtx-4090": 24e9,
    "b200": 180e9,
}


@dataclass(frozen=True)
class GroupPlan:
    """The layers of one model in one KV-cache group.

    token_bytes: bytes of a token in all these layers.
    window: tokens that a row sees, or None.
    held: tokens in the blocks that a request of max_model_len holds at most while it generates.
    pool: tokens in the blocks that max_num_seqs requests get where there is a window, which does
        not grow with the text; None without a window.
    """

    name: str
    num_layers: int
    token_bytes: int
    window: int | None
    held: int
    pool: int | None


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of weights, of the buffers for max_num_seqs requests, and of the KV cache."""

    target_weights: int
    draft_weights: int
    groups: tuple[GroupPlan, ...]
    draft_buffers: int
    logits: int
    usable: int
    block_size: int
    max_model_len: int
    max_num_seqs: int

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the groups that keep all tokens."""
        return sum(g.token_bytes for g in self.groups if g.pool is None)

    @property
    def window_bytes(self) -> int:
        """Bytes of the pools of the groups with a window."""
        return sum(g.token_bytes * g.pool for g in self.groups if g.pool is not None)

    @property
    def cache_bytes(self) -> int:
        """Bytes left for keys and values; negative if the weights do not fit."""
        return (
            self.usable
            - self.target_weights
            - self.draft_weights
            - self.draft_buffers
            - self.logits
        )

    @property
    def cache_tokens(self) -> int:
        """Tokens of all requests, in whole blocks, beside the pools of groups with a window."""
        room = max(0, self.cache_bytes - self.window_bytes)
        if not self.token_bytes:  # pools of windows alone hold texts of any length
            return self.max_num_seqs * self._request_tokens if room else 0
        return room // (self.token_bytes * self.block_size) * self.block_size

    @property
    def num_requests(self) -> int:
        """Requests of max_model_len tokens that fit together."""
        return self.cache_tokens // self._request_tokens

    @property
    def _request_tokens(self) -> int:
        return -(-self.max_model_len // self.block_size) * self.block_size


def planned_placement(config: EngineConfig) -> Placement:
    """Return the placement of an engine whose devices need not exist."""
    size = config.tensor_parallel_size
    mesh = None if size == 1 else AbstractMesh((size,), (MODEL,))
    return Placement(mesh, config.enable_expert_parallel)


def memory_plan(
    target: TargetConfig,
    draft: DraftConfig | None,
    config: EngineConfig,
    *,
    memory: float,
    dtype: str,
    num_speculative_tokens: int,
    draft_kv_cache_dtype: KVCacheDtype | None = None,
) -> MemoryPlan:
    """Plan the memory of a target and a draft (None for plain decoding) on a GPU.

    With tensor_parallel_size in config, it is the memory of each of so many GPUs.

    config: lengths, batch and block size, the caches' dtype, and the share of `memory` (in bytes)
        that may be used.
    dtype: of the weights.
    draft_kv_cache_dtype: of the draft's caches; None for that of the target's, as SpeculativeConfig
        has it.
    """
    size, placement = config.tensor_parallel_size, planned_placement(config)
    layout = placement.target(target)
    specs = models.family(target).param_specs(target)
    check_cuts(specs, layout, "the target")
    K, itemsize = num_speculative_tokens if draft is not None else 0, jnp.dtype(dtype).itemsize
    target_weights = weight_bytes(specs, dtype, layout)
    tile = Ops(attention="mosaic_gpu").prefill_tile
    rows = {
        "max_model_len": config.max_model_len,
        "head_room": K + 1,
        "max_chunk": config.prefill_tiles(tile) * tile,
        "rounds_per_step": rounds_per_step(config, on_gpu=True, weight_bytes=target_weights),
    }
    num_requests, lengths = config.max_num_seqs, (config.block_size, config.max_model_len)
    kv_cache_dtype = config.kv_cache_dtype
    cache_dtype = resolve_cache_dtype(kv_cache_dtype, dtype)
    pools = partial(group_plans, max_num_seqs=num_requests, **rows)
    groups = pools(
        "target",
        layout.on_device(target),
        target.cache_groups(*lengths),
        cache_dtype=cache_dtype,
    )
    draft_weights = buffers = 0
    if draft is not None:
        layout = placement.draft(draft)
        groups += pools(
            "draft",
            layout.on_device(draft),
            draft.cache_groups(*lengths),
            cache_dtype=resolve_draft_cache_dtype(
                draft_kv_cache_dtype, draft, kv_cache_dtype, dtype
            ),
        )
    if draft is not None and draft.method in drafts.FAMILIES:
        cfg = layered(draft)
        specs = drafts.family(cfg).param_specs(cfg)
        check_cuts(specs, layout, "the draft")
        draft_weights = weight_bytes(specs, dtype, layout)
        # A draft of blocks reads its rows when the target has made them, and corrects its logits
        # where they lie; a model reads tokens.
        width, waits = drafts.hidden_width(cfg, target), draft.method in drafts.STEPS
        pending = (K + 1) * (width * itemsize + 4) if waits else 0
        buffers = num_requests * (pending + K * (cfg.draft_vocab_size // size * 4 + 4))
    return MemoryPlan(
        target_weights=target_weights,
        draft_weights=draft_weights,
        groups=groups,
        draft_buffers=buffers,
        logits=num_requests * (K + 1) * target.vocab_size // size * 4,
        usable=int(memory * config.gpu_memory_utilization),
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        max_num_seqs=num_requests,
    )


def weight_bytes(
    specs: Params | list[Params], dtype: DTypeLike, layout: Layout = ONE_DEVICE_LAYOUT
) -> int:
    """Return the bytes that the arrays of a parameter table take on a device."""
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    return sum(
        math.prod(layout.piece_of(spec)) * jnp.dtype(spec.dtype or dtype).itemsize
        for spec in leaves
    )


def group_plans(
    owner: str,
    cfg: Any,
    groups: tuple[CacheGroup, ...],
    *,
    cache_dtype: jnp.dtype,
    max_num_seqs: int,
    **rows: int,
) -> tuple[GroupPlan, ...]:
    """Return the plans of a model's KV-cache groups that have layers.

    rows: keywords of pool_sizes.demand.
    """
    block_size = groups[0].block_size
    layers = layer_block_bytes(cfg, block_size, cache_dtype)
    plans = []
    for i, group in enumerate(groups):
        own = [size for size, of in zip(layers, cfg.group_of_layer, strict=True) if of == i]
        needed = demand(group, **rows)
        pool = (
            needed.of_requests(max_num_seqs, caching=True) * block_size
            if needed.has_window
            else None
        )
        if own:
            name, sees = f"{owner}: {_kind(cfg, group)}", group.window or group.chunk
            plans.append(
                GroupPlan(
                    name, len(own), sum(own) // block_size, sees, needed.running * block_size, pool
                )
            )
    return tuple(plans)


def _kind(cfg: Any, group: CacheGroup) -> str:
    return (
        "latent attention"
        if group.reach is None and hasattr(cfg.attention, "kv_lora_rank")
        else str(group)
    )
