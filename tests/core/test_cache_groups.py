"""KV-cache groups: each type of attention has its own metadata, a draft's steps build that of the draft's group alone, and rounds cross
window, block and length boundaries without touching a block that is not theirs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import decode, metadata, models
from jaxspec.config import CacheGroup, RoundConfig
from jaxspec.metadata import build_metadata, rebuild_draft_metadata
from jaxspec.propose import propose
from jaxspec.verify import verify
from tests.support.families import family_model
from tests.support.tiny import block_table, random_prompts, sampling_state, start

K = 4
FULL, WINDOW, CHUNK = CacheGroup(4, 40), CacheGroup(4, 40, window=6), CacheGroup(4, 40, chunk=8)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[CacheGroup]:
    """The group of each metadata that is built from here on."""
    groups: list[CacheGroup] = []
    build = metadata._build

    def counted(group: CacheGroup, *args: Any, **kwargs: Any) -> Any:
        groups.append(group)
        return build(group, *args, **kwargs)

    monkeypatch.setattr(metadata, "_build", counted)
    return groups


def hybrid_state() -> tuple[RoundConfig, Any, Any, Any]:
    """gpt-oss with an EAGLE draft that has a window of its own."""
    model = family_model("gpt_oss", "eagle", window=7)
    cfg = model.round_config(K, max_model_len=40, sampled=False)
    table, num_blocks = block_table(3, cfg, shuffle_seed=0)
    sampling = jax.tree.map(jnp.asarray, sampling_state([0] * 3))
    state = decode.init_state(cfg, sampling, jnp.full(3, 9), jnp.full((3, 1), -1), num_blocks, jnp.float32)
    return cfg, model.params, state, jnp.asarray(table)


def test_a_draft_step_builds_the_metadata_of_its_own_group_only(built: list[CacheGroup]) -> None:
    """Step 0's, step 1's, and one in the body of the loop; none of the target's two groups."""
    cfg, params, state, table = hybrid_state()
    jax.eval_shape(lambda s: propose(cfg, params["draft"], decode.draft_inputs(s, table), s.draft_caches), state)
    assert cfg.draft_group not in cfg.target_group
    assert built == [cfg.draft_group] * 3


def test_verify_builds_the_metadata_of_each_group_of_the_target_once(built: list[CacheGroup]) -> None:
    cfg, params, state, table = hybrid_state()
    proposal = jax.eval_shape(lambda s: propose(cfg, params["draft"], decode.draft_inputs(s, table), s.draft_caches), state).proposal
    built.clear()
    jax.eval_shape(
        lambda s, p: verify(cfg, params["target"], s.next_token, p, s.seq_lens, s.active, table, s.target_caches, s.sampling)[0],
        state,
        proposal,
    )
    assert tuple(built) == cfg.target_group and len(built) == 2


def test_every_group_sees_what_its_attention_says() -> None:
    """Window starts by definition, at each step of a draft that had such groups, through blocks, windows, chunks and the length limit."""
    groups = (FULL, WINDOW, CHUNK)
    table = jnp.asarray(np.random.default_rng(0).permutation(40 * 10).reshape(40, 10), jnp.int32)
    lens = jnp.arange(1, 41, dtype=jnp.int32)
    rows = jnp.minimum(lens, 3)
    built = build_metadata(groups, table, lens - rows, rows, 3)
    for step in range(6):
        position = np.asarray(built[0].positions)
        full, window, chunk = (np.asarray(m.window_start) for m in built)
        np.testing.assert_array_equal(full, 0)
        np.testing.assert_array_equal(window, np.maximum(position - 5, 0), err_msg=f"step {step}")
        np.testing.assert_array_equal(chunk, position - position % 8, err_msg=f"step {step}")
        for other in built[1:]:
            np.testing.assert_array_equal(other.positions, position)
            np.testing.assert_array_equal(other.slot_mapping, built[0].slot_mapping)
        built = rebuild_draft_metadata(groups, built)


