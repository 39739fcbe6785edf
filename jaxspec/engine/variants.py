"""Variants of a program: the sampling features that it computes, which may be more than are needed.

A program with more features gives the same tokens, to the bit. So a batch runs in any variant that
is compiled and serves it, and no mixture of requests has to wait for its own. LEVELS are the few
variants that serve every request. No jax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from jaxspec.config import SamplingFeatures
from jaxspec.engine.round_configs import GREEDY
from jaxspec.sampling.processors import BEFORE_TEMPERATURE, PROCESSORS
from jaxspec.sampling.rows import Shapes as ArrayShapes
from jaxspec.sampling.rows import StateLayout

# How often a feature reads or writes the logits of a round on a GPU, about. The order counts.
PASSES_OF_NOISE, PASSES_OF_LOGPROBS = 3, 23
PASSES_OF_ALL = 1000  # the vocabulary is sorted and copied to the host; all rows of a prompt

# Greedy requests need no noise and no truncation, which take most passes and most of compiling.
CHANGED = SamplingFeatures(sampled=False, processors=frozenset(p.name for p in BEFORE_TEMPERATURE))
SAMPLED = SamplingFeatures()
TRUNCATED = SamplingFeatures(processors=frozenset({"truncation"}))
SCORED = SamplingFeatures(logprobs=True)
PROCESSED = SamplingFeatures(processors=frozenset(p.name for p in PROCESSORS))
EVERYTHING = replace(PROCESSED, logprobs=True, all_logprobs=True)
ROUND_LEVELS = (
    GREEDY,
    CHANGED,
    SAMPLED,
    TRUNCATED,
    SCORED,
    PROCESSED,
    replace(PROCESSED, logprobs=True),
    EVERYTHING,
)
# A prefill samples from few rows, so log-probabilities of these cost little. Those of the prompt,
# and a sorted vocabulary, are computed where a request reads them. Greedy prompts run in SAMPLED:
# noise for these rows is three passes over their logits.
PREFILL_LEVELS = (
    CHANGED,
    SAMPLED,
    TRUNCATED,
    SCORED,
    replace(SCORED, prompt_logprobs=True),
    replace(PROCESSED, logprobs=True),
    replace(EVERYTHING, prompt_logprobs=True),
)
# A warm-up for every request compiles the other levels, which are rare, for fewer sizes: every
# third number of tiles of a prefill call and every second batch, from the largest down.
COMMON = (GREEDY, SAMPLED, TRUNCATED)
RARE_TILE_STRIDE, RARE_BATCH_STRIDE = 3, 2


def prefill_sizes(features: SamplingFeatures, tiles: Sequence[int]) -> Sequence[int]:
    """Return the sizes of prefill calls that a warm-up for every request compiles a level for."""
    return _sizes_of(features, tiles, RARE_TILE_STRIDE)


def round_batches(features: SamplingFeatures, batches: Sequence[int]) -> Sequence[int]:
    """Return the batches that a warm-up for every request compiles a level's rounds for."""
    return _sizes_of(features, batches, RARE_BATCH_STRIDE)


def _sizes_of(features: SamplingFeatures, sizes: Sequence[int], stride: int) -> Sequence[int]:
    return sizes if features in COMMON else sizes[::-1][::stride][::-1]


@dataclass(frozen=True)
class Variant:
    """The features that a program computes, and the arrays of the state that it runs on.

    features: their processors are those that the state holds
    arrays: sizes of the state's arrays (StateLayout.shapes)
    is_full: whether the arrays have room for every request that limits allow
    limits_drafts: as in RoundConfig
    """

    features: SamplingFeatures
    arrays: ArrayShapes
    is_full: bool
    limits_drafts: bool = False

    @classmethod
    def of(
        cls, features: SamplingFeatures, layout: StateLayout, *, limits_drafts: bool = False
    ) -> Variant:
        """Return the variant with just these features, over arrays of a layout's sizes."""
        layout = layout.hold(features)
        return cls(features, layout.shapes, layout.is_full, limits_drafts)

    def serves(self, needed: Variant) -> bool:
        """Return whether requests that need a variant can run in this one.

        Arrays of four times the needed size and more take memory for nothing, so only arrays that
        are always there may be so large.
        """
        own = dict(self.arrays)
        return (
            self.features.holds(needed.features)
            and self.limits_drafts >= needed.limits_drafts
            and all(
                n <= m and (self.is_full or m < 4 * n)
                for name, sizes in needed.arrays
                for n, m in zip(sizes, own[name], strict=True)
            )
        )

    @property
    def passes(self) -> int:
        """About how often the program reads or writes the logits."""
        features = self.features
        return (
            PASSES_OF_NOISE * features.sampled
            + sum(p.passes for p in PROCESSORS if p.name in features.processors)
            + PASSES_OF_LOGPROBS * features.logprobs
            + PASSES_OF_ALL * (features.all_logprobs + features.prompt_logprobs)
        )

    def layout(self, like: StateLayout) -> StateLayout:
        """Return the layout of the arrays; sizes that the variant does not know are like's."""
        held = like.hold(self.features)
        return replace(held, sizes={**held.sizes, **dict(self.arrays)})


