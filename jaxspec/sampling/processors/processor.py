"""The interface of a logits processor: one feature of SamplingParams in one file.

To add one, write its class in a file beside this one, list it in
jaxspec/sampling/processors/__init__.py, and give SamplingParams its field with the field's
validation. Everything else loops over that list.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.sampling.params import SamplingParams
from pallas_kernels.vocab_shards import WHOLE, VocabShards

State = TypeVar("State")


@dataclass(frozen=True)
class Vocabulary:
    """The target's vocabulary.

    size: number of tokens
    eos_token_ids: tokens that end a text unless a request ignores them
    """

    size: int
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class SampledRequest:
    """A request as the host knows it when its row of the state is made.

    params: token ids in range (SamplingParams.check_vocabulary)
    seed: an integer, of which the low 64 bits count
    prompt_token_ids: the prompt
    generated_token_ids: all tokens that a preempted request has generated, the token that is not
        cached yet included; empty for a new request
    """

    params: SamplingParams
    seed: int = 0
    prompt_token_ids: Sequence[int] = ()
    generated_token_ids: Sequence[int] = ()


@struct.dataclass
class Window:
    """The place of the rows of logits that a processor is applied to.

    positions:    int32 [batch]; row i predicts the token at positions + i
    draft_tokens: int32 [batch, rows - 1]; row i follows the drafts 0 .. i-1. None for one row
    shards:       how the rows are cut over devices
    """

    positions: jax.Array
    draft_tokens: jax.Array | None = None
    shards: VocabShards = WHOLE


Axes = tuple[str | None, ...]  # an array's logical axes (jaxspec.parallel.axes)


class LogitsProcessor(Protocol[State]):
    """One feature: which requests use it, its state on the device, and what it does to logits.

    State is a pytree of arrays whose first axis is the batch. State and operations exist only while
    some running request needs the processor. The rows of other requests are neutral. `init` makes
    such a row for any request that does not need the processor. `apply` keeps the logits of that
    request bit for bit (0 is 0, whatever its sign).

    name: key of the state in SamplingState.processors and member of SamplingFeatures.processors
    least_sizes: the sizes that a state has at least; their number is the number of axes whose size
        depends on the requests
    passes: how often `apply` reads or writes all logits on a GPU, about; of the programs that could
        run, the one with the fewest passes does (jaxspec.engine.variants)
    large_state: whether `observe` returns an array of the vocabulary's size. A round then writes
        the new array into the old one's memory (jaxspec.decode.programs)
    """

    name: ClassVar[str]
    passes: ClassVar[int]
    least_sizes: ClassVar[tuple[int, ...]] = ()
    large_state: ClassVar[bool] = False

    @abstractmethod
    def needs(self, params: SamplingParams) -> bool:
        """Return whether a request with these parameters uses the feature."""
        ...

    def sizes(self, params: SamplingParams, vocabulary: Vocabulary) -> tuple[int, ...]:
        """Return the sizes that the request's state has at least, such as its tokens of bad words.

        All rows share one shape, so `init` receives the largest sizes of the running requests.
        """
        return ()

    def most_sizes(self, vocabulary: Vocabulary) -> tuple[int, ...]:
        """Return sizes that hold every request (jaxspec.sampling.limits)."""
        return ()

    @abstractmethod
    def init(
        self, request: SampledRequest, vocabulary: Vocabulary, sizes: tuple[int, ...]
    ) -> State:
        """Return the request's row, NumPy arrays without the batch axis."""
        ...

    def axes(self, state: State) -> Any:
        """Return the logical axes (Axes) of each array of a state with its batch axis.

        A pytree of the state's structure. An axis that is as long as the vocabulary is "vocab", and
        cut as the logits are. All others are None.
        """
        return jax.tree.map(unsplit, state)

    def resize(self, state: State, sizes: tuple[int, ...]) -> State:
        """Return the state padded or cut to these sizes on the device.

        Rows of running requests keep their meaning: these sizes are at least their own.
        """
        return state

    @abstractmethod
    def apply(self, state: State, logits: jax.Array, window: Window) -> jax.Array:
        """Return processed float32 logits [batch, rows, vocab], the own piece of each row.

        Row i is processed as plain decoding would after the drafts 0 .. i-1, so a state that
        depends on generated tokens must count the drafts of the window as well.
        """
        ...

    def observe(self, state: State, tokens: jax.Array, shards: VocabShards) -> State:
        """Return the state after these committed tokens, int32 [batch, n] padded with -1."""
        return state


def is_axes(node: object) -> bool:
    """Return whether a node of a pytree is an array's Axes."""
    return type(node) is tuple and all(isinstance(axis, str | None) for axis in node)


def unsplit(array: jax.Array) -> Axes:
    """Return the logical axes of an array that each device holds whole."""
    return (None,) * array.ndim


def resized(rows: jax.Array, size: int) -> jax.Array:
    """Return int32 [batch, n] as [batch, size], cut or padded with -1 at the end of each row."""
    if rows.shape[1] == size:
        return rows
    more = max(0, size - rows.shape[1])
    return jnp.pad(rows[:, :size], ((0, 0), (0, more)), constant_values=-1)
