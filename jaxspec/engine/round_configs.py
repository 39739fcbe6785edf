"""The static descriptions of the programs that an engine runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jaxlib

from jaxspec import drafts
from jaxspec.config import (
    CacheGroup,
    DraftConfig,
    DraftSampling,
    EngineConfig,
    Ops,
    RoundConfig,
    SamplingFeatures,
    SpeculativeConfig,
    TargetConfig,
)
from jaxspec.engine.pass_bytes import PassBytes
from jaxspec.parallel.layout import Placement

# A CUDA graph saves the host its launches, and the device a part of the gaps between them. Before
# jaxlib 0.12 it drops the kernels' early launches of their successors (programmatic dependent
# launch). With older versions it pays where the host is the limit, and where most products are
# XLA's, which launch none early (docs/notes/cuda-graphs.md):
# - of a small target, always;
# - of few rows, where a slow host takes as long to launch a layer (eight launches, 56 to 100 us) as
#   the device to run it. An H200 reads 256 MiB in 62 us;
# - of many rows.
GRAPHS_LAUNCH_EARLY = tuple(map(int, jaxlib.__version__.split(".")[:2])) >= (0, 12)
GRAPHS_BELOW_BYTES = 4 << 30
FEW_ROWS, GRAPHS_BELOW_BYTES_A_LAYER = 16, 256 << 20
GRAPHS_ABOVE_ROWS = 64
GREEDY = SamplingFeatures(sampled=False)


class ConfigKey(NamedTuple):
    """What tells the configs of one engine apart.

    features, num_speculative_tokens, limits_drafts: see RoundConfigs.get
    cuda_graphs: as in RoundConfig
    """

    features: SamplingFeatures
    num_speculative_tokens: int
    limits_drafts: bool
    cuda_graphs: bool


def _draft_sampling(draft: DraftConfig, speculative: SpeculativeConfig) -> DraftSampling:
    """How drafts are sampled. A one-hot drafter's drafts are certain, as greedy ones are."""
    if drafts.drafter(draft).one_hot:
        return "greedy"
    return speculative.draft_sample_method  # type: ignore[return-value]


def _fallback(target: TargetConfig, speculative: SpeculativeConfig | None) -> DraftConfig | None:
    """Return the config of the fallback; None for none."""
    if speculative is None or speculative.fallback_method is None:
        return None
    return drafts.MODEL_FREE[speculative.fallback_method].settings(target, speculative)


