"""Attention: its dimensions, and the groups of layers that share a block table."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxspec.config.reading import ConfigError
from jaxspec.config.rope import RopeConfig


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
    sinks: bool = (
        False  # a learned logit per head that joins the softmax's denominator only (gpt-oss)
    )
    rope_interleave: bool = False  # rotated pairs stand side by side in the checkpoint (Llama 4); put in our order when loaded

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.head_dim

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads: expected a multiple of num_key_value_heads {self.num_kv_heads}, got {self.num_heads}"
            )
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
            raise ConfigError(
                f"o_groups: expected a divisor of num_attention_heads {self.num_heads}, got {self.o_groups}"
            )
        if self.rope_head_dim % 2 or self.rope_head_dim > min(self.head_dim, self.index_head_dim):
            raise ConfigError(
                f"qk_rope_head_dim: expected an even number of at most head_dim {self.head_dim} and index_head_dim {self.index_head_dim}, "
                f"got {self.rope_head_dim}"
            )

    def rate(self, kind: str) -> int | None:
        """Tokens of one compressed entry in a layer of this kind."""
        return {
            "compressed_sparse_attention": self.sparse_rate,
            "heavily_compressed_attention": self.heavy_rate,
        }.get(kind)


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
