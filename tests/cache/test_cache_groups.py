"""KV-cache groups: each type of attention has its own metadata, a draft's steps build that of the
draft's group alone, and rounds cross window, block and length boundaries without touching a block
that is not theirs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import models
from jaxspec.cache import metadata
from jaxspec.cache.arrays import init_cache
from jaxspec.cache.metadata import build_metadata, rebuild_draft_metadata
from jaxspec.config import REFERENCE_OPS, CacheGroup, RoundConfig
from jaxspec.decode import prefill, programs
from jaxspec.decode import round as decode
from jaxspec.decode import state as decode_state
from jaxspec.drafts.drafter import PromptChunk
from jaxspec.layers.context import Pass
from tests.support.families import family_model
from tests.support.tiny import ATTENTION, random_prompts, sampling_state, start

K = 4
FULL, WINDOW, CHUNK = CacheGroup(4, 40), CacheGroup(4, 40, window=6), CacheGroup(4, 40, chunk=8)


Built = list[tuple[CacheGroup, int]]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Built:
    """The group of each metadata that is built from here on, and how many pages the table has that
    it is built from."""
    groups: Built = []
    build = metadata._build_group

    def counted(group: CacheGroup, block_table: jax.Array, *args: Any, **kwargs: Any) -> Any:
        groups.append((group, block_table.shape[1]))
        return build(group, block_table, *args, **kwargs)

    monkeypatch.setattr(metadata, "_build_group", counted)
    return groups


@pytest.fixture
def hybrid() -> tuple[RoundConfig, Any, Any, Any]:
    """gpt-oss with an EAGLE draft that has a window of its own; each group's block table has
    another width, 10, 11 and 12 pages."""
    model = family_model("gpt_oss", "eagle", window=7)
    cfg = model.round_config(K, max_model_len=40, sampled=False)
    sampling = jax.tree.map(jnp.asarray, sampling_state([0] * 3))
    state = decode_state.init_state(
        cfg,
        sampling,
        jnp.full(3, 9),
        jnp.full((3, 1), -1),
        (30, 33, 36),
        dtype=jnp.float32,
        cache_dtype=jnp.float32,
    )
    tables = tuple(
        jnp.arange(3 * pages, dtype=jnp.int32).reshape(3, pages) for pages in (10, 11, 12)
    )
    return cfg, model.params, state, tables


def test_a_round_builds_the_metadata_of_each_group_from_its_own_table_and_no_other(
    built: Built, hybrid: Any
) -> None:
    """Draft step 0's, and one in the body of the loop, of the draft's group; then that of the
    target's groups, once each."""
    cfg, params, state, tables = hybrid
    jax.eval_shape(lambda s: decode.decode_round(cfg, params, s, tables), state)
    (full, window), (own,) = cfg.target_groups, cfg.draft_groups
    assert cfg.cache_groups == (full, window, own)
    assert built == [(own, 12)] * 2 + [(full, 10), (window, 11)]


def test_prefill_and_a_round_without_drafts_build_each_groups_metadata_once(
    built: Built, hybrid: Any
) -> None:
    cfg, params, state, tables = hybrid
    (full, window), (own,) = cfg.target_groups, cfg.draft_groups
    ints, tokens = jnp.ones(3, jnp.int32), jnp.ones((3, 8), jnp.int32)
    chunk = PromptChunk(tokens, start=ints, num_tokens=ints, next_token=ints)
    jax.eval_shape(lambda s: prefill.prefill(cfg, params, s, tables, chunk), state)
    assert built == [(full, 10), (window, 11), (own, 12)]
    built.clear()
    jax.eval_shape(
        lambda s: decode.decode_round(replace(cfg, num_speculative_tokens=0), params, s, tables),
        state,
    )
    assert built == [(own, 12), (full, 10), (window, 11)]


def test_a_draft_that_sees_as_far_as_a_group_of_the_target_has_its_table_and_blocks(
    built: Built,
) -> None:
    model = family_model("gpt_oss", "eagle", window=5)
    cfg = model.round_config(1, max_model_len=40, sampled=False)
    sampling = jax.tree.map(jnp.asarray, sampling_state([0] * 3))
    state = decode_state.init_state(
        cfg,
        sampling,
        jnp.full(3, 9),
        jnp.full((3, 1), -1),
        (30, 33),
        dtype=jnp.float32,
        cache_dtype=jnp.float32,
    )
    assert [cache.k.shape[0] for cache in (*state.target_caches, *state.draft.caches)] == [
        33,
        30,
        33,
    ]
    tables = tuple(jnp.zeros((3, pages), jnp.int32) for pages in (10, 11))
    jax.eval_shape(lambda s: decode.decode_round(cfg, model.params, s, tables), state)
    full, window = cfg.target_groups
    assert built == [(window, 11), (full, 10), (window, 11)], "step 0's, verify's two"


