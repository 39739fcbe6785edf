"""The least that a round must read, write and compute, from the configurations alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import mul
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec import drafts, models
from jaxspec.cache.pool_sizes import layer_block_bytes
from jaxspec.config import CacheGroup, RoundConfig
from jaxspec.drafts import LayeredConfig
from jaxspec.drafts.families import layered
from jaxspec.layers.moe import MoEConfig
from jaxspec.layers.mxfp4 import Mxfp4Spec
from jaxspec.layers.params import Params, ParamSpec
from jaxspec.layers.quantized.table import QuantizedSpec
from jaxspec.parallel.layout import Layout
from jaxspec.tools.memory_plan import weight_bytes

FLOAT32 = 4
RESERVE = 1 << 30  # bytes for activations, programs and what the allocator cannot use


@dataclass(frozen=True)
class Floor:
    """Bytes and floating-point operations of one round (or of a plain step: K = 0).

    target_weights: each matrix once; of an embedding the used rows; of experts those that are hit
        when every row draws its own at random
    draft_weights:  the same K times, EAGLE-3's fc once
    kv:     keys and values read, by the target once and by each draft step
    logits: float32, written and read once each
    flops:  of matrix products and attention

    Noise is in neither: it is made where it is read, and its hashes are integer operations.
    """

    target_weights: int
    draft_weights: int
    kv: int
    logits: int
    flops: int

    @property
    def bytes(self) -> int:
        return self.target_weights + self.draft_weights + self.kv + self.logits

    def to_dict(self, bytes_per_second: float, flops_per_second: float) -> dict[str, Any]:
        """Return the counts, their times in seconds at these rates, and the larger of the times."""
        times = {
            "bytes_seconds": self.bytes / bytes_per_second,
            "arithmetic_seconds": self.flops / flops_per_second,
        }
        return asdict(self) | {"bytes": self.bytes} | times | {"seconds": max(times.values())}


def round_floor(
    cfg: RoundConfig, batch: int, context: int, *, dtype: DTypeLike, cache_dtype: DTypeLike
) -> Floor:
    """Return the floor of a round of `batch` requests that hold `context` tokens each.

    It is that of each device, with its pieces. What devices send each other is not in it.

    dtype, cache_dtype: of the weights, and of the target's caches.
    """
    itemsize, devices = jnp.dtype(dtype).itemsize, cfg.placement.size
    on_device = cfg.on_device()
    target: Any = cfg.target  # one with experts has `moe`
    K = cfg.num_speculative_tokens
    rows = batch * (K + 1)
    vocabulary = batch * (K + 1) * target.vocab_size // devices
    weights, experts = _target_matrices(cfg)
    layout = cfg.placement.target(cfg.target)
    always, expert_bytes = (weight_bytes(part, dtype, layout) for part in _target_parts(cfg))
    draft_bytes = kv_draft = draft_flops = draft_logits = 0
    if cfg.draft is not None:
        draft = layered(cfg.draft)
        layout = cfg.placement.draft(draft)
        each, after, once, head, draft_experts = _draft_matrices(draft, layout)
        # Step 0 reads K+1 rows a request; one of them goes on after the last attention.
        draft_bytes = itemsize * (
            K * (each + head) + once + (rows + (K - 1) * batch) * draft.hidden_size
        )
        draft_flops = 2 * (
            (each - after + once) * rows + (after + (K - 1) * each + K * head) * batch
        )
        if draft_experts:  # an MTP module's layer is the target's
            draft_bytes += int(itemsize * draft_experts * K * share_hit(target.moe, batch))
            draft_flops += int(
                2 * draft_experts * target.moe.top_k / target.moe.num_experts * K * batch
            )
        of_draft = cfg.cache_dtype_of_draft(cache_dtype)
        blocks = layer_block_bytes(layered(on_device.draft), cfg.block_size, of_draft)
        seen = seen_tokens(cfg.draft_groups, draft.group_of_layer, context)
        kv_draft = K * batch * sum(map(mul, seen, blocks)) // cfg.block_size
        draft_logits = batch * K * draft.draft_vocab_size // devices
    attended: Any = on_device.target.attention
    tokens = seen_tokens(cfg.target_groups, cfg.target.group_of_layer, context)
    attention_flops = 4 * rows * sum(tokens) * attended.num_heads * attended.head_dim
    blocks = layer_block_bytes(on_device.target, cfg.block_size, cache_dtype)
    kv_target = sum(map(mul, tokens, blocks))
    read, used = always + itemsize * rows * target.hidden_size, float(weights)
    if experts:
        read += int(expert_bytes * share_hit(target.moe, rows))
        used += experts * target.moe.top_k / target.moe.num_experts
    return Floor(
        target_weights=read,
        draft_weights=draft_bytes,
        kv=batch * kv_target // cfg.block_size + kv_draft,
        logits=2 * FLOAT32 * (vocabulary + draft_logits),
        flops=int(2 * used * rows) + attention_flops + draft_flops,
    )


def share_hit(moe: MoEConfig, rows: int) -> float:
    """Return the share of a layer's experts that some row chose."""
    return 1 - (1 - moe.top_k / moe.num_experts) ** rows