def test_groups_can_have_block_tables_of_their_own() -> None:
    tables = tuple(jnp.asarray(np.random.default_rng(i).permutation(10)[None], jnp.int32) for i in range(2))
    start_, rows = jnp.asarray([5], jnp.int32), jnp.asarray([3], jnp.int32)
    both = build_metadata((FULL, WINDOW), tables, start_, rows, 3)
    for group, table, together in zip((FULL, WINDOW), tables, both, strict=True):
        alone = build_metadata(group, table, start_, rows, 3)
        jax.tree.map(np.testing.assert_array_equal, together, alone)


def test_blocks_that_left_the_window_are_never_read() -> None:
    """The window's group has a block table of its own, where the pages before the window are a block full of NaN."""
    model, size = family_model("gpt_oss", "eagle"), 4
    cfg, params = model.target, model.params["target"]
    groups = cfg.cache_groups(size, 40)
    tokens = jnp.asarray(random_prompts([24]), jnp.int32)
    table = jnp.arange(1, 11, dtype=jnp.int32)[None]

    @jax.jit
    def run(tokens: jax.Array, begin: jax.Array, tables: Any, caches: Any) -> tuple[jax.Array, Any]:
        rows = tokens.shape[1]
        built = build_metadata(groups, tables, begin, jnp.full(1, rows), rows)
        out = models.family(cfg).forward(params, cfg, tokens, built, caches)
        return out.hidden, out.caches

    empty = decode.init_cache(cfg.attention, cfg.num_layers, 11, size, jnp.float32)
    caches = run(tokens[:, :20], jnp.asarray([0]), (table, table), empty)[1]
    right = run(tokens[:, 20:], jnp.asarray([20]), (table, table), caches)[0]
    first_page = (20 - cfg.sliding_window + 1) // size
    freed = jnp.where(jnp.arange(10) < first_page, 0, table)
    poisoned = jax.tree.map(lambda pool: pool.at[0].set(jnp.nan), caches)
    assert first_page >= 3
    np.testing.assert_array_equal(run(tokens[:, 20:], jnp.asarray([20]), (table, freed), poisoned)[0], right)


def marked(caches: Any, blocks: np.ndarray) -> Any:
    return jax.tree.map(lambda pool: pool.at[blocks].set(7.0), caches)


@pytest.mark.parametrize("num_drafts", [3, 7])
@pytest.mark.parametrize(("family", "method", "window"), [("gpt_oss", "eagle", 6), ("deepseek_v3", "mtp", None)])
def test_rounds_to_the_length_limit_leave_other_blocks_alone(family: str, method: str, window: int | None, num_drafts: int) -> None:
    """Past every window, block and max_model_len, where the last rounds verify rows that no longer fit; the text is plain decoding's."""
    model = family_model(family, method, window=window)
    prompts, limit = random_prompts([9, 3]), 27
    texts = {}
    for count in (0, num_drafts):
        cfg = model.round_config(count, max_model_len=limit, sampled=False)
        table, num_blocks = block_table(2, cfg, shuffle_seed=1, guard=3)
        ends = [limit - len(p) for p in prompts]
        first, state = start(cfg, model.params, prompts, sampling_state([0] * 2), table, num_blocks, max_tokens=ends, chunk=4)
        guards = np.array(sorted(set(range(num_blocks)) - set(table.reshape(-1).tolist())))
        state = replace(state, target_caches=marked(state.target_caches, guards), draft_caches=marked(state.draft_caches, guards))
        text = [[int(t)] for t in first]
        while np.asarray(state.active).any():
            verification, state = decode.run_round(cfg, model.params, state, table, "round")
            for row, (tokens, kept) in enumerate(zip(verification.output_tokens, verification.num_sampled.tolist(), strict=True)):
                text[row] += tokens[:kept].tolist()
        for pool in jax.tree.leaves((state.target_caches, state.draft_caches)):
            np.testing.assert_array_equal(pool[guards], 7.0)
        texts[count] = [t[:end] for t, end in zip(text, ends, strict=True)]
    assert texts[0] == texts[num_drafts] and [len(t) for t in texts[0]] == ends