class RoundConfigs:
    """Make one RoundConfig for each kind of batch, and keep it: jit looks up its object fastest.

    pass_bytes: of the target's weights
    """

    def __init__(
        self,
        target: TargetConfig,
        draft: DraftConfig | None,
        speculative: SpeculativeConfig | None,
        config: EngineConfig,
        *,
        ops: Ops,
        placement: Placement,
        pass_bytes: PassBytes,
        draft_cache_dtype: str | None = None,
        acceptance_rates: tuple[float, ...] | None = None,
    ) -> None:
        self._pass_bytes = pass_bytes
        self._speculative = speculative
        longest = speculative.draft_max_model_len if speculative else None
        if draft is not None and drafts.drafter(draft).one_hot:
            # A look-up reads the token after the cached ones. Without a limit it is written there
            # past the draft's context too, and another request's is not found instead.
            longest = None
        self._plain = RoundConfig.for_models(
            target,
            draft,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            draft_context=longest,
            fallback=_fallback(target, speculative),
            ops=ops,
            placement=placement,
            draft_cache_dtype=draft_cache_dtype,
        )
        if speculative is not None:
            assert draft is not None
            self._plain = replace(
                self._plain,
                num_speculative_tokens=speculative.max_k,
                rule=speculative.rejection_sample_method,
                draft_sampling=_draft_sampling(draft, speculative),
                acceptance_rates=acceptance_rates,
                adaptive=speculative.adapts,
                num_block_drafts=speculative.max_k if speculative.adaptive else None,
                max_num_verify_tokens=speculative.max_num_verify_tokens,
            )
        self.version = 0  # counts calls of override
        self._overrides: dict[str, Any] = {}
        self._made: dict[ConfigKey, RoundConfig] = {}

    def override(
        self,
        *,
        ops: Ops | None = None,
        acceptance_rates: tuple[float, ...] | None = None,
        cuda_graphs: bool | None = None,
    ) -> None:
        """Set fields of every later RoundConfig, for benchmarks; None keeps a field."""
        given = {
            "ops": ops,
            "acceptance_rates": acceptance_rates,
            "cuda_graphs": cuda_graphs,
        }
        self._overrides |= {name: value for name, value in given.items() if value is not None}
        self._made.clear()
        self.version += 1

    def get(
        self,
        features: SamplingFeatures,
        *,
        num_speculative_tokens: int | None = None,
        limits_drafts: bool = False,
        batch: int = 1,
    ) -> RoundConfig:
        """Return the config of rounds for batches of this size whose requests need these features.

        num_speculative_tokens: the rounds' K; None: the engine's
        limits_drafts: whether some request is allowed fewer drafts
        """
        K = num_speculative_tokens
        if K is None:
            K = self._plain.num_speculative_tokens
        return self._at(features, K, limits_drafts, self._are_graphs(batch * (K + 1)))

    def for_prefill(self, features: SamplingFeatures) -> RoundConfig:
        """Return the config of prefill calls.

        With early launches too, a call of a target with large layers is no CUDA graph: kernel by
        kernel its first token comes sooner.
        """
        K = self._plain.num_speculative_tokens
        return self._at(features, K, False, self._host_is_the_limit(K + 1))

    def _at(
        self, features: SamplingFeatures, K: int, limits_drafts: bool, cuda_graphs: bool
    ) -> RoundConfig:
        limits_drafts = (limits_drafts or self.always_limits_drafts) and K > 0
        return self.at(ConfigKey(features, K, limits_drafts, cuda_graphs))

    def _are_graphs(self, rows: int) -> bool:
        """Return whether rounds of so many rows are CUDA graphs."""
        return GRAPHS_LAUNCH_EARLY or rows > GRAPHS_ABOVE_ROWS or self._host_is_the_limit(rows)

    def _host_is_the_limit(self, rows: int) -> bool:
        """Return whether a host may launch more slowly than the device runs passes of such rows."""
        read = self._pass_bytes
        return (
            read.total < GRAPHS_BELOW_BYTES
            or (rows <= FEW_ROWS and read.a_layer(rows) < GRAPHS_BELOW_BYTES_A_LAYER)
            or self._plain.placement.size > 1  # the host launches for all devices
        )

    def _make(
        self, features: SamplingFeatures, K: int, limits_drafts: bool, cuda_graphs: bool
    ) -> RoundConfig:
        rates, speculative = self._plain.acceptance_rates, self._speculative
        values: dict[str, Any] = {
            "num_speculative_tokens": K,
            "acceptance_rates": None if rates is None else rates[:K],
            "cuda_graphs": cuda_graphs,
        }
        if limits_drafts and speculative is not None:
            values |= {
                "limits_drafts": True,
                "draft_max_model_len": speculative.draft_max_model_len,
            }
        return replace(self._plain.with_features(features), **(values | self._overrides))

    def key_of(self, cfg: RoundConfig) -> ConfigKey:
        """Return the plain data of which `at` makes this config, in another process too."""
        return next(ConfigKey(*key) for key, made in self._made.items() if made is cfg)

    def at(self, key: ConfigKey) -> RoundConfig:
        """Return the config of a key."""
        if key not in self._made:
            self._made[key] = self._make(*key)
        return self._made[key]

    @property
    def always_limits_drafts(self) -> bool:
        """Whether all rounds limit drafts, since acceptance may."""
        return self._plain.adaptive

    @property
    def greedy(self) -> RoundConfig:
        """The config of greedy rounds, for what does not depend on the batch."""
        return self.get(GREEDY)

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The KV-cache groups, each with a pool of blocks and a block table of its own."""
        return self.greedy.cache_groups

    @property
    def lookahead(self) -> int:
        """Tokens after its own that a cached position depends on; 0 without a draft.

        See Drafter.
        """
        draft = self._plain.draft
        return 0 if draft is None else drafts.drafter(draft).lookahead

    @property
    def lag(self) -> int:
        """Cached tokens that the draft may not have read after a round; 0 without a draft.

        See Drafter.
        """
        draft = self._plain.draft
        return 0 if draft is None else drafts.drafter(draft).lag(self._plain)

    def may_wait(self, batch: int) -> bool:
        """Return whether a request may get no token from a round in batches of so many slots."""
        return self._plain.flat_rows(batch) is not None

    def k_of_batch(self, batch_size: int) -> int:
        """Return the K of rounds with so many running requests, or the largest if it adapts."""
        return self._speculative.k_of_batch(batch_size) if self._speculative else 0
