"""The configs of targets and drafts as the rest of the package reads them.

Each family has a frozen dataclass of its own with these members and more.
"""

from __future__ import annotations

from typing import Protocol

from jaxspec.config.attention import AttentionKind, CacheGroup


class TargetConfig(Protocol):
    """The static shape of a target: frozen and hashable."""

    @property
    def model_type(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def attention(self) -> AttentionKind: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """For each layer, the index of its group in cache_groups."""
        ...

    def cache_groups(self, block_size: int, max_model_len: int) -> tuple[CacheGroup, ...]:
        """Return the KV-cache groups of the layers."""
        ...


class DraftConfig(Protocol):
    """The static description of a draft: frozen and hashable."""

    @property
    def method(self) -> str: ...
    @property
    def num_layers(self) -> int:
        """Layers with a cache."""
        ...

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """For each layer, the index of its group in cache_groups."""
        ...

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Boundary ids of the target's layers whose hidden states it reads; () for the last one."""
        ...

    @property
    def attention(self) -> AttentionKind:
        """Attention config of the layers' caches; see jaxspec.cache.arrays.init_cache."""
        ...

    def cache_groups(self, block_size: int, max_model_len: int) -> tuple[CacheGroup, ...]:
        """Return the KV-cache groups of the layers."""
        ...
