"""Opening checkpoint folders: what is read, what is refused, and that a pickle never runs."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.config import ConfigError
from jaxspec.loading import checkpoint, open_checkpoint

TENSORS = {
    "bf16": (np.arange(12, dtype=np.float32).reshape(3, 4) / 7).astype(ml_dtypes.bfloat16),
    "f16": np.linspace(-1, 1, 6, dtype=np.float16),
    "f32": np.full((2, 2), np.float32(1 / 3)),
    "i64": np.array([0, -5, 2**40]),
    "bool": np.array([True, False, True]),
}


def folder_with(
    tmp_path: Path,
    tensors: dict[str, np.ndarray] | None = None,
    config: str = '{"model_type": "llama"}',
) -> Path:
    (tmp_path / "config.json").write_text(config)
    if tensors is not None:
        save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def write_shards(tmp_path: Path) -> Path:
    folder_with(tmp_path)
    names = list(TENSORS)
    shards = {
        "model-00001-of-00002.safetensors": names[:2],
        "model-00002-of-00002.safetensors": names[2:],
    }
    for file, held in shards.items():
        save_file({n: TENSORS[n] for n in held}, tmp_path / file)
    weight_map = {n: file for file, held in shards.items() for n in held}
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return tmp_path


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_every_dtype_round_trips_bit_for_bit(tmp_path, layout):
    opened = open_checkpoint(
        folder_with(tmp_path, TENSORS) if layout == "single" else write_shards(tmp_path)
    )
    assert opened.config == {"model_type": "llama"}
    assert opened.shapes == {name: array.shape for name, array in TENSORS.items()}
    for name, array in TENSORS.items():
        read = opened.tensors[name].read()
        assert read.dtype == array.dtype
        assert read.tobytes() == array.tobytes(), name


def test_opening_reads_no_tensor_and_reading_reads_one(tmp_path, monkeypatch):
    """Nor is the header read again, which grows with the number of tensors."""
    path = folder_with(tmp_path, TENSORS) / "model.safetensors"
    fromfile, read = np.fromfile, []

    def note(file, dtype, count, offset):
        read.append((count, offset))
        return fromfile(file, dtype, count, offset=offset)

    monkeypatch.setattr(np, "fromfile", note)
    opened = open_checkpoint(tmp_path)
    assert read == []
    for name in ("safe_open", "json"):
        monkeypatch.setattr(checkpoint, name, None)
    np.testing.assert_array_equal(opened.tensors["f32"].read(), TENSORS["f32"])
    ((count, offset),) = read
    assert count == TENSORS["f32"].nbytes
    assert path.read_bytes()[offset : offset + count] == TENSORS["f32"].tobytes()


def test_a_file_that_is_cut_after_it_was_opened_is_one_sentence(tmp_path):
    path = folder_with(tmp_path, {"f32": TENSORS["f32"]}) / "model.safetensors"
    opened = open_checkpoint(tmp_path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ConfigError, match=r"model.safetensors: expected 16 bytes .*, got 13$"):
        opened.tensors["f32"].read()


@pytest.mark.parametrize("cut", [4, 100, -1])
def test_truncated_safetensors_says_how_many_bytes_it_has(tmp_path, cut):
    path = folder_with(tmp_path, TENSORS) / "model.safetensors"
    data = path.read_bytes()[:cut]
    path.write_bytes(data)
    with pytest.raises(
        ConfigError,
        match=(
            rf"model\.safetensors: expected .*, got {len(data)} bytes|expected "
            rf"{len(data) + 1} bytes .*, got {len(data)} "
        ),
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"<html>404 not found</html>" * 10,
        (50).to_bytes(8, "little") + b"x" * 100,
        (2).to_bytes(8, "little") + b"[]",
    ],
)
def test_a_file_that_is_not_safetensors_is_refused_by_name(tmp_path, content):
    (folder_with(tmp_path) / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors: expected a safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("ends", [["0", "5"], [[0], [0]], [float("nan")], [3.5], [True]])
def test_offsets_that_are_no_integers_are_one_sentence(tmp_path, ends):
    header = {
        f"w{i}": {"dtype": "F32", "shape": [1], "data_offsets": [0, end]}
        for i, end in enumerate(ends)
    }
    text = json.dumps(header).encode()
    (folder_with(tmp_path) / "model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + bytes(8)
    )
    with pytest.raises(ConfigError, match=r"model\.safetensors: expected a safetensors"):
        open_checkpoint(tmp_path)


def test_a_config_that_is_a_pipe_is_not_waited_for(tmp_path):
    folder_with(tmp_path, TENSORS)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(
        ConfigError, match=r"config\.json: expected a JSON file, got something else"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("other", ["model.safetensors.index.json", "pytorch_model.bin"])
def test_a_broken_link_beside_the_weights_that_are_read_is_passed_over(tmp_path, other):
    folder_with(tmp_path, TENSORS)
    (tmp_path / other).symlink_to("nowhere")
    assert set(open_checkpoint(tmp_path).tensors) == set(TENSORS)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_weights_that_are_a_broken_link_or_a_folder_are_named(tmp_path, name):
    folder_with(tmp_path)
    (tmp_path / name).symlink_to("nowhere")
    with pytest.raises(ConfigError, match=f"{name}: expected a file, got a link that leads"):
        open_checkpoint(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=f"{name}: expected a file, got something else"):
        open_checkpoint(tmp_path)


def test_a_tensor_dtype_that_is_not_supported_is_named(tmp_path):
    folder_with(tmp_path, {"w": np.zeros(2, np.uint16)})
    with pytest.raises(
        ConfigError, match=r"model\.safetensors: expected tensors of F32.*, got U16 for w"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, r"config\.json: expected a JSON file, got No such file"),
        ("{,", r"config\.json: expected valid JSON, got"),
        ("[1]", r"config\.json: expected a JSON object, got a list"),
    ],
)
def test_a_missing_or_malformed_config_is_named(tmp_path, config, message):
    folder_with(tmp_path, TENSORS, config or "{}")
    if config is None:
        (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(tmp_path)


def test_a_folder_without_weights_or_no_folder_is_named(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"expected model\.safetensors, .* or pytorch_model\.bin, got \['config\.json'\]",
    ):
        open_checkpoint(folder_with(tmp_path))
    with pytest.raises(
        ConfigError, match=r"nowhere: expected a checkpoint folder, got nothing there"
    ):
        open_checkpoint(tmp_path / "nowhere")


def test_a_missing_shard_is_named(tmp_path):
    (write_shards(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"expected the shard model-00002-of-00002\.safetensors beside it"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("change", ["lacks", "adds"])
def test_a_shard_that_differs_from_the_index_is_named(tmp_path, change):
    index = write_shards(tmp_path) / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    if change == "lacks":
        content["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    else:
        del content["weight_map"]["f16"]
    index.write_text(json.dumps(content))
    with pytest.raises(
        ConfigError,
        match=rf"model-00001-of-00002.*lists.*{'ghost' if change == 'lacks' else 'f16'}",
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "", ".", 7])
def test_a_shard_name_that_is_no_files_is_refused(tmp_path, name):
    index = write_shards(tmp_path) / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    found["weight_map"] = dict.fromkeys(found["weight_map"], name)
    index.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match="expected the shard .* beside it, got no such file"):
        open_checkpoint(tmp_path)


def test_a_shard_outside_the_folder_is_refused(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    folder_with(inner)
    save_file(TENSORS, tmp_path / "outside.safetensors")
    weight_map = dict.fromkeys(TENSORS, "../outside.safetensors")
    (inner / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match="beside it"):
        open_checkpoint(inner)


def test_an_index_without_a_weight_map_is_refused(tmp_path):
    (folder_with(tmp_path) / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="expected an object 'weight_map'"):
        open_checkpoint(tmp_path)


class Hostile:
    def __init__(self, victim: Path):
        self.victim = victim

    def __reduce__(self):
        return os.system, (f"touch {self.victim}",)


@pytest.mark.parametrize("form", ["plain", "zip"])
@pytest.mark.oracle
def test_a_malicious_pickle_never_runs(tmp_path, form):
    import torch

    victim = tmp_path / "ran"
    content = {"w": Hostile(victim)}
    path = folder_with(tmp_path) / "pytorch_model.bin"
    if form == "plain":
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, path)
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin: expected a pickle of tensors only"):
        open_checkpoint(tmp_path)
    assert not victim.exists()


def test_without_torch_a_pickle_is_refused_unopened_and_the_way_out_named(tmp_path, monkeypatch):
    victim = tmp_path / "ran"
    (folder_with(tmp_path) / "pytorch_model.bin").write_bytes(pickle.dumps({"w": Hostile(victim)}))
    monkeypatch.setitem(sys.modules, "torch", None)  # import torch raises ImportError
    with pytest.raises(
        ConfigError,
        match=r"got a pickle, which is read only with torch installed.*convert it with .*save_file",
    ):
        open_checkpoint(tmp_path)
    assert not victim.exists()


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.oracle
def test_a_pickle_of_tensors_reads_bit_for_bit(tmp_path, legacy):
    import torch

    folder_with(tmp_path)
    values = {
        n: torch.from_numpy(a.astype(np.float32)).bfloat16() if n == "bf16" else torch.from_numpy(a)
        for n, a in TENSORS.items()
    }
    values["strided"] = torch.arange(6.0).reshape(2, 3).T
    torch.save(values, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    opened = open_checkpoint(tmp_path)
    for name, array in (
        TENSORS | {"strided": np.arange(6, dtype=np.float32).reshape(2, 3).T}
    ).items():
        read = opened.tensors[name].read()
        assert opened.tensors[name].shape == read.shape == array.shape
        assert read.dtype == array.dtype
        assert read.tobytes() == array.tobytes(), name


@pytest.mark.oracle
def test_a_pickle_of_float8_reads_bit_for_bit(tmp_path):
    import torch

    values = np.array([[1.5, -448.0], [0.0, 2.0**-9]], ml_dtypes.float8_e4m3fn)
    stored = torch.from_numpy(values.view(np.uint8)).view(torch.float8_e4m3fn)
    torch.save({"w": stored}, folder_with(tmp_path) / "pytorch_model.bin")
    read = open_checkpoint(tmp_path).tensors["w"].read()
    assert read.dtype == values.dtype and read.tobytes() == values.tobytes()


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["float8_e5m2", "complex64", "sparse_coo"])
def test_a_tensor_of_a_pickle_in_another_dtype_is_named(tmp_path, kind):
    import torch

    tensor = torch.eye(2)
    tensor = tensor.to_sparse() if kind == "sparse_coo" else tensor.to(getattr(torch, kind))
    torch.save({"w": tensor}, folder_with(tmp_path) / "pytorch_model.bin")
    message = rf"pytorch_model\.bin: expected tensors of float32, .*, got torch\.{kind} for w"
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.oracle
def test_a_pickle_with_other_things_than_tensors_is_refused(tmp_path):
    import torch

    folder_with(tmp_path)
    torch.save({"w": torch.zeros(1), "step": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="expected a dictionary of tensors"):
        open_checkpoint(tmp_path)


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_that_is_nested_too_deep_is_refused(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text(DEEP)
    with pytest.raises(ConfigError, match=f"{name}: expected valid JSON, got maximum recursion"):
        open_checkpoint(tmp_path)


def test_a_header_that_is_nested_too_deep_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    header = b'{"w": ' + DEEP.encode() + b"}"
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ConfigError, match="expected a safetensors header, got RecursionError"):
        open_checkpoint(tmp_path)


def test_a_torch_whose_pickles_can_run_code_is_refused(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    torch = SimpleNamespace(__version__="2.5.1+cu124", load=lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(ConfigError, match=r"expected torch 2\.6 or newer .*, got 2\.5\.1\+cu124"):
        open_checkpoint(tmp_path)
