"""Rounds in which requests with a poor head look their drafts up: exact, the same greedy text, and
certain drafts have one-hot logits."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import RoundConfig
from jaxspec.decode import fallback, programs
from jaxspec.decode.adaptive import SCALE
from jaxspec.decode.state import DecodeState
from jaxspec.drafts.drafter import Proposal
from jaxspec.drafts.ngram import NgramConfig
from jaxspec.drafts.suffix import SuffixConfig
from tests.decode.test_block_drafts import plain_text as plain_block_text
from tests.decode.test_families_distribution import (
    VOCAB,
    flattened,
    numbers_accepted,
    probabilities,
    sampled,
)
from tests.decode.test_greedy_text import LENGTHS, MAX_TOKENS, model_and_plain_text
from tests.drafts import test_ngram as ngram
from tests.support.families import family_model
from tests.support.slow import slow, slow_unless
from tests.support.statistics import chi_square, within_limit
from tests.support.tiny import (
    BLOCK_METHODS,
    Model,
    agreeing_block_model,
    agreeing_model,
    block_tables,
    random_prompts,
    sampling_state,
    start,
)

pytestmark = pytest.mark.once

K = 3


def with_fallback(cfg: RoundConfig, vocab: int, method: str = "ngram") -> RoundConfig:
    lookup = SuffixConfig(vocab, 8, 1) if method == "suffix" else NgramConfig(vocab, 3, 1)
    groups = lookup.cache_groups(cfg.block_size, cfg.max_model_len)
    return replace(cfg, adaptive=True, limits_drafts=True, fallback=lookup, fallback_groups=groups)


def breaking_even_at(state: DecodeState, rate: int) -> DecodeState:
    """Return the state whose requests look drafts up below this rate, in 1 / SCALE."""
    assert state.acceptance is not None and state.acceptance.break_even is not None
    rates = jnp.full_like(state.acceptance.break_even, rate)
    return replace(state, acceptance=replace(state.acceptance, break_even=rates))


def statistic(
    rule: str, batches: int, max_model_len: int = 24
) -> tuple[tuple[float, int], set[int], set[float]]:
    """Return that of the first tokens of requests, the numbers of accepted drafts, and the shares
    of looked-up rounds. Requests begin with their head and leave it when a draft is rejected.

    max_model_len: of a program of its own, where a test has changed what is traced
    """
    model = flattened(family_model("gpt_oss", "eagle", window=4, disturbance=1.0, vocab=VOCAB))
    expected = probabilities(model)
    cfg = with_fallback(model.round_config(K, max_model_len=max_model_len, rule=rule), VOCAB)
    counts, rounds = sampled(cfg, model.params, batches, lambda state: breaking_even_at(state, 760))
    shares = set()
    for found in rounds:
        assert found.is_lookup is not None
        shares.add(float(found.is_lookup.mean()))
    return chi_square(counts, expected / expected.sum()), numbers_accepted(rounds), shares


@pytest.mark.parametrize(
    ("rule", "batches"), [("probabilistic", 3), slow("block", 3), slow("probabilistic", 12)]
)
def test_text_follows_the_target_jointly_over_rounds(rule: str, batches: int) -> None:
    found, accepted, shares = statistic(rule, batches)
    assert accepted == set(range(K + 1)) and 0 in shares and 0.2 < max(shares) < 0.98, shares
    assert within_limit(*found), found


FAULTS = {"the head's logits": 28, "a look at the drafts": 32}


# The second one: the toys' test below has it too, over more tokens.
@pytest.mark.parametrize("fault", slow_unless(["the head's logits"], FAULTS))
def test_faults_bias_the_text(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked-up drafts that are judged by the head's logits; slots whose head drafts an even token
    that keep its drafts."""
    right = fallback.fall_back

    def wrong(cfg: Any, state: Any, tables: Any, proposal: Proposal, ids: Any) -> Any:
        if fault == "the head's logits":
            found, is_lookup, state = right(cfg, state, tables, proposal, ids)
            return replace(found, draft_logits=proposal.draft_logits), is_lookup, state
        is_odd = proposal.draft_tokens[:, 0] % 2 == 1
        looks = replace(state.acceptance, break_even=jnp.where(is_odd, 2 * SCALE, 0))
        found, is_lookup, after = right(
            cfg, replace(state, acceptance=looks), tables, proposal, ids
        )
        return found, is_lookup, replace(after, acceptance=state.acceptance)

    monkeypatch.setattr(fallback, "fall_back", wrong)
    found, *_ = statistic("probabilistic", 3, max_model_len=FAULTS[fault])
    assert not within_limit(*found), found


BREAK_EVEN = np.where(np.arange(ngram.TRIALS) % 2, 2 * SCALE, 760).astype(np.int32)


def biases(rule: str, chain: str) -> list[Any]:
    """Of many trials of a toy head. Half of the requests begin with it, the others look up."""
    trials = ngram.play(rule, chain, 1.0, 2, break_even=jnp.asarray(BREAK_EVEN))
    joint = ngram.joint_statistic(trials, chain, 1.0)
    found: list[Any] = list(ngram.biased_steps(trials, chain, 1.0))
    return found if within_limit(*joint) else [*found, joint]


@pytest.mark.usefixtures("toy_families")
@pytest.mark.parametrize(
    ("rule", "chain"),
    [("probabilistic", "agreeing"), slow("block", "agreeing"), slow("block", "alike")],
)
def test_every_position_follows_the_target(rule: str, chain: str) -> None:
    assert not biases(rule, chain)


