"""Matrices in float8 with a scale a block, as in DeepSeek-V3's own files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxspec.config import ConfigError
from jaxspec.layers.params import matrix, vector
from jaxspec.loading import load_params
from jaxspec.loading.checkpoint import LazyTensor, open_checkpoint
from jaxspec.loading.model import table_tensors

BLOCK = (4, 8)
CONFIG = {
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
}
SHAPES = {
    "a.weight": (8, 16),
    "b.weight": (6, 11),
}  # whole blocks, and parts of blocks at both edges
SPECS = {
    "a": matrix("a.weight", 16, 8, (None, None)),
    "b": matrix("b.weight", 11, 6, (None, None)),
    "norm": vector("norm.weight", 5),
}


def stored() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found: dict[str, np.ndarray] = {"norm.weight": rng.normal(size=5).astype(ml_dtypes.bfloat16)}
    for name, (rows, columns) in SHAPES.items():
        found[name] = rng.normal(size=(rows, columns)).astype(ml_dtypes.float8_e4m3fn)
        scales = rng.uniform(0.01, 2, (-(-rows // BLOCK[0]), -(-columns // BLOCK[1])))
        found[f"{name}_scale_inv"] = scales.astype(np.float32)
    return found


def write(folder: Path, values: dict[str, np.ndarray], config: dict[str, Any] = CONFIG) -> Path:
    """As safetensors has it; its own writer of numpy arrays knows no float8."""
    names = {"float8_e4m3fn": "F8_E4M3", "float32": "F32", "bfloat16": "BF16", "int32": "I32"}
    header, data = {}, b""
    for name, value in values.items():
        raw = value.tobytes()
        header[name] = {
            "dtype": names[value.dtype.name],
            "shape": list(value.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def opened(folder: Path) -> Mapping[str, LazyTensor]:
    """As a config without a quantisation reads them."""
    return table_tensors(open_checkpoint(folder), object(), SPECS)


def test_a_weight_is_its_float8_times_its_blocks_scale(tmp_path: Path) -> None:
    values = stored()
    params = load_params(SPECS, opened(write(tmp_path, values)), jnp.float32)
    for key in ("a", "b"):
        weight, scales = (
            values[f"{key}.weight"].astype(np.float32),
            values[f"{key}.weight_scale_inv"],
        )
        rows, columns = np.indices(weight.shape)
        expected = weight * scales[rows // BLOCK[0], columns // BLOCK[1]]
        np.testing.assert_array_equal(params[key], expected.T)
    np.testing.assert_array_equal(params["norm"], values["norm.weight"].astype(np.float32))


def test_a_shape_is_the_matrixs_and_scales_are_no_tensors_of_their_own(tmp_path: Path) -> None:
    tensors = opened(write(tmp_path, stored()))
    assert {n: t.shape for n, t in tensors.items()} == {**SHAPES, "norm.weight": (5,)}


def _without(name: str) -> Any:
    return lambda values, config: ({k: v for k, v in values.items() if k != name}, config)


WRONG: dict[str, Any] = {
    r"a\.weight: expected a\.weight_scale_inv beside a float8 tensor, got none": _without(
        "a.weight_scale_inv"
    ),
    r"a\.weight_scale_inv: expected the tensor a\.weight that it scales, got none": _without(
        "a.weight"
    ),
    (
        r"b\.weight_scale_inv: expected \(2, 2\) scales of a "
        r"matrix \(6, 11\), got \(2, 1\)"
    ): lambda values, config: (
        values | {"b.weight_scale_inv": values["b.weight_scale_inv"][:, :1]},
        config,
    ),
    r"norm\.weight_scale_inv: expected scales of a matrix, got those of a tensor \(5,\)": (
        lambda values, config: (
            values | {"norm.weight_scale_inv": np.ones(2, np.float32)},
            config,
        )
    ),
    r"quantization_config: expected fmt 'e4m3', got 'e5m2'": lambda values, config: (
        values,
        {"quantization_config": config["quantization_config"] | {"fmt": "e5m2"}},
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_an_error(message: str, tmp_path: Path) -> None:
    values, config = WRONG[message](stored(), CONFIG)
    with pytest.raises(ConfigError, match=message):
        opened(write(tmp_path, values, config))


@pytest.mark.parametrize("size", [[128], [128, 0], [128, 64.5], [True, 8], 128, None])
def test_a_block_has_two_sizes(size: Any, tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": size}}
    message = f"quantization_config: expected weight_block_size as two sizes, got {size}"
    with pytest.raises(ConfigError, match=rf"{re.escape(message)}$"):
        opened(write(tmp_path, stored(), config))


@pytest.mark.parametrize("size", [128, 10**9, 10**30])
def test_a_block_may_be_larger_than_a_matrix(size: int, tmp_path: Path) -> None:
    values = stored()
    for key in ("a", "b"):
        values[f"{key}.weight_scale_inv"] = values[f"{key}.weight_scale_inv"][:1, :1]
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [size, size]}}
    params = load_params(SPECS, opened(write(tmp_path, values, config)), jnp.float32)
    for key in ("a", "b"):
        weight, scale = values[f"{key}.weight"], values[f"{key}.weight_scale_inv"]
        np.testing.assert_array_equal(params[key], (weight.astype(np.float32) * scale).T)


def test_scales_are_floats(tmp_path: Path) -> None:
    values = stored()
    values["b.weight_scale_inv"] = np.ones((2, 2), np.int32)
    tensors = opened(write(tmp_path, values))
    message = r"^b\.weight_scale_inv: expected scales in bfloat16 or float16 or float32, got int32$"
    with pytest.raises(ConfigError, match=message):
        load_params(SPECS, tensors, jnp.float32)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (np.nan, "positive, finite scales, got nan"),
        (np.inf, "positive, finite scales, got inf"),
        (-0.5, "positive, finite scales, got -0.5"),
        (0, "positive scales of weights other than 0, got 0.0"),
    ],
)
def test_scales_that_no_block_has_are_named(scale: float, message: str, tmp_path: Path) -> None:
    values = stored()
    values["b.weight_scale_inv"][1, 0] = scale
    tensors = opened(write(tmp_path, values))
    with pytest.raises(ConfigError, match=rf"^b\.weight_scale_inv: expected {message}$"):
        load_params(SPECS, tensors, jnp.float32)
    values["b.weight"][BLOCK[0] :, : BLOCK[1]] = 0
    if scale == 0:  # of weights of 0
        params = load_params(SPECS, opened(write(tmp_path, values)), jnp.float32)
        assert not params["b"][: BLOCK[1], BLOCK[0] :].any() and params["b"].any()


@pytest.mark.parametrize("settings", [None, {"quant_method": "other"}])
def test_without_the_method_the_scales_are_unexpected(settings: Any, tmp_path: Path) -> None:
    """Whatever else the config has."""
    quantization = settings and CONFIG["quantization_config"] | settings
    tensors = opened(write(tmp_path, stored(), {"quantization_config": quantization}))
    with pytest.raises(
        ConfigError, match=r"2 unexpected: a\.weight_scale_inv, b\.weight_scale_inv"
    ):
        load_params(SPECS, tensors, jnp.float32)
