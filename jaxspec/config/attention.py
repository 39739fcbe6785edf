"""Attention: dimensions, and groups of layers that share a block table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from jaxspec.config.reading import ConfigError
from jaxspec.config.rope import RopeConfig
from jaxspec.parallel.axes import Axes


@dataclass(frozen=True)
class AttentionConfig:
    """The static part of one self-attention layer of a target or a draft.

    sinks:           a learned logit for each head, in the softmax's denominator only (gpt-oss)
    rope_interleave: rotated pairs are adjacent in the checkpoint (Llama 4); loading reorders them
    """

    AXES: ClassVar[Axes] = {
        "num_heads": "heads",
        "num_kv_heads": "kv_heads",
        "output_width": "head_out",
    }

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    rms_norm_eps: float = 1e-5
    sinks: bool = False
    rope_interleave: bool = False

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.head_dim

    @property
    def output_width(self) -> int:
        """Depth of the projection after attention: the outputs of all heads."""
        return self.num_heads * self.head_dim

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "num_attention_heads: expected a multiple of num_key_value_heads "
                f"{self.num_kv_heads}, got {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim: expected an even number, got {self.head_dim}")


@dataclass(frozen=True)
class MLAConfig:
    """The static part of one layer of multi-head latent attention (DeepSeek-V2, 2405.04434).

    A token's cache entry is one vector, shared by all heads: its latent of kv_lora_rank and a key
    of rope_head_dim.

    q_lora_rank:     width of the query's latent; None for a full query projection
    rope_interleave: rotated pairs are adjacent in the checkpoint; loading reorders them
    bias:            the projections from and to the residual stream have a bias
    num_kv_heads:    KV heads of the cache, as the attention op sees it
    """

    AXES: ClassVar[Axes] = {"num_heads": "heads", "output_width": "head_out"}

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
    num_kv_heads: int = 1

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.rope_head_dim

    @property
    def output_width(self) -> int:
        """Depth of the projection after attention: the outputs of all heads."""
        return self.num_heads * self.v_head_dim

    @property
    def head_dim(self) -> int:
        """Width of a cache entry, and of a query that has absorbed the key projection."""
        return self.kv_lora_rank + self.rope_head_dim

    @property
    def scale(self) -> float:
        """Factor of the scores; it follows from the head's width before absorption."""
        return (self.nope_head_dim + self.rope_head_dim) ** -0.5 * self.rope.softmax_factor


@dataclass(frozen=True)
class CompressedAttentionConfig:
    """The static part of DeepSeek-V4's attention, whose layers differ in kind.

    A layer sees the last sliding_window tokens. Its kind decides which compressed entries it sees:
    "sliding_attention": none.
    "compressed_sparse_attention": one for every sparse_rate tokens; an indexer chooses index_top_k
        of them.
    "heavily_compressed_attention": one for every heavy_rate tokens.

    layer_types:     the kind of each layer that this config's caches are made for
    rope:            rotary embedding of layers that compress nothing
    compressed_rope: rotary embedding of the other layers
    num_kv_heads:    1, since one vector of a token is key and value of all heads
    """

    AXES: ClassVar[Axes] = {
        "num_heads": "heads",
        "o_groups": "heads",
        "output_width": "head_out",
    }

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
    num_kv_heads: int = 1

    def __post_init__(self) -> None:
        if self.num_heads % self.o_groups:
            raise ConfigError(
                f"o_groups: expected a divisor of num_attention_heads {self.num_heads}, "
                f"got {self.o_groups}"
            )
        if self.rope_head_dim % 2 or self.rope_head_dim > min(self.head_dim, self.index_head_dim):
            raise ConfigError(
                f"qk_rope_head_dim: expected an even number of at most head_dim {self.head_dim} "
                f"and index_head_dim {self.index_head_dim}, got {self.rope_head_dim}"
            )

    @property
    def output_width(self) -> int:
        """Depth of the last projection: the outputs of all groups."""
        return self.o_groups * self.o_lora_rank

    def rate(self, kind: str) -> int | None:
        """Return the tokens of one compressed entry in a layer of this kind; None without any."""
        return {
            "compressed_sparse_attention": self.sparse_rate,
            "heavily_compressed_attention": self.heavy_rate,
        }.get(kind)


@dataclass(frozen=True)
class TokenHistoryConfig:
    """A layer that caches token ids alone, for drafters that look tokens up."""


AttentionKind = AttentionConfig | MLAConfig | CompressedAttentionConfig | TokenHistoryConfig


@dataclass(frozen=True)
class CacheGroup:
    """The layers that share a block table, and the geometry of their metadata.

    block_size:    tokens of a block
    max_model_len: no row at this position or beyond is ever written
    window:        a row sees this many tokens, itself included
    chunk:         a row sees back to the last position that is a multiple of this (Llama 4)

    window and chunk are None for full attention; at most one of them is given.
    """

    block_size: int
    max_model_len: int
    window: int | None = None
    chunk: int | None = None

    def __str__(self) -> str:
        if self.window is not None:
            return f"a window of {self.window}"
        return "full attention" if self.chunk is None else f"chunks of {self.chunk}"

    def sees_as_far_as(self, other: CacheGroup) -> bool:
        """Whether rows of both groups see the same positions."""
        return (self.window, self.chunk) == (other.window, other.chunk)

    @property
    def reach(self) -> int | None:
        """The most positions before its own that a row sees; None for all of them."""
        seen = self.window or self.chunk
        return None if seen is None else seen - 1

    def first_seen(self, position: int) -> int:
        """Return the first position that rows from this one on see."""
        if self.window is not None:
            return max(position - self.window + 1, 0)
        return 0 if self.chunk is None else position // self.chunk * self.chunk
