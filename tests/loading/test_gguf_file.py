"""GGUF conversion against transformers' own loader of the same file, and what it refuses."""

from __future__ import annotations

import filecmp
import json
import stat

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxspec.commands import plan
from jaxspec.config import ConfigError, RopeConfig
from jaxspec.loading import gguf_file, open_checkpoint, shards
from jaxspec.loading.cache import MARKER
from jaxspec.loading.gguf_file import config_of_gguf, convert_gguf
from jaxspec.tools.cli import command


def transformers_weights(path):
    """name -> float32 array, as transformers dequantises and renames them."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return model, {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def assert_bit_equal(opened, expected, tied):
    assert set(expected) - set(opened.tensors) == ({"lm_head.weight"} if tied else set())
    assert set(opened.tensors) <= set(expected)
    for name, tensor in opened.tensors.items():
        read = tensor.read()
        assert read.dtype == np.float32
        assert read.tobytes() == np.ascontiguousarray(expected[name]).tobytes(), name


def assert_same_config(ours, theirs):
    keys = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    for key in (
        *keys,
        "max_position_embeddings",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
    ):
        assert ours[key] == getattr(theirs, key), key
    assert np.float32(ours["rms_norm_eps"]) == np.float32(theirs.rms_norm_eps)
    assert RopeConfig.from_hf(ours) == RopeConfig(theirs.rope_parameters["rope_theta"])


@pytest.mark.oracle("accelerate")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_each_architecture_is_bit_equal_to_transformers_loader(write_gguf, tmp_path, arch, tied):
    # transformers reads no key_length for qwen2 (its config has no head_dim): there the head is
    # hidden / heads wide
    path = write_gguf(
        arch, tied=tied, head_dim=16 if arch == "qwen2" else 128 if arch == "qwen3" else 32
    )
    opened = open_checkpoint(convert_gguf(path, tmp_path / "out"))
    model, expected = transformers_weights(path)
    assert_bit_equal(opened, expected, tied)
    assert_same_config(opened.config, model.config)


def test_the_cached_default_target_is_what_the_code_converts_today(smollm2, smollm2_fresh):
    """Else gguf_file's output changed and cache.CONVERSION was not raised.

    tests/parity/test_smollm2.py compares the cached one with transformers.
    """
    names = sorted(p.name for p in smollm2_fresh.iterdir())
    assert [
        n for n in names if not filecmp.cmp(smollm2 / n, smollm2_fresh / n, shallow=False)
    ] == []
    assert sorted(p.name for p in smollm2.iterdir()) == sorted([*names, MARKER])


@pytest.mark.parametrize("shape", [(12 * 4, 5), (12 * 4,)], ids=["weight", "bias"])
def test_unpermute_undoes_llama_cpps_permutation(shape):
    rows = np.arange(np.prod(shape)).reshape(shape)
    permuted = (
        rows.reshape(4, 2, 12 // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    )  # LlamaModel.permute in convert_hf_to_gguf.py
    assert not np.array_equal(permuted, rows)
    np.testing.assert_array_equal(gguf_file.unpermute(permuted, heads=4), rows)


def test_config_holds_what_the_metadata_says(write_gguf, tmp_path):
    out = convert_gguf(write_gguf("qwen3", tied=False), tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("qwen3", ["Qwen3ForCausalLM"])
    assert (config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]) == (
        32,
        4,
        2,
    )
    assert (config["rope_theta"], config["rms_norm_eps"], config["tie_word_embeddings"]) == (
        50000.0,
        1e-5,
        False,
    )
    assert (config["attention_bias"], config["vocab_size"]) == (False, 270)
    assert json.loads((out / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": [2, 0],
    }  # eos, then eot


@pytest.mark.parametrize("limit", [1, 50_000])
def test_a_large_model_is_written_in_shards_that_open(write_gguf, tmp_path, monkeypatch, limit):
    path = write_gguf()
    whole = open_checkpoint(convert_gguf(path, tmp_path / "whole"))
    monkeypatch.setattr(shards, "SHARD_BYTES", limit)
    out = convert_gguf(path, tmp_path / "sharded")
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 3
    written = sum(p.stat().st_size for p in out.glob("*.safetensors"))
    assert (
        written < 1.2 * (tmp_path / "whole" / "model.safetensors").stat().st_size
    )  # each tensor once
    sharded = open_checkpoint(out)
    assert sharded.shapes == whole.shapes
    for name, tensor in whole.tensors.items():
        np.testing.assert_array_equal(sharded.tensors[name].read(), tensor.read())


def llama3_factors(factor, theta=50000.0, head_dim=32):
    """Independent of the product: transformers' inverse frequencies, unscaled over scaled."""
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    rope["original_max_position_embeddings"] = 8192
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=4, head_dim=head_dim, rope_parameters=rope
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    plain = 1.0 / (theta ** (torch.arange(0, head_dim, 2) / head_dim))
    return (plain / scaled).numpy().astype(np.float32)


