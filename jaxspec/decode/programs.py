"""The compilation modes: one program per round, one per draft step, or none at all.

All of them run the same functions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec import drafts
from jaxspec.cache.arrays import KVCache
from jaxspec.cache.metadata import BlockTables
from jaxspec.config import RoundConfig
from jaxspec.config.ops import XlaFlags
from jaxspec.decode.kept_jit import KeptJit
from jaxspec.decode.mailboxes import given_addresses, launching
from jaxspec.decode.packed import Packed, pack
from jaxspec.decode.prefill import prefill
from jaxspec.decode.round import decode_round, verify_and_commit
from jaxspec.decode.slots import ended_rows, spread_rows, with_rows
from jaxspec.decode.spread import EVERYWHERE, Specs, spread
from jaxspec.decode.state import DecodeState, draft_context
from jaxspec.decode.verify import Verification
from jaxspec.drafts.drafter import DraftPart, PromptChunk
from jaxspec.drafts.ngram import NgramState
from jaxspec.layers.params import Params
from jaxspec.sampling.logits import has_large_state
from jaxspec.sampling.state import SamplingState


class Program:
    """A function(cfg, *args) that is compiled once for each set of compiler options of cfg.

    It runs on the devices of cfg.placement. The first `static` arguments are static, and argument
    `donate` is donated.

    results: see spread
    options: the compiler options of a cfg
    """

    def __init__(
        self,
        function: Callable[..., Any],
        donate: int,
        static: int = 1,
        results: Callable[[tuple[Specs, ...]], Specs] | None = None,
        options: Callable[[RoundConfig], XlaFlags] = lambda cfg: cfg.compiler_options,
    ) -> None:
        self.function = spread(function, static, results)
        self._named_as = function
        self._options = options
        self._donate, self._static = donate, static
        self._made: dict[XlaFlags, KeptJit] = {}

    def __call__(self, cfg: RoundConfig, *args: Any) -> Any:
        with launching(cfg), matmul_precision(cfg):
            return self._of(cfg)(cfg, *args, **given_addresses(cfg))

    def compile(self, cfg: RoundConfig, *args: Any) -> None:
        """Compile for arguments of these shapes; a later call with such arguments runs at once.

        args: arrays, or a ShapeDtypeStruct for each. Nothing is computed and nothing is donated.
        """
        with matmul_precision(cfg):
            self._of(cfg).compile(cfg, *args, **given_addresses(cfg))

    def jitted(self, cfg: RoundConfig) -> Any:
        """Return the jitted function with the compiler options of cfg, its first argument."""
        return self._of(cfg).jitted

    def cache_size(self) -> int:
        """Return the number of compiled programs."""
        return sum(made.cache_size() for made in self._made.values())

    def _of(self, cfg: RoundConfig) -> KeptJit:
        options = self._options(cfg)
        if options not in self._made:
            made = KeptJit(
                self.function,
                donate=self._donate,
                static=self._static,
                options=options,
                told_by=-1,  # the block tables, the host's arrays: what changes from call to call
                named_as=self._named_as,
            )
            return self._made.setdefault(options, made)  # another thread may be faster
        return self._made[options]


def matmul_precision(cfg: RoundConfig) -> contextlib.AbstractContextManager[object]:
    """Return the context in which programs are traced and found: Ops.full_float32.

    A precision that the caller has chosen in jax's settings stays.
    """
    chosen = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    if cfg.ops.full_float32 and chosen is None:
        return jax.default_matmul_precision("highest")
    return contextlib.nullcontext()


@struct.dataclass
class DonatedBuffers:
    """The large arrays of a state, which a round writes in place.

    Small arrays are not donated. XLA copies a donated array that is still read when its memory is
    written, and one that the program returns unchanged. A copy costs about 2 us per launch on an
    H200.

    draft:    fields of the drafter's state: its caches, and those that it calls LARGE
    sampling: the whole sampling state, where a logits processor keeps [batch, vocab]; else None
    text:     as in DecodeState
    """

    target_caches: KVCache
    draft: dict[str, Any]
    sampling: SamplingState | None
    text: NgramState | None = None


def split_donated(state: DecodeState) -> tuple[DonatedBuffers, DecodeState]:
    """Return the buffers that a round writes in place, and the state without them."""
    draft, draft_buffers = state.draft, {}
    if draft is not None:
        names = ("caches", *draft.LARGE)
        draft_buffers = {name: getattr(draft, name) for name in names}
        draft = replace(draft, **dict.fromkeys(names))
    is_large = has_large_state(state.sampling)
    buffers = DonatedBuffers(
        state.target_caches, draft_buffers, state.sampling if is_large else None, state.text
    )
    sampling = None if is_large else state.sampling
    rest = replace(state, target_caches=None, draft=draft, sampling=sampling, text=None)  # type: ignore[arg-type]
    return buffers, rest


def join_donated(buffers: DonatedBuffers, rest: DecodeState) -> DecodeState:
    """Put the two parts of split_donated together again."""
    draft = None if rest.draft is None else replace(rest.draft, **buffers.draft)
    sampling = rest.sampling if buffers.sampling is None else buffers.sampling
    return replace(
        rest,
        target_caches=buffers.target_caches,
        draft=draft,
        sampling=sampling,
        text=buffers.text,
    )


def decode_round_in_place(
    cfg: RoundConfig,
    params: Params,
    buffers: DonatedBuffers,
    rest: DecodeState,
    block_tables: BlockTables,
) -> tuple[Verification, DonatedBuffers, DecodeState]:
    """Run decode_round on a state in two parts; the buffers are donated.

    The rest of the successor holds None for each array that the round does not change, so that the
    program neither copies nor returns it.
    """
    state = join_donated(buffers, rest)
    verification, state = decode_round(cfg, params, state, block_tables)
    buffers, after = split_donated(state)
    changed = jax.tree.map(lambda new, old: None if new is old else new, after, rest)
    return verification, buffers, changed


def _run_round(
    cfg: RoundConfig, params: Params, state: DecodeState, block_tables: BlockTables
) -> tuple[Verification, DecodeState]:
    buffers, rest = split_donated(state)
    verification, buffers, changed = round_program(cfg, params, buffers, rest, block_tables)
    rest = jax.tree.map(
        lambda new, old: old if new is None else new, changed, rest, is_leaf=lambda x: x is None
    )
    return verification, join_donated(buffers, rest)


def compile_round(
    cfg: RoundConfig, params: Params, state: DecodeState, block_tables: BlockTables
) -> None:
    """Compile the program of one round for these shapes; see Program.compile."""
    round_program.compile(cfg, params, *split_donated(state), block_tables)


def prefill_packed(
    cfg: RoundConfig, params: Params, state: DecodeState, inputs: Packed
) -> tuple[Verification, DecodeState]:
    """Run prefill on arrays that the host has packed; see run_prefill."""
    block_tables, chunk, prompts = inputs.unpack()
    if prompts is None:
        return prefill(cfg, params, state, block_tables, chunk)
    rows, ending = prompts
    processors = spread_rows(state.sampling.processors, ending, chunk.num_tokens.shape[0])
    state = with_rows(state, rows, processors)
    verification, state = prefill(cfg, params, state, block_tables, chunk)
    return verification, ended_rows(state, ending)


def result_and_state(arguments: tuple[Specs, ...]) -> Specs:
    """Return the partition of (Verification, state), for arguments (params, state, ...)."""
    return EVERYWHERE, arguments[1]


def result_and_rows(arguments: tuple[Specs, ...]) -> Specs:
    """Return the partition of (Verification, state); the argument may be without_rows."""
    state = arguments[1]
    draft = None if state.draft is None else _filled(state.draft)
    return EVERYWHERE, replace(_filled(state), draft=draft, sampling=_filled(state.sampling))


def _filled(specs: Any) -> Any:
    """The partition of a dataclass whose fields without one are whole on each device."""
    missing = [f.name for f in fields(specs) if getattr(specs, f.name) is None]
    return replace(specs, **dict.fromkeys(missing, EVERYWHERE))


def result_and_parts(arguments: tuple[Specs, ...]) -> Specs:
    """Return the partition of decode_round_in_place's results."""
    return EVERYWHERE, arguments[1], EVERYWHERE


