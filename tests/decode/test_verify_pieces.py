"""Judging a batch whose logits would be too large in pieces gives the same bits as judging it
whole."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.arrays import init_cache
from jaxspec.decode import verify
from jaxspec.drafts.autoregressive import Proposal
from tests.support.tiny import LAYERS, VOCAB, agreeing_model, block_tables, sampling_state

K, BATCH = 3, 7


@pytest.mark.parametrize(
    ("rule", "temperature", "sizes"),
    [("block", 1.0, (1, 3, 4)), ("strict", 1.0, (3,)), ("probabilistic", 0.0, (4,))],
)
def test_pieces_give_the_bits_of_the_whole(
    rule: str, temperature: float, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """7 requests, of which 3 and 4 at a time leave a rest; log-probabilities are among the
    results."""
    model = agreeing_model("eagle")
    cfg = model.round_config(K, rule=rule, sampled=temperature > 0, logprobs=True)
    tables, num_blocks = block_tables(BATCH, cfg)
    rng = np.random.default_rng(0)
    caches = init_cache(cfg.target.attention, num_blocks * LAYERS, cfg.block_size, jnp.float32)
    caches = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), caches)
    drafts = jnp.asarray(rng.integers(0, VOCAB, (BATCH, K)), jnp.int32)
    proposal = Proposal(
        drafts,
        jnp.asarray(rng.normal(size=(BATCH, K, VOCAB)), jnp.float32) if temperature else None,
    )
    sampling = jax.tree.map(jnp.asarray, sampling_state(list(range(BATCH)), temperature))
    seq_lens, active = (
        jnp.asarray([5, 9, 1, 3, 2, 7, 4], jnp.int32),
        jnp.asarray([True] * 4 + [False] + [True] * 2),
    )

    def judged(size: int) -> Any:
        monkeypatch.setattr(verify, "MAX_LOGITS_BYTES", size * 4 * (K + 1) * VOCAB)
        assert verify.piece_size(cfg, BATCH) == size
        run = jax.jit(
            lambda *args: verify.verify(
                cfg,
                model.params["target"],
                seq_lens,
                proposal,
                seq_lens,
                active,
                jax.tree.map(jnp.asarray, cfg.target_tables(tables)),
                caches,
                *args,
            )[0]
        ).lower(sampling)
        assert f"tensor<{size}x{K + 1}x{VOCAB}xf32>" in run.as_text()
        return jax.tree.map(np.asarray, run.compile()(sampling))

    whole = judged(BATCH)
    assert whole.num_sampled[4] == 0 and whole.num_sampled.sum() >= 6
    for size in sizes:
        jax.tree.map(np.testing.assert_array_equal, judged(size), whole)


def test_a_gigabyte_is_the_limit() -> None:
    """Also of a batch that is prime, which is not judged one request at a time."""
    cfg = agreeing_model("eagle").round_config(K)
    at_a_time = (1 << 30) // (4 * (K + 1) * VOCAB)
    assert verify.piece_size(cfg, 64) == 64 and verify.piece_size(cfg, 4 * at_a_time) == at_a_time
    assert at_a_time // 2 < verify.piece_size(cfg, 2_796_203) <= at_a_time
