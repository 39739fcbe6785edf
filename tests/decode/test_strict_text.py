"""Under the strict rule a seed gives the same sampled text with and without speculation: the noise
belongs to the position."""

from __future__ import annotations

import pytest

from tests.support.slow import slow
from tests.support.tiny import agreeing_model, generate, random_prompts, sampling_state

pytestmark = pytest.mark.once

LENGTHS, MAX_TOKENS, TEMPERATURES = (5, 9, 1), 20, (0.5, 0.7, 1.0)


@pytest.mark.parametrize(
    ("method", "K", "draft_sampling"),
    [slow("eagle3", 1, "probabilistic"), ("eagle", 3, "probabilistic"), ("eagle3", 4, "greedy")],
)
def test_sampled_text_equals_plain_text_with_the_same_seed(
    method: str, K: int, draft_sampling: str
) -> None:
    model, prompts = agreeing_model(method), random_prompts(LENGTHS)
    plain_texts = []
    for seed in range(3):
        sampling = sampling_state([seed, seed + 100, seed + 200], TEMPERATURES)
        plain = generate(
            model.round_config(0), model.params, prompts, sampling, max_tokens=MAX_TOKENS
        )
        cfg = model.round_config(K, rule="strict", draft_sampling=draft_sampling)
        run = generate(cfg, model.params, prompts, sampling, max_tokens=MAX_TOKENS)
        assert run.token_ids == plain.token_ids
        assert run.mean_acceptance_length > 1.1  # not by rejecting everything
        plain_texts.append(plain.token_ids)
    assert all(a != b for i, a in enumerate(plain_texts) for b in plain_texts[:i]), (
        "seeds: expected another text for each"
    )


def test_truncated_text_equals_plain_text_with_the_same_seed() -> None:
    model, prompts = agreeing_model("eagle"), random_prompts(LENGTHS)
    sampling = sampling_state([1, 2, 3], 1.0, top_k=[0, 5, 3], top_p=[0.8, 1.0, 0.9])
    plain = generate(
        model.round_config(0, processors=frozenset({"truncation"})),
        model.params,
        prompts,
        sampling,
        max_tokens=MAX_TOKENS,
    )
    run = generate(
        model.round_config(3, rule="strict", processors=frozenset({"truncation"})),
        model.params,
        prompts,
        sampling,
        max_tokens=MAX_TOKENS,
    )
    assert run.token_ids == plain.token_ids
    assert (
        run.token_ids
        != generate(
            model.round_config(0), model.params, prompts, sampling, max_tokens=MAX_TOKENS
        ).token_ids
    )
