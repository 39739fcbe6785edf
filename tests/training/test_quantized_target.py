"""A head is trained on the hidden states of the quantised target that it will draft for."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxspec.loading.conversion import convert_checkpoint
from jaxspec.loading.model import load_target
from jaxspec.training.target import greedy_tokens, target_states
from tests.parity.ours import PagedTarget, by_position
from tests.support import quantized


def test_training_reads_the_states_that_decoding_makes(tmp_path: Path) -> None:
    plain = quantized.plain_checkpoint(tmp_path / "plain")
    folder = convert_checkpoint(plain, tmp_path / "fp8", "fp8")
    cfg, params = load_target(folder, jnp.float32)
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, 12)
    hidden, aux = target_states(
        params, cfg, jnp.asarray(tokens)[None], jnp.array([12]), aux_layers=(0, 1, 2)
    )
    decoded = PagedTarget(cfg, params, 1, block_size=4, aux_layers=(0, 1, 2))
    for position in range(12):
        decoded.feed(1, [position], [[int(tokens[position])]])
    np.testing.assert_allclose(hidden[0], by_position(decoded.hidden[0]), rtol=1e-4, atol=1e-4)
    assert aux is not None
    np.testing.assert_allclose(aux[0], by_position(decoded.aux[0]), rtol=1e-4, atol=1e-4)
    greedy = greedy_tokens(params, cfg, hidden)[0]
    np.testing.assert_array_equal(greedy, by_position(decoded.logits[0]).argmax(-1))
    other_cfg, other = load_target(plain, jnp.float32)
    unlike, _ = target_states(
        other, other_cfg, jnp.asarray(tokens)[None], jnp.array([12]), aux_layers=()
    )
    assert np.abs(np.asarray(hidden) - np.asarray(unlike)).max() > 0.02
