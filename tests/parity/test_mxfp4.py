"""gpt-oss checkpoints in MXFP4: read from the original names and packed, or dequantised, with the
bits that transformers gives."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxspec import LLM, SamplingParams, models
from jaxspec.config import ConfigError
from jaxspec.loading import load_params, open_checkpoint
from jaxspec.loading.model import load_target, with_expert_storage
from jaxspec.parallel.layout import Placement
from jaxspec.parallel.mesh import MODEL
from tests.parity.oracles import TOLERANCE, edit_config, edit_tensors, hf_outputs, hf_target
from tests.parity.ours import PagedTarget, by_position
from tests.parity.test_families import GPT_OSS


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny gpt-oss whose experts are random MXFP4 codes."""
    folder = tmp_path_factory.mktemp("mxfp4")
    hf_target(folder, **{**GPT_OSS, "hidden_size": 64, "intermediate_size": 32})
    rng = np.random.default_rng(0)

    def pack(tensors: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
            experts, depth, width = tensors.pop(name).shape
            tensors[f"{name}_blocks"] = rng.integers(
                0, 256, (experts, width, depth // 32, 16)
            ).astype(np.uint8)
            tensors[f"{name}_scales"] = rng.integers(
                121, 126, (experts, width, depth // 32)
            ).astype(np.uint8)

    edit_tensors(folder, pack)
    return edit_config(folder, lambda c: c.update(quantization_config={"quant_method": "mxfp4"}))


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, Mxfp4Config  # type: ignore[attr-defined]

    quantization = Mxfp4Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        checkpoint,
        quantization_config=quantization,
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()


@pytest.mark.oracle("transformers")
@pytest.mark.parametrize("kept", ["packed", "dequantised"])
def test_experts_have_the_bits_of_transformers(kept: str, checkpoint: Path, oracle: Any) -> None:
    _, params = load_target(checkpoint, jnp.float32, mxfp4=kept)
    for ours, theirs in zip(params["layers"], oracle.model.layers, strict=True):
        experts = theirs.mlp.experts
        gate_up = experts.gate_up_proj.detach().numpy()
        np.testing.assert_array_equal(
            ours["experts"]["gate_up"].to_array(jnp.float32),
            np.concatenate([gate_up[..., ::2], gate_up[..., 1::2]], axis=-1),
        )
        np.testing.assert_array_equal(
            ours["experts"]["down"].to_array(jnp.float32), experts.down_proj.detach().numpy()
        )


@pytest.mark.oracle("transformers")
@pytest.mark.parametrize("kept", ["dequantised", "packed"])
def test_logits_equal_transformers_dequantised_or_packed(
    kept: str, checkpoint: Path, oracle: Any
) -> None:
    opened = open_checkpoint(checkpoint)
    cfg = replace(models.config_from_hf(opened.config), mxfp4=kept)
    params = load_params(models.family(cfg).param_specs(cfg), opened.tensors, jnp.float32)
    if kept == "packed":
        assert {a.dtype for a in jax.tree.leaves(params["layers"][0]["experts"]["down"])} == {
            jnp.dtype("int32")
        }
    tokens = np.random.default_rng(1).integers(0, cfg.vocab_size, 20).tolist()
    target = PagedTarget(cfg, params, 1, block_size=4)
    target.feed(12, [0], [tokens[:12]])
    for position in range(12, 20):  # 2 of 8 experts: gathered
        target.feed(1, [position], [tokens[position : position + 1]])
    np.testing.assert_allclose(
        by_position(target.logits[0]), hf_outputs(oracle, np.array(tokens)).logits, **TOLERANCE
    )


@pytest.mark.oracle("transformers")
def test_an_engine_keeps_experts_packed(checkpoint: Path, oracle: Any) -> None:
    llm = LLM.from_pretrained(
        str(checkpoint), dtype="float32", max_model_len=32, max_num_seqs=1, block_size=16
    )
    assert {
        a.dtype for a in jax.tree.leaves(llm.params["target"]["layers"][0]["experts"]["down"])
    } == {jnp.dtype("int32")}
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(0.0, max_tokens=4, ignore_eos=True))
    text = [5, 6, 7, *output.token_ids]
    assert hf_outputs(oracle, np.array(text)).logits[2:6].argmax(-1).tolist() == output.token_ids
    edit_config(checkpoint, lambda c: c.pop("quantization_config"))
    with pytest.raises(
        ConfigError, match="mxfp4 'dequantised': expected a target with MXFP4 weights, got none"
    ):
        load_target(checkpoint, jnp.float32, mxfp4="dequantised")
    edit_config(checkpoint, lambda c: c.update(quantization_config={"quant_method": "mxfp4"}))


@pytest.mark.oracle("transformers")  # writes the checkpoint
@pytest.mark.parametrize(
    ("devices", "expert_parallel", "width", "kept"),
    [
        (1, False, 32, "packed"),
        (2, True, 32, "packed"),
        (2, False, 32, "dequantised"),
        (2, False, 64, "packed"),
        (8, False, 2880, "packed"),
    ],
)
def test_experts_stay_packed_in_pieces_of_whole_blocks(
    devices: int, expert_parallel: bool, width: int, kept: str, checkpoint: Path
) -> None:
    cfg: Any = models.config_from_hf(open_checkpoint(checkpoint).config)
    cfg = replace(cfg, moe=replace(cfg.moe, intermediate_size=width))
    mesh = None if devices == 1 else AbstractMesh((devices,), (MODEL,))
    layout = Placement(mesh, expert_parallel).target(cfg)
    assert with_expert_storage(cfg, "auto", layout).mxfp4 == kept
    assert with_expert_storage(cfg, "packed", layout).mxfp4 == "packed"


@pytest.mark.oracle("transformers")
@pytest.mark.parametrize("kept", ["packed", "dequantised"])
def test_blocks_that_are_no_bytes_and_scales_that_are_no_numbers_are_refused(
    kept: str, checkpoint: Path, tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.experts.down_proj"
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)

    def spoil(tensors: dict[str, Any]) -> None:
        tensors[f"{name}_scales"][3, 2, 0] = 255

    edit_tensors(tmp_path, spoil)
    with pytest.raises(
        ConfigError, match=f"^{name}_scales: expected scales that are numbers, got NaN"
    ):
        load_target(tmp_path, jnp.float32, mxfp4=kept)

    def retype(tensors: dict[str, Any]) -> None:
        tensors[f"{name}_blocks"] = tensors[f"{name}_blocks"].astype(np.int32)

    edit_tensors(tmp_path, retype)
    with pytest.raises(
        ConfigError, match=f"{name}: expected uint8 blocks and scales, got int32 and uint8$"
    ):
        load_target(tmp_path, jnp.float32, mxfp4=kept)


@pytest.mark.parametrize(
    ("key", "value"),
    [("quantization_config", {"quant_method": "fp8"}), ("layer_types", ["chunked_attention"] * 2)],
)
def test_what_gpt_oss_does_not_implement_is_refused(key: str, value: Any) -> None:
    config = dict(
        model_type="gpt_oss",
        num_hidden_layers=2,
        vocab_size=8,
        hidden_size=32,
        intermediate_size=32,
        num_local_experts=4,
        **{key: value},
    )
    with pytest.raises(ConfigError, match=key):
        models.config_from_hf(config)


@pytest.mark.parametrize(("hidden", "inner", "got"), [(48, 32, 48), (64, 24, 24)])
@pytest.mark.parametrize("kept", ["packed", "dequantised"])
def test_widths_of_experts_are_whole_blocks(kept: Any, hidden: int, inner: int, got: int) -> None:
    config = dict(
        model_type="gpt_oss",
        num_hidden_layers=1,
        vocab_size=8,
        hidden_size=hidden,
        intermediate_size=inner,
        num_local_experts=4,
        quantization_config={"quant_method": "mxfp4"},
    )
    cfg: Any = models.config_from_hf(config)
    with pytest.raises(
        ConfigError, match=f"_proj: expected columns in multiples of 32 .*got {got}"
    ):
        models.family(cfg).param_specs(replace(cfg, mxfp4=kept))
