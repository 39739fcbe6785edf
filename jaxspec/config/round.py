"""The static description of a compiled round: its models, its kernels, its rule, and what its requests ask for."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from jaxspec.config.attention import CacheGroup
from jaxspec.config.speculative import DraftSampling, RejectionRule


@dataclass(frozen=True)
class Kernels:
    """Which implementation of each op in pallas_kernels runs; chosen once, when the engine is built (jaxspec.layers.kernels.choose)."""

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
    """What some request of a batch uses; the compiled round holds no operation for anything else.

    A request's tokens do not depend on the features that its neighbours use
    (jaxspec.sampling.rows.features_of).

    sampled: a temperature is above 0
    processors: names of logits processors (jaxspec.sampling.processors)
    logprobs: log-probabilities of generated tokens
    all_logprobs: those of the whole vocabulary
    prompt_logprobs: log-probabilities of prompt tokens; prefill's alone
    """

    sampled: bool = True
    processors: frozenset[str] = frozenset()
    logprobs: bool = False
    all_logprobs: bool = False
    prompt_logprobs: bool = False

    def __or__(self, other: SamplingFeatures) -> SamplingFeatures:
        """Return what either needs."""
        names = [f.name for f in fields(SamplingFeatures)]
        return SamplingFeatures(**{n: getattr(self, n) | getattr(other, n) for n in names})


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
    than the host's launches, and the rows so few that the products are our kernels (jaxspec.engine.round_configs).
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
        cls,
        target: Any,
        draft: Any = None,
        *,
        block_size: int,
        max_model_len: int,
        draft_context: int | None = None,
        **values: Any,
    ) -> RoundConfig:
        """With the KV-cache groups of the target's layers and of the draft's, which sees draft_context tokens at most (None: all)."""
        own = (
            None
            if draft is None
            else draft.cache_groups(block_size, min(draft_context or max_model_len, max_model_len))
        )
        return cls(
            target=target,
            target_group=target.cache_groups(block_size, max_model_len),
            draft=draft,
            draft_group=own,
            **values,
        )

    @property
    def target_groups(self) -> tuple[CacheGroup, ...]:
        """The target's, always as a tuple."""
        return self.target_group if isinstance(self.target_group, tuple) else (self.target_group,)

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """For each layer of the target, the index of its group."""
        return (
            self.target.group_of_layer
            if isinstance(self.target_group, tuple)
            else (0,) * self.target.num_layers
        )

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
        found = (
            i
            for i, group in enumerate(self.target_groups)
            if sight(group) == sight(self.draft_group)
        )
        return next(found, len(self.target_groups))

    def target_tables(self, block_tables: Any) -> Any:
        """The target's of the block tables of cache_groups, in the structure of target_group; one table, no tuple, is everybody's."""
        if not isinstance(block_tables, tuple):
            return block_tables
        return (
            block_tables[: len(self.target_groups)]
            if isinstance(self.target_group, tuple)
            else block_tables[0]
        )

    def draft_table(self, block_tables: Any) -> Any:
        """The draft's of the block tables of cache_groups."""
        return block_tables[self.draft_pool] if isinstance(block_tables, tuple) else block_tables

    @property
    def _a_group(self) -> CacheGroup:
        return self.target_groups[0]

    @property
    def compiler_options(self) -> tuple[tuple[str, str | bool], ...]:
        """XLA's flags for the programs of this round, as measured on an H200 (docs/notes/).

        For what the matmul kernel leaves to XLA (prefill, large batches) cuBLAS beats the Triton products that XLA's autotuner picks.
        A kernel whose result goes into one step's columns would be launched a second time as a "dynamic slice fusion", which writes there.
        """
        if self.kernels.matmul == "reference":
            return ()
        graphs = () if self.cuda_graphs else (("xla_gpu_enable_command_buffer", ""),)
        return (
            ("xla_gpu_enable_triton_gemm", False),
            ("xla_gpu_enable_dynamic_slice_fusion", False),
            *graphs,
        )

    @property
    def keeps_draft_logits(self) -> bool:
        """Whether q is needed: drafts are sampled, some request samples, and the rule reads q."""
        return (
            self.draft_sampling == "probabilistic"
            and self.sampled
            and self.rule in ("probabilistic", "block")
        )

    def with_features(self, features: SamplingFeatures) -> RoundConfig:
        """The same round for a batch that needs these features."""
        return replace(
            self, **{f.name: getattr(features, f.name) for f in fields(SamplingFeatures)}
        )
