"""The round is one program with donated caches that nothing copies, and it never calls the host."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import RoundConfig
from jaxspec.decode import programs
from jaxspec.decode import round as decode
from jaxspec.sampling.processors.penalties import PenaltiesState
from tests.support.slow import slow_unless
from tests.support.tiny import (
    METHODS,
    Model,
    agreeing_model,
    block_tables,
    random_prompts,
    sampling_state,
    start,
)

LENGTHS, K = (5, 9, 1), 3
# Operations that reach the host, in StableHLO and in optimised HLO (whose tables of file and
# function names may hold any word).
HOST = re.compile(
    r'custom_call @\w*callback|custom_call_target="\w*callback|'
    r"\b(?:infeed|outfeed|send|recv)\(|stablehlo\.(?:infeed|outfeed|send|recv)"
)


def lowered(cfg: RoundConfig, model: Model) -> tuple[Any, Any, tuple[np.ndarray, ...]]:
    tables, num_blocks = block_tables(
        3, cfg, shuffle_seed=0, guard=5
    )  # a pool larger than what attention gathers of it
    _, state = start(
        cfg,
        model.params,
        random_prompts(LENGTHS),
        sampling_state([1, 2, 3], 1.0),
        tables,
        num_blocks,
    )
    return (
        programs.round_program.jitted(cfg).lower(
            cfg, model.params, *programs.split_donated(state), tables
        ),
        state,
        tables,
    )


@pytest.mark.parametrize("method", slow_unless(["eagle3"], METHODS))
def test_the_round_is_one_program_with_donated_caches_and_no_host_callback(method: str) -> None:
    model = agreeing_model(method)
    cfg = model.round_config(K)
    program, state, tables = lowered(cfg, model)
    assert not HOST.search(program.as_text())
    compiled = program.compile()
    text = compiled.as_text()
    assert text.count("ENTRY ") == 1 and not HOST.search(text)

    caches = jax.tree.leaves((state.target_caches, state.draft.caches))
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(x.nbytes for x in caches)
    verification, after = programs.run_round(cfg, model.params, state, tables, "round")
    donated, rows = programs.split_donated(state)
    assert all(x.is_deleted() for x in jax.tree.leaves(donated)), "what is large is donated"
    assert not any(
        x.is_deleted() for x in jax.tree.leaves((verification, after, rows, model.params))
    )
    assert after.max_tokens is state.max_tokens, (
        "what a round leaves alone does not pass through it"
    )


def test_counts_of_the_whole_vocabulary_are_donated_as_well() -> None:
    model = agreeing_model("eagle")
    _, state, _ = lowered(model.round_config(K), model)
    assert programs.split_donated(state)[0].sampling is None
    ones, counts = jnp.ones(3), jnp.zeros((3, 7), jnp.int32)
    counting = replace(
        state,
        sampling=replace(
            state.sampling,
            processors={"penalties": PenaltiesState(ones, ones, ones, counts, counts > 0)},
        ),
    )
    donated, rows = programs.split_donated(counting)
    assert donated.sampling is counting.sampling and rows.sampling is None


def test_the_search_finds_a_host_callback() -> None:
    program = jax.jit(lambda x: jax.pure_callback(lambda y: y, x, x)).lower(np.ones(3, np.float32))
    compiled = program.compile().as_text()
    assert HOST.search(program.as_text()) and compiled and HOST.search(compiled)


def cache_copies(text: str, caches: list[jax.Array]) -> list[str]:
    """Lines of optimised HLO that copy a buffer as large as a cache, in whatever shape it is seen
    there."""
    sizes = {x.size for x in caches}
    found = []
    for line in text.splitlines():
        match = re.search(r"= f32\[([\d,]+)\]\S* copy\(", line)
        if match and np.prod([int(n) for n in match[1].split(",")]) in sizes:
            found.append(line.strip())
    return found


@pytest.mark.parametrize("method", slow_unless(["eagle"], METHODS))
def test_no_cache_is_copied(method: str) -> None:
    """In the optimised program; without donation there is a copy of every cache, so the search can
    find them."""
    model = agreeing_model(method)
    cfg = model.round_config(K)
    program, state, tables = lowered(cfg, model)
    caches = jax.tree.leaves((state.target_caches, state.draft.caches))
    assert not cache_copies(program.compile().as_text(), caches)
    kept = jax.jit(partial(decode.decode_round, cfg)).lower(model.params, state, tables).compile()
    assert len(cache_copies(kept.as_text(), caches)) >= len(caches)
    assert kept.memory_analysis().alias_size_in_bytes == 0


def test_no_cache_is_copied_by_a_plain_step_of_one_request() -> None:
    """One row to write: XLA likes to make that a choice between the old cache and the new one."""
    model = agreeing_model("eagle")
    cfg = model.round_config(0)
    tables, num_blocks = block_tables(1, cfg, guard=5)
    _, state = start(
        cfg, model.params, random_prompts((5,)), sampling_state([1], 1.0), tables, num_blocks
    )
    text = (
        programs.round_program.jitted(cfg)
        .lower(cfg, model.params, *programs.split_donated(state), tables)
        .compile()
        .as_text()
    )
    assert not cache_copies(text, jax.tree.leaves(state.target_caches))