@pytest.mark.oracle
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_freqs_become_llama3_scaling(write_gguf, tmp_path, factor):
    out = convert_gguf(
        write_gguf("llama", extra={"rope_freqs.weight": llama3_factors(factor)}), tmp_path / "out"
    )
    opened = open_checkpoint(out)
    assert "rope_freqs.weight" not in opened.tensors
    assert RopeConfig.from_hf(opened.config) == RopeConfig(
        50000.0, "llama3", factor, 1.0, 4.0, 8192
    )


REFUSED = [
    (
        {"extra": {"rope_freqs.weight": np.linspace(1, 9, 16, dtype=np.float32)}},
        "expected rope_freqs.weight of llama3 rope scaling",
    ),
    (
        {"extra": {"blk.0.ffn_gate_inp.weight": np.ones((4, 64), np.float32)}},
        "got 'blk.0.ffn_gate_inp.weight'",
    ),
    ({"kv": {"llama.expert_count": 8}}, "expected a dense model, got 8 experts"),
    ({"kv": {"llama.rope.scaling.type": "yarn"}}, r"expected no rope.scaling.type, got 'yarn'"),
    ({"arch": "gemma2"}, "expected a GGUF of architecture llama, qwen2, qwen3, got 'gemma2'"),
    ({"pre": "tekken"}, "expected a tokenizer.ggml.pre among .*, got 'tekken'"),
    (
        {"arch": "qwen2", "pre": "smollm"},
        "expected tokenizer.ggml.pre 'qwen2' for a qwen2 model, got 'smollm'",
    ),
    ({"rope_dim": 16}, "expected rope and values as wide as the head, 32"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_what_would_change_the_maths_is_refused_and_nothing_is_left(
    write_gguf, tmp_path, options, message
):
    path = write_gguf(**options)
    with pytest.raises(ConfigError, match=message):
        convert_gguf(path, tmp_path / "made" / "out")
    assert list((tmp_path / "made").glob("*") if (tmp_path / "made").exists() else []) == []


@pytest.mark.parametrize("keep", [0, 3, 2000, -100], ids=str)
def test_a_truncated_gguf_is_named(write_gguf, tmp_path, keep):
    path = write_gguf()
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=rf"{path.name}: expected a whole GGUF file, got"):
        convert_gguf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_conversion_that_dies_leaves_no_folder(write_gguf, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(shards, "save_file", fail)
    with pytest.raises(KeyboardInterrupt):
        convert_gguf(write_gguf(), tmp_path / "made" / "out")
    assert list((tmp_path / "made").iterdir()) == []


def test_an_existing_folder_is_not_overwritten(write_gguf, tmp_path):
    with pytest.raises(ConfigError, match="expected a folder that does not exist yet"):
        convert_gguf(write_gguf(), tmp_path)


def test_a_folder_that_cannot_be_made_is_one_sentence(write_gguf, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="expected a folder that can be made, got File exists"):
        convert_gguf(write_gguf(), tmp_path / "file" / "out")


def test_others_may_read_the_result(write_gguf, tmp_path):
    out = convert_gguf(write_gguf(), tmp_path / "out")
    assert all(p.stat().st_mode & stat.S_IROTH for p in (out, *out.iterdir()))


def test_a_file_is_planned_by_its_header(write_gguf, tmp_path):
    path = write_gguf()
    folder = convert_gguf(path, tmp_path / "out")
    assert config_of_gguf(path) == json.loads((folder / "config.json").read_text())
    flags = ["--target", str(path), "--gpu", "1", "--max-model-len", "32"]
    done = CliRunner().invoke(command(plan.main), flags)
    assert done.exit_code == 0 and "target weights" in done.output, done.output
