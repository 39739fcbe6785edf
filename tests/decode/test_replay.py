"""A draft that knows the text is accepted whole in every round, one that is always wrong never; the
text is the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.tiny import VOCAB, Model, generate, random_prompts, sampling_state, tiny_model
from tests.support.toys import ToyDraft

LENGTHS, MAX_TOKENS = (5, 9, 1), 17

pytestmark = pytest.mark.usefixtures("toy_families")


def with_replay(
    model: Model, prompts: list[list[int]], texts: list[list[int]], offset: int
) -> tuple[ToyDraft, Any]:
    """A draft that proposes each request's own continuation, `offset` added to every token."""
    whole = np.zeros((len(prompts), 64), np.int32)
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        whole[row, : len(prompt) + len(text)] = prompt + text
    return ToyDraft(VOCAB, method="replay"), {
        "target": model.params["target"],
        "draft": {"text": jnp.asarray((whole + offset) % VOCAB)},
    }


def expected_counts(K: int, accepted: int) -> list[int]:
    """Accepted drafts a round, until the first token and those of the rounds reach MAX_TOKENS."""
    rounds = -(-(MAX_TOKENS - 1) // (accepted + 1))
    return [accepted] * rounds


@pytest.mark.parametrize(
    ("K", "rule", "temperature"),
    [(1, "strict", 0.9), (2, "block", 0.0), (3, "probabilistic", 0.0), (5, "strict", 0.9)],
)
def test_replay_is_accepted_whole_and_a_hostile_draft_never(
    K: int, rule: str, temperature: float
) -> None:
    """Sampled under the strict rule, greedy under the others: elsewhere a sampled text is not the
    plain one."""
    model = tiny_model("eagle")
    prompts, sampling = random_prompts(LENGTHS), sampling_state([1, 2, 3], temperature)
    sampled = bool(temperature)
    plain = generate(
        model.round_config(0, sampled=sampled), model.params, prompts, sampling, max_tokens=40
    )
    for offset, accepted in ((0, K), (1, 0)):
        draft, params = with_replay(model, prompts, plain.token_ids, offset)
        cfg = model.round_config(
            0,
            draft=draft,
            rule=rule,
            sampled=sampled,
            draft_sampling="greedy",
            num_speculative_tokens=K,
        )
        cfg = replace(cfg, draft_groups=cfg.target_groups)
        run = generate(cfg, params, prompts, sampling, max_tokens=MAX_TOKENS)
        assert run.token_ids == [text[:MAX_TOKENS] for text in plain.token_ids]
        for row in range(len(prompts)):
            assert [counts[row] for counts in run.accepted] == expected_counts(K, accepted)
