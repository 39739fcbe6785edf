"""Weights that are finite and still overflow end the first request with a sentence."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, ConfigError, EngineConfig, SamplingParams
from tests.support.toys import ToyTarget

V = 24
pytestmark = pytest.mark.usefixtures("toy_families")


def engine(table: np.ndarray) -> LLM:
    config = EngineConfig(max_model_len=64, block_size=16, batch_buckets=(8,))
    params = {"table": jnp.asarray(table, jnp.float32)}
    return LLM((ToyTarget(V), params), eos_token_ids=(), config=config)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error_that_names_the_largest_weight(
    wrong: float,
) -> None:
    table = np.zeros((V, V), np.float32)
    table[3, 5] = wrong
    llm = engine(table)
    params = SamplingParams(0.0, max_tokens=2)
    for _ in range(2):  # the error comes again
        with pytest.raises(ConfigError, match=r"target: expected finite logits, got NaN or inf.*t"):
            llm.generate([[1, 2], [3]], params)


def test_logits_of_minus_infinity_and_large_ones_are_finite() -> None:
    table = np.zeros((V, V), np.float32)
    table[:, 7], table[:, 8] = 3e38, -np.inf
    assert engine(table).generate([[1]], SamplingParams(0.0, max_tokens=2))[0].token_ids == [7, 7]


def test_only_the_first_prompt_is_looked_at() -> None:
    table = np.eye(V, dtype=np.float32)
    table[3, 5] = np.nan
    llm = engine(table)
    params = SamplingParams(0.0, max_tokens=1)
    assert llm.generate([[1]], params)[0].token_ids == [1]
    assert len(llm.generate([[3]], params)[0].token_ids) == 1
