"""Quantised targets against other implementations: compressed-tensors under transformers for what
it reads, and plain float32 models of the same weights for GPTQ and AWQ."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.layers.quantized import files
from jaxspec.layers.quantized.table import QuantizedSpec
from jaxspec.loading.conversion import convert_checkpoint
from jaxspec.loading.model import load_target
from pallas_kernels.fp8_matmul import Fp8Weight, reference
from pallas_kernels.fp8_matmul.rows import Rows
from pallas_kernels.int4_matmul import Int4Weight
from pallas_kernels.moe import stored as of_experts
from tests.parity.oracles import hf_outputs, hf_target
from tests.parity.ours import PagedTarget, by_position
from tests.support import quantized
from tests.support.slow import slow

# Float32 with another order of summation. Rounding to fp8 may turn that into a whole step of a
# code where a value lies between two; the seeds here have none.
TOLERANCE: Any = dict(rtol=1e-4, atol=1e-4)
TOKENS = np.random.default_rng(0).integers(0, 96, 20)


def logits(folder: Path) -> np.ndarray:
    """Ours, with float32 activations: a prompt, then single rows."""
    cfg, params = load_target(folder, jnp.float32)
    target = PagedTarget(cfg, params, 1, block_size=4)
    target.feed(16, [0], [TOKENS[:16].tolist()])
    for position in range(16, 20):
        target.feed(1, [position], [TOKENS[position : position + 1].tolist()])
    return by_position(target.logits[0])


def transformers_logits(folder: Path) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return hf_outputs(model.eval(), TOKENS).logits


def without_head(folder: Path) -> Path:
    tensors = quantized.tensors_of(folder)
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Plain checkpoints: one whose blocks end with its projections, and one whose do not.

    The third has no head of its own.
    """
    folder = tmp_path_factory.mktemp("plain")
    tied = quantized.WIDE | {"tie_word_embeddings": True}
    return {
        "tied": without_head(quantized.plain_checkpoint(folder / "tied", tied)),
        "wide": quantized.plain_checkpoint(folder / "wide", quantized.WIDE),
        "narrow": quantized.plain_checkpoint(folder / "narrow", quantized.NARROW),
    }


