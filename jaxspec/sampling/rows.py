"""The host's half of sampling: what a batch of requests needs, and its rows of a SamplingState."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import SamplingFeatures
from jaxspec.sampling.logits import state_axes
from jaxspec.sampling.params import SamplingParams, end_token_ids, most_end_token_ids
from jaxspec.sampling.processors import PROCESSORS
from jaxspec.sampling.processors.processor import SampledRequest, Vocabulary, is_axes
from jaxspec.sampling.state import SamplingState

GREEDY_PARAMS = SamplingParams(temperature=0)
IDLE = SampledRequest(GREEDY_PARAMS)


def features_of(requests: Iterable[SamplingParams]) -> SamplingFeatures:
    """Return what the rounds of a batch of these requests must compute."""
    requests = list(requests)
    return SamplingFeatures(
        sampled=any(not params.greedy for params in requests),
        processors=frozenset(p.name for p in PROCESSORS if any(map(p.needs, requests))),
        logprobs=any(params.logprobs is not None for params in requests),
        all_logprobs=any(params.logprobs == -1 for params in requests),
        prompt_logprobs=any(params.prompt_logprobs is not None for params in requests),
    )


STOPS = "stop_token_ids"  # DecodeState.stop_token_ids among the sizes of a StateLayout
SIZED = tuple(p for p in PROCESSORS if p.least_sizes)
Sizes = Mapping[str, tuple[int, ...]]
Shapes = tuple[tuple[str, tuple[int, ...]], ...]


def _least_sizes() -> Sizes:
    return {p.name: p.least_sizes for p in PROCESSORS} | {STOPS: (4,)}


def _most_sizes(vocabulary: Vocabulary) -> Sizes:
    sizes = {p.name: p.most_sizes(vocabulary) for p in PROCESSORS}
    return sizes | {STOPS: (most_end_token_ids(vocabulary.eos_token_ids),)}


@dataclass(frozen=True)
class StateLayout:
    """Structure and shapes that all rows of a SamplingState share.

    vocabulary: the target's
    held: names of the processors that the state has
    sizes: for the name of each processor, whether held or not, the sizes that its state has once
        held (LogitsProcessor.sizes); for STOPS the columns of DecodeState.stop_token_ids
    least: sizes that are kept when no request needs them
    """

    vocabulary: Vocabulary
    held: frozenset[str] = frozenset()
    sizes: Sizes = field(default_factory=_least_sizes)
    least: Sizes = field(default_factory=_least_sizes)

    def fit(
        self, features: SamplingFeatures, requests: Iterable[SamplingParams] = ()
    ) -> StateLayout:
        """Return the layout for a batch of just these requests, which need these features.

        Sizes are powers of two, so that few programs compile. They grow at once. They shrink where
        these requests need a quarter or less, and back to `least`, whose programs are compiled.
        """
        needed = self._needed(requests)
        sizes = {
            name: tuple(map(_fitted, self.sizes[name], needed[name], self.least[name]))
            for name in needed
        }
        return replace(self, held=features.processors, sizes=sizes)

    def hold(self, features: SamplingFeatures) -> StateLayout:
        """Return the layout with the processors of these features and the sizes that it has."""
        return replace(self, held=features.processors)

    def grown(self, requests: Iterable[SamplingParams]) -> StateLayout:
        """Return the layout with room for these requests as well."""
        needed = self._needed(requests)
        sizes = {name: tuple(map(max, self.sizes[name], needed[name])) for name in needed}
        return replace(self, sizes=sizes)

    def has_room(self, params: SamplingParams) -> bool:
        """Return whether the state's arrays, once held, have room for a request."""
        (stops,) = self.sizes[STOPS]
        if len(end_token_ids(params, self.vocabulary.eos_token_ids)) > stops:
            return False
        return all(
            n <= m
            for p in SIZED
            if p.needs(params)
            for n, m in zip(p.sizes(params, self.vocabulary), self.sizes[p.name], strict=True)
        )

    def full(self, features: SamplingFeatures) -> StateLayout:
        """Return the layout of these features with room for every request that limits allow."""
        most = _most_sizes(self.vocabulary)
        return replace(self, held=features.processors, sizes=most, least=most)

    @property
    def is_full(self) -> bool:
        """Whether the state has room for every request that limits allow."""
        most = _most_sizes(self.vocabulary)
        return all(self.sizes[name] == most[name] for name in (STOPS, *self.held))

    @property
    def shapes(self) -> Shapes:
        """The sizes that tell the arrays of one layout from those of another; hashable."""
        return tuple((name, self.sizes[name]) for name in (STOPS, *sorted(self.held)))

    def with_stops(self, columns: int) -> StateLayout:
        """Return the layout of a state whose stop_token_ids have so many columns."""
        return replace(self, sizes={**self.sizes, STOPS: (columns,)})

    def with_room(self, requests: Iterable[SamplingParams]) -> StateLayout:
        """Return the layout with room for these requests, which it keeps when they are gone."""
        return replace(self, least=self._needed(requests))

    def has_shapes_of(self, other: StateLayout) -> bool:
        """Return whether states of both layouts have the same arrays."""
        return self.held == other.held and all(
            self.sizes[name] == other.sizes[name] for name in (STOPS, *self.held)
        )

    def _needed(self, requests: Iterable[SamplingParams]) -> Sizes:
        """The sizes that these requests need, at least `least`."""
        eos = self.vocabulary.eos_token_ids
        most = {name: list(sizes) for name, sizes in self.least.items()}
        most[STOPS] = [max(*most[STOPS], len(eos))]
        for params in {id(each): each for each in requests}.values():  # many have the same
            most[STOPS] = [max(*most[STOPS], len(end_token_ids(params, eos)))]
            for processor in SIZED:
                sizes = processor.sizes(params, self.vocabulary)
                most[processor.name] = list(map(max, most[processor.name], sizes))
        limit = _most_sizes(self.vocabulary)
        return {
            name: tuple(map(min, map(_power_of_two, sizes), limit[name]))
            for name, sizes in most.items()
        }


