"""Products of int4 weights equal float64 products of what their codes stand for."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.int4_matmul import Inputs, Int4Weight, int4_matmul, pack
from tests.kernels.interpreter import interpreted, needs_mosaic
from tests.kernels.test_matmul import assert_bits_are_the_rows_own

# Largest error, in units of the value's size plus the root mean square of the result: one rounding
# of the result to bfloat16, four with SwiGLU, or float32 sums of 256 terms.
TOLERANCE = {"bfloat16": 2 * 2.0**-8, "swiglu": 5 * 2.0**-8, "float32": 1e-6}


def int4_weight(
    seed: int, width: int, depth: int, *, group: int, zeros: bool, scale_dtype: Any = jnp.bfloat16
) -> tuple[Int4Weight, np.ndarray]:
    """A random weight, and its values in float64 [in, out]."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (width, depth)).astype(np.uint8)
    scales = rng.uniform(0.5, 2.0, (depth // group, width)) / depth**0.5 / 4
    scales = jnp.asarray(scales, scale_dtype)
    offsets = rng.integers(0, 17, (depth // group, width)).astype(np.uint8)
    weight = Int4Weight(jnp.asarray(pack(codes)), scales, jnp.asarray(offsets) if zeros else None)
    zero = offsets.repeat(group, axis=0).astype(np.float64) if zeros else 8.0
    exact = np.asarray(scales).astype(np.float64).repeat(group, axis=0)
    return weight, (codes.T.astype(np.float64) - zero) * exact


def assert_close(inputs: Inputs[Int4Weight], arrays: list[np.ndarray], got: Any) -> None:
    results = [np.asarray(inputs.x).astype(np.float64) @ array for array in arrays]
    if inputs.swiglu:
        gate, up = results
        results = [gate / (1 + np.exp(-gate)) * up]
    expected = np.concatenate(results, axis=1)
    if inputs.bias is not None:
        expected = expected + np.asarray(inputs.bias).astype(np.float64)
    if inputs.residual is not None:
        expected = expected + np.asarray(inputs.residual).astype(np.float64)
    got = np.asarray(got).astype(np.float64)
    assert got.shape == expected.shape and np.isfinite(got).all()
    kind = "swiglu" if inputs.swiglu else jnp.dtype(inputs.out_dtype).name
    error = np.abs(got - expected) / (np.abs(expected) + np.sqrt(np.square(expected).mean()))
    assert error.max() <= TOLERANCE[kind], error.max()


def test_units_keep_every_code_in_its_place() -> None:
    codes = np.random.default_rng(0).integers(0, 16, (2, 32, 192)).astype(np.uint8)
    weight = Int4Weight(jnp.asarray(pack(codes)), jnp.ones((2, 3, 32)))
    assert weight.shape == (2, 192, 32) and weight.group == 64
    assert (np.asarray(weight.codes()) == codes.swapaxes(1, 2)).all()


def test_a_word_holds_what_a_thread_multiplies() -> None:
    """Lane 4 * g + t, word j: columns g and g + 8, depths 16 * j + 2 * t and on."""
    g, t, j = 3, 2, 1
    codes = np.zeros((16, 64), np.uint8)
    expected = 0
    for k in range(2):
        for h in range(2):
            for pair in range(2):
                code = 1 + 4 * k + 2 * h + pair
                codes[g + 8 * h, 16 * j + 8 * k + 2 * t + pair] = code
                expected |= code << (4 * (2 * k + h) + 16 * pair)
    words = pack(codes).view(np.uint32).reshape(8, 4, 4)
    assert words[g, t, j] == expected and np.count_nonzero(words) == 1


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", [64, 128])
def test_the_reference_equals_float64(group: int, dtype: str, zeros: bool) -> None:
    made = [int4_weight(seed, 80, 256, group=group, zeros=zeros) for seed in (0, 1)]
    weights, arrays = tuple(w for w, _ in made), [a for _, a in made]
    x = jax.random.normal(jax.random.key(0), (5, 256), jnp.dtype(dtype))
    inputs = Inputs(x=x, weights=weights, out_dtype=jnp.dtype(dtype))
    assert_close(inputs, arrays, int4_matmul(inputs))


def test_the_reference_fuses_swiglu_and_residual() -> None:
    made = [int4_weight(seed, 64, 256, group=128, zeros=True) for seed in (0, 1)]
    weights, arrays = tuple(w for w, _ in made), [a for _, a in made]
    x, residual = (
        jax.random.normal(jax.random.key(i), (5, n), jnp.bfloat16) for i, n in ((0, 256), (1, 64))
    )
    inputs = Inputs(x=x, weights=weights, residual=residual, swiglu=True)
    assert_close(inputs, arrays, int4_matmul(inputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": jnp.ones((3, 64))}, r"scales: expected \[groups that divide 256, 64\]"),
        ({"scales": jnp.ones((2, 32))}, r"scales: expected \[groups that divide 256, 64\]"),
        ({"zeros": jnp.ones((1, 64), jnp.uint8)}, r"zeros: expected \(2, 64\), got \(1, 64\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    weight = dataclasses.replace(int4_weight(0, 64, 256, group=128, zeros=True)[0], **change)
    with pytest.raises(ValueError, match=message):
        int4_matmul(Inputs(x=jnp.ones((1, 256), jnp.bfloat16), weights=(weight,)))


# Small enough for the interpreter: depth, widths, rows, group, zeros, scales and what is fused.
SMALL: dict[str, tuple[int, tuple[int, ...], int, int, bool, str, str]] = {
    "one row, no zeros": (512, (64,), 1, 128, False, "bfloat16", ""),
    "sixteen rows, several tiles": (512, (192,), 16, 128, True, "float16", ""),
    "40 rows, padded to 64": (256, (64,), 40, 128, True, "bfloat16", ""),
    "64 rows, more steps than stages": (3072, (64,), 64, 128, False, "bfloat16", ""),
    "groups of 64 in three warpgroups": (576, (128,), 4, 64, True, "float32", ""),
    "one group for all depths": (512, (64,), 4, 512, True, "bfloat16", ""),
    "groups of 192, which steps of 128 would cut": (768, (64,), 4, 192, True, "bfloat16", ""),
    "groups of 384, which steps of 256 would cut": (1536, (64,), 40, 384, True, "bfloat16", ""),
    "a depth that is split": (4096, (64,), 4, 128, True, "bfloat16", "residual"),
    "residual, sixteen rows": (512, (128,), 16, 128, False, "bfloat16", "residual"),
    "bias": (512, (128,), 16, 128, False, "bfloat16", "bias"),
    "swiglu": (512, (128, 128), 3, 128, True, "bfloat16", "swiglu"),
    "swiglu, 32 rows": (512, (64, 64), 32, 64, True, "bfloat16", "swiglu"),
    "float32": (512, (128,), 3, 128, True, "bfloat16", "float32"),
}


@needs_mosaic
@pytest.mark.parametrize("name", SMALL)
def test_the_kernel_equals_float64(name: str) -> None:
    depth, widths, rows, group, zeros, scale_dtype, fused = SMALL[name]
    made = [
        int4_weight(i, width, depth, group=group, zeros=zeros, scale_dtype=jnp.dtype(scale_dtype))
        for i, width in enumerate(widths)
    ]
    residual = None
    if fused == "residual":
        residual = jax.random.normal(jax.random.key(1), (rows, widths[0]), jnp.bfloat16)
    inputs = Inputs(
        x=jax.random.normal(jax.random.key(0), (rows, depth), jnp.bfloat16),
        weights=tuple(w for w, _ in made),
        bias=jax.random.normal(jax.random.key(2), widths) if fused == "bias" else None,
        residual=residual,
        swiglu=fused == "swiglu",
        out_dtype=jnp.dtype("float32" if fused == "float32" else "bfloat16"),
    )
    with interpreted():
        got = int4_matmul(inputs, implementation="mosaic_gpu")
    assert_close(inputs, [a for _, a in made], got)


@needs_mosaic
def test_a_row_has_the_bits_of_any_other_batch() -> None:
    weight, _ = int4_weight(0, 64, 512, group=128, zeros=True)
    x = jax.random.normal(jax.random.key(0), (64, 512), jnp.bfloat16)
    with interpreted():
        made = [
            int4_matmul(Inputs(x=x[:rows], weights=(weight,)), implementation="mosaic_gpu")
            for rows in (3, 16, 64)
        ]
    for few in made[:2]:
        np.testing.assert_array_equal(few, made[2][: len(few)])


# ---- on the device


@pytest.mark.gpu
@pytest.mark.parametrize("fused", ["", "swiglu"])
@pytest.mark.parametrize(
    ("group", "zeros", "scale_dtype"),
    [
        (128, False, "bfloat16"),
        (128, True, "float16"),
        (64, True, "bfloat16"),
        (64, False, "float32"),
    ],
)
def test_rows_have_the_same_bits_in_mma_and_wgmma_on_the_gpu(
    group: int, zeros: bool, scale_dtype: str, fused: str
) -> None:
    """mma.sync multiplies up to 16 rows, and wgmma more. Without SwiGLU, results are the sums."""
    widths = (1024, 1024) if fused else (2048,)
    form: dict[str, Any] = {"group": group, "zeros": zeros, "scale_dtype": jnp.dtype(scale_dtype)}
    keys = jax.random.split(jax.random.key(0))
    magnitudes = jnp.exp2(jax.random.randint(keys[0], (64, 4096), -8, 8).astype(jnp.float32))
    x = (jax.random.normal(keys[1], (64, 4096)) * magnitudes).astype(jnp.bfloat16)
    inputs = Inputs(
        x=x,
        weights=tuple(int4_weight(i, width, 4096, **form)[0] for i, width in enumerate(widths)),
        swiglu=bool(fused),
        out_dtype=jnp.dtype("bfloat16" if fused else "float32"),
    )

    def run(inputs: Inputs[Int4Weight]) -> np.ndarray:
        return np.asarray(int4_matmul(inputs, implementation="mosaic_gpu"))

    assert_bits_are_the_rows_own(inputs, (1, 8, 16, 24, 40), run)