@dataclass(frozen=True)
class Warmed:
    """The variants that warm-up compiles together.

    of_rounds, of_prefill: None where there is none to compile
    batches: of the rounds, the smallest first
    tiles: of the prefill calls, the fewest first
    """

    of_rounds: Variant | None
    of_prefill: Variant | None
    batches: Sequence[int]
    tiles: Sequence[int]

    @property
    def rounds(self) -> Variant:
        """of_rounds, where there is one."""
        assert self.of_rounds is not None
        return self.of_rounds

    @property
    def prefill(self) -> Variant:
        """of_prefill, where there is one."""
        assert self.of_prefill is not None
        return self.of_prefill

    def layout(self, like: StateLayout) -> StateLayout:
        """Return the layout of both variants' arrays; see Variant.layout."""
        return (self.of_rounds or self.prefill).layout(like)


@dataclass(frozen=True)
class RoundShape:
    """The shape of a step's rounds: slots of the batch, columns of the block tables, K."""

    batch: int
    pages: int
    num_speculative_tokens: int

    @property
    def size(self) -> int:
        """The dimension in which a program may be larger than requests need."""
        return self.batch

    def of_size(self, size: int) -> RoundShape:
        """Return the same shape with another size."""
        return replace(self, batch=size)


@dataclass(frozen=True)
class PrefillShape:
    """The shape of a prefill call, in any batch: its tiles, columns of the block tables.

    size and of_size: as RoundShape's
    """

    tiles: int
    pages: int

    @property
    def size(self) -> int:
        return self.tiles

    def of_size(self, size: int) -> PrefillShape:
        return replace(self, tiles=size)


Shape = TypeVar("Shape", RoundShape, PrefillShape)


class Variants:
    """The variants that are compiled, by shape."""

    def __init__(self) -> None:
        self._compiled: dict[RoundShape | PrefillShape, list[Variant]] = {}
        self._features: set[SamplingFeatures] = set()

    def add(self, shape: RoundShape | PrefillShape, variant: Variant) -> None:
        """Note that a program of this shape and variant is compiled."""
        self._features.add(variant.features)
        known = self._compiled.setdefault(shape, [])
        if variant not in known:
            known.append(variant)
            known.sort(key=lambda v: (v.passes, v.limits_drafts, v.arrays))

    def has(self, shape: RoundShape | PrefillShape, variant: Variant) -> bool:
        """Return whether a program of this shape and variant is compiled."""
        return variant in self._compiled.get(shape, ())

    def are_all_of(self, features: SamplingFeatures) -> bool:
        """Return whether every compiled variant has just these features."""
        return self._features <= {features}

    def knows(self, shape: RoundShape | PrefillShape) -> bool:
        """Return whether some program of this shape is compiled."""
        return shape in self._compiled

    def prefills(self) -> list[PrefillShape]:
        """Return the shapes of the prefill calls that are compiled."""
        return [s for s in self._compiled if isinstance(s, PrefillShape)]

    def serving(
        self,
        shape: RoundShape | PrefillShape,
        needed: Variant,
        *,
        arrays: ArrayShapes | None = None,
    ) -> Variant | None:
        """Return the variant with the fewest passes that is compiled and serves; None for none.

        arrays: those that the state has; a variant for these comes before others
        """
        found = [v for v in self._compiled.get(shape, ()) if v.serves(needed)]
        return min(found, key=lambda v: v.arrays != arrays, default=None)

    def smallest(self, least: Shape, needed: Variant) -> Shape:
        """Return the smallest compiled shape from this size on that serves; `least` for none."""
        found = [
            shape
            for shape in self._compiled
            if isinstance(shape, type(least))
            and shape.size >= least.size
            and shape.of_size(least.size) == least
            and self.serving(shape, needed)
        ]
        return min(found, key=lambda shape: shape.size, default=least)


def level_for(needed: Variant, layout: StateLayout, *, limits_drafts: bool) -> Variant:
    """Return the level with the fewest passes that serves; most later mixtures run in it as well.

    layout: what the requests need, as `needed` does
    limits_drafts: whether rounds have drafts that could be limited
    """
    features = next(level for level in ROUND_LEVELS if level.holds(needed.features))
    if is_shared(features):
        return full_variant(features, layout, limits_drafts=limits_drafts)
    return Variant.of(features, layout, limits_drafts=needed.limits_drafts)


def is_shared(features: SamplingFeatures) -> bool:
    """Return whether a level computes features that few of its requests use."""
    return bool(features.processors - TRUNCATED.processors)


def full_variant(
    features: SamplingFeatures, layout: StateLayout, *, limits_drafts: bool = False
) -> Variant:
    """Return the variant with these features that has room for every request."""
    return Variant.of(features, layout.full(features), limits_drafts=limits_drafts)
