"""The static description of a compiled round: models, ops, rejection rule and sampling features."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec.config.attention import CacheGroup
from jaxspec.config.models import DraftConfig, TargetConfig
from jaxspec.config.ops import COPYING, HIDING, Ops, XlaFlags
from jaxspec.config.speculative import DraftSampling, RejectionRule
from jaxspec.parallel.group import ONE_DEVICE, Group
from jaxspec.parallel.layout import ONE_PLACE, Placement
from jaxspec.parallel.mesh import MODEL
from pallas_kernels.vocab_shards import WHOLE, VocabShards

Table = TypeVar("Table")


@dataclass(frozen=True, kw_only=True)
class SamplingFeatures:
    """The sampling features that at least one request of a batch uses.

    A program compiled for these features holds no operation for others. A request's tokens are the
    same in every program that holds the features that it uses, to the bit.

    sampled:         a temperature is above 0
    processors:      names of logits processors (jaxspec.sampling.processors)
    logprobs:        log-probabilities of generated tokens
    all_logprobs:    log-probabilities of the whole vocabulary
    prompt_logprobs: log-probabilities of prompt tokens, in prefill only
    """

    sampled: bool = True
    processors: frozenset[str] = frozenset()
    logprobs: bool = False
    all_logprobs: bool = False
    prompt_logprobs: bool = False

    def __or__(self, other: SamplingFeatures) -> SamplingFeatures:
        """Return the features of either."""
        names = [f.name for f in fields(SamplingFeatures)]
        return SamplingFeatures(**{n: getattr(self, n) | getattr(other, n) for n in names})

    def holds(self, other: SamplingFeatures) -> bool:
        """Return whether these features include all of the others."""
        return self | other == self

    @property
    def of_rounds(self) -> SamplingFeatures:
        """These features without those that prefill alone computes."""
        return replace(self, prompt_logprobs=False)


@dataclass(frozen=True, kw_only=True)
class RoundConfig(SamplingFeatures):
    """The static part of a round: one compiled program per value (and per batch and page bucket).

    target, draft: the family configs; draft None decodes plainly (num_speculative_tokens 0)
    target_groups: the KV-cache groups of the target's layers
    ops: the implementation of each op
    draft_groups: the KV-cache groups of the draft's layers; a draft step builds metadata for these
        alone
    acceptance_rates: conditional rates of the synthetic rule
    limits_drafts: whether some request may have fewer drafts than K, by its own parameters or by
        draft_max_model_len
    adaptive: whether each request's acceptance so far limits its drafts, or leaves them to the
        fallback (jaxspec.decode.adaptive); limits_drafts holds then
    num_block_drafts: drafts that a pass over a block has rows for: num_speculative_tokens (None) or
        more. A block's rows see each other, so drafts depend on their number
    fallback: the method without a model that drafts for requests whose head does not pay
    fallback_groups: the KV-cache groups of its text
    draft_max_model_len: the longest context that the draft may see, in tokens; None for any
    max_num_verify_tokens: the most rows of a verify pass; None for any
    draft_cache_dtype: name of the dtype of the draft's keys and values; None: the target's
    cuda_graphs: False launches kernel by kernel. Before jax 0.12, a kernel starts while the one
        before it drains only if launched so. That pays if the GPU is slower than the host's
        launches, and the rows are so few that the products are our kernels
        (jaxspec.engine.round_configs).
    vocab_shards: how rows of logits are cut over devices, the target's and the draft's. The
        vocabularies of `target` and `draft` are whole; a device has `vocab_shards.piece` of them
    placement: the devices; a program runs by the round of one of them (on_device)
    """

    target: TargetConfig
    target_groups: tuple[CacheGroup, ...]
    ops: Ops
    draft: DraftConfig | None = None
    draft_groups: tuple[CacheGroup, ...] = ()
    num_speculative_tokens: int = 0
    rule: RejectionRule = "strict"
    draft_sampling: DraftSampling = "probabilistic"
    acceptance_rates: tuple[float, ...] | None = None
    limits_drafts: bool = False
    adaptive: bool = False
    num_block_drafts: int | None = None
    fallback: DraftConfig | None = None
    fallback_groups: tuple[CacheGroup, ...] = ()
    draft_max_model_len: int | None = None
    max_num_verify_tokens: int | None = None
    draft_cache_dtype: str | None = None
    cuda_graphs: bool = True
    vocab_shards: VocabShards = WHOLE
    placement: Placement = ONE_PLACE

    @property
    def block_size(self) -> int:
        """Tokens per block, in every group."""
        return self._a_group.block_size

    @property
    def max_model_len(self) -> int:
        """Tokens that a request may hold in the target's cache."""
        return self._a_group.max_model_len

    @classmethod
    def for_models(
        cls,
        target: TargetConfig,
        draft: DraftConfig | None = None,
        *,
        ops: Ops,
        block_size: int,
        max_model_len: int,
        draft_context: int | None = None,
        fallback: DraftConfig | None = None,
        **values: Any,
    ) -> RoundConfig:
        """Return a round of these models, with their KV-cache groups.

        draft_context: the longest context that the draft sees, in tokens; None for max_model_len.
        """
        draft_len = min(draft_context or max_model_len, max_model_len)
        return cls(
            target=target,
            target_groups=target.cache_groups(block_size, max_model_len),
            ops=ops,
            draft=draft,
            draft_groups=() if draft is None else draft.cache_groups(block_size, draft_len),
            fallback=fallback,
            fallback_groups=(
                () if fallback is None else fallback.cache_groups(block_size, max_model_len)
            ),
            **values,
        )

    def cache_dtype_of_draft(self, cache_dtype: DTypeLike) -> jnp.dtype:
        """Return the dtype of the draft's keys and values; cache_dtype: of the target's."""
        return jnp.dtype(self.draft_cache_dtype or cache_dtype)

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The groups with their own pool of blocks and block table.

        The target's groups come first. A draft's group that sees as far as one of them shares its
        blocks. The draft's other groups follow.
        """
        own = [
            group
            for group, pool in zip(self._other_groups, self._other_pools, strict=True)
            if pool >= len(self.target_groups)
        ]
        return (*self.target_groups, *own)

    @property
    def _other_groups(self) -> tuple[CacheGroup, ...]:
        """The draft's groups and the fallback's."""
        return (*self.draft_groups, *self.fallback_groups)

    @property
    def draft_pools(self) -> tuple[int, ...]:
        """Index in cache_groups of the group that holds the blocks, for each of draft_groups."""
        return self._other_pools[: len(self.draft_groups)]

    @property
    def fallback_pools(self) -> tuple[int, ...]:
        """The same for each of fallback_groups."""
        return self._other_pools[len(self.draft_groups) :]

    @property
    def _other_pools(self) -> tuple[int, ...]:
        pools: list[int] = []
        num_pools = len(self.target_groups)
        for group in self._other_groups:
            shared = [i for i, g in enumerate(self.target_groups) if g.sees_as_far_as(group)]
            pools.append(shared[0] if shared else num_pools)
            num_pools += not shared
        return tuple(pools)

    def target_tables(self, block_tables: tuple[Table, ...]) -> tuple[Table, ...]:
        """Select the block tables of target_groups from those of cache_groups."""
        return block_tables[: len(self.target_groups)]

    def draft_tables(self, block_tables: tuple[Table, ...]) -> tuple[Table, ...]:
        """Select the block tables of draft_groups from those of cache_groups."""
        return tuple(block_tables[pool] for pool in self.draft_pools)

    def fallback_tables(self, block_tables: tuple[Table, ...]) -> tuple[Table, ...]:
        """Select the block tables of fallback_groups from those of cache_groups."""
        return tuple(block_tables[pool] for pool in self.fallback_pools)

    def on_device(self, addresses: jax.Array | None = None) -> RoundConfig:
        """Return the round as one of the devices runs it, inside jax.shard_map.

        The models have the sizes of the device's pieces.

        addresses: see Group
        """
        placement = self.placement
        if placement.mesh is None:
            return self
        alone = replace(placement, mesh=None)
        if placement.size == 1:
            return replace(self, placement=alone)
        group = Group(MODEL, placement.size, addresses)
        draft = self.draft
        return replace(
            self,
            target=placement.target(self.target).on_device(self.target),
            draft=None if draft is None else placement.draft(draft).on_device(draft),
            ops=replace(self.ops, layers=group, vocabulary=group),
            vocab_shards=VocabShards(MODEL, placement.size, addresses),
            placement=alone,
        )

    @property
    def draft_ops(self) -> Ops:
        """The ops of the draft, whose layers may be whole on each device."""
        if self.placement.replicates_draft:
            return replace(self.ops, layers=ONE_DEVICE)
        return self.ops

    @property
    def _a_group(self) -> CacheGroup:
        return self.target_groups[0]

    @property
    def compiler_options(self) -> XlaFlags:
        """XLA flags for the programs of this round."""
        return self.ops.compiler_options(cuda_graphs=self.cuda_graphs)

    @property
    def prefill_options(self) -> XlaFlags:
        """XLA flags for the programs that prefill, whose sums XLA exchanges."""
        hiding = HIDING if self.placement.size > 1 else ()
        # The kernel runs where two devices of one process reach each other's memory.
        if self.placement.size == 2 and self.ops.all_reduce != "reference":
            hiding += COPYING
        return self.ops.compiler_options(cuda_graphs=self.cuda_graphs, hiding=hiding)

    @property
    def keeps_draft_logits(self) -> bool:
        """Whether q is needed: drafts are sampled, some request samples, and the rule reads q."""
        return (
            self.draft_sampling == "probabilistic"
            and self.sampled
            and self.rule in ("probabilistic", "block")
        )

    def flat_rows(self, batch: int) -> int | None:
        """Return the rows of a flat verify pass of a batch of so many slots.

        None where K+1 rows for each slot are within max_num_verify_tokens.
        """
        budget = self.max_num_verify_tokens
        if budget is None or batch * (self.num_speculative_tokens + 1) <= budget:
            return None
        return budget

    def with_features(self, features: SamplingFeatures) -> RoundConfig:
        """Return the same round for a batch that needs these features."""
        return replace(
            self, **{f.name: getattr(features, f.name) for f in fields(SamplingFeatures)}
        )