def _fitted(size: int, needed: int, least: int) -> int:
    """The next size of an axis that has `size` and needs `needed`, which is at least `least`."""
    return needed if needed > size or 4 * needed <= size or needed == least else size


def sampling_rows(
    layout: StateLayout, requests: Sequence[SampledRequest], *, batch: int | None = None
) -> SamplingState:
    """Return NumPy rows of these requests, then idle rows up to `batch`.

    The structure depends on the layout alone, which may hold more than these requests need.
    """
    idle = (batch or len(requests)) - len(requests)
    everyone = [*requests, *[IDLE] * idle]
    keys = [(r.seed >> 32 & 0xFFFFFFFF, r.seed & 0xFFFFFFFF) for r in everyone]
    processors = {}
    if layout.held:
        rows = [_processor_states(layout, request) for request in requests]
        if idle:
            rows += [_processor_states(layout, IDLE)] * idle
        processors = jax.tree.map(lambda *x: np.stack(x), *rows)
    return SamplingState(
        keys=np.asarray(keys, np.uint32),  # type: ignore[arg-type]
        temperature=np.asarray([r.params.temperature for r in everyone], np.float32),  # type: ignore[arg-type]
        processors=processors,
    )


def _processor_states(layout: StateLayout, request: SampledRequest) -> dict[str, Any]:
    """The row of one request, without the batch axis."""
    return {
        p.name: p.init(request, layout.vocabulary, layout.sizes[p.name])
        for p in PROCESSORS
        if p.name in layout.held
    }


def most_slot_bytes(vocabulary: Vocabulary, pieces: int = 1) -> int:
    """Return the bytes of a slot of a SamplingState with room for every request, on a device.

    pieces: number of devices that share the vocabulary
    """
    every = SamplingFeatures(processors=frozenset(p.name for p in PROCESSORS))
    slot = sampling_rows(StateLayout(vocabulary).full(every), [IDLE])
    axes = jax.tree.leaves(state_axes(slot), is_leaf=is_axes)
    arrays = zip(jax.tree.leaves(slot), axes, strict=True)
    return sum(x.nbytes // (pieces if "vocab" in of else 1) for x, of in arrays)


def change_layout(sampling: SamplingState, layout: StateLayout) -> SamplingState:
    """Return a device's state with the processors and the sizes of another layout.

    Processors that are new get neutral rows; those that the layout does not hold are dropped.
    Running requests keep what they use, so the host need not know what the rounds in flight have
    generated.
    """
    batch = sampling.temperature.shape[0]
    neutral = sampling_rows(layout, [IDLE]).processors

    states = {}
    for processor in PROCESSORS:
        name = processor.name
        if name in sampling.processors and name in layout.held:
            states[name] = processor.resize(sampling.processors[name], layout.sizes[name])
        elif name in layout.held:
            states[name] = jax.tree.map(lambda row: repeated(row, batch), neutral[name])
    return replace(sampling, processors=states)


@partial(jax.jit, static_argnums=1)
def repeated(row: jax.Array, batch: int) -> jax.Array:
    """[1, ...] -> [batch, ...]; of a NumPy array, one row crosses to the device."""
    return jnp.broadcast_to(row, (batch, *row.shape[1:]))


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n, 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()
