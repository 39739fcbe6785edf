"""Weights that no model can have are refused when they are read, and the message names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.config import ConfigError
from jaxspec.layers.mxfp4 import packed_weight
from jaxspec.layers.params import (
    AssembledSpec,
    IndexSpec,
    JoinedSpec,
    ParamSpec,
    cut,
    joined,
    matrix,
)
from jaxspec.loading import load_params, open_checkpoint
from jaxspec.loading.weight_checks import CHUNK, is_finite

FLOATS = [np.float32, np.float16, ml_dtypes.bfloat16]
WRONG = [np.nan, -np.nan, np.inf, -np.inf]


def load(tmp_path: Path, spec: ParamSpec, values: np.ndarray, dtype: Any = np.float32) -> Any:
    (tmp_path / "config.json").write_text("{}")
    save_file({spec.name: np.ascontiguousarray(values)}, tmp_path / "model.safetensors")
    return load_params({"w": spec}, open_checkpoint(tmp_path).tensors, dtype, source="target")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("wrong", WRONG)
def test_one_number_that_is_not_finite_is_seen_wherever_it_is(dtype: Any, wrong: float) -> None:
    array = np.random.default_rng(0).normal(size=(4, CHUNK // 2 + 3)).astype(dtype)
    array[0, :4] = [-0.0, np.finfo(np.float16).max, -np.finfo(np.float16).max, 1e-7]
    assert is_finite(array) and is_finite(array.T)
    for place in ((0, 0), (1, 17), (3, CHUNK // 2 + 2)):
        damaged = array.copy()
        damaged[place] = wrong
        assert not is_finite(damaged) and not is_finite(damaged.T)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("wrong", "name"), [(np.nan, "NaN"), (np.inf, "infinity")])
def test_weights_that_are_not_finite_are_named(
    tmp_path: Path, dtype: Any, wrong: float, name: str
) -> None:
    values = np.ones((6, 4), dtype)
    values[2, 1:3] = wrong
    with pytest.raises(ConfigError) as e:
        load(tmp_path, matrix("lm_head.weight", 4, 6, ("embed", "vocab")), values)
    assert str(e.value) == (
        f"target: lm_head.weight: expected finite numbers, got {name} in 2 of 24 places"
    )


def test_an_array_of_another_shape_than_its_spec_is_named(tmp_path: Path) -> None:
    sources = (("w", (2, 6)),)
    spec = AssembledSpec("w", (2, 4), (None, None), sources=sources, build=lambda arrays: arrays[0])
    with pytest.raises(ConfigError, match=r"w: expected the shape \(2, 4\), got \(2, 6\)"):
        load(tmp_path, spec, np.ones((2, 6), np.float32))


def test_a_number_too_large_for_the_dtype_of_the_weights_is_named(tmp_path: Path) -> None:
    values = np.full((2, 2), np.finfo(np.float32).max)
    with pytest.raises(ConfigError, match="expected finite numbers, got infinity in 4 of 4"):
        load(tmp_path, ParamSpec("w", (2, 2), (None, None)), values, ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.bool_])
def test_integers_and_booleans_are_no_floats(tmp_path: Path, dtype: Any) -> None:
    stored = "int32" if dtype == np.int64 else np.dtype(dtype).name
    with pytest.raises(ConfigError) as e:
        load(tmp_path, ParamSpec("norm", (3,), (None,)), np.ones(3, dtype))
    assert str(e.value) == f"target: norm: expected floating-point numbers, got {stored}"


PARTS = ("k.weight", "v.weight")


def load_joined(tmp_path: Path, dtypes: list[Any], dtype: Any = np.float32) -> np.ndarray:
    """Two matrices side by side, with values that every dtype can hold."""
    spec: JoinedSpec = joined(
        "{k,v}", [matrix(name, 2, 2, ("embed", "kv_heads")) for name in PARTS]
    )
    values = {
        name: np.arange(4 * i, 4 * i + 4, dtype=np.float32).reshape(2, 2).astype(own)
        for i, (name, own) in enumerate(zip(PARTS, dtypes, strict=True))
    }
    (tmp_path / "config.json").write_text("{}")
    save_file(values, tmp_path / "model.safetensors")
    tensors = open_checkpoint(tmp_path).tensors
    return np.asarray(load_params({"w": spec}, tensors, dtype, source="target")["w"])


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.bool_])
def test_integers_beside_floats_are_no_floats_either(tmp_path: Path, dtype: Any) -> None:
    with pytest.raises(ConfigError) as e:
        load_joined(tmp_path, [np.float32, dtype])
    stored = np.dtype(dtype).name
    assert str(e.value) == f"target: v.weight: expected floating-point numbers, got {stored}"


@pytest.mark.parametrize("other", FLOATS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_joined_arrays_may_be_stored_in_several_floats(
    tmp_path: Path, other: Any, dtype: Any
) -> None:
    found = load_joined(tmp_path, [ml_dtypes.bfloat16, other], dtype)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.astype(np.float32), [[0, 2, 4, 6], [1, 3, 5, 7]])


def test_floats_are_no_packed_weights_and_no_indices(tmp_path: Path) -> None:
    for wanted in ("uint8", "int32"):
        with pytest.raises(ConfigError, match=f"expected {wanted} numbers, got float32"):
            load(tmp_path, ParamSpec("w", (3,), (None,), dtype=wanted), np.ones(3, np.float32))


def test_indices_out_of_their_table_are_refused(tmp_path: Path) -> None:
    spec = IndexSpec("table", (2,), (None,), below=4)
    assert load(tmp_path, spec, np.array([0, 3]))["w"].tolist() == [0, 3]
    for wrong in (4, -1):
        with pytest.raises(ConfigError, match=r"table: expected indices in 0\.\.3, got"):
            load(tmp_path, spec, np.array([1, wrong]))


def test_a_cut_table_of_indices_is_checked_too(tmp_path: Path) -> None:
    whole, spec = (IndexSpec("table", (size,), (None,), below=4) for size in (3, 2))
    assert load(tmp_path, cut(whole, spec), np.array([0, 3, 9]))["w"].tolist() == [0, 3]
    with pytest.raises(ConfigError, match=r"table: expected indices in 0\.\.3, got"):
        load(tmp_path, cut(whole, spec), np.array([1, 4, 0]))


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (255, r"w_scales: expected scales that are numbers, got NaN \(255\)"),
        (129, "target: w: expected scales of at most 128, got 129; mxfp4 'dequantised' takes .*"),
    ],
)
def test_scales_that_the_kernel_cannot_read_are_refused(
    tmp_path: Path, scale: int, message: str
) -> None:
    entry = packed_weight("w", (1, 32, 16), (None, None, None))
    tensors = {
        "w_blocks": np.zeros((1, 16, 1, 16), np.uint8),
        "w_scales": np.full((1, 16, 1), 128, np.uint8),
    }

    def read() -> Any:
        (tmp_path / "config.json").write_text("{}")
        save_file(tensors, tmp_path / "model.safetensors")
        opened = open_checkpoint(tmp_path).tensors
        return load_params({"w": entry}, opened, np.float32, source="target")

    assert read()["w"].units.dtype == np.int32
    tensors["w_scales"][0, 7, 0] = scale
    with pytest.raises(ConfigError, match=f"^{message}$"):
        read()