prefill_program = Program(
    prefill_packed,
    donate=2,
    results=result_and_rows,
    options=lambda cfg: cfg.prefill_options,
)
round_program = Program(decode_round_in_place, donate=2, results=result_and_parts)
verify_program = Program(verify_and_commit, donate=2, results=result_and_state)
_eager_round = spread(decode_round, 1, result_and_state)
_eager_prefill = spread(prefill_packed, 1, result_and_rows)


@functools.cache
def draft_part_program(part: DraftPart) -> Program:
    """The program of one draft part, named after it; its carry is donated."""
    return Program(part, donate=4)


def _step_by_step(
    cfg: RoundConfig, params: Params, state: DecodeState, block_tables: BlockTables
) -> tuple[Verification, DecodeState]:
    if cfg.num_speculative_tokens == 0:
        return _run_round(cfg, params, state, block_tables)
    assert cfg.draft is not None
    context, carry = draft_context(cfg, state, block_tables), state.draft
    for index, part in enumerate(drafts.drafter(cfg.draft).parts(cfg)):
        carry = draft_part_program(part)(cfg, params["draft"], context, np.int32(index), carry)
    state = replace(state, draft=carry.state)
    return verify_program(cfg, params, state, block_tables, carry.proposal)


def run_round(
    cfg: RoundConfig, params: Params, state: DecodeState, block_tables: Any, compilation: str
) -> tuple[Verification, DecodeState]:
    """Run one round in a compilation mode.

    compilation: "round" (one executable), "step" (one for each draft step) or "eager"
    """
    if compilation == "eager":
        with jax.disable_jit(), matmul_precision(cfg):
            return _eager_round(cfg, params, state, jax.tree.map(jnp.asarray, block_tables))
    if compilation == "step":
        return _step_by_step(cfg, params, state, block_tables)
    return _run_round(cfg, params, state, block_tables)


def run_prefill(
    cfg: RoundConfig,
    params: Params,
    state: DecodeState,
    block_tables: BlockTables,
    chunk: PromptChunk,
    prompts: tuple[DecodeState, np.ndarray] | None = None,
    *,
    compilation: str,
) -> tuple[Verification, DecodeState]:
    """Run one prefill chunk in the given compilation mode; see prefill.

    block_tables, chunk: NumPy arrays
    prompts: (rows of slots.prefill_rows, ending of slots.spread_rows), for a state of
        slots.without_rows. The state that comes back has the rows of slots.ended_rows.
        None: the state has its rows, and they come back.
    """
    inputs = pack((block_tables, chunk, prompts))
    if compilation == "eager":
        with jax.disable_jit(), matmul_precision(cfg):
            return _eager_prefill(cfg, params, state, jax.tree.map(jnp.asarray, inputs))
    return prefill_program(cfg, params, state, inputs)


def compile_prefill(
    cfg: RoundConfig,
    params: Params,
    state: DecodeState,
    block_tables: BlockTables,
    chunk: PromptChunk,
    prompts: tuple[DecodeState, np.ndarray],
) -> None:
    """Compile the program of a prefill chunk for these shapes; see Program.compile."""
    prefill_program.compile(cfg, params, state, pack((block_tables, chunk, prompts)))
