"""The compilation modes run the same functions: a whole round as one program, a program a draft step, or none at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache.metadata import BlockTables
from jaxspec.config import RoundConfig
from jaxspec.decode.prefill import prefill
from jaxspec.decode.round import decode_round, verify_and_commit
from jaxspec.decode.state import DecodeState, draft_inputs
from jaxspec.decode.verify import Verification
from jaxspec.drafts.autoregressive import DraftInputs, first_step, next_step
from jaxspec.layers.params import Params
from jaxspec.sampling.logits import has_large_state


class Program:
    """function(cfg, *args) compiled with the first `static` arguments static, argument `donate` donated, and the compiler options that cfg
    asks for."""

    def __init__(self, function: Callable[..., Any], donate: int, static: int = 1) -> None:
        self._function, self._donate, self._static = function, donate, tuple(range(static))
        self._compiled: dict[tuple[tuple[str, Any], ...], Any] = {}

    def __call__(self, cfg: RoundConfig, *args: Any) -> Any:
        return self.jitted(cfg)(cfg, *args)

    def jitted(self, cfg: RoundConfig) -> Any:
        """jax.jit's function, with the options of cfg, which it takes first."""
        options = cfg.compiler_options
        if options not in self._compiled:
            self._compiled[options] = jax.jit(
                self._function,
                static_argnums=self._static,
                donate_argnums=self._donate,
                compiler_options=dict(options) or None,
            )
        return self._compiled[options]

    def cache_size(self) -> int:
        """How many programs were compiled."""
        return sum(compiled._cache_size() for compiled in self._compiled.values())


def _draft_first_step(
    cfg: RoundConfig, params: Params, state: DecodeState, block_tables: BlockTables
) -> tuple[Any, DraftInputs, DecodeState]:
    inputs = draft_inputs(state, cfg.draft_table(block_tables))
    carry = first_step(cfg, params["draft"], inputs, state.draft_caches)
    return carry, inputs, replace(state, draft_caches=())


# Of a state, what a round is given to write into. Donating the small arrays too would cost a launch of about 2 us each: XLA copies what is
# still read when its memory is written, and what goes out as it came in.
DONATED = ("target_caches", "draft_caches", "pending_hidden")


def take_apart(state: DecodeState) -> tuple[dict[str, Any], DecodeState]:
    """What is donated to a round, and the state without it."""
    names = (*DONATED, "sampling") if has_large_state(state.sampling) else DONATED
    return {name: getattr(state, name) for name in names}, replace(state, **dict.fromkeys(names))


def decode_round_of_parts(
    cfg: RoundConfig,
    params: Params,
    donated: dict[str, Any],
    rows: DecodeState,
    block_tables: BlockTables,
) -> tuple[Verification, dict[str, Any], DecodeState]:
    """decode_round of a state taken apart; None stands for the rows' arrays that it leaves alone."""
    verification, state = decode_round(cfg, params, replace(rows, **donated), block_tables)
    donated, after = take_apart(state)
    return (
        verification,
        donated,
        jax.tree.map(lambda new, old: None if new is old else new, after, rows),
    )


def _run_round(
    cfg: RoundConfig, params: Params, state: DecodeState, block_tables: BlockTables
) -> tuple[Verification, DecodeState]:
    donated, rows = take_apart(state)
    verification, donated, changed = round_program(cfg, params, donated, rows, block_tables)
    rows = jax.tree.map(
        lambda new, old: old if new is None else new, changed, rows, is_leaf=lambda x: x is None
    )
    return verification, replace(rows, **donated)


prefill_program = Program(prefill, donate=2)
round_program = Program(decode_round_of_parts, donate=2)
verify_program = Program(verify_and_commit, donate=2)
first_step_program = Program(_draft_first_step, donate=2)
next_step_program = Program(next_step, donate=4)


def _step_by_step(
    cfg: RoundConfig, params: Params, state: DecodeState, block_tables: BlockTables
) -> tuple[Verification, DecodeState]:
    if cfg.num_speculative_tokens == 0:
        return _run_round(cfg, params, state, block_tables)
    carry, inputs, state = first_step_program(cfg, params, state, block_tables)
    for step in range(1, cfg.num_speculative_tokens):
        carry = next_step_program(cfg, params["draft"], inputs, np.int32(step), carry)
    return verify_program(
        cfg, params, replace(state, draft_caches=carry.caches), block_tables, carry.proposal
    )


def run_round(
    cfg: RoundConfig, params: Params, state: DecodeState, block_tables: Any, compilation: str
) -> tuple[Verification, DecodeState]:
    """One round in the given compilation mode: "round" (one executable), "step" (one a draft step) or "eager"."""
    if compilation == "eager":
        with jax.disable_jit():
            return decode_round(cfg, params, state, jax.tree.map(jnp.asarray, block_tables))
    if compilation == "step":
        return _step_by_step(cfg, params, state, block_tables)
    return _run_round(cfg, params, state, block_tables)


def run_prefill(
    cfg: RoundConfig, params: Params, state: DecodeState, *args: Any, compilation: str
) -> tuple[Verification, DecodeState]:
    """One prefill chunk in the given compilation mode; args as `prefill` takes them after the state."""
    if compilation == "eager":
        with jax.disable_jit():
            return prefill(cfg, params, state, *jax.tree.map(jnp.asarray, args))
    return prefill_program(cfg, params, state, *args)