def seen_tokens(
    groups: Sequence[CacheGroup], group_of_layer: Sequence[int], context: int
) -> list[int]:
    """Return, for each layer, the tokens of a request that its last row sees.

    groups, group_of_layer: of the target or of the draft
    """
    return [min(groups[i].window or groups[i].chunk or context, context) for i in group_of_layer]


def memory_needed(
    cfg: RoundConfig, batch: int, slots: int, *, dtype: DTypeLike, cache_dtype: DTypeLike
) -> int:
    """Return the bytes of device memory that a case needs.

    They are those of weights, caches of `slots` tokens a request, the logits with the sampler's
    copies, and a reserve.
    """
    weights = weight_bytes(models.family(cfg.target).param_specs(cfg.target), dtype)
    layers = layer_block_bytes(cfg.target, cfg.block_size, cache_dtype)
    block = sum(layers)
    if cfg.draft is not None:
        weights += weight_bytes(drafts.family(layered(cfg.draft)).param_specs(cfg.draft), dtype)
        of_draft = cfg.cache_dtype_of_draft(cache_dtype)
        block += sum(layer_block_bytes(cfg.draft, cfg.block_size, of_draft))
    logits = FLOAT32 * batch * (cfg.num_speculative_tokens + 1) * cfg.target.vocab_size
    if cfg.ops.attention == "reference":
        # One layer's keys and values at a time are gathered, and again in float32.
        block += max(layers) + max(layer_block_bytes(cfg.target, cfg.block_size, jnp.float32))
    caches = batch * slots * block // cfg.block_size
    return weights + caches + 4 * logits + RESERVE


def _target_matrices(cfg: RoundConfig) -> tuple[int, int]:
    """Count the numbers that one target pass always reads, and those of all experts.

    The embedding counts where it is the head too.
    """
    layout = cfg.placement.target(cfg.target)
    always, experts = _target_parts(cfg)
    return _size(always, layout), _size(experts, layout)


def _target_parts(cfg: RoundConfig) -> tuple[Params, Params]:
    """Return the tables of what one target pass always reads, and of all experts.

    The embedding is in them where it is the head too.
    """
    specs = models.family(cfg.target).param_specs(cfg.target)
    others = {
        name: spec
        for name, spec in specs.items()
        if name != "layers" and (name != "embed_tokens" or cfg.target.tie_word_embeddings)
    }
    layers = [{n: s for n, s in layer.items() if n != "experts"} for layer in specs["layers"]]
    experts = [layer["experts"] for layer in specs["layers"] if "experts" in layer]
    return {**others, "layers": layers}, experts


def _expert_size(specs: Any, layout: Layout) -> int:
    return sum(_size(layer["experts"], layout) for layer in specs["layers"] if "experts" in layer)


def _draft_matrices(draft: LayeredConfig, layout: Layout) -> tuple[int, int, int, int, int]:
    """Count a draft's numbers: (each, after, once, head, experts).

    each:    read by every draft step, without head and experts
    after:   those of `each` after the last attention
    once:    read once a round
    head:    in the head
    experts: in the experts
    """
    specs = drafts.family(draft).param_specs(draft)
    fused = ("fc", "fc_bias", "fc_norm", "input_norm") if draft.method == "eagle3" else ()
    each = {
        name: spec
        for name, spec in specs.items()
        if name not in (*fused, "embed_tokens", "lm_head")
    }
    experts = _expert_size(specs, layout)
    head = draft.hidden_size * draft.draft_vocab_size // layout.num_pieces("vocab")
    last = specs["layers"][-1]
    after = _size(
        {
            name: spec
            for name, spec in last.items()
            if name not in ("self_attn", "input_layernorm", "experts")
        },
        layout,
    )
    after += _size(last["self_attn"]["o_proj"], layout)
    return (
        _size(each, layout) - experts,
        after,
        _size({n: s for n, s in specs.items() if n in fused}, layout),
        head,
        experts,
    )


def _size(specs: Any, layout: Layout) -> int:
    return sum(_numbers(spec, layout) for spec in jax.tree.leaves(specs))


def _numbers(spec: ParamSpec, layout: Layout) -> int:
    """Count the weights of an array; scales of quantised ones are none."""
    stored = math.prod(layout.piece_of(spec))
    if isinstance(spec, Mxfp4Spec):
        return stored * Mxfp4Spec.WEIGHTS // Mxfp4Spec.WORDS
    if isinstance(spec, QuantizedSpec):
        return stored * spec.weights_per_entry
    return stored
