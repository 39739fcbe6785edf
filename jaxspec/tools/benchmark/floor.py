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
from jaxspec.drafts import BLOCKS, LayeredConfig
from jaxspec.drafts.draft_model import METHOD as DRAFT_MODEL
from jaxspec.drafts.families import block, layered
from jaxspec.drafts.independent import ROWS
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
    draft_weights:  the same K times, EAGLE-3's fc once; of a block draft each matrix once, but W2
        of DSpark K times
    kv:     keys and values read, by the target once and by each draft step, or once by the block
    logits: float32, written and read once each; DSpark's twice where q is kept
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
    rows = cfg.flat_rows(batch) or batch * (K + 1)
    vocabulary = rows * target.vocab_size // devices
    always, experts = _target_weights(cfg, dtype)
    draft = _DraftFloor(0, 0, 0, 0)
    if cfg.draft is not None:
        count = _block_floor if cfg.draft.method in BLOCKS else _steps_floor
        draft = count(cfg, batch, context, jnp.dtype(dtype), cache_dtype)
    tokens = seen_tokens(cfg.target_groups, cfg.target.group_of_layer, context)
    attention = _attention_flops(on_device.target, rows, tokens)
    blocks = layer_block_bytes(on_device.target, cfg.block_size, cache_dtype)
    kv_target = sum(map(mul, tokens, blocks))
    read, used = always.bytes + itemsize * rows * target.hidden_size, float(always.numbers)
    if experts.numbers:
        read += int(experts.bytes * target.moe.share_chosen(rows))
        used += experts.numbers * target.moe.top_k / target.moe.num_experts
    return Floor(
        target_weights=read,
        draft_weights=draft.weights,
        kv=batch * kv_target // cfg.block_size + draft.kv,
        logits=2 * FLOAT32 * (vocabulary + draft.logits),
        flops=int(2 * used * rows) + attention + draft.flops,
    )


@dataclass(frozen=True)
class _DraftFloor:
    """A draft's share of the Floor: bytes of weights and of kv, logits (a count), flops."""

    weights: int
    kv: int
    logits: int
    flops: int


@dataclass(frozen=True)
class _Weights:
    """Some weights: how many numbers, and the bytes that they take as they are stored."""

    numbers: int
    bytes: int

    @classmethod
    def of(cls, specs: Params | list[Params], dtype: DTypeLike, layout: Layout) -> _Weights:
        return cls(_size(specs, layout), weight_bytes(specs, dtype, layout))

    def __add__(self, other: _Weights) -> _Weights:
        return _Weights(self.numbers + other.numbers, self.bytes + other.bytes)

    def __rmul__(self, times: int) -> _Weights:
        return _Weights(times * self.numbers, times * self.bytes)


def _steps_floor(
    cfg: RoundConfig, batch: int, context: int, dtype: jnp.dtype, cache_dtype: DTypeLike
) -> _DraftFloor:
    """Return the share of a draft that makes a token a pass."""
    target: Any = cfg.target
    draft, K = layered(cfg.draft), cfg.num_speculative_tokens
    layout = cfg.placement.draft(draft).without_zeros
    each, after, once, head, experts = _draft_matrices(draft, dtype, layout)
    # Rows of step 0; one of each request's goes on after the last attention.
    first = batch * (ROWS if draft.method == DRAFT_MODEL else K + 1)
    rows = first + (K - 1) * batch
    weights = (K * (each + head) + once).bytes + dtype.itemsize * rows * draft.hidden_size
    of_first = each.numbers - after + once.numbers
    of_others = after + (K - 1) * each.numbers + K * head.numbers
    flops = 2 * (of_first * first + of_others * batch)
    flops += _attention_flops(layered(cfg.on_device().draft), rows, _seen_by_draft(cfg, context))
    if experts.numbers:  # an MTP module's layer is the target's
        weights += int(experts.bytes * K * target.moe.share_chosen(batch))
        flops += int(2 * experts.numbers * target.moe.top_k / target.moe.num_experts * K * batch)
    return _DraftFloor(
        weights,
        kv=K * _context_bytes(cfg, batch, context, cache_dtype),
        logits=batch * K * draft.draft_vocab_size // cfg.placement.size,
        flops=flops,
    )


