"""Strict loading: names, shapes, orientation, dtypes, and one tensor in host memory at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.config import ConfigError
from jaxspec.layers.params import ParamSpec, matrix, vector
from jaxspec.loading import check_shapes, load_params, open_checkpoint

SPECS = {
    "embed": ParamSpec("embed.weight", (5, 4), ("vocab", "embed")),
    "layers": [
        {
            "up": matrix(f"layers.{i}.up.weight", 4, 6, ("embed", "mlp")),
            "norm": vector(f"layers.{i}.norm.weight", 4),
        }
        for i in range(2)
    ],
}


def arrays(dtype=np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        s.name: rng.normal(size=s.checkpoint_shape).astype(dtype) for s in jax.tree.leaves(SPECS)
    }


def opened(tmp_path, values):
    (tmp_path / "config.json").write_text("{}")
    save_file(values, tmp_path / "model.safetensors")
    return open_checkpoint(tmp_path).tensors


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("stored", [np.float32, np.float16, jnp.bfloat16])
def test_params_hold_the_checkpoint_transposed_where_said_and_cast(tmp_path, stored, dtype):
    values = arrays(stored)
    params = load_params(SPECS, opened(tmp_path, values), dtype)
    assert jax.tree.structure(params) == jax.tree.structure(SPECS)
    for spec, leaf in zip(jax.tree.leaves(SPECS), jax.tree.leaves(params), strict=True):
        assert isinstance(leaf, jax.Array)
        assert (leaf.shape, leaf.dtype) == (spec.shape, dtype)
        expected = values[spec.name].T if spec.transpose else values[spec.name]
        np.testing.assert_array_equal(np.asarray(leaf), expected.astype(dtype))


def test_integers_become_int32_and_booleans_stay(tmp_path):
    specs = {
        "d2t": ParamSpec("d2t", (3,), (None,), dtype="int32"),
        "t2d": ParamSpec("t2d", (2,), (None,), dtype="bool"),
    }
    params = load_params(
        specs,
        opened(tmp_path, {"d2t": np.array([0, -3, 70000]), "t2d": np.array([True, False])}),
        jnp.bfloat16,
    )
    assert (params["d2t"].dtype, params["t2d"].dtype) == (jnp.int32, jnp.bool_)
    assert params["d2t"].tolist() == [0, -3, 70000]


def test_an_integer_beyond_int32_is_an_error(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"head: d2t: expected integers that fit int32, got values in \[0, 4294967296\]",
    ):
        load_params(
            {"d2t": vector("d2t", 2)},
            opened(tmp_path, {"d2t": np.array([0, 2**32])}),
            jnp.float32,
            source="head",
        )


@pytest.mark.parametrize("read", [True, False], ids=["load_params", "check_shapes"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embed.weight": None}, "got 4: 1 missing: embed.weight"),
        ({"lm_head.weight": (5, 4)}, "got 6: 1 unexpected: lm_head.weight"),
        (
            {"layers.1.up.weight": (4, 6)},
            r"1 misshapen: layers.1.up.weight \(expected \(6, 4\), got \(4, 6\)\)",
        ),
        (
            {"layers.0.norm.weight": (4, 1)},
            r"layers.0.norm.weight \(expected \(4,\), got \(4, 1\)\)",
        ),
        ({f"x{i}": (1,) for i in range(7)}, "7 unexpected: x0, x1, x2, x3, x4, ...$"),
        ({"embed.weight": None, "embed": (5, 4)}, "1 missing: embed.weight; 1 unexpected: embed$"),
    ],
)
def test_every_difference_is_an_error_that_names_it(tmp_path, change, message, read):
    values = arrays()
    for name, shape in change.items():
        values.pop(name, None)
        if shape is not None:
            values[name] = np.zeros(shape, np.float32)
    tensors = opened(tmp_path, values)
    with pytest.raises(
        ConfigError, match="^my model: expected 5 tensors by its config, .*" + message
    ):
        if read:
            load_params(SPECS, tensors, jnp.float32, source="my model")
        else:
            check_shapes(SPECS, {n: a.shape for n, a in values.items()}, source="my model")


def test_ignore_excuses_extra_tensors_only(tmp_path):
    values = arrays() | {"rotary.inv_freq": np.zeros(2, np.float32)}
    tensors = opened(tmp_path, values)
    load_params(SPECS, tensors, jnp.float32, ignore=lambda n: n.endswith("inv_freq"))
    del values["embed.weight"]
    with pytest.raises(ConfigError, match="1 missing: embed"):
        check_shapes(SPECS, {n: a.shape for n, a in values.items()}, ignore=lambda n: True)


def test_one_tensor_at_a_time_is_on_the_host():
    """Each array must be on the device (and released here) before the next one is read."""
    events: list[str] = []

    class Tensor:
        def __init__(self, name, shape):
            self.name, self.shape = name, shape

        def read(self):
            events.append("read")
            return np.zeros(self.shape, np.float32)

    put = jax.device_put

    def spy(array):
        events.append("put")
        return put(array)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_put", spy)
        tensors: Any = {s.name: Tensor(s.name, s.checkpoint_shape) for s in jax.tree.leaves(SPECS)}
        load_params(SPECS, tensors, jnp.float32)
    assert events == ["read", "put"] * 5


def test_weights_larger_than_the_device_are_one_sentence_with_the_numbers(tmp_path, monkeypatch):
    def full(array):
        if array.nbytes < 4 * 5 * 4:
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 96 bytes."
            )
        return jnp.asarray(array)

    tensors = opened(tmp_path, arrays())
    monkeypatch.setattr(jax, "device_put", full)
    with pytest.raises(
        ConfigError,
        match=(
            r"target: expected 0.0 GB of free device memory for its "
            r"weights, got room for 0.0 GB of them"
        ),
    ):
        load_params(SPECS, tensors, jnp.float32, source="target")