@pytest.mark.oracle("compressed_tensors")
@pytest.mark.parametrize(
    ("format", "source"),
    [
        ("fp8", "narrow"),
        ("fp8-block", "wide"),
        ("fp8-block", "narrow"),
        ("int4", "wide"),
        ("fp8", "tied"),
        slow("fp8-block", "tied"),
        ("int4", "tied"),
    ],
)
def test_a_converted_checkpoint_has_the_logits_of_transformers(
    format: Any, source: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    out = convert_checkpoint(sources[source], tmp_path / "out", format)
    expected = transformers_logits(out)
    assert np.abs(expected - logits(sources[source])).max() > 0.05  # it is quantised
    np.testing.assert_allclose(logits(out), expected, **TOLERANCE)


@pytest.mark.oracle("compressed_tensors")
def test_static_files_of_llm_compressor_have_the_logits_of_transformers(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    out = quantized.compressed_static_fp8(sources["wide"], tmp_path / "out")
    np.testing.assert_allclose(logits(out), transformers_logits(out), **TOLERANCE)


@pytest.mark.oracle("compressed_tensors")
def test_asymmetric_four_bits_are_what_compressed_tensors_decompresses(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    """transformers 5.23 makes no room for packed zeros, so the library reads them by itself."""
    import torch
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    out = quantized.compressed_int4(sources["wide"], tmp_path / "out")
    group = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]
    scheme = QuantizationScheme.model_validate(group["group_0"])
    stored = load_file(out / "model.safetensors")
    _, params = load_target(out, jnp.float32)
    module = "model.layers.1.mlp.down_proj."
    state = {
        name.removeprefix(module): torch.from_numpy(array.copy())
        for name, array in stored.items()
        if name.startswith(module)
    }
    state["weight_scale"] = state["weight_scale"].float()  # its products round to the scales' dtype
    weight = PackedQuantizationCompressor.decompress(state, scheme)["weight"]
    np.testing.assert_array_equal(
        params["layers"][1]["down_proj"].to_array(jnp.float32), weight.numpy().T
    )


@pytest.mark.oracle("compressed_tensors")
def test_modelopts_files_have_the_logits_of_llm_compressors(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    """transformers does not read ModelOpt's, whose numbers are those of static llm-compressor."""
    ours = logits(quantized.modelopt_fp8(sources["wide"], tmp_path / "modelopt"))
    other = quantized.compressed_static_fp8(sources["wide"], tmp_path / "compressed")
    np.testing.assert_allclose(ours, transformers_logits(other), **TOLERANCE)


@pytest.mark.oracle("compressed_tensors")
@pytest.mark.parametrize("source", ["wide", "narrow"])
def test_deepseeks_blocks_have_the_logits_of_compressed_tensors(
    source: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    """The same blocks by other names; transformers multiplies DeepSeek's on a GPU only."""
    ours = logits(quantized.deepseek_fp8(sources[source], tmp_path / "deepseek"))
    other = convert_checkpoint(sources[source], tmp_path / "out", "fp8-block")
    np.testing.assert_allclose(ours, transformers_logits(other), **TOLERANCE)


INT4: dict[str, tuple[Callable[[Path, Path], Path], bool]] = {
    "gptq": (lambda source, out: quantized.gptq(source, out, sym=False), False),
    "gptq_symmetric": (lambda source, out: quantized.gptq(source, out, sym=True), True),
    "gptq_v2": (lambda source, out: quantized.gptq(source, out, sym=False, v2=True), False),
    "awq": (quantized.awq, False),
    "compressed": (quantized.compressed_int4, False),
}


@pytest.mark.parametrize("form", INT4)
def test_four_bits_have_the_logits_of_the_weights_that_they_stand_for(
    form: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    write, sym = INT4[form]
    plain = quantized.dequantised_int4(sources["wide"], tmp_path / "plain", sym=sym)
    np.testing.assert_allclose(
        logits(write(sources["wide"], tmp_path / form)), logits(plain), **TOLERANCE
    )


def test_weights_stay_codes_and_ignored_ones_floats(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    fp8 = convert_checkpoint(sources["wide"], tmp_path / "fp8", "fp8")
    _, params = load_target(fp8, jnp.float32)
    layer = params["layers"][0]
    assert isinstance(layer["self_attn"]["qkv_proj"], Fp8Weight)
    assert layer["down_proj"].codes.dtype == jnp.float8_e4m3fn
    assert params["lm_head"].values.dtype == jnp.float32
    _, params = load_target(
        convert_checkpoint(sources["wide"], tmp_path / "4", "int4"), jnp.float32
    )
    assert isinstance(params["layers"][1]["gate_proj"], Int4Weight)


@pytest.mark.oracle("compressed_tensors")
def test_groups_and_ignored_modules_are_those_of_transformers(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    kept = tuple(
        f"model.layers.{i}.mlp.{name}" for i in (0, 1) for name in ("gate_proj", "up_proj")
    ) + tuple(f"model.layers.1.self_attn.{p}_proj" for p in "qkvo")
    config = json.loads(json.dumps(quantized.STATIC))
    config["ignore"] = ["lm_head", r"re:.*layers\.1\.self_attn\..*", *kept[:2], *kept[2:4]]
    out = quantized.rewritten(
        sources["wide"],
        tmp_path / "mixed",
        config,
        lambda module, weight: quantized.static_fp8(
            module, weight, shape=(1,), inputs=quantized.INPUT_SCALES
        ),
        ignore=kept,
    )
    _, params = load_target(out, jnp.float32)
    kinds = [type(layer["self_attn"]["qkv_proj"]).__name__ for layer in params["layers"]]
    assert kinds == ["Fp8Weight", "Weight"]
    np.testing.assert_allclose(logits(out), transformers_logits(out), **TOLERANCE)


# --- faults that the comparisons above must see


@pytest.mark.parametrize("fault", ["nibbles", "zeros", "neighbour"])
def test_a_wrong_layout_of_four_bits_shows(
    fault: str, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWQ's words read in their plain order, GPTQ's zeros without their one, or the scales of the
    next channel, move logits far more than the tolerance."""
    form = "awq" if fault == "nibbles" else "gptq"
    out = INT4[form][0](sources["wide"], tmp_path / form)
    right = logits(out)
    if fault == "nibbles":
        monkeypatch.setattr(files, "AWQ_ORDER", tuple(range(8)))
    elif fault == "zeros":
        read = files._zeros
        monkeypatch.setattr(files, "_zeros", lambda form, array: read(form, array) - np.uint8(1))
    else:
        assemble = QuantizedSpec.assemble
        monkeypatch.setattr(
            QuantizedSpec,
            "assemble",
            lambda spec, arrays: np.roll(assemble(spec, arrays), spec.part == "scales", axis=-1),
        )
    assert np.abs(logits(out) - right).max() > 0.1


def test_a_scale_of_the_next_channel_shows(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = convert_checkpoint(sources["narrow"], tmp_path / "out", "fp8")
    right = logits(out)
    read = files.read

    def shifted(form: Any, part: Any, *rest: Any) -> np.ndarray:
        array = read(form, part, *rest)
        return np.roll(array, 1, axis=0) if part == "scales" else array

    monkeypatch.setattr(files, "read", shifted)
    assert np.abs(logits(out) - right).max() > 0.1


# --- experts and latent attention -------------------------------------------------------------


EXPERTS = dict(
    vocab_size=96,
    hidden_size=128,
    intermediate_size=256,
    moe_intermediate_size=128,
    num_experts=4,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
)
LATENT = quantized.LATENT_SIZES | dict(
    vocab_size=96,
    hidden_size=128,
    intermediate_size=256,
    moe_intermediate_size=64,
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    num_attention_heads=4,
    head_dim=64,
)


def deepseek_blocks(source: Path, folder: Path, *, codes: bool) -> Path:
    """Every projection of a model in blocks of 128, as DeepSeek and Qwen publish it.

    codes: False for the plain float32 model of the same weights
    """
    config = json.loads((source / "config.json").read_text())
    tensors = quantized.tensors_of(source)
    for name in [n for n in tensors if "_proj" in n and n.endswith(".weight")]:
        made = quantized.block_fp8("weight_scale_inv", tensors[name])
        scales = np.repeat(np.repeat(made["weight_scale_inv"], 128, 0), 128, 1)
        rows, columns = tensors[name].shape
        if codes:
            tensors |= {f"{name.removesuffix('.weight')}.{part}": a for part, a in made.items()}
        else:
            tensors[name] = made["weight"].astype(np.float32) * scales[:rows, :columns]
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if codes:
        config |= {"quantization_config": quantized.DEEPSEEK_FP8}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.oracle("transformers")  # writes the checkpoint
@pytest.mark.parametrize(
    ("model_type", "dimensions"), [("qwen3_moe", EXPERTS), ("deepseek_v3", LATENT)]
)
def test_what_is_absorbed_is_dequantised_and_the_rest_is_not(
    model_type: str,
    dimensions: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With activations as they are, logits are those of the dequantised model. DeepSeek's experts
    here are too narrow for blocks that gate and up do not share."""
    hf_target(tmp_path / "source", model_type=model_type, **dimensions)
    stored = deepseek_blocks(tmp_path / "source", tmp_path / "codes", codes=True)
    plain = deepseek_blocks(tmp_path / "source", tmp_path / "plain", codes=False)
    _, params = load_target(stored, jnp.float32)
    layer = params["layers"][1]
    gate_up = layer["experts"]["gate_up"]
    assert isinstance(layer["self_attn"]["o_proj"], Fp8Weight)
    if model_type == "qwen3_moe":
        assert isinstance(gate_up, Fp8Weight) and gate_up.scales.shape == (4, 2, 1)
    else:
        assert gate_up.values.dtype == jnp.float32
        assert layer["self_attn"]["k_b_proj"].dtype == jnp.float32
        assert isinstance(layer["self_attn"]["q_b_proj"], Fp8Weight)
        assert isinstance(layer["shared"]["down_proj"], Fp8Weight)
    expected = logits(plain)
    rounded = np.abs(logits(stored) - expected).max()
    assert 1e-3 < rounded < 1.0  # activations are quantised too

    def unrounded(x: Any, activation: Any, scale: Any = None) -> Rows:
        ones = jnp.ones((-(-x.shape[1] // 128), x.shape[0]), jnp.float32)
        return Rows(x.astype(jnp.float32), ones)

    for module in (reference, of_experts):
        monkeypatch.setattr(module, "quantise", unrounded)
    jax.clear_caches()
    np.testing.assert_allclose(logits(stored), expected, **TOLERANCE)
    jax.clear_caches()


@pytest.mark.oracle("compressed_tensors")
@pytest.mark.parametrize("format", ["fp8", slow("fp8-block"), "int4"])
def test_converted_experts_have_the_logits_of_transformers(
    format: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers dequantises experts, and leaves the activations that they multiply. With plain
    attention beside them, no value is rounded to a code."""
    source = quantized.plain_checkpoint(tmp_path / "source", quantized.EXPERTS)
    out = with_plain_attention(convert_checkpoint(source, tmp_path / "out", format), source)
    expected = transformers_logits(out)
    if format != "int4":
        assert np.abs(logits(out) - expected).max() > 0.01

        def unrounded(x: Any, activation: Any) -> Rows:
            of_block = activation == "block"
            shape = (x.shape[1] // 128, x.shape[0]) if of_block else (x.shape[0],)
            return Rows(x.astype(jnp.float32), jnp.ones(shape, jnp.float32))

        monkeypatch.setattr(of_experts, "quantise", unrounded)
        jax.clear_caches()
    np.testing.assert_allclose(logits(out), expected, **TOLERANCE)
    jax.clear_caches()


@pytest.mark.parametrize("form", ["fp8-block", "gptq"])
def test_experts_of_published_files_are_what_their_codes_stand_for(
    form: str, tmp_path: Path
) -> None:
    """Qwen's FP8 and GPTQ."""
    source = quantized.plain_checkpoint(tmp_path / "source", quantized.EXPERTS)
    if form == "gptq":
        out = quantized.gptq(source, tmp_path / "out", sym=True)
        kind: type = Int4Weight
    else:
        out, kind = quantized.deepseek_fp8(source, tmp_path / "out"), Fp8Weight
    _, params = load_target(out, jnp.float32)
    stored = quantized.tensors_of(out)
    for i, layer in enumerate(params["layers"]):
        for name, parts in (("gate_up", ("gate_proj", "up_proj")), ("down", ("down_proj",))):
            assert isinstance(layer["experts"][name], kind)
            got = np.asarray(layer["experts"][name].to_array(jnp.float32))
            for n in range(4):
                modules = [f"model.layers.{i}.mlp.experts.{n}.{part}" for part in parts]
                expected = np.concatenate([plain_of(stored, module) for module in modules])
                np.testing.assert_array_equal(got[n], expected.T)


def with_plain_attention(folder: Path, source: Path) -> Path:
    tensors = quantized.tensors_of(folder)
    own = {name: a for name, a in quantized.tensors_of(source).items() if "self_attn" in name}
    kept = {name: a for name, a in tensors.items() if "self_attn" not in name}
    save_file(kept | own, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"].append("re:.*self_attn.*")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def plain_of(tensors: dict[str, np.ndarray], module: str) -> np.ndarray:
    """The weight [out, in] of a module of blocks, or of symmetric 4-bit codes."""
    if f"{module}.weight" in tensors:
        scales = tensors[f"{module}.weight_scale_inv"]
        return tensors[f"{module}.weight"].astype(np.float32) * blocks_of(scales)
    words = tensors[f"{module}.qweight"].view(np.uint32)  # eight depths in each
    codes = np.stack([words >> (4 * i) & 15 for i in range(8)], axis=1).reshape(-1, words.shape[1])
    scales = np.repeat(tensors[f"{module}.scales"].astype(np.float32), 128, axis=0)
    return ((codes.astype(np.float32) - 8) * scales).T


def blocks_of(scales: np.ndarray) -> np.ndarray:
    return np.repeat(np.repeat(scales, 128, 0), 128, 1)
