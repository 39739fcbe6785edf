"""The target's pass in training: by the attention kernel, and by the reference."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import models
from jaxspec.config import REFERENCE_OPS, AttentionConfig, Ops, RopeConfig
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


GPT_OSS = families.target_config("gpt_oss", head_dim=64, sliding_window=20)
# One query a KV head and 64 rows: the kernel of a round's few rows serves these.
NARROW = dataclasses.replace(
    TARGET, attention=dataclasses.replace(ATTENTION, num_heads=1, num_kv_heads=1)
)


def documents(size: int, *rows: tuple[int, ...]) -> np.ndarray:
    """Return the document of each token, of rows of `size` with documents of these lengths."""
    numbers = np.full((len(rows), size), -1, np.int32)
    for row, lengths in zip(numbers, rows, strict=True):
        row[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    return numbers


def states(
    cfg: models.TargetConfig, of: np.ndarray, tokens: np.ndarray, params: Params, ops: Ops
) -> np.ndarray:
    """Return hidden and aux of real rows, side by side."""
    lengths, starts = jnp.sum(of >= 0, axis=1, dtype=jnp.int32), document_starts(jnp.asarray(of))
    hidden, aux = jax.jit(
        lambda params: target_states(params, cfg, jnp.asarray(tokens), lengths, (1,), starts, ops)
    )(params)
    assert aux is not None
    return np.asarray(jnp.concatenate((hidden, aux), axis=-1), np.float32)[of >= 0]


def row_errors(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the root mean square error of each row, beside that of all expected numbers."""
    return np.sqrt(np.mean((found - expected) ** 2, axis=1) / np.mean(expected**2))


def compare_kernel_and_reference(cfg: models.TargetConfig, rows: int) -> None:
    """Rows are whole, part full, and of several documents, which do not see each other."""
    params = init_random(
        models.family(cfg).param_specs(cfg), jax.random.key(0), jnp.dtype(jnp.bfloat16)
    )
    third = rows // 3
    of = documents(rows, (third + 8, rows - third - 23, 15), (third,), (rows,))
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, of.shape, np.int32)
    expected = states(cfg, of, tokens, params, REFERENCE_OPS)
    with interpreted():
        ops = for_whole_sequences(cfg, rows, jnp.bfloat16)
        assert ops.names() | {"attention": "reference"} == REFERENCE_OPS.names()
        assert ops.attention == "mosaic_gpu"
        found = states(cfg, of, tokens, params, ops)
    errors = row_errors(found, expected)
    # A rounding is 0.002. A rounded router sends a few rows to another expert.
    assert errors.max() > 0 and np.quantile(errors, 0.9) < 0.025

    together = np.minimum(of, 0)  # what rows would see without their documents' borders
    other = states(cfg, together, tokens, params, REFERENCE_OPS)
    assert np.quantile(row_errors(other, expected), 0.9) > 0.1


CASES = pytest.mark.parametrize(
    "cfg, rows",
    [(TARGET, ROWS), (GPT_OSS, ROWS), (NARROW, 64)],
    ids=["full", "windows and sinks", "few rows"],
)


@needs_mosaic
@CASES
def test_the_kernel_makes_the_states_of_the_reference(cfg: models.TargetConfig, rows: int) -> None:
    compare_kernel_and_reference(cfg, rows)


@pytest.mark.gpu
@CASES
def test_the_kernel_makes_the_states_of_the_reference_on_a_gpu(
    cfg: models.TargetConfig, rows: int
) -> None:
    compare_kernel_and_reference(cfg, rows)


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
