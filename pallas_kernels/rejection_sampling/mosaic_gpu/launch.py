"""A batch of rejection sampling as its kernels see it, and how each kernel is launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import warpgroup_kernel
from pallas_kernels.pieces import LANES, Pieces
from pallas_kernels.rejection_sampling.inputs import Rule
from pallas_kernels.types import Ref
from pallas_kernels.vocab_shards import WHOLE, VocabShards


@dataclass(frozen=True)
class Problem:
    """Static description of a batch. Rows of all requests lie below each other.

    sweep:          pieces of a target's row in the pass over all rows
    draw:           pieces of a target's row where noise or q is read too
    draft_sweep:    pieces of a draft's row in the pass over all rows; None: one-hot drafts
    accept_stream, recover_stream: number of the random stream (noise.Stream); None: numbers are
                    given
    shards:         how the rows are cut over devices; `sweep`, `draw` and `draft_sweep` cut the own
                    piece of a row
    gathers_draft:  whether `draft` becomes whole rows for the kernels that read it at the target's
                    ids
    one_draft_row:  whether these rows are only the rejected drafts', one for each request
    """

    batch: int
    K: int
    rule: Rule
    sampled: bool
    sweep: Pieces
    draw: Pieces
    draft_sweep: Pieces | None = None
    accept_stream: int | None = None
    recover_stream: int | None = None
    shards: VocabShards = WHOLE
    gathers_draft: bool = False
    one_draft_row: bool = False

    @property
    def rows(self) -> int:
        return self.K + 1

    @property
    def vocab(self) -> int:
        """Size of the target's vocabulary."""
        return self.shards.total(self.sweep.vocab)

    @property
    def draft_width(self) -> int:
        """Logits of a draft's row that is read at the target's ids."""
        assert self.draft_sweep is not None
        width = self.draft_sweep.vocab
        return self.shards.total(width) if self.gathers_draft else width


TARGET, DRAFT = 0, 1  # columns of `first_ids`, the first ids of the own pieces

Arrays = dict[str, jax.Array | None]  # inputs of a kernel by name; None: not given


class Refs(SimpleNamespace):
    """A kernel's inputs and outputs by name; an input that is not given is None."""

    # Any: a name may be None, and each kernel knows which of its names are given.
    def __getattr__(self, name: str) -> Any:
        return None


def first_id(problem: Problem, refs: Refs) -> jax.Array | None:
    """Return the id of the first token of the own piece; None for whole rows, where it is 0."""
    return None if problem.shards.is_whole else refs.first_ids[TARGET]


def partials(rows: int, *dtypes: DTypeLike) -> list[jax.ShapeDtypeStruct]:
    """Return types of partial results, one for each piece of a row: [rows, LANES] of every dtype.

    Lanes past the last piece are never written.
    """
    return [jax.ShapeDtypeStruct((rows, LANES), dtype) for dtype in dtypes]


def launch(
    kernel_name: str,
    body: Callable[[Refs, jax.Array], None],
    grid: int,
    inputs: Arrays,
    outputs: dict[str, jax.ShapeDtypeStruct],
    approximate: bool = False,
) -> dict[str, jax.Array]:
    """Run body(refs, block) for every block of the grid, one warpgroup each."""
    present = {name: array for name, array in inputs.items() if array is not None}
    names = [*present, *outputs]

    def of_block(*refs: Ref) -> None:
        body(Refs(**dict(zip(names, refs, strict=True))), lax.axis_index("block"))

    results = warpgroup_kernel.launch(
        kernel_name,
        of_block,
        grid,
        tuple(present.values()),
        tuple(outputs.values()),
        launches_next=True,
        approximate=approximate,
    )
    return dict(zip(outputs, results, strict=True))