def test_every_group_sees_what_its_attention_says() -> None:
    """Window starts by definition, at each step of a draft that had such groups, through blocks,
    windows, chunks and the length limit."""
    groups = (FULL, WINDOW, CHUNK)
    layers: Any = {"attention": ATTENTION, "ops": REFERENCE_OPS}
    table = jnp.asarray(np.random.default_rng(0).permutation(40 * 10).reshape(40, 10), jnp.int32)
    tables = (table,) * 3
    lens = jnp.arange(1, 41, dtype=jnp.int32)
    rows = jnp.minimum(lens, 3)
    built = build_metadata(groups, tables, lens - rows, rows, 3, **layers)
    for step in range(1, 7):
        position = np.asarray(built[0].positions)
        full, window, chunk = (np.asarray(m.window_start) for m in built)
        np.testing.assert_array_equal(full, 0)
        np.testing.assert_array_equal(window, np.maximum(position - 5, 0), err_msg=f"step {step}")
        np.testing.assert_array_equal(chunk, position - position % 8, err_msg=f"step {step}")
        for other in built[1:]:
            np.testing.assert_array_equal(other.positions, position)
            np.testing.assert_array_equal(other.slot_mapping, built[0].slot_mapping)
        built = rebuild_draft_metadata(groups, tables, lens, rows, step, **layers)


def test_groups_can_have_block_tables_of_their_own() -> None:
    tables = tuple(
        jnp.asarray(np.random.default_rng(i).permutation(10)[None], jnp.int32) for i in range(2)
    )
    start_, rows = jnp.asarray([5], jnp.int32), jnp.asarray([3], jnp.int32)
    layers: Any = {"attention": ATTENTION, "ops": REFERENCE_OPS}
    both = build_metadata((FULL, WINDOW), tables, start_, rows, 3, **layers)
    for group, table, together in zip((FULL, WINDOW), tables, both, strict=True):
        (alone,) = build_metadata((group,), (table,), start_, rows, 3, **layers)
        jax.tree.map(np.testing.assert_array_equal, together, alone)


def test_blocks_that_left_the_window_are_never_read() -> None:
    """The window's group has a block table of its own, where the pages before the window are a
    block full of NaN."""
    model, size = family_model("gpt_oss", "eagle"), 4
    cfg: Any = model.target
    params = model.params["target"]
    groups = cfg.cache_groups(size, 40)
    tokens = jnp.asarray(random_prompts([24]), jnp.int32)
    table = jnp.arange(1, 11, dtype=jnp.int32)[None]

    @jax.jit
    def run(tokens: jax.Array, begin: jax.Array, tables: Any, caches: Any) -> tuple[jax.Array, Any]:
        rows = tokens.shape[1]
        built = build_metadata(
            groups,
            tables,
            begin,
            jnp.full(1, rows),
            rows,
            attention=cfg.attention,
            ops=REFERENCE_OPS,
        )
        pass_ = Pass(built, REFERENCE_OPS)
        out = models.family(cfg).forward(params, cfg, tokens, pass_, caches)
        return out.hidden, out.caches

    empty = init_cache(cfg.attention, (11,) * cfg.num_layers, size, jnp.float32)
    caches = run(tokens[:, :20], jnp.asarray([0]), (table, table), empty)[1]
    right = run(tokens[:, 20:], jnp.asarray([20]), (table, table), caches)[0]
    first_page = (20 - cfg.sliding_window + 1) // size
    freed = jnp.where(jnp.arange(10) < first_page, 0, table)
    poisoned = jax.tree.map(lambda pool: pool.at[0].set(jnp.nan), caches)
    assert first_page >= 3
    np.testing.assert_array_equal(
        run(tokens[:, 20:], jnp.asarray([20]), (table, freed), poisoned)[0], right
    )


