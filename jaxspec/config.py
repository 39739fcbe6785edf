"""Frozen, hashable configuration and all of its validation."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from os import PathLike, fspath
from typing import Any, Literal, get_args

RejectionRule = Literal["strict", "probabilistic", "block", "synthetic"]
DraftSampling = Literal["greedy", "probabilistic"]
Compilation = Literal["round", "step", "eager"]
METHODS = ("eagle", "eagle3", "mtp")


class ConfigError(ValueError):
    """A setting, a checkpoint or a request that cannot be honoured; the message is one sentence for the user."""


def read_int(config: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1) -> int:
    """An integer of a raw config.json, of at least `least`; ConfigError if it is absent without a default, or something else."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if value is None or not is_int(value) or value < least:
        raise ConfigError(f"config.json: expected {key} to be an integer of at least {least}, got {value!r}")
    return int(value)


def read_number(config: Mapping[str, Any], key: str, default: float) -> float:
    """A positive number of a raw config.json, or the default where it is absent."""
    value = config.get(key)
    if value is None:
        return default
    if not is_number(value) or value <= 0:
        raise ConfigError(f"config.json: expected {key} to be a positive number, got {value!r}")
    return float(value)


def read_object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object of a raw config.json, empty where it is absent or null."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"config.json: expected {key} to be an object, got {value!r:.200}")
    return value or {}


