"""The compilation modes run the same functions: identical tokens and identical counts."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxspec.decode import programs
from tests.support.compilations import counting_compilations
from tests.support.tiny import (
    agreeing_model,
    block_tables,
    generate,
    random_prompts,
    sampling_state,
    start,
)

LENGTHS, K = (5, 9, 1), 5


@pytest.mark.parametrize(("method", "rule"), [("eagle", "probabilistic"), ("eagle3", "block")])
def test_round_and_step_give_identical_tokens_and_counts(method: str, rule: str) -> None:
    """A greedy and two sampled requests, K = 5."""
    model, prompts = agreeing_model(method), random_prompts(LENGTHS)
    cfg = model.round_config(K, rule=rule)
    sampling = sampling_state([1, 2, 3], (0.0, 0.8, 1.0))
    runs = [
        generate(cfg, model.params, prompts, sampling, max_tokens=20, compilation=mode)
        for mode in ("round", "step")
    ]
    assert runs[0].token_ids == runs[1].token_ids
    assert runs[0].accepted == runs[1].accepted
    assert runs[0].mean_acceptance_length > 1.3


def test_eager_gives_the_same_tokens_and_counts() -> None:
    model, prompts = agreeing_model("eagle"), random_prompts(LENGTHS)
    cfg = model.round_config(2, rule="probabilistic")  # each step takes a second, uncompiled
    sampling = sampling_state([1, 2, 3], (0.0, 0.8, 1.0))
    tables, num_blocks = block_tables(3, cfg)
    rounds = []
    for mode in ("round", "eager"):
        _, state = start(cfg, model.params, prompts, sampling, tables, num_blocks)
        verification, state = programs.run_round(cfg, model.params, state, tables, mode)
        rounds.append(jax.tree.map(np.asarray, verification))
    compiled, eager = rounds
    np.testing.assert_array_equal(compiled.output_tokens, eager.output_tokens)
    np.testing.assert_array_equal(compiled.num_sampled, eager.num_sampled)
    assert compiled.num_sampled.max() > 1


def test_step_mode_compiles_one_program_for_all_later_steps() -> None:
    """First step, next step (for steps 1 .. 4), verify and commit: three programs, and none in the
    round after.

    The steps' programs are those of the draft's two parts.
    """
    model = agreeing_model("eagle")
    cfg = model.round_config(K, max_model_len=68)  # a shape that no other test uses
    tables, num_blocks = block_tables(3, cfg)
    _, state = start(
        cfg, model.params, random_prompts(LENGTHS), sampling_state([1, 2, 3]), tables, num_blocks
    )
    with counting_compilations() as compiled:
        _, state = programs.run_round(cfg, model.params, state, tables, "step")
    names = ("first_draft_step", "next_draft_step", "verify_and_commit")
    for name in names:
        assert len([program for program in compiled if name in program]) == 1, compiled
    with counting_compilations() as compiled:
        programs.run_round(cfg, model.params, state, tables, "step")
    assert not compiled


def launches(trace_folder: str) -> int:
    """How many executables a profile saw the CPU client run."""
    (path,) = Path(trace_folder).rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(path))
    return sum(
        "ExecuteHelper" in event.name
        for plane in data.planes
        for line in plane.lines
        for event in line.events
    )


def test_a_decode_only_round_launches_one_program(tmp_path: Path) -> None:
    """Counted in a profile, the host's block table being NumPy; step mode's count shows that the
    profile sees them."""
    model = agreeing_model("eagle")
    cfg = model.round_config(K, rule="probabilistic")
    tables, num_blocks = block_tables(3, cfg)
    assert all(isinstance(table, np.ndarray) for table in tables)
    seen = {}
    for mode in ("round", "step"):
        _, state = start(
            cfg,
            model.params,
            random_prompts(LENGTHS),
            sampling_state([1, 2, 3]),
            tables,
            num_blocks,
        )
        _, state = programs.run_round(cfg, model.params, state, tables, mode)
        jax.block_until_ready(state)
        with jax.profiler.trace(str(tmp_path / mode)):
            verification, state = programs.run_round(cfg, model.params, state, tables, mode)
            jax.block_until_ready((verification, state))
        seen[mode] = launches(str(tmp_path / mode))
    assert seen["round"] == 1
    assert seen["step"] >= 6  # the first step, four later ones, verify and commit