# Every kind of attention: full; full and window, with a draft of another window; full and chunks;
# latent; compressed entries and window.
KINDS = {
    "mimo": ("mtp", None),
    "gpt_oss": ("eagle", 6),
    "llama4_text": ("eagle_llama4", None),
    "deepseek_v3": ("mtp", None),
    "deepseek_v4": ("mtp", None),
}
USUAL = {
    ("mimo", 5),
    ("gpt_oss", 3),
    ("gpt_oss", 7),
    ("llama4_text", 6),
    ("deepseek_v3", 7),
    ("deepseek_v4", 4),
}
PROMPTS, LIMIT, GUARDS = random_prompts([9, 3]), 27, 3


def own_tables(
    cfg: RoundConfig,
) -> tuple[tuple[np.ndarray, ...], list[np.ndarray], tuple[int, ...]]:
    """Return a block table for each group, its blocks of no request, and its number of blocks.

    No two groups have the same blocks in their tables.
    """
    pages = -(-LIMIT // cfg.block_size)
    num_blocks, tables, guards = 2 * pages + GUARDS, [], []
    for group in range(len(cfg.cache_groups)):
        blocks = np.random.default_rng(1 + group).permutation(num_blocks).astype(np.int32)
        tables.append(blocks[GUARDS:].reshape(2, pages))
        guards.append(np.sort(blocks[:GUARDS]))
    assert len({tuple(g) for g in guards}) == len(guards)
    return tuple(tables), guards, (num_blocks,) * len(tables)


@cache
def texts_to_the_limit(family: str, num_speculative_tokens: int) -> list[list[int]]:
    """Greedy, from prompts in chunks to max_model_len, where the last rounds verify rows that no
    longer fit. The blocks of nobody are full of sevens, and have to stay it."""
    method, window = KINDS[family]
    model = family_model(family, method, window=window)
    cfg = model.round_config(num_speculative_tokens, max_model_len=LIMIT, sampled=False)
    tables, guards, num_blocks = own_tables(cfg)
    ends = [LIMIT - len(p) for p in PROMPTS]
    first, state = start(
        cfg,
        model.params,
        PROMPTS,
        sampling_state([0] * 2),
        tables,
        num_blocks,
        max_tokens=ends,
        chunk=4,
    )
    pools = [*cfg.target.group_of_layer]
    if num_speculative_tokens:
        pools += [cfg.draft_pools[group] for group in cfg.draft.group_of_layer]
    mark = lambda caches, pools: tuple(  # noqa: E731
        jax.tree.map(lambda pool, at=guards[i]: pool.at[at].set(7.0), cache)
        for cache, i in zip(caches, pools, strict=True)
    )
    layers = len(state.target_caches)
    state = replace(state, target_caches=mark(state.target_caches, pools[:layers]))
    if num_speculative_tokens:
        caches = mark(state.draft.caches, pools[layers:])
        state = replace(state, draft=replace(state.draft, caches=caches))
    text = [[int(t)] for t in first]
    while np.asarray(state.active).any():
        verification, state = programs.run_round(cfg, model.params, state, tables, "round")
        for row, (tokens, kept) in enumerate(
            zip(verification.output_tokens, verification.num_sampled.tolist(), strict=True)
        ):
            text[row] += tokens[:kept].tolist()
    draft_caches = state.draft.caches if num_speculative_tokens else ()
    for layer, i in zip((*state.target_caches, *draft_caches), pools, strict=True):
        for pool in jax.tree.leaves(layer):
            np.testing.assert_array_equal(pool[guards[i]], 7.0)
    return [t[:end] for t, end in zip(text, ends, strict=True)]


@pytest.mark.once
@pytest.mark.parametrize(
    ("family", "num_speculative_tokens"),
    [
        pytest.param(f, K, marks=[pytest.mark.slow] * ((f, K) not in USUAL))
        for f in KINDS
        for K in range(3, 8)
    ],
)
def test_rounds_to_the_length_limit_leave_other_blocks_alone(
    family: str, num_speculative_tokens: int
) -> None:
    """Past every window, chunk, block and max_model_len, of every kind of attention; the text is
    plain decoding's."""
    texts = texts_to_the_limit(family, num_speculative_tokens)
    assert texts == texts_to_the_limit(family, 0) and [len(t) for t in texts] == [
        LIMIT - len(p) for p in PROMPTS
    ]
