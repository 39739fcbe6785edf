"""A verify pass of few rows: requests share them or wait. Each has the text that it has alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import RoundConfig
from jaxspec.decode import programs
from jaxspec.decode import round as round_module
from jaxspec.decode import verify as verify_module
from jaxspec.decode.row_budget import Share, share_rows
from tests.decode.test_block_drafts import small_model
from tests.decode.test_families_distribution import BATCH, LENGTH, PROMPT, VOCAB, probabilities
from tests.support.families import family_model
from tests.support.slow import slow
from tests.support.statistics import chi_square, within_limit
from tests.support.tiny import (
    Model,
    agreeing_block_model,
    agreeing_model,
    block_tables,
    random_prompts,
    sampling_state,
    start,
)

pytestmark = pytest.mark.once

# --- who takes part
# --------------------------------------------------------------------------------------------------


def shared(wanted: list[int], waited: list[int], rows: int, budget: int) -> Share:
    share = share_rows(jnp.asarray(wanted, jnp.int32), jnp.asarray(waited, jnp.int32), rows, budget)
    return jax.tree.map(np.asarray, share)


def test_requests_take_part_in_the_order_of_their_waiting_until_the_rows_are_taken() -> None:
    share = shared([4, 1, 0, 3, 2], [0, 2, 5, 0, 1], rows=4, budget=8)
    assert share.num_rows.tolist() == [4, 1, 0, 0, 2]
    assert share.waited.tolist() == [0, 0, 0, 1, 0]
    # Slot 1 lies first, then slot 4, slot 0, and masked rows from place 7 on.
    assert share.flat.index[1, 0] == 0
    assert share.flat.index[4, :2].tolist() == [1, 2]
    assert share.flat.index[0].tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize("seed", range(3))
def test_flat_rows_are_each_real_row_once_then_masked_ones(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch, rows, budget = 7, 4, 19
    share = shared(rng.integers(0, rows + 1, batch).tolist(), [0] * batch, rows, budget)
    real = {i * rows + t for i, n in enumerate(share.num_rows) for t in range(n)}
    place, index = share.flat.place, share.flat.index.reshape(-1)
    assert set(place[: len(real)].tolist()) == real
    assert len(set(place.tolist())) == budget
    assert sorted(index.tolist()) == list(range(batch * rows))
    assert index[place].tolist() == list(range(budget))


def test_no_request_waits_forever() -> None:
    """Seven that want all rows, of which three fit: each takes part every third round at least."""
    waited, served = jnp.zeros(7, jnp.int32), np.zeros(7, int)
    for _ in range(14):
        share = share_rows(jnp.full(7, 4, jnp.int32), waited, 4, 13)
        waited, served = share.waited, served + (np.asarray(share.num_rows) > 0)
        assert int(waited.max()) <= 2
    assert served.sum() == 3 * 14 and served.min() >= 14 // 3


# --- texts
# --------------------------------------------------------------------------------------------------

LENGTHS, MAX_TOKENS = (5, 9, 1, 4, 6), (24, 17, 21, 2, 30)
MOST = (0, 1, 16, 3, 2)  # drafts that each request is allowed


def texts(
    model: Model,
    cfg: RoundConfig,
    temperature: list[float],
    *,
    most: tuple[int, ...] = MOST,
    prompts: list[list[int]] | None = None,
) -> tuple[list[list[int]], int]:
    """Return the texts, and how often a request that was active waited."""
    prompts = random_prompts(LENGTHS) if prompts is None else prompts
    tables, num_blocks = block_tables(len(prompts), cfg, shuffle_seed=3)
    sampling = sampling_state(range(len(prompts)), temperature)
    first, state = start(
        cfg, model.params, prompts, sampling, tables, num_blocks, max_tokens=MAX_TOKENS
    )
    state = replace(state, draft_limit=jnp.asarray(most, jnp.int32))
    found, waits = [[int(t)] for t in first], 0
    while (active := np.asarray(state.active)).any():
        made, state = programs.run_round(cfg, model.params, state, tables, "round")
        counts = np.asarray(made.num_sampled)
        for row, text in enumerate(found):
            text += np.asarray(made.output_tokens)[row, : counts[row]].tolist()
        waits += int((active & (counts == 0)).sum())
    return [text[:limit] for text, limit in zip(found, MAX_TOKENS, strict=True)], waits


def config(model: Model, K: int, budget: int | None, **changes: Any) -> RoundConfig:
    limits = {} if K == 0 else {"limits_drafts": True}
    return model.round_config(K, max_num_verify_tokens=budget, **limits, **changes)


def model_of(method: str) -> Model:
    if method in ("dflash", "dspark"):
        return agreeing_block_model(method)
    return agreeing_model(method)


MIXED = [0.0, 1.0, 0.7, 1.3, 0.0]


@pytest.mark.parametrize(
    ("method", "K", "budget", "rule"),
    [
        ("eagle3", 3, 8, "probabilistic"),
        ("dspark", 5, 7, "block"),
        ("eagle", 16, 18, "strict"),
        slow("eagle3", 1, 6, "block"),
        slow("eagle", 2, 5, "probabilistic"),
        slow("dflash", 4, 9, "probabilistic"),
        slow("dspark", 7, 12, "probabilistic"),
        slow("dflash", 11, 16, "strict"),
        slow("dspark", 16, 17, "block"),
    ],
)
def test_texts_are_those_without_a_budget(method: str, K: int, budget: int, rule: str) -> None:
    """Greedy and sampled requests side by side, each with a number of drafts of its own."""
    model = model_of(method)
    expected, none = texts(model, config(model, K, None, rule=rule), MIXED)
    found, waits = texts(model, config(model, K, budget, rule=rule), MIXED)
    assert none == 0 and waits > 3
    assert [len(text) for text in expected] == list(MAX_TOKENS)
    assert found == expected


def test_logits_of_flat_rows_may_be_judged_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two requests each."""
    model, K = model_of("eagle3"), 2
    expected, _ = texts(model, config(model, K, None), MIXED)
    monkeypatch.setattr(
        verify_module, "MAX_LOGITS_BYTES", 2 * 4 * (K + 1) * model.target.vocab_size
    )
    found, waits = texts(model, config(model, K, 6), MIXED)
    assert waits > 3
    assert found == expected


