"""Prefill in chunks of any size leaves the same caches, pending row and first proposal as in one
chunk."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import drafts
from jaxspec.cache.arrays import KVCache
from jaxspec.config import RoundConfig
from jaxspec.decode import programs
from jaxspec.decode import state as decode_state
from jaxspec.decode.state import DecodeState, draft_context
from jaxspec.drafts.autoregressive import draft_inputs, propose
from jaxspec.layers.context import Pass
from tests.support import toys
from tests.support.tiny import (
    METHODS,
    block_tables,
    pad_chunk,
    random_prompts,
    sampling_state,
    start,
    tiny_model,
)

LENGTHS, K, BLOCK = (13, 8, 1, 5), 2, 4
TOLERANCE: dict[str, Any] = {"atol": 2e-5, "rtol": 2e-5}


def gathered(
    caches: KVCache,
    cfg: RoundConfig,
    tables: tuple[np.ndarray, ...],
    row: int,
    length: int,
) -> np.ndarray:
    """The keys and values of positions 0 .. length-1 of a request, all layers."""
    table, size = tables[0], cfg.block_size  # every group has the same table
    slots = [table[row, p // size] * size + p % size for p in range(length)]
    pools = [x for cache in caches for x in (cache.k, cache.v)]  # type: ignore[union-attr]
    return np.stack([np.asarray(x).reshape(-1, *x.shape[2:])[slots] for x in pools])


@pytest.mark.parametrize("method", METHODS)
def test_chunked_prefill_equals_one_chunk(method: str) -> None:
    """Chunks of 1, K, block size - 1 and block size; prompts that end in different chunks, and at a
    chunk's end."""
    model = tiny_model(method)
    cfg = model.round_config(K, block_size=BLOCK, max_model_len=32, rule="probabilistic")
    prompts, sampling = random_prompts(LENGTHS), sampling_state([1, 2, 3, 4], (0.0, 1.0, 0.7, 1.0))
    tables, num_blocks = block_tables(len(prompts), cfg, shuffle_seed=0)
    first_proposal = jax.jit(
        lambda state: propose(
            cfg,
            model.params["draft"],
            draft_inputs(state.draft, draft_context(cfg, state, jax.tree.map(jnp.asarray, tables))),
            state.draft.caches,
        )
    )

    def prefilled(chunk: int | None) -> tuple[np.ndarray, DecodeState, Any]:
        first, state = start(cfg, model.params, prompts, sampling, tables, num_blocks, chunk=chunk)
        return first, state, first_proposal(state).proposal

    first, whole, proposal = prefilled(None)
    for chunk in (1, K, BLOCK - 1, BLOCK):
        chunked_first, chunked, chunked_proposal = prefilled(chunk)
        assert chunked_first.tolist() == first.tolist()
        assert chunked_proposal.draft_tokens.tolist() == proposal.draft_tokens.tolist()
        np.testing.assert_allclose(
            chunked_proposal.draft_logits, proposal.draft_logits, **TOLERANCE
        )
        for row, length in enumerate(LENGTHS):
            for caches, expected, cached in (
                (chunked.target_caches, whole.target_caches, length),
                (chunked.draft.caches, whole.draft.caches, length - 1),
            ):
                np.testing.assert_allclose(
                    gathered(caches, cfg, tables, row, cached),
                    gathered(expected, cfg, tables, row, cached),
                    **TOLERANCE,
                    err_msg=f"{chunk}",
                )
        for name in ("seq_lens", "next_token", "active", "num_generated"):
            np.testing.assert_array_equal(
                getattr(chunked, name), getattr(whole, name), err_msg=name
            )
        np.testing.assert_array_equal(chunked.draft.num_pending, whole.draft.num_pending)
        np.testing.assert_array_equal(
            chunked.draft.pending_tokens[:, 0], whole.draft.pending_tokens[:, 0]
        )
        np.testing.assert_allclose(
            chunked.draft.pending_hidden[:, 0], whole.draft.pending_hidden[:, 0], **TOLERANCE
        )


