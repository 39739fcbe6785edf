"""A state reached by rounds is the state that prefilling the same text gives: for what the draft
proposes next, and for the caches.

Text alone cannot show this: a draft that reads the wrong hidden states or rows is only accepted
less often.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decode import programs
from jaxspec.decode.state import DecodeState, draft_context
from jaxspec.drafts.autoregressive import draft_inputs, propose
from jaxspec.drafts.drafter import Proposal
from tests.support.tiny import (
    METHODS,
    agreeing_model,
    block_tables,
    random_prompts,
    sampling_state,
    start,
)

LENGTHS, K, LONGEST = (5, 9, 1), 3, 40
TOLERANCE: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}  # float32, sums in another order


@pytest.mark.parametrize("method", METHODS)
def test_a_state_reached_by_rounds_equals_one_prefilled_with_the_same_text(method: str) -> None:
    model, texts = agreeing_model(method, seed=1), [list(p) for p in random_prompts(LENGTHS)]
    cfg = model.round_config(K, rule="probabilistic")
    sampling = sampling_state([1, 2, 3])
    tables, num_blocks = block_tables(3, cfg, shuffle_seed=0)
    table = tables[0]  # of every group
    proposed = jax.jit(
        lambda state: propose(
            cfg,
            model.params["draft"],
            draft_inputs(state.draft, draft_context(cfg, state, jax.tree.map(jnp.asarray, tables))),
            state.draft.caches,
        )
    )

    def next_proposal(state: DecodeState) -> tuple[Proposal, list[np.ndarray]]:
        """And the draft's keys and values once it has read all of its pending rows."""
        carry = proposed(state)
        return carry.proposal, cached(carry.caches)

    def cached(caches: object) -> list[np.ndarray]:
        """Of the positions of each text that are cached, next_token's own not among them."""
        size, found = cfg.block_size, []
        for row, text in enumerate(texts):
            slots = [table[row, p // size] * size + p % size for p in range(len(text) - 1)]
            found += [
                np.asarray(x).reshape(-1, *x.shape[2:])[slots] for x in jax.tree.leaves(caches)
            ]
        return found

    first, state = start(cfg, model.params, texts, sampling, tables, num_blocks, chunk=LONGEST)
    for text, token in zip(texts, first.tolist(), strict=True):
        text.append(token)
    pending = set()
    for _ in range(5):
        verification, state = programs.run_round(cfg, model.params, state, tables, "round")
        for text, tokens, count in zip(
            texts,
            verification.output_tokens.tolist(),
            verification.num_sampled.tolist(),
            strict=True,
        ):
            text += tokens[:count]
        first, fresh = start(
            cfg,
            model.params,
            [text[:-1] for text in texts],
            sampling,
            tables,
            num_blocks,
            chunk=LONGEST,
        )
        assert first.tolist() == [text[-1] for text in texts] == state.next_token.tolist()
        assert fresh.seq_lens.tolist() == state.seq_lens.tolist()
        (proposal, draft), (fresh_proposal, fresh_draft) = (
            next_proposal(state),
            next_proposal(fresh),
        )
        assert proposal.draft_tokens.tolist() == fresh_proposal.draft_tokens.tolist()
        assert proposal.draft_logits is not None and fresh_proposal.draft_logits is not None
        np.testing.assert_allclose(proposal.draft_logits, fresh_proposal.draft_logits, **TOLERANCE)
        for x, y in zip(
            [*draft, *cached(state.target_caches)],
            [*fresh_draft, *cached(fresh.target_caches)],
            strict=True,
        ):
            np.testing.assert_allclose(x, y, **TOLERANCE)
        pending |= set(state.draft.num_pending.tolist())
    assert 1 in pending and len(pending) >= 3, (
        "expected rounds that accept nothing, and rounds that accept more and less"
    )