@pytest.mark.parametrize(
    ("target", "method"),
    [
        ("gpt_oss", "eagle3"),
        ("glm4_moe_lite", "mtp"),
        ("llama4_text", "eagle"),
        slow("qwen3_moe", "eagle3"),
    ],
)
def test_greedy_texts_of_other_families_are_plain_texts(target: str, method: str) -> None:
    """Windows and chunks, latent attention, scaled queries, experts."""
    model = family_model(target, method)
    greedy = [0.0] * len(LENGTHS)
    plain, _ = texts(model, config(model, 0, None, sampled=False), greedy)
    found, waits = texts(model, config(model, 3, 9, sampled=False), greedy)
    assert waits > 3
    assert found == plain


# --- distribution
# --------------------------------------------------------------------------------------------------


def statistic(model: Model, rule: str, budget: int, batches: int) -> tuple[float, int]:
    """Of the first LENGTH tokens of each request, over as many rounds as they took."""
    cfg = model.round_config(3, max_model_len=24, rule=rule, max_num_verify_tokens=budget)
    tables, num_blocks = block_tables(BATCH, cfg)
    counts, waits = np.zeros((VOCAB,) * LENGTH), 0
    for batch in range(batches):
        sampling = sampling_state(range(batch * BATCH, (batch + 1) * BATCH), 1.0)
        first, state = start(
            cfg, model.params, [PROMPT] * BATCH, sampling, tables, num_blocks, max_tokens=LENGTH
        )
        texts = [[int(token)] for token in first]
        while (active := np.asarray(state.active)).any():
            made, state = programs.run_round(cfg, model.params, state, tables, "round")
            tokens, num_sampled = np.asarray(made.output_tokens), np.asarray(made.num_sampled)
            for row in np.flatnonzero(num_sampled):
                texts[row] += tokens[row, : num_sampled[row]].tolist()
            waits += int((active & (num_sampled == 0)).sum())
        np.add.at(counts, tuple(np.array([text[:LENGTH] for text in texts]).T), 1)
    assert waits > BATCH * batches
    expected = probabilities(model)
    return chi_square(counts, expected / expected.sum())


@pytest.mark.parametrize("rule", ["probabilistic", slow("block")])
def test_text_follows_the_target_where_requests_of_uneven_drafts_wait(rule: str) -> None:
    found = statistic(small_model("dspark", 0.3), rule, budget=2_000, batches=3)
    assert within_limit(*found), found


def test_drafts_that_are_cut_by_a_look_at_themselves_bias_the_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The room for each draft depends on its token."""
    verify = round_module.verify

    def look(*args: Any) -> Any:
        cfg, params, next_token, proposal, *rest = args
        tokens = proposal.draft_tokens
        is_kept = jnp.cumprod((tokens % 2 == 0).astype(jnp.int32), axis=1) > 0
        cut = replace(proposal, draft_tokens=jnp.where(is_kept, tokens, -1))
        return verify(cfg, params, next_token, cut, *rest)

    monkeypatch.setattr(round_module, "verify", look)
    model = small_model("dspark", 0.3, draft_block_size=11)
    found = statistic(model, "probabilistic", budget=2_001, batches=3)
    assert not within_limit(*found), found