def test_a_chunks_last_row_pairs_with_the_next_prompt_token() -> None:
    """With any other token there the draft cache is another one: the comparison above can fail."""
    model = tiny_model("eagle")
    cfg = model.round_config(K, block_size=BLOCK, max_model_len=32)
    prompts, sampling = random_prompts((9,)), sampling_state([1])
    tables, num_blocks = block_tables(1, cfg)
    _, whole = start(cfg, model.params, prompts, sampling, tables, num_blocks)
    off = []
    for wrong in (False, True):
        state = decode_state.init_state(
            cfg,
            jax.tree.map(jnp.asarray, sampling),
            *stop_arrays(1),
            num_blocks,
            dtype=jnp.float32,
            cache_dtype=jnp.float32,
        )
        for begin in range(0, 9, 3):
            chunk = pad_chunk(prompts, begin, 3)
            following: Any = np.asarray(chunk.next_token)
            if wrong:
                following = np.where(following >= 0, (following + 1) % 48, following)
            _, state = programs.run_prefill(
                cfg,
                model.params,
                state,
                tables,
                replace(chunk, next_token=following.astype(np.int32)),
                compilation="round",
            )
        difference = gathered(state.draft.caches, cfg, tables, 0, 8) - gathered(
            whole.draft.caches, cfg, tables, 0, 8
        )
        off.append(np.abs(difference).max((0, 2, 3)))
    assert off[0].max() < 1e-4
    assert (off[1] > 1e-2).tolist() == [p % 3 == 2 for p in range(8)]


def stop_arrays(batch: int) -> tuple[jax.Array, jax.Array]:
    return jnp.full(batch, 64, jnp.int32), jnp.full((batch, 1), -1, jnp.int32)


@pytest.mark.usefixtures("toy_families")
def test_the_drafts_ids_are_the_prompts_shifted_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """[10,11,12 | 20,21 | 30,31,32,33] with sampled next tokens 100, 200, 300 (cases.md 3.5): the
    last pair of each waits as pending."""
    seen = []

    def forward(
        params: Any,
        cfg: Any,
        tokens: jax.Array,
        hidden: jax.Array,
        pass_: Pass,
        caches: Any,
    ) -> Any:
        seen.append(
            (
                np.asarray(tokens),
                np.asarray(hidden[..., 0]),
                np.asarray(pass_.positions),
                np.asarray(pass_.metadata[0].seq_lens),
            )
        )
        return toys.DRAFT_FAMILIES["toy"].forward(params, cfg, tokens, hidden, pass_, caches)

    recorder = SimpleNamespace(**(vars(toys.DRAFT_FAMILIES["toy"]) | {"forward": forward}))
    monkeypatch.setitem(drafts.FAMILIES, "toy", recorder)
    table = np.zeros((301, 301), np.float32)
    table[[12, 21, 33], [100, 200, 300]] = 9
    cfg = toys.toy_config(301, 2)
    prompts = [[10, 11, 12], [20, 21], [30, 31, 32, 33]]
    params = {"target": {"table": jnp.asarray(table)}, "draft": {"table": jnp.asarray(table)}}
    first, state = start(
        cfg,
        params,
        prompts,
        sampling_state([0] * 3),
        (np.zeros((3, 1), np.int32),),
        (1,),
        compilation="eager",
    )
    (tokens, hidden, positions, seq_lens) = seen[0]
    rows = [tokens[b, :n].tolist() for b, n in enumerate(seq_lens)]
    assert first.tolist() == [100, 200, 300]
    assert rows == [[11, 12], [21], [31, 32, 33]]
    assert [hidden[b, :n].tolist() for b, n in enumerate(seq_lens)] == [
        [10, 11],
        [20],
        [30, 31, 32],
    ]
    assert positions.tolist() == [[0, 1, 2, 3]] * 3
    assert state.draft.pending_tokens[:, 0].tolist() == [100, 200, 300]
    assert state.draft.pending_hidden[:, 0, 0].tolist() == [12, 21, 33]
    assert state.draft.num_pending.tolist() == [1, 1, 1] and state.seq_lens.tolist() == [3, 2, 4]
