"""The target's pass in training: by the attention kernel, and by the reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import models
from jaxspec.config import REFERENCE_OPS, AttentionConfig, RopeConfig
from jaxspec.layers.op_choice import for_whole_sequences
from jaxspec.layers.params import Params, init_random
from jaxspec.training.documents import document_starts
from jaxspec.training.target import target_states
from tests.kernels.interpreter import interpreted, needs_mosaic
from tests.support import families

ROWS = 128
ATTENTION = AttentionConfig(num_heads=3, num_kv_heads=1, head_dim=64, rope=RopeConfig(1e4))
TARGET = models.llama.LlamaConfig(
    "llama", 96, 64, 96, 2, ATTENTION, 1e-5, 256, tie_word_embeddings=True
)


def documents(*rows: tuple[int, ...]) -> np.ndarray:
    """Return the document of each token, of rows with documents of these lengths."""
    numbers = np.full((len(rows), ROWS), -1, np.int32)
    for row, lengths in zip(numbers, rows, strict=True):
        row[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    return numbers


def states(of: np.ndarray, tokens: np.ndarray, params: Params, **options: Any) -> np.ndarray:
    """Return hidden and aux of real rows, side by side."""
    lengths, starts = jnp.sum(of >= 0, axis=1, dtype=jnp.int32), document_starts(jnp.asarray(of))
    hidden, aux = jax.jit(
        lambda params: target_states(
            params, TARGET, jnp.asarray(tokens), lengths, (1,), starts, **options
        )
    )(params)
    assert aux is not None
    return np.asarray(jnp.concatenate((hidden, aux), axis=-1), np.float32)[of >= 0]


def compare_kernel_and_reference() -> None:
    """Rows are whole, part full, and of several documents, which do not see each other."""
    params = init_random(
        models.family(TARGET).param_specs(TARGET), jax.random.key(0), jnp.dtype(jnp.bfloat16)
    )
    of = documents((50, 63, 15), (41,), (ROWS,))
    tokens = np.random.default_rng(0).integers(0, TARGET.vocab_size, of.shape, np.int32)
    expected = states(of, tokens, params, ops=REFERENCE_OPS)
    with interpreted():
        ops = for_whole_sequences(TARGET, ROWS, jnp.bfloat16)
        assert ops.names() | {"attention": "reference"} == REFERENCE_OPS.names()
        assert ops.attention == "mosaic_gpu"
        found = states(of, tokens, params, ops=ops)
    error = np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))
    assert 0 < error < 0.01  # a rounding of bfloat16 is 0.002

    together = np.minimum(of, 0)  # what rows would see without their documents' borders
    other = states(together, tokens, params, ops=REFERENCE_OPS)
    assert np.sqrt(np.mean((other - expected) ** 2) / np.mean(expected**2)) > 0.1


@needs_mosaic
def test_the_kernel_makes_the_states_of_the_reference() -> None:
    compare_kernel_and_reference()


@pytest.mark.gpu
def test_the_kernel_makes_the_states_of_the_reference_on_a_gpu() -> None:
    compare_kernel_and_reference()


@needs_mosaic
@pytest.mark.parametrize(
    "cfg, rows, dtype",
    [
        (TARGET, ROWS, jnp.float32),
        (TARGET, 100, jnp.bfloat16),
        (
            dataclasses.replace(TARGET, attention=dataclasses.replace(ATTENTION, head_dim=32)),
            ROWS,
            jnp.bfloat16,
        ),
        (families.target_config("deepseek_v3"), ROWS, jnp.bfloat16),
    ],
    ids=["float32", "rows", "head_dim", "latents"],
)
def test_the_reference_serves_other_targets(
    cfg: models.TargetConfig, rows: int, dtype: jnp.dtype
) -> None:
    with interpreted():
        assert for_whole_sequences(cfg, rows, dtype) == REFERENCE_OPS


def test_the_reference_serves_other_devices() -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("this one has the kernel")
    assert for_whole_sequences(TARGET, ROWS, jnp.bfloat16) == REFERENCE_OPS