def refuse_unless(config: Mapping[str, Any], key: str, expected: object) -> None:
    """Raise for a switch of a raw config.json that changes the maths in a way that is not implemented; null counts as absent."""
    if config.get(key) is not None and config[key] != expected:
        raise ConfigError(f"{key}: expected {expected!r} for model_type {config.get('model_type')!r}, got {config[key]!r}")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. ``llama3`` rescales low frequencies (Llama 3.1's rope_scaling); ``yarn`` (2309.00071) blends
    interpolated and original frequencies between the dimensions that turn beta_slow and beta_fast times in the original context.

    attention_factor: on cos and sin (YaRN's temperature). softmax_factor: on an MLA layer's softmax scale (DeepSeek's mscale_all_dim).
    """

    theta: float = 10000.0
    rope_type: Literal["default", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    softmax_factor: float = 1.0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], default_theta: float = 10000.0) -> RopeConfig:
        """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` + ``rope_scaling`` (before), both raw JSON."""
        scaling = read_object(config, "rope_parameters") or read_object(config, "rope_scaling")
        theta = read_number(scaling, "rope_theta", read_number(config, "rope_theta", default_theta))
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if config.get("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
            raise ConfigError("partial_rotary_factor: expected 1.0 (the whole head is rotated), got another value")
        if kind == "default":
            return cls(theta)
        needed = {
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
            "yarn": ("factor", "original_max_position_embeddings"),
        }
        if kind not in needed:
            raise ConfigError(f"rope_type: expected 'default', 'llama3' or 'yarn', got {kind!r}")
        missing = [k for k in needed[kind] if k not in scaling]
        if missing:
            raise ConfigError(f"rope_type {kind!r}: expected the keys {missing} in rope_scaling, got {sorted(scaling)}")
        factor, original = read_number(scaling, "factor", 1.0), read_int(scaling, "original_max_position_embeddings")
        if kind == "yarn":
            return cls._yarn(theta, factor, original, scaling)
        return cls(
            theta,
            "llama3",
            factor=factor,
            low_freq_factor=read_number(scaling, "low_freq_factor", 1.0),
            high_freq_factor=read_number(scaling, "high_freq_factor", 4.0),
            original_max_position_embeddings=original,
        )

    @classmethod
    def _yarn(cls, theta: float, factor: float, original: int, scaling: Mapping[str, Any]) -> RopeConfig:
        """DeepSeek gives mscale and mscale_all_dim: their ratio is on cos and sin, the latter's square on MLA's softmax scale."""
        mscale = lambda weight: 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0  # noqa: E731
        one, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = mscale(one) / mscale(all_dims) if one and all_dims else mscale(1.0)
        return cls(
            theta,
            "yarn",
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=read_number(scaling, "beta_fast", 32.0),
            beta_slow=read_number(scaling, "beta_slow", 1.0),
            truncate=bool(scaling.get("truncate", True)),
            attention_factor=read_number(scaling, "attention_factor", attention),
            softmax_factor=mscale(all_dims) ** 2 if all_dims else 1.0,
        )


@dataclass(frozen=True)
class AttentionConfig:
    """The static part of one self-attention layer, target's or draft's."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    rms_norm_eps: float = 1e-5
    sinks: bool = False  # a learned logit per head that joins the softmax's denominator only (gpt-oss)
    rope_interleave: bool = False  # rotated pairs stand side by side in the checkpoint (Llama 4); put in our order when loaded

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.head_dim

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_attention_heads: expected a multiple of num_key_value_heads {self.num_kv_heads}, got {self.num_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim: expected an even number, got {self.head_dim}")


@dataclass(frozen=True)
class MLAConfig:
    """The static part of one layer of multi-head latent attention (DeepSeek-V2, 2405.04434).

    A token's cache entry is one vector: its latent of kv_lora_rank and a key of rope_head_dim, shared by all heads.
    q_lora_rank: None for a full query projection. bias: on the projections from and to the residual stream.
    rope_interleave: how the checkpoint orders the rotated dimensions; weights are put in our order when they are loaded.
    """

    num_heads: int
    kv_lora_rank: int
    q_lora_rank: int | None
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    rope_interleave: bool = True
    bias: bool = False
    rms_norm_eps: float = 1e-5
    num_kv_heads: int = 1  # as the attention op sees the cache

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.rope_head_dim

    @property
    def head_dim(self) -> int:
        """Of a cache entry, and of a query that has absorbed the key projection."""
        return self.kv_lora_rank + self.rope_head_dim

    @property
    def scale(self) -> float:
        """On the scores: by the head's own width, before absorption."""
        return (self.nope_head_dim + self.rope_head_dim) ** -0.5 * self.rope.softmax_factor


@dataclass(frozen=True)
class CompressedAttentionConfig:
    """The static part of DeepSeek-V4's attention, whose layers differ in kind.

    A layer sees the last sliding_window tokens, and what its kind compresses of all tokens: nothing ("sliding_attention"), one entry for
    every sparse_rate tokens, of which an indexer chooses index_top_k ("compressed_sparse_attention"), or one for every heavy_rate
    ("heavily_compressed_attention"). layer_types: the kind of each layer that this config's caches are made for.
    rope: of layers that compress nothing; compressed_rope: of the others.
    """

    num_heads: int
    head_dim: int
    rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    layer_types: tuple[str, ...]
    sparse_rate: int
    heavy_rate: int
    index_heads: int
    index_head_dim: int
    index_top_k: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    compressed_rope: RopeConfig = field(default_factory=RopeConfig)
    rms_norm_eps: float = 1e-6
    num_kv_heads: int = 1  # one vector a token is key and value of all heads

    def __post_init__(self) -> None:
        if self.num_heads % self.o_groups:
            raise ConfigError(f"o_groups: expected a divisor of num_attention_heads {self.num_heads}, got {self.o_groups}")
        if self.rope_head_dim % 2 or self.rope_head_dim > min(self.head_dim, self.index_head_dim):
            raise ConfigError(
                f"qk_rope_head_dim: expected an even number of at most head_dim {self.head_dim} and index_head_dim {self.index_head_dim}, "
                f"got {self.rope_head_dim}"
            )

    def rate(self, kind: str) -> int | None:
        """Tokens of one compressed entry in a layer of this kind."""
        return {"compressed_sparse_attention": self.sparse_rate, "heavily_compressed_attention": self.heavy_rate}.get(kind)


@dataclass(frozen=True)
class CacheGroup:
    """The layers that share a block table, and the geometry that their metadata is built from.

    max_model_len: no row at this position or beyond is ever written.
    window: a row sees this many tokens, itself included. chunk: a row sees back to the last multiple of this position (Llama 4).
    None for full attention; at most one of the two.
    """

    block_size: int
    max_model_len: int
    window: int | None = None
    chunk: int | None = None

    def __str__(self) -> str:
        if self.window is not None:
            return f"a window of {self.window}"
        return "full attention" if self.chunk is None else f"chunks of {self.chunk}"

    @property
    def reach(self) -> int | None:
        """How many positions before its own a row sees at most; None: all of them."""
        seen = self.window or self.chunk
        return None if seen is None else seen - 1

    def first_seen(self, position: int) -> int:
        """The first position that rows from this one on see."""
        if self.window is not None:
            return max(position - self.window + 1, 0)
        return 0 if self.chunk is None else position // self.chunk * self.chunk


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs; nothing here changes what a request's distribution is.

    max_model_len: tokens a request may hold, prompt included. max_num_seqs: requests that run together.
    block_size: tokens a KV-cache block. max_num_batched_tokens: tokens of one prefill call, of all requests together; a longer prompt
    is prefilled in chunks, with a round of the other requests after each.
    gpu_memory_utilization: the share of the device's memory that weights, KV cache and everything else may take together.
    num_gpu_blocks_override: KV-cache blocks, on a GPU or a CPU, of each pool (with a window: no more than max_num_seqs requests need), or a
    tuple with one number for each KV-cache group; None: what that share leaves (on a CPU 4 GiB), and no more than max_num_seqs requests of
    max_model_len need. enable_prefix_caching: prompts that start alike share the blocks of what they share.
    compilation: "round" (one program a round), "step" (one a draft step) or "eager" (none).
    batch_buckets: batch sizes that programs are compiled for; a smaller batch is padded. None: powers of two.
    rounds_per_step: rounds that one dispatched program runs. Several give the host more time a round; requests come, and results are read,
    only between two steps. None: 4 on a GPU whose rounds would be shorter than the host's time (jaxspec.rounds), else 1.
    kernels: "reference", "mosaic_gpu", or "auto" for what the device and the models allow; "op=name,op=name" for single ops
    (jaxspec.kernels).
    batch_invariant: rounds of one batch size and prefill calls of one size, the largest, whatever runs. A product's last bits depend on how
    many rows it has, so in bfloat16 a request's text can depend on its neighbours where its logits tie; with this it does not (unless
    a preempted request is prefilled again). In float32 it makes no difference. It costs a request that runs alone the time of a full batch.
    """

    max_model_len: int = 2048
    max_num_seqs: int = 8
    block_size: int = 64
    max_num_batched_tokens: int = 2048
    compilation: Compilation = "round"
    batch_buckets: tuple[int, ...] | None = None
    rounds_per_step: int | None = None
    kernels: str = "auto"
    gpu_memory_utilization: float = 0.9
    num_gpu_blocks_override: int | tuple[int, ...] | None = None
    enable_prefix_caching: bool = True
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if not is_number(self.gpu_memory_utilization) or not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization: expected a number in (0, 1], got {self.gpu_memory_utilization!r}")
        blocks = self.num_gpu_blocks_override
        if blocks is not None and not all(is_int(b) and b >= 1 for b in (blocks if isinstance(blocks, tuple) else (blocks,))):
            raise ConfigError(f"num_gpu_blocks_override: expected an integer of at least 1, a tuple of them or None, got {blocks!r}")
        for name in ("enable_prefix_caching", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: expected true or false, got {getattr(self, name)!r}")
        for name in ("max_model_len", "max_num_seqs", "block_size", "max_num_batched_tokens"):
            value = getattr(self, name)
            if not is_int(value) or value < 1:
                raise ConfigError(f"{name}: expected an integer of at least 1, got {value!r}")
        if self.compilation not in get_args(Compilation):
            raise ConfigError(f"compilation: expected one of {', '.join(get_args(Compilation))}, got {self.compilation!r}")
        rounds = self.rounds_per_step
        if rounds is not None and (not is_int(rounds) or rounds < 1 or (rounds > 1 and self.compilation != "round")):
            raise ConfigError(
                "rounds_per_step: expected None or an integer of at least 1, which is 1 unless compilation is 'round', got "
                f"{rounds!r} with compilation {self.compilation!r}"
            )
        buckets = self.batch_buckets
        if buckets is None:
            powers = tuple(1 << i for i in range((self.max_num_seqs - 1).bit_length() + 1))
            buckets = (self.max_num_seqs,) if self.batch_invariant else powers
        right = isinstance(buckets, Iterable) and all(is_int(b) and b >= 1 for b in buckets)
        buckets = tuple(sorted(set(buckets))) if right else ()
        if not buckets or buckets[-1] < self.max_num_seqs:
            raise ConfigError(
                f"batch_buckets: expected batch sizes of at least 1 whose largest reaches max_num_seqs {self.max_num_seqs}, "
                f"got {self.batch_buckets}"
            )
        if self.batch_invariant and len(buckets) > 1:
            raise ConfigError(f"batch_buckets: expected one batch size with batch_invariant, got {buckets}")
        object.__setattr__(self, "batch_buckets", buckets)


@dataclass(frozen=True)
class Kernels:
    """Which implementation of each op in pallas_kernels runs; chosen once, when the engine is built (jaxspec.kernels.choose)."""

    attention: str = "reference"
    matmul: str = "reference"
    rms_norm: str = "reference"
    rope_cache: str = "reference"
    step_metadata: str = "reference"
    rejection_sampling: str = "reference"
    gumbel_sample: str = "reference"
    moe: str = "reference"

    def __str__(self) -> str:
        """ "reference", or "mosaic_gpu (rms_norm reference)": the commonest, then the ops that differ."""
        chosen = {f.name: getattr(self, f.name) for f in fields(self)}
        names = list(chosen.values())
        most = max(dict.fromkeys(names), key=names.count)
        others = ", ".join(f"{op} {name}" for op, name in chosen.items() if name != most)
        return f"{most} ({others})" if others else most


REFERENCE_KERNELS = Kernels()


@dataclass(frozen=True, kw_only=True)
class SamplingFeatures:
    """What some request of a batch asks for; the compiled round holds nothing of what none does.

    sampled: a temperature above 0. truncated: top-k or top-p. logit_bias: biases, allowed and banned tokens. all_logprobs: logprobs of the
    whole vocabulary. prompt_logprobs is prefill's. A request's tokens are the same whichever of these its neighbours need
    (jaxspec.sampling_params.features_of).
    """

    sampled: bool = True
    truncated: bool = False
    min_p: bool = False
    penalties: bool = False
    logit_bias: bool = False
    min_tokens: bool = False
    bad_words: bool = False
    logprobs: bool = False
    all_logprobs: bool = False
    prompt_logprobs: bool = False

    def __or__(self, other: SamplingFeatures) -> SamplingFeatures:
        """What either needs."""
        return SamplingFeatures(**{f.name: getattr(self, f.name) or getattr(other, f.name) for f in fields(SamplingFeatures)})


@dataclass(frozen=True)
class RoundConfig(SamplingFeatures):
    """Everything static about a round: one compiled program per value (and per batch and page bucket).

    target, draft: the family configs; draft None decodes plainly (num_speculative_tokens 0).
    target_group: the KV-cache group of the target's layers, or a tuple of them where they differ (the target's cache_groups).
    draft_group: that of the draft's, whose metadata is all that a draft step builds.
    acceptance_rates: conditional rates of the synthetic rule.
    limits_drafts: whether some request is allowed fewer drafts than K, by its own parameters or by
    draft_max_model_len, the longest context that the draft is asked about (None: any).
    cuda_graphs: False launches kernel by kernel, which lets one start while the one before drains; worth it only where the GPU is slower
    than the host's launches.
    """

    target: Any
    target_group: CacheGroup | tuple[CacheGroup, ...]
    draft: Any = None
    draft_group: CacheGroup | None = None
    num_speculative_tokens: int = 0
    rule: RejectionRule = "strict"
    draft_sampling: DraftSampling = "probabilistic"
    acceptance_rates: tuple[float, ...] | None = None
    kernels: Kernels = Kernels()
    limits_drafts: bool = False
    draft_max_model_len: int | None = None
    cuda_graphs: bool = True

    @property
    def block_size(self) -> int:
        """Tokens a block, in every group."""
        return self._a_group.block_size

    @property
    def max_model_len(self) -> int:
        """Tokens that a request may hold in the target's cache."""
        return self._a_group.max_model_len

    @classmethod
    def of_pair(
        cls, target: Any, draft: Any = None, *, block_size: int, max_model_len: int, draft_context: int | None = None, **values: Any
    ) -> RoundConfig:
        """With the KV-cache groups of the target's layers and of the draft's, which sees draft_context tokens at most (None: all)."""
        own = None if draft is None else draft.cache_groups(block_size, min(draft_context or max_model_len, max_model_len))
        return cls(target=target, target_group=target.cache_groups(block_size, max_model_len), draft=draft, draft_group=own, **values)

    @property
    def target_groups(self) -> tuple[CacheGroup, ...]:
        """The target's, always as a tuple."""
        return self.target_group if isinstance(self.target_group, tuple) else (self.target_group,)

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """For each layer of the target, the index of its group."""
        return self.target.group_of_layer if isinstance(self.target_group, tuple) else (0,) * self.target.num_layers

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Those with a pool and a block table of their own: the target's, then the draft's unless it sees just as far as one of them."""
        own = self.draft_group is not None and self.draft_pool == len(self.target_groups)
        return (*self.target_groups, self.draft_group) if own else self.target_groups  # type: ignore[return-value]

    @property
    def draft_pool(self) -> int:
        """The index in cache_groups of the group that holds the draft's layers."""
        assert self.draft_group is not None
        sight = lambda group: (group.window, group.chunk)  # noqa: E731
        found = (i for i, group in enumerate(self.target_groups) if sight(group) == sight(self.draft_group))
        return next(found, len(self.target_groups))

    def target_tables(self, block_tables: Any) -> Any:
        """The target's of the block tables of cache_groups, in the structure of target_group; one table, no tuple, is everybody's."""
        if not isinstance(block_tables, tuple):
            return block_tables
        return block_tables[: len(self.target_groups)] if isinstance(self.target_group, tuple) else block_tables[0]

    def draft_table(self, block_tables: Any) -> Any:
        """The draft's of the block tables of cache_groups."""
        return block_tables[self.draft_pool] if isinstance(block_tables, tuple) else block_tables

    @property
    def _a_group(self) -> CacheGroup:
        return self.target_groups[0]

    @property
    def compiler_options(self) -> tuple[tuple[str, str | bool], ...]:
        """XLA's flags for the programs of this round, as measured on an H200 (docs/performance.md).

        For what the matmul kernel leaves to XLA (prefill, large batches) cuBLAS beats the Triton products that XLA's autotuner picks.
        A kernel whose result goes into one step's columns would be launched a second time as a "dynamic slice fusion", which writes there.
        """
        if self.kernels.matmul == "reference":
            return ()
        graphs = () if self.cuda_graphs else (("xla_gpu_enable_command_buffer", ""),)
        return (("xla_gpu_enable_triton_gemm", False), ("xla_gpu_enable_dynamic_slice_fusion", False), *graphs)

    @property
    def keeps_draft_logits(self) -> bool:
        """Whether q is needed: drafts are sampled, some request samples, and the rule reads q."""
        return self.draft_sampling == "probabilistic" and self.sampled and self.rule in ("probabilistic", "block")

    def with_features(self, features: SamplingFeatures) -> RoundConfig:
        """The same round for a batch that needs these features."""
        return replace(self, **{f.name: getattr(features, f.name) for f in fields(SamplingFeatures)})


_RULE_ALIASES = {"standard": "probabilistic"}  # vLLM's later name
_DRAFT_ALIASES = {"gumbel": "probabilistic"}


@dataclass(frozen=True)
class SpeculativeConfig:
    """What drafts, how many tokens, and how they are judged; the keys are vLLM's.

    method: "eagle" (EAGLE-1), "eagle3", or "mtp" (the module of multi-token prediction in the target's own checkpoint).
    model: a folder, a hub id, or a name under checkpoints/ that holds the draft head; None with "mtp": the target's.
    rejection_sample_method: "strict" | "probabilistic" (vLLM's "standard") | "block" | "synthetic".
    draft_sample_method: "greedy" (argmax, a one-hot q) or "probabilistic" (sampled at the request's temperature).
    synthetic_acceptance_rates: unconditional rate per position, non-increasing; or give
    synthetic_acceptance_length (mean length, bonus token included) or synthetic_acceptance_rate (mean over positions).
    num_speculative_tokens_per_batch_size: (first, last, K) for batches of first to last running requests, K from 0 to
    num_speculative_tokens, which other batch sizes keep; a sampled request's text then depends on how many run beside it.
    draft_max_model_len: the longest context in tokens that the draft is asked about; longer requests go on without drafts.
    eagle_aux_hidden_state_layer_ids, norm_*, fc_norm: override what the checkpoint's config says (None: keep it).
    mtp_zero_first_embedding: whether an MTP module's row of position 0 goes without an embedding (None: as drafts/mtp.py says).
    """

    model: str | None = None
    method: str = "eagle3"
    num_speculative_tokens: int = 3
    rejection_sample_method: str = "probabilistic"
    draft_sample_method: str = "probabilistic"
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    synthetic_acceptance_length: float | None = None
    synthetic_acceptance_rate: float | None = None
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()
    draft_max_model_len: int | None = None
    mtp_zero_first_embedding: bool | None = None

    def __post_init__(self) -> None:
        set_field = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        if isinstance(self.model, PathLike):
            set_field("model", fspath(self.model))
        for name in ("method", "rejection_sample_method", "draft_sample_method", "model"):
            if not isinstance(getattr(self, name), str) and not (name == "model" and self.model is None):
                raise ConfigError(f"{name}: expected a name, got {getattr(self, name)!r}")
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "mtp_zero_first_embedding"):
            if not isinstance(getattr(self, name), bool | None):
                raise ConfigError(f"{name}: expected true, false or none, got {getattr(self, name)!r}")
        for name, is_right in (("synthetic_acceptance_rates", is_number), ("eagle_aux_hidden_state_layer_ids", is_int)):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, list | tuple) and all(map(is_right, value))):
                raise ConfigError(f"{name}: expected a list of {'numbers' if is_right is is_number else 'integers'}, got {value!r}")
        set_field("rejection_sample_method", _RULE_ALIASES.get(self.rejection_sample_method, self.rejection_sample_method))
        set_field("draft_sample_method", _DRAFT_ALIASES.get(self.draft_sample_method, self.draft_sample_method))
        for name in ("synthetic_acceptance_rates", "eagle_aux_hidden_state_layer_ids"):
            if getattr(self, name) is not None:
                set_field(name, tuple(getattr(self, name)))
        if self.method not in METHODS:
            raise ConfigError(f"method: expected one of {', '.join(METHODS)}, got {self.method!r}")
        if not is_int(self.num_speculative_tokens) or self.num_speculative_tokens < 1:
            raise ConfigError(f"num_speculative_tokens: expected an integer of at least 1, got {self.num_speculative_tokens}")
        set_field("num_speculative_tokens_per_batch_size", self._read_schedule())
        if self.draft_max_model_len is not None and (not is_int(self.draft_max_model_len) or self.draft_max_model_len < 1):
            raise ConfigError(f"draft_max_model_len: expected an integer of at least 1 or none, got {self.draft_max_model_len!r}")
        if self.rejection_sample_method not in get_args(RejectionRule):
            raise ConfigError(
                f"rejection_sample_method: expected one of {', '.join(get_args(RejectionRule))}, got {self.rejection_sample_method!r}"
            )
        if self.draft_sample_method not in get_args(DraftSampling):
            raise ConfigError(
                f"draft_sample_method: expected one of {', '.join(get_args(DraftSampling))}, got {self.draft_sample_method!r}"
            )
        for name in ("synthetic_acceptance_length", "synthetic_acceptance_rate"):
            if getattr(self, name) is not None and not is_number(getattr(self, name)):
                raise ConfigError(f"{name}: expected a number, got {getattr(self, name)!r}")
        given = [n for n in ("rates", "length", "rate") if getattr(self, f"synthetic_acceptance_{n}") is not None]
        if (self.rejection_sample_method == "synthetic") != (len(given) == 1) or len(given) > 1:
            raise ConfigError(
                "synthetic_acceptance_rates, _length or _rate: expected exactly one with rejection_sample_method 'synthetic' and none "
                f"with another method, got {given or 'none'} with {self.rejection_sample_method!r}"
            )

    def _read_schedule(self) -> tuple[tuple[int, int, int], ...]:
        given, K = self.num_speculative_tokens_per_batch_size, self.num_speculative_tokens
        if not isinstance(given, list | tuple) or not all(
            isinstance(r, list | tuple) and len(r) == 3 and all(map(is_int, r)) and 1 <= r[0] <= r[1] and 0 <= r[2] <= K for r in given
        ):
            raise ConfigError(
                f"num_speculative_tokens_per_batch_size: expected a list of (first, last, K) with 1 <= first <= last and K from 0 to "
                f"num_speculative_tokens {K}, got {given!r}"
            )
        ranges = tuple(sorted((r[0], r[1], r[2]) for r in given))
        if any(before[1] >= after[0] for before, after in pairwise(ranges)):
            raise ConfigError(f"num_speculative_tokens_per_batch_size: expected ranges that do not overlap, got {given!r}")
        return ranges

    def num_drafts(self, batch_size: int) -> int:
        """K for so many running requests."""
        schedule = self.num_speculative_tokens_per_batch_size
        return next((K for first, last, K in schedule if first <= batch_size <= last), self.num_speculative_tokens)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpeculativeConfig:
        """From JSON as vLLM's --speculative-config takes it; an unknown key is an error, not ignored."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"speculative config: expected keys among {sorted(known)}, got {unknown}")
        return cls(**values)


def is_number(x: Any) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool) and math.isfinite(x)


def is_int(x: Any) -> bool:
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)
