"""Judging a batch whose logits would be too large in pieces gives the same bits as judging it whole."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import decode, verify
from tests.support.tiny import VOCAB, agreeing_model, block_table, random_prompts, sampling_state, start

LENGTHS, K = (5, 9, 1, 3, 2, 7), 3


@pytest.mark.parametrize(("rule", "temperature"), [("block", 1.0), ("strict", 1.0), ("probabilistic", 0.0)])
def test_pieces_give_the_bits_of_the_whole(rule: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 requests, whole and 1, 2 and 3 at a time; log-probabilities are among the results."""
    model = agreeing_model("eagle")
    cfg = model.round_config(K, rule=rule, sampled=temperature > 0, logprobs=True)
    table, num_blocks = block_table(6, cfg)
    _, state = start(cfg, model.params, random_prompts(LENGTHS), sampling_state(list(range(6)), temperature), table, num_blocks)
    results: list[Any] = []
    for most in (6, 1, 2, 4):  # 4 does not divide 6: 3 at a time
        monkeypatch.setattr(verify, "MAX_LOGITS_BYTES", most * 4 * (K + 1) * VOCAB)
        size = verify.piece_size(cfg, 6)
        assert size == {4: 3}.get(most, most)
        run = jax.jit(lambda s, _=most: decode.decode_round(cfg, model.params, s, jnp.asarray(table)))
        assert f"tensor<{size}x{K + 1}x{VOCAB}xf32>" in run.lower(state).as_text()
        results.append(jax.tree.map(np.asarray, run(state)[0]))
    for pieces in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, pieces, results[0])


def test_a_gigabyte_is_the_limit() -> None:
    cfg = agreeing_model("eagle").round_config(K)
    at_a_time = (1 << 30) // (4 * (K + 1) * VOCAB)
    assert verify.piece_size(cfg, 64) == 64 and verify.piece_size(cfg, 4 * at_a_time) <= at_a_time