@pytest.mark.usefixtures("toy_families")
def test_a_choice_that_looks_at_the_drafts_that_are_judged_biases_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slots whose head drafts what the text says keep the head's drafts."""
    right = fallback.fall_back

    def look(cfg: Any, state: Any, tables: Any, head: Proposal, ids: Any) -> Any:
        found, is_lookup, state = right(cfg, state, tables, head, ids)
        is_lookup &= found.draft_tokens[:, 0] != head.draft_tokens[:, 0]
        assert found.draft_logits is not None and head.draft_logits is not None
        tokens = jnp.where(is_lookup[:, None], found.draft_tokens, head.draft_tokens)
        logits = jnp.where(is_lookup[:, None, None], found.draft_logits, head.draft_logits)
        return Proposal(tokens, logits), is_lookup, state

    monkeypatch.setattr(fallback, "fall_back", look)
    assert biases("probabilistic", "agreeing")


CASES = [
    (method, k, lookup)
    for method in ("eagle", "eagle3")
    for k in range(1, 17)
    for lookup in ("ngram", "suffix")
]
CASES += [(method, k, "ngram") for method in BLOCK_METHODS for k in (1, 2, 4, 16)]
USUAL = [
    ("eagle", 5, "ngram"),
    ("eagle3", 3, "suffix"),
    ("dspark", 4, "ngram"),
]


@pytest.mark.parametrize(("method", "k", "lookup"), slow_unless(USUAL, CASES))
def test_greedy_text_equals_plain_text(method: str, k: int, lookup: str) -> None:
    """Unequal prompts and ends; the head drafts in some rounds and the text in others. The text
    that is looked up holds all tokens but the last."""
    if method in BLOCK_METHODS:
        model, plain = agreeing_block_model(method), plain_block_text("agreeing", method)
        lengths = (24, 33, 21, 2)
    else:
        model, plain = model_and_plain_text("agreeing", method)
        lengths = MAX_TOKENS
    rule = ("probabilistic", "block", "strict")[k % 3]
    cfg = model.round_config(k, block_size=(4, 1, 16)[k % 3], rule=rule)
    cfg = with_fallback(cfg, model.target.vocab_size, lookup)
    tables, num_blocks = block_tables(4, cfg, shuffle_seed=k)
    prompts = random_prompts(LENGTHS)
    first, state = start(
        cfg,
        model.params,
        prompts,
        sampling_state([0] * 4),
        tables,
        num_blocks,
        max_tokens=lengths,
        chunk=4,
    )
    state = breaking_even_at(state, 840)
    texts, sources = [[int(t)] for t in first], set()
    while np.asarray(state.active).any():
        result, state = programs.run_round(cfg, model.params, state, tables, "round")
        tokens, num_sampled = map(np.asarray, (result.output_tokens, result.num_sampled))
        for row, text in enumerate(texts):
            text += tokens[row, : num_sampled[row]].tolist()
        assert result.is_lookup is not None
        accepts = num_sampled > 1
        sources |= set(np.asarray(result.is_lookup)[accepts].tolist())
    assert [t[:n] for t, n in zip(texts, lengths, strict=True)] == plain
    assert sources == {False, True}, "drafts of both are accepted"
    (table,) = cfg.fallback_tables(tables)
    assert state.text is not None
    held = np.asarray(state.text.caches[0].tokens)[np.asarray(table)].reshape(len(texts), -1)
    for row, known in enumerate(map(list.__add__, prompts, texts)):
        assert held[row, : len(known) - 1].tolist() == known[:-1]


def test_looked_up_drafts_are_certain_and_end_before_a_token_that_the_head_lacks() -> None:
    """The text 1 2 3 4 1 2 goes on with 3 4 1; token 4 is not in the second head's vocabulary, and
    token 3 is not in the third's. The text 1 2 3 4 5 6 goes on with nothing."""
    model: Model = agreeing_model("eagle")
    cfg = with_fallback(model.round_config(K), 48)
    tables, num_blocks = block_tables(3, cfg)
    on_device = tuple(map(jnp.asarray, tables))
    _, state = start(
        cfg,
        model.params,
        [[1, 2, 3, 4, 1], [1, 2, 3, 4, 1], [1, 2, 3, 4, 5]],
        sampling_state([1, 2, 3], 1.0),
        tables,
        num_blocks,
        max_tokens=9,
    )
    state = replace(state, next_token=jnp.asarray([2, 2, 6], jnp.int32))
    assert state.acceptance is not None
    looks = replace(state.acceptance, break_even=jnp.asarray([0, 2 * SCALE, 2 * SCALE]))
    state = replace(state, acceptance=looks)
    head = Proposal(jnp.full((3, K), 7, jnp.int32), jnp.full((3, K, 48), 0.5))

    def without(token: int) -> jax.Array:
        ids = jnp.arange(48, dtype=jnp.int32)
        return jnp.where(ids == token, -1, (ids + 5) % 48)

    for ids, expected in (
        (None, [3, 4, 1]),
        (without(4), [3, -1, -1]),
        (without(3), [7, 7, 7]),
    ):
        own, is_lookup, _ = fallback.fall_back(cfg, state, on_device, head, ids)
        assert own.draft_tokens.tolist() == [[7] * K, expected, [7] * K]
        assert is_lookup.tolist() == [False, expected[0] == 3, False]
        assert own.draft_logits is not None
        q = np.asarray(jax.nn.softmax(own.draft_logits, axis=-1))
        np.testing.assert_allclose(q[[0, 2]], 1 / 48, rtol=1e-6)
        if not is_lookup[1]:
            np.testing.assert_allclose(q[1], 1 / 48, rtol=1e-6)
            continue
        for i, token in enumerate(itertools.takewhile(lambda t: t >= 0, expected)):
            draft_id = token if ids is None else int(ids[token])
            assert q[1, i, draft_id] == 1 and q[1, i].sum() == 1
