"""Rounds of DFlash and DSpark drafts: greedy text equals plain text, and sampled text follows the
target's distribution jointly over several rounds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import drafts
from jaxspec.decode.state import draft_context
from jaxspec.drafts import DSparkConfig
from jaxspec.drafts import block as block_module
from jaxspec.layers.params import init_random
from jaxspec.loading.binding import bind_draft
from tests.decode.test_families_distribution import flattened, joint_statistic
from tests.support.families import family_model
from tests.support.slow import slow, slow_unless
from tests.support.statistics import within_limit
from tests.support.tiny import (
    BLOCK_METHODS,
    Model,
    agreeing_block_model,
    block_config,
    block_tables,
    generate,
    random_prompts,
    sampling_state,
    tiny_model,
)

# --- greedy text
# --------------------------------------------------------------------------------------------------

LENGTHS, MAX_TOKENS = (5, 9, 1, 4), (24, 33, 21, 2)
RULES = ("probabilistic", "block", "strict")
CASES = [
    (method, K, (4, 1, 16)[K % 3], RULES[K // 3 % 3], K % 2 == 0)
    for method, K in itertools.product(BLOCK_METHODS, range(1, 17))
]
USUAL = [c for c in CASES if c[:2] in (("dflash", 1), ("dflash", 6), ("dspark", 3), ("dspark", 16))]


@cache
def plain_text(kind: str, method: str) -> list[list[int]]:
    model = agreeing_block_model(method) if kind == "agreeing" else tiny_model(method)
    cfg = model.round_config(0, sampled=False)
    state = sampling_state([0] * 4)
    return generate(
        cfg, model.params, random_prompts(LENGTHS), state, max_tokens=MAX_TOKENS
    ).token_ids


def assert_equals_plain(
    model: Model, kind: str, method: str, K: int, block_size: int, **changes: Any
) -> float:
    """By chunks, over shuffled blocks, unequal prompts and ends; the mean acceptance length."""
    cfg = model.round_config(K, block_size=block_size, **changes)
    run = generate(
        cfg,
        model.params,
        random_prompts(LENGTHS),
        sampling_state([0] * 4),
        max_tokens=MAX_TOKENS,
        chunk=4,
        shuffle_seed=K,
    )
    plain = plain_text(kind, method)
    assert [len(text) for text in plain] == list(MAX_TOKENS)
    assert run.token_ids == plain
    return run.mean_acceptance_length


@pytest.mark.once
@pytest.mark.parametrize(
    ("method", "K", "block_size", "rule", "sampled"), slow_unless(USUAL, CASES)
)
def test_greedy_text_equals_plain_text_when_drafts_are_accepted(
    method: str, K: int, block_size: int, rule: str, sampled: bool
) -> None:
    model = agreeing_block_model(method)
    length = assert_equals_plain(
        model, "agreeing", method, K, block_size, rule=rule, sampled=sampled
    )
    assert length > (1.3 if method == "dflash" or K == 1 else 1.6), length


@pytest.mark.once
@pytest.mark.parametrize(
    ("method", "window", "mapped", "K"),
    [("dspark", 3, True, 4), *(slow("dflash", w, m, 2) for w, m in ((None, True), (3, False)))],
)
def test_greedy_text_equals_plain_text_when_they_are_not(
    method: str, window: int | None, mapped: bool, K: int
) -> None:
    model = tiny_model(method, window=window, mapped=mapped)
    assert assert_equals_plain(model, "hostile", method, K, 4, rule="block", sampled=True) < 1.4


@pytest.mark.once
@pytest.mark.parametrize("rule", ["strict", slow("block")])
def test_greedy_text_equals_plain_text_when_confidence_ends_drafts(rule: str) -> None:
    model = agreeing_block_model("dspark", confidence_threshold=0.3)
    whole = agreeing_block_model("dspark")
    lengths = [
        assert_equals_plain(m, "agreeing", "dspark", 6, 4, rule=rule, sampled=True)
        for m in (model, whole)
    ]
    assert 1.1 < lengths[0] < lengths[1] - 0.3, lengths  # some are ended


@pytest.mark.parametrize("method", ["dspark", slow("dflash")])
def test_modes_of_compilation_give_the_same_text(method: str) -> None:
    """A program a round, a program for the draft, and none."""
    model = agreeing_block_model(method)
    cfg = model.round_config(2, rule="probabilistic", sampled=False)
    texts = [
        generate(
            cfg,
            model.params,
            random_prompts((3, 5)),
            sampling_state([0] * 2),
            max_tokens=(3, 4),
            compilation=compilation,
        ).token_ids
        for compilation in ("round", "step", "eager")
    ]
    assert texts[0] == texts[1] == texts[2]


# --- rows of padding
# --------------------------------------------------------------------------------------------------


@pytest.mark.once
def test_rows_of_padding_change_no_draft_and_write_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("dspark", window=3)
    cfg = model.round_config(5, rule="probabilistic", sampled=True)
    tables, _ = block_tables(2, cfg)
    run = generate(
        cfg, model.params, random_prompts((5, 9)), sampling_state([1] * 2), max_tokens=(4, 6)
    )
    state = replace(run.state, active=jnp.ones(2, bool))
    context = draft_context(cfg, state, jax.tree.map(jnp.asarray, tables))
    found = []
    for padding in (0, 3):
        monkeypatch.setattr(block_module, "idle_rows", lambda *_, padding=padding: padding)
        drafter, params = drafts.layered_drafter(model.draft), model.params["draft"]
        drafted = drafter.propose(cfg, params, state.draft, context)
        found.append(jax.tree.map(np.asarray, drafted))
    np.testing.assert_array_equal(found[0][0].draft_tokens, found[1][0].draft_tokens)
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


# --- distribution
# --------------------------------------------------------------------------------------------------

VOCAB, K = 5, 3


def small_model(method: str, threshold: float = 0.0, **changes: Any) -> Model:
    """A target with windows and a random draft over five tokens."""
    theirs = family_model("gpt_oss", "eagle", window=4, disturbance=1.0, vocab=VOCAB)
    values: dict[str, Any] = dict(vocab_size=VOCAB, draft_vocab_size=VOCAB, mask_token_id=VOCAB - 1)
    heads = dict(confidence_threshold=threshold) if method == "dspark" else {}
    draft = block_config(method, window=4, **{**values, **heads, **changes})
    own = init_random(drafts.family(draft).param_specs(draft), jax.random.key(7), jnp.float32)
    target = theirs.params["target"]
    params = {"target": target, "draft": bind_draft(draft, own, target, None)}
    return flattened(replace(theirs, draft=draft, params=params))


@pytest.mark.once
@pytest.mark.parametrize(
    ("method", "rule", "threshold", "changes", "batches"),
    [
        ("dflash", "block", 0.0, {}, 3),
        ("dspark", "block", 0.3, {}, 3),
        # tests/parity has this kind's logits, test_row_budget.py the rule.
        slow("dspark", "probabilistic", 0.0, {"markov_kind": "rnn"}, 3),
        slow("dflash", "probabilistic", 0.0, {}, 12),
        slow("dspark", "probabilistic", 0.3, {"markov_kind": "gated"}, 12),
        slow("dspark", "block", 0.0, {"sample_from_anchor": False}, 12),
        slow("dspark", "strict", 0.3, {}, 12),
    ],
)
def test_text_follows_the_target_jointly_over_rounds(
    method: str, rule: str, threshold: float, changes: dict[str, Any], batches: int
) -> None:
    found, accepted = joint_statistic(small_model(method, threshold, **changes), K, rule, batches)
    assert accepted == set(range(K + 1))
    assert within_limit(*found), found


@pytest.mark.once
def test_logits_without_the_markov_term_bias_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens come from the corrected logits, and q is the uncorrected one's."""
    monkeypatch.setattr(DSparkConfig, "corrects_logits", property(lambda self: False))
    found, _ = joint_statistic(small_model("dspark", draft_block_size=9), K, "probabilistic", 3)
    assert not within_limit(*found), found


@pytest.mark.once
def test_drafts_that_end_by_a_look_at_themselves_bias_the_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last draft is judged by its own token, instead of by those before it."""
    draw_step = block_module.draw_step

    def look(*args: Any) -> Any:
        *_, step, before = args
        made = draw_step(*args)
        goes_on = (before.num_proposed == step) & (made.token % 2 == 0)
        return replace(made, num_proposed=before.num_proposed + goes_on.astype(jnp.int32))

    monkeypatch.setattr(block_module, "draw_step", look)
    found, _ = joint_statistic(
        small_model("dspark", 0.3, draft_block_size=10), K, "probabilistic", 3
    )
    assert not within_limit(*found), found
