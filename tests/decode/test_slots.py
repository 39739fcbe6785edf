"""Rows of the resident state: moved, filled and cleared; drafts limited row by row; rounds without
drafts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decode import programs, slots
from jaxspec.decode import state as decode_state
from jaxspec.decode.round import allowed_drafts, limit_drafts
from jaxspec.drafts.autoregressive import Proposal
from tests.support.tiny import (
    agreeing_model,
    block_tables,
    pad_chunk,
    random_prompts,
    sampling_state,
    start,
)

K = 3


def test_moved_rows_bring_everything_and_the_others_are_idle() -> None:
    model = agreeing_model("eagle")
    cfg = model.round_config(K)
    tables, num_blocks = block_tables(3, cfg)
    _, state = start(
        cfg,
        model.params,
        random_prompts((5, 9, 1)),
        sampling_state([1, 2, 3], 0.7),
        tables,
        num_blocks,
    )
    rows = slots.without_caches(state)
    moved = slots.move(rows, np.asarray([2, -1, 0, -1], np.int32))
    assert moved.active.tolist() == [True, False, True, False]
    for new, old in ((0, 2), (2, 0)):
        jax.tree.map(
            lambda x, y, new=new, old=old: np.testing.assert_array_equal(x[new], y[old]),
            moved,
            rows,
        )
    ended = slots.deactivate(moved.active, np.asarray([True, False, False, False]))
    assert ended.tolist() == [False, False, True, False]


def test_only_prompts_that_end_come_back() -> None:
    model = agreeing_model("eagle")
    cfg = model.round_config(K)
    tables, num_blocks = block_tables(3, cfg)
    _, state = start(
        cfg, model.params, random_prompts((5, 9, 1)), sampling_state([1, 2, 3]), tables, num_blocks
    )
    rows = slots.without_caches(state)
    at = np.asarray([3, 1], np.int32)  # 3 rows: the first is of no prompt
    taken = slots.take({"rows": rows}, at)["rows"]
    assert taken.next_token[1] == rows.next_token[1]
    taken = replace(taken, active=jnp.zeros_like(taken.active))
    before = [np.asarray(x) for x in jax.tree.leaves(rows)]
    after = slots.put_back(rows, at, replace(taken, next_token=taken.next_token + 100))
    assert after.next_token.tolist() == [before[1][0], before[1][1] + 100, before[1][2]]
    assert after.active.tolist() == [True, False, True]


@pytest.mark.parametrize("compilation", ["round", "eager"])
def test_prefill_makes_the_same_of_rows_that_the_host_has(compilation: str) -> None:
    """The second request was preempted after two tokens; the third ends at its first one.

    The rows come back in the order of `ending`, whose last entry is of no prompt.
    """
    model = agreeing_model("eagle3")
    cfg = model.round_config(K, max_num_verify_tokens=8)
    tables, num_blocks = block_tables(3, cfg)
    chunk = pad_chunk(random_prompts((5, 9, 2)), 0, 9)
    ints = partial(np.asarray, dtype=np.int32)
    own: Any = {
        "next_token": ints([0, 7, 0]),
        "num_generated": ints([0, 2, 0]),
        "max_tokens": ints([9, 8, 1]),
        "stop_token_ids": ints([[1, -1], [-1, -1], [2, 3]]),
        "draft_limit": ints([K, 1, 2]),
    }
    sampling = jax.tree.map(np.asarray, sampling_state([1, 2, 3], 0.7))
    results = []
    for of_host in (False, True):
        state = decode_state.init_state(
            cfg,
            sampling_state([1, 2, 3], 0.7),
            jnp.asarray(own["max_tokens"]),
            jnp.asarray(own["stop_token_ids"]),
            num_blocks,
            dtype=jnp.float32,
            cache_dtype=jnp.float32,
        )
        prompts = None
        if of_host:
            rows = slots.prefill_rows(state, slots.PromptRows(**own, sampling=sampling))
            prompts = rows, ints([2, 0, 1, 3])
            state = slots.without_rows(state, {"row": jnp.asarray([20, 0, 10, 90])})
        else:
            state = replace(state, **jax.tree.map(jnp.asarray, own))
        results.append(
            programs.run_prefill(
                cfg, model.params, state, tables, chunk, prompts, compilation=compilation
            )
        )
    (expected, all_rows), (verification, state) = results
    jax.tree.map(np.testing.assert_array_equal, expected, verification)
    assert state.sampling.processors["row"][:3].tolist() == [20, 0, 10]  # a row of each tile
    state = replace(state, sampling=replace(state.sampling, processors={}))
    jax.tree.map(np.testing.assert_array_equal, all_rows.target_caches, state.target_caches)
    all_rows, ended = slots.without_caches(all_rows), slots.without_caches(state)
    assert jax.tree.structure(all_rows) == jax.tree.structure(ended)
    for one, other in ((2, 0), (0, 1), (1, 2)):
        jax.tree.map(
            lambda x, y, one=one, other=other: np.testing.assert_array_equal(x[one], y[other]),
            all_rows,
            ended,
        )
    state = all_rows
    assert verification.num_sampled.tolist() == [1, 0, 1]
    assert state.active.tolist() == [True, True, False] and state.next_token[1] == 7


def test_drafts_past_a_requests_own_number_and_past_the_drafts_context_are_placeholders() -> None:
    """Draft i comes from a context of seq_lens + i tokens, of which 10 are the most."""
    model = agreeing_model("eagle")
    cfg = model.round_config(K, limits_drafts=True, draft_max_model_len=10)
    state = decode_state.init_state(
        cfg,
        sampling_state([0] * 7),
        jnp.zeros(7, jnp.int32),
        jnp.full((7, 1), -1),
        (1,),
        dtype=jnp.float32,
        cache_dtype=jnp.float32,
    )
    state = replace(state, seq_lens=jnp.asarray([5, 8, 9, 10, 11, 12, 5], jnp.int32))
    state = replace(state, draft_limit=state.draft_limit.at[6].set(1))
    limited = limit_drafts(
        allowed_drafts(cfg, state, None), Proposal(jnp.full((7, K), 4, jnp.int32), None)
    ).draft_tokens
    assert (limited >= 0).sum(axis=1).tolist() == [3, 3, 2, 1, 0, 0, 1] and limited[2].tolist() == [
        4,
        4,
        -1,
    ]


def test_a_round_without_drafts_leaves_the_drafts_cache_as_a_round_with_them() -> None:
    """Up to the pending rows: what a later round drafts from."""
    model = agreeing_model("eagle")
    cfg = model.round_config(K)
    tables, num_blocks = block_tables(1, cfg)
    caches = {}
    for drafts in (0, K):
        _, state = start(
            cfg, model.params, random_prompts((9,)), sampling_state([1]), tables, num_blocks
        )
        untouched = np.asarray(state.draft.caches[0].k)
        round_cfg = replace(cfg, num_speculative_tokens=drafts)
        verification, state = programs.run_round(round_cfg, model.params, state, tables, "round")
        caches[drafts] = np.asarray(state.draft.caches[0].k).reshape(-1, *untouched.shape[2:])[:9]
        assert verification.output_tokens.shape == (
            1,
            drafts + 1,
        ) and state.draft.pending_tokens.shape == (1, K + 1)  # type: ignore[union-attr]
    np.testing.assert_allclose(caches[0], caches[K], rtol=1e-5, atol=1e-6)
    assert not np.allclose(caches[0][8], untouched.reshape(-1, *untouched.shape[2:])[8]), (
        "the prompt's last row was pending"
    )
