"""Padding rows, whatever they hold, change no live row, cache block or metric; nor do slots and
neighbours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decode import programs
from jaxspec.sampling.processors.truncation import TruncationState
from jaxspec.sampling.state import SamplingState
from tests.support.tiny import (
    agreeing_model,
    block_tables,
    generate,
    random_prompts,
    sampling_state,
    start,
)

pytestmark = pytest.mark.once

LENGTHS, K = (5, 9, 1), 3
TEMPERATURES = (0.0, 1.0, 0.8)


def padded(sampling: SamplingState, order: list[int | None]) -> SamplingState:
    """The rows of `order`, None a padding row: greedy, as the engine makes them."""
    idle = jax.tree.map(lambda x: np.concatenate([x, np.zeros_like(x[:1])]), sampling)
    if "truncation" in idle.processors:
        idle.processors["truncation"].top_p[-1] = 1.0
    return jax.tree.map(lambda x: x[[len(LENGTHS) if i is None else i for i in order]], idle)


BUCKET_OF_4: list[int | None] = [0, 1, 2, None]
BUCKET_OF_8: list[int | None] = [None, 2, None, 0, 1, None, None, None]
OTHER_NEIGHBOURS: list[int | None] = [2, 2, 0, 1]


@pytest.mark.parametrize(
    ("method", "rule", "draft_sampling", "orders"),
    [
        ("eagle3", "strict", "probabilistic", [BUCKET_OF_4, OTHER_NEIGHBOURS]),
        ("eagle", "probabilistic", "probabilistic", [BUCKET_OF_8]),
        ("eagle3", "block", "greedy", [BUCKET_OF_4, OTHER_NEIGHBOURS]),
    ],
)
def test_text_does_not_depend_on_padding_slot_or_neighbours(
    method: str, rule: str, draft_sampling: str, orders: list[list[int | None]]
) -> None:
    """Greedy and sampled requests: in buckets of 3, 4 and 8, in other slots, beside other
    requests."""
    model, prompts = agreeing_model(method), random_prompts(LENGTHS)
    cfg = model.round_config(K, rule=rule, draft_sampling=draft_sampling)
    sampling = sampling_state([1, 2, 3], TEMPERATURES)
    alone = generate(cfg, model.params, prompts, sampling, max_tokens=12)
    for order in orders:
        run = generate(
            cfg,
            model.params,
            [[] if i is None else prompts[i] for i in order],
            padded(sampling, order),
            max_tokens=[1 if i is None else 12 for i in order],
            shuffle_seed=len(order),
        )
        assert run.token_ids == [[] if i is None else alone.token_ids[i] for i in order]
        if sorted(i for i in order if i is not None) == [0, 1, 2]:
            assert sorted(map(sorted, run.accepted)) == sorted(map(sorted, alone.accepted))


@pytest.mark.parametrize("rule", ["strict", "block"])
def test_poisoned_padding_rows_change_nothing(rule: str) -> None:
    """Rows 1 and 3 are idle and hold NaN hidden states, wild tokens and lengths, and a block table
    that names live blocks."""
    model = agreeing_model("eagle3")
    processors = frozenset({"truncation"} if rule == "block" else ())
    cfg = model.round_config(K, rule=rule, processors=processors)
    tables, num_blocks = block_tables(4, cfg, guard=2, shuffle_seed=1)
    prompts = [random_prompts(LENGTHS)[0], [], random_prompts(LENGTHS)[1], []]
    all_kept = ([0] * 3, [1.0] * 3) if processors else ()
    sampling = padded(sampling_state([1, 2, 3], TEMPERATURES, *all_kept), [0, None, 1, None])
    results = []
    for poison in (False, True):
        _, state = start(cfg, model.params, prompts, sampling, tables, num_blocks)
        used = tuple(t.copy() for t in tables)
        if poison:
            for table, named in zip(used, tables, strict=True):
                table[[1, 3]] = named[[0, 2]]
            state = replace(
                state,
                seq_lens=state.seq_lens.at[jnp.array([1, 3])].set(jnp.array([7, 2**30], jnp.int32)),
                next_token=state.next_token.at[jnp.array([1, 3])].set(
                    jnp.array([-5, 2**30], jnp.int32)
                ),
                draft=state.draft.replace(
                    pending_tokens=state.draft.pending_tokens.at[jnp.array([1, 3])].set(2**30),
                    pending_hidden=state.draft.pending_hidden.at[jnp.array([1, 3])].set(jnp.nan),
                    num_pending=state.draft.num_pending.at[jnp.array([1, 3])].set(
                        jnp.array([4, 2], jnp.int32)
                    ),
                ),
                sampling=SamplingState(
                    state.sampling.keys.at[jnp.array([1, 3])].set(jnp.uint32(2**32 - 1)),
                    state.sampling.temperature.at[1].set(jnp.nan),
                    {
                        name: TruncationState(
                            truncation.top_k.at[1].set(10**9), truncation.top_p.at[3].set(jnp.nan)
                        )
                        for name, truncation in state.sampling.processors.items()
                    },
                ),
            )
        outputs = []
        for _ in range(4):
            verification, state = programs.run_round(cfg, model.params, state, used, "round")
            outputs.append(jax.tree.map(np.asarray, verification))
        results.append((outputs, jax.tree.map(np.asarray, state)))
    (clean, clean_state), (dirty, dirty_state) = results
    for a, b in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(a.output_tokens, b.output_tokens)
        np.testing.assert_array_equal(a.num_sampled, b.num_sampled)
        assert b.num_sampled[[1, 3]].tolist() == [0, 0]
    jax.tree.map(
        np.testing.assert_array_equal,
        (clean_state.target_caches, clean_state.draft.caches),
        (dirty_state.target_caches, dirty_state.draft.caches),
    )
    live: dict[str, Any] = {
        name: (getattr(clean_state, name)[[0, 2]], getattr(dirty_state, name)[[0, 2]])
        for name in ("seq_lens", "next_token")
    }
    for name, (a, b) in live.items():
        np.testing.assert_array_equal(a, b, err_msg=name)
    assert dirty_state.active.tolist() == clean_state.active.tolist() == [True, False, True, False]