def _block_floor(
    cfg: RoundConfig, batch: int, context: int, dtype: jnp.dtype, cache_dtype: DTypeLike
) -> _DraftFloor:
    """Return the share of a draft that makes a block a pass.

    The pass reads the layers and the head once. After verification fc and context_kv make the
    context's keys and values. Each draft reads what corrects its logits.
    """
    draft, K = block(cfg.draft), cfg.num_speculative_tokens
    layout = cfg.placement.draft(draft).without_zeros
    specs = drafts.family(draft).param_specs(draft)

    def weights_of(*names: str) -> _Weights:
        return _Weights.of({name: specs[name] for name in names if name in specs}, dtype, layout)

    rows, hidden = K if draft.sample_from_anchor else K + 1, draft.hidden_size
    context_parts = weights_of("fc", "hidden_norm", "context_kv", "context_kv_bias")
    layers, head = weights_of("layers", "norm"), _head(draft, dtype, layout)
    per_draft = weights_of("markov_w2", "markov_proj", "markov_bias")
    if draft.confidence_threshold > 0:
        per_draft += weights_of("confidence", "confidence_bias")
    rank = specs["markov_w1"].shape[1] if "markov_w1" in specs else 0
    looked_up = batch * (rows * hidden + K * rank)
    attention = _attention_flops(
        layered(cfg.on_device().draft), batch * rows, _seen_by_draft(cfg, context)
    )
    keeps_corrected = draft.corrects_logits and cfg.keeps_draft_logits
    read = context_parts + layers + head + K * per_draft
    multiplied = context_parts.numbers * (K + 1) + layers.numbers * rows
    multiplied += K * (head.numbers + per_draft.numbers)
    return _DraftFloor(
        weights=read.bytes + dtype.itemsize * looked_up,
        kv=_context_bytes(cfg, batch, context, cache_dtype),
        logits=batch * K * draft.draft_vocab_size // cfg.placement.size * (1 + keeps_corrected),
        flops=2 * batch * multiplied + attention,
    )


def _context_bytes(cfg: RoundConfig, batch: int, context: int, cache_dtype: DTypeLike) -> int:
    """Return the bytes of keys and values that one pass of the draft reads."""
    of_draft = cfg.cache_dtype_of_draft(cache_dtype)
    blocks = layer_block_bytes(layered(cfg.on_device().draft), cfg.block_size, of_draft)
    return batch * sum(map(mul, _seen_by_draft(cfg, context), blocks)) // cfg.block_size


def _seen_by_draft(cfg: RoundConfig, context: int) -> list[int]:
    return seen_tokens(cfg.draft_groups, layered(cfg.draft).group_of_layer, context)


def _attention_flops(on_device: Any, rows: int, seen: Sequence[int]) -> int:
    """Return the operations of rows over the tokens `seen` by each layer of a device's model."""
    attended = on_device.attention
    return 4 * rows * sum(seen) * attended.num_heads * attended.head_dim


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


def _target_weights(cfg: RoundConfig, dtype: DTypeLike) -> tuple[_Weights, _Weights]:
    """Return what one target pass always reads, and all experts.

    The embedding is in the former where it is the head too.
    """
    layout = cfg.placement.target(cfg.target).without_zeros
    specs = models.family(cfg.target).param_specs(cfg.target)
    others = {
        name: spec
        for name, spec in specs.items()
        if name != "layers" and (name != "embed_tokens" or cfg.target.tie_word_embeddings)
    }
    layers, experts = _without_experts(specs["layers"])
    always = {**others, "layers": layers}
    return _Weights.of(always, dtype, layout), _Weights.of(experts, dtype, layout)


def _without_experts(layers: Sequence[Params]) -> tuple[list[Params], list[Params]]:
    """Return the layers' tables without experts, and those of the experts."""
    others = [{n: s for n, s in layer.items() if n != "experts"} for layer in layers]
    return others, [layer["experts"] for layer in layers if "experts" in layer]


def _head(draft: LayeredConfig, dtype: jnp.dtype, layout: Layout) -> _Weights:
    """Return the head, the draft's own or the target's. Heads are never stored as codes."""
    numbers = draft.hidden_size * draft.draft_vocab_size // layout.num_pieces("vocab")
    return _Weights(numbers, numbers * dtype.itemsize)


def _draft_matrices(
    draft: LayeredConfig, dtype: jnp.dtype, layout: Layout
) -> tuple[_Weights, int, _Weights, _Weights, _Weights]:
    """Return a draft's weights: (each, after, once, head, experts).

    each:    read by every draft step, without head and experts
    after:   how many numbers of `each` come after the last attention
    once:    read once a round
    """
    specs = drafts.family(draft).param_specs(draft)
    fused = ("fc", "fc_bias", "fc_norm", "input_norm") if draft.method == "eagle3" else ()
    each = {
        name: spec
        for name, spec in specs.items()
        if name not in (*fused, "embed_tokens", "lm_head", "layers")
    }
    each["layers"], experts = _without_experts(specs["layers"])
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
        _Weights.of(each, dtype, layout),
        after,
        _Weights.of({n: s for n, s in specs.items() if n in fused}, dtype, layout),
        _head(draft, dtype, layout),
        _Weights.of(experts, dtype, layout),
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
