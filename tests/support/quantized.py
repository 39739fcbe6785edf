"""Tiny quantised checkpoints with the names and shapes of published ones, written without the
package's own packing: what a format means stands here once more."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxspec import models
from jaxspec.loading import open_checkpoint

FP8 = ml_dtypes.float8_e4m3fn
ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
OF_MLP = tuple(f"{name}_proj" for name in ("gate", "up", "down"))
PROJECTIONS = (*ATTENTION, *(f"mlp.{name}" for name in OF_MLP))
# 64 rows of keys and values: blocks of 128 do not end where these projections end.
NARROW = dict(
    model_type="llama",
    vocab_size=96,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
    rms_norm_eps=1e-3,
    tie_word_embeddings=False,
    hidden_act="silu",
    rope_theta=500.0,
    dtype="float32",
)
WIDE = NARROW | dict(model_type="qwen3", head_dim=64)  # q 256 rows, k and v 128
EXPERTS = WIDE | dict(
    model_type="qwen3_moe",
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
    norm_topk_prob=True,
)
# Of latent attention, whose matrices have whole blocks of 128, and of the experts after it.
LATENT_SIZES = dict(
    num_key_value_heads=4,
    q_lora_rank=128,
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=64,
    first_k_dense_replace=1,
    num_experts_per_tok=2,
)
LATENT = (
    NARROW
    | LATENT_SIZES
    | dict(model_type="glm4_moe_lite", n_routed_experts=8, moe_intermediate_size=128)
)
GROUPS = LATENT | dict(model_type="deepseek_v3", n_group=4, topk_group=2)


def projections(config: dict[str, Any]) -> list[str]:
    """Those of a layer."""
    if "num_experts" not in config:
        return list(PROJECTIONS)
    experts = range(config["num_experts"])
    return [*ATTENTION, *(f"mlp.experts.{n}.{p}" for n in experts for p in OF_MLP)]


def modules(config: dict[str, Any]) -> list[str]:
    return [
        f"model.layers.{i}.{p}"
        for i in range(config["num_hidden_layers"])
        for p in projections(config)
    ]


def plain_checkpoint(folder: Path, config: dict[str, Any] = NARROW, seed: int = 0) -> Path:
    """Random weights, as transformers names them."""
    rng = np.random.default_rng(seed)
    D, vocab = config["hidden_size"], config["vocab_size"]
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes = {"q": (q, D), "k": (kv, D), "v": (kv, D), "o": (D, q)}
    shapes |= {"gate": (inner, D), "up": (inner, D), "down": (D, inner)}
    tensors: dict[str, np.ndarray] = {
        "model.embed_tokens.weight": rng.normal(size=(vocab, D)),
        "lm_head.weight": rng.normal(size=(vocab, D)) * D**-0.5,
        "model.norm.weight": 1 + 0.2 * rng.normal(size=D),
    }
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = 1 + 0.2 * rng.normal(size=D)
        if "num_experts" in config:
            tensors[f"{prefix}.mlp.gate.weight"] = rng.normal(size=(config["num_experts"], D))
        if config["model_type"] != "llama":
            for norm in ("q_norm", "k_norm"):
                name = f"{prefix}.self_attn.{norm}.weight"
                tensors[name] = 1 + 0.2 * rng.normal(size=config["head_dim"])
        for projection in projections(config):
            rows, columns = shapes[projection.split(".")[-1].removesuffix("_proj")]
            values = rng.normal(size=(rows, columns)) * columns**-0.5
            # Rows differ in size, so that a neighbour's scale shows.
            tensors[f"{prefix}.{projection}.weight"] = values * rng.uniform(0.5, 2, (rows, 1))
    folder.mkdir(parents=True)
    save_file(
        {n: np.ascontiguousarray(a, np.float32) for n, a in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def random_checkpoint(folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """Random weights of any family, by the names and shapes of its own table."""
    rng = np.random.default_rng(seed)
    cfg = models.config_from_hf(config)
    tensors: dict[str, np.ndarray] = {}
    for spec in jax.tree.leaves(models.family(cfg).param_specs(cfg)):
        for name, shape in spec.tensors.items():
            values = rng.normal(size=shape)
            if len(shape) == 1:
                values = 0.2 * values + name.endswith("norm.weight")
            elif "embed" not in name:
                values *= shape[1] ** -0.5 * rng.uniform(0.5, 2, (shape[0], 1))
            tensors[name] = np.ascontiguousarray(values, np.float32)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rewritten(
    source: Path,
    folder: Path,
    quantization: dict[str, Any],
    quantise: Callable[[str, np.ndarray], dict[str, np.ndarray]],
    ignore: tuple[str, ...] = (),
) -> Path:
    """The source with each projection's weight replaced by `quantise(module, weight)`."""
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    for module in modules(config):
        if module not in ignore:
            made = quantise(module, tensors.pop(f"{module}.weight"))
            tensors |= {f"{module}.{name}": array for name, array in made.items()}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """All tensors as they are stored; safetensors' own reader for numpy knows no float8."""
    opened = open_checkpoint(folder)
    return {name: tensor.read() for name, tensor in opened.tensors.items()}


def in_bfloat16(source: Path, folder: Path) -> Path:
    """The same checkpoint with its weights rounded."""
    folder.mkdir()
    tensors = {name: a.astype(ml_dtypes.bfloat16) for name, a in tensors_of(source).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


# --- fp8


def blocks(shape: tuple[int, int]) -> Iterator[tuple[int, int, slice, slice]]:
    """Index and place of each 128 x 128 block of a matrix."""
    for i in range(-(-shape[0] // 128)):
        for j in range(-(-shape[1] // 128)):
            yield i, j, slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)


def block_fp8(name: str, weight: np.ndarray) -> dict[str, np.ndarray]:
    """DeepSeek's: weight / scale in float8, and the scale of each block under this name."""
    codes = np.zeros(weight.shape, FP8)
    scales = np.zeros((-(-weight.shape[0] // 128), -(-weight.shape[1] // 128)), np.float32)
    for i, j, rows, columns in blocks(weight.shape):
        scales[i, j] = np.abs(weight[rows, columns]).max() / 448
        codes[rows, columns] = (weight[rows, columns] / scales[i, j]).astype(FP8)
    return {"weight": codes, name: scales}


DEEPSEEK_FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}


def deepseek_fp8(source: Path, folder: Path) -> Path:
    return rewritten(
        source, folder, DEEPSEEK_FP8, lambda _, weight: block_fp8("weight_scale_inv", weight)
    )


def static_fp8(
    module: str, weight: np.ndarray, *, shape: tuple[int, ...], inputs: dict[str, float]
) -> dict[str, np.ndarray]:
    """One scale for the weight, and one for the input: 4 standard deviations reach 448."""
    scale = np.float32(np.abs(weight).max() / 448)
    role = module.split(".")[-1]
    return {
        "weight": (weight / scale).astype(FP8),
        "weight_scale": np.full(shape, scale, np.float32),
        "input_scale": np.full(shape, inputs[role], np.float32),
    }


# Those of one input are equal.
INPUT_SCALES: dict[str, float] = dict.fromkeys(("q_proj", "k_proj", "v_proj"), 0.011)
INPUT_SCALES |= {"o_proj": 0.007, "gate_proj": 0.012, "up_proj": 0.012, "down_proj": 0.02}
MODELOPT: dict[str, Any] = {
    "producer": {"name": "modelopt", "version": "0.33.0"},
    "quantization": {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
    },
}


def modelopt_fp8(source: Path, folder: Path, inputs: dict[str, float] = INPUT_SCALES) -> Path:
    """Scalars without an axis, scales of a KV cache, and the settings in a file of their own."""

    def quantise(module: str, weight: np.ndarray) -> dict[str, np.ndarray]:
        made = static_fp8(module, weight, shape=(), inputs=inputs)
        if module.endswith(("k_proj", "v_proj")):
            made[f"{module[-6]}_scale"] = np.full((), 0.5, np.float32)
        return made

    rewritten(source, folder, {}, quantise)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    return folder


def with_kv_scales(folder: Path, strategy: str, scales: Any) -> Path:
    """The scales of fp8 keys in a checkpoint of compressed-tensors, and twice as large ones of
    values: () or (1,) for all heads ("tensor"), (heads, 1, 1) for each ("attn_head")."""
    config = json.loads((folder / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False}
    config["quantization_config"]["kv_cache_scheme"] = scheme | {"symmetric": True}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = tensors_of(folder)
    for i in range(config["num_hidden_layers"]):
        for name, factor in (("k_scale", 1), ("v_scale", 2)):
            values = np.array(np.multiply(factor, scales), np.float32)
            tensors[f"model.layers.{i}.self_attn.{name}"] = values
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def modelopt_channel_fp8(source: Path, folder: Path) -> Path:
    """ModelOpt's FP8_PER_CHANNEL_PER_TOKEN: a scale [out] for the weight, none for the input."""

    def quantise(_: str, weight: np.ndarray) -> dict[str, np.ndarray]:
        scales = (np.abs(weight).max(axis=1) / 448).astype(np.float32)
        return {"weight": (weight / scales[:, None]).astype(FP8), "weight_scale": scales}

    settings = MODELOPT["quantization"] | {
        "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN",
        "kv_cache_quant_algo": None,
    }
    return rewritten(source, folder, {"quant_method": "modelopt", **settings}, quantise)


def compressed(
    weights: dict[str, Any], inputs: dict[str, Any] | None, format: str, **more: Any
) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **more,
    }


FP8_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
STATIC = compressed(
    FP8_TENSOR | {"dynamic": False}, FP8_TENSOR | {"dynamic": False}, "float-quantized"
)


def compressed_static_fp8(source: Path, folder: Path) -> Path:
    """llm-compressor's "FP8": what ModelOpt stores, in the other format."""
    quantise = partial(static_fp8, shape=(1,), inputs=INPUT_SCALES)
    return rewritten(source, folder, STATIC, quantise)


# --- 4 bits


def asymmetric(weight: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes 0 .. 15 [out, in], float16 scales and zeros [out, in / group]."""
    parts = weight.reshape(weight.shape[0], -1, group)
    low, high = np.minimum(parts.min(-1), 0), np.maximum(parts.max(-1), 0)
    scales = ((high - low) / 15).astype(np.float16)
    wide = scales.astype(np.float32)[..., None]
    zeros = np.clip(np.rint(-low[..., None] / wide), 1, 15)
    codes = np.clip(np.rint(parts / wide) + zeros, 0, 15)
    return codes.reshape(weight.shape).astype(int), scales, zeros[..., 0].astype(int)


def symmetric(weight: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same with zeros of 8."""
    parts = weight.reshape(weight.shape[0], -1, group)
    scales = (np.abs(parts).max(-1) / 7.5).astype(np.float16)
    codes = np.clip(np.rint(parts / scales.astype(np.float32)[..., None]) + 8, 0, 15)
    return codes.reshape(weight.shape).astype(int), scales, np.full(scales.shape, 8)


def floats(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """The weights [out, in] that codes stand for."""
    group = codes.shape[1] // scales.shape[1]
    wide = [np.repeat(a, group, axis=1).astype(np.float32) for a in (zeros, scales)]
    return (codes.astype(np.float32) - wide[0]) * wide[1]


def word(nibbles: list[int]) -> int:
    """Eight codes in an int32, the first in the lowest four bits."""
    value = sum(code << (4 * i) for i, code in enumerate(nibbles))
    return value - (1 << 32) if value >= 1 << 31 else value


def along_rows(codes: np.ndarray) -> np.ndarray:
    """[n, m] -> int32 [n / 8, m]: eight neighbours of a column in a word."""
    return np.array(
        [[word([int(codes[8 * i + k, j]) for k in range(8)]) for j in range(codes.shape[1])]
         for i in range(codes.shape[0] // 8)],
        np.int32,
    )  # fmt: skip


# AutoAWQ: "order_map = [0, 2, 4, 6, 1, 3, 5, 7]", the column that each nibble holds.
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def along_columns(codes: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """[n, m] -> int32 [n, m / 8]: eight columns of a row in a word, in this order."""
    return np.array(
        [[word([int(row[8 * j + k]) for k in order]) for j in range(len(row) // 8)]
         for row in codes],
        np.int32,
    )  # fmt: skip


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "lm_head": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def gptq(source: Path, folder: Path, *, sym: bool, v2: bool = False) -> Path:
    """AutoGPTQ's layout, or GPTQModel's."""
    own = {"sym": sym} | ({"checkpoint_format": "gptq_v2"} if v2 else {})
    quantise = partial(gptq_parts, sym=sym, v2=v2)
    made = rewritten(source, folder, GPTQ | own, lambda _, weight: quantise(weight))
    return with_dtype(made, "float16")


def gptq_parts(weight: np.ndarray, *, sym: bool = False, v2: bool = False) -> dict[str, np.ndarray]:
    """AutoGPTQ's layout: words along the input, and zeros less one; GPTQModel's has whole zeros."""
    codes, scales, zeros = (symmetric if sym else asymmetric)(weight, 128)
    return {
        "qweight": along_rows(codes.T),
        "qzeros": along_columns(zeros.T - (0 if v2 else 1)),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": (np.arange(weight.shape[1]) // 128).astype(np.int32),
    }


def awq(source: Path, folder: Path) -> Path:
    """AutoAWQ's layout."""
    made = rewritten(source, folder, AWQ, lambda _, weight: awq_parts(weight))
    return with_dtype(made, "float16")


def awq_parts(weight: np.ndarray) -> dict[str, np.ndarray]:
    """AutoAWQ's layout: words along the output, in an order of their own."""
    codes, scales, zeros = asymmetric(weight, 128)
    return {
        "qweight": along_columns(codes.T, AWQ_COLUMNS),
        "qzeros": along_columns(zeros.T, AWQ_COLUMNS),
        "scales": np.ascontiguousarray(scales.T),
    }


def packed_parts(weight: np.ndarray) -> dict[str, np.ndarray]:
    """llm-compressor's W4A16_ASYM: words along the input, zeros in words along the output."""
    codes, scales, zeros = asymmetric(weight, 128)
    return {
        "weight_packed": along_columns(codes),
        "weight_scale": scales,
        "weight_zero_point": along_rows(zeros),
        "weight_shape": np.array(weight.shape, np.int64),
    }


OF_GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
W4A16 = compressed(OF_GROUPS | {"symmetric": False}, None, "pack-quantized")


def compressed_int4(source: Path, folder: Path, *, lm_head: bool = False) -> Path:
    """llm-compressor's W4A16_ASYM, with the head in codes or plain."""
    config = W4A16 | {"ignore": [] if lm_head else ["lm_head"]}
    out = rewritten(source, folder, config, lambda _, weight: packed_parts(weight))
    if lm_head:
        tensors = tensors_of(out)
        made = packed_parts(tensors.pop("lm_head.weight"))
        tensors |= {f"lm_head.{part}": array for part, array in made.items()}
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return with_dtype(out, "float16")


def with_dtype(folder: Path, dtype: str) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    return folder


def dequantised_int4(source: Path, folder: Path, *, sym: bool = False) -> Path:
    """The plain checkpoint of the weights that 4-bit ones stand for: an oracle of its products."""
    made = symmetric if sym else asymmetric
    rewritten(source, folder, {}, lambda _, w: {"weight": floats(*made(w, 128))})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# --- heads

STATIC_FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
FP8_HEAD: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head", "fc"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


# Parts and settings of a head whose matrices, fc among them, have four bits.
FOUR_BITS: dict[str, tuple[Callable[[np.ndarray], dict[str, np.ndarray]], dict[str, Any]]] = {
    "int4": (packed_parts, W4A16),
    "gptq": (gptq_parts, GPTQ | {"sym": False}),
    "awq": (awq_parts, AWQ),
}


def four_bit_head(folder: Path, form: str, *, lm_head: bool = False, method: str = "eagle") -> Path:
    """A plain head with all matrices in 4 bits, with an lm_head of its own or without."""
    out = eagle_head(folder, "plain") if method == "eagle" else eagle3_head(folder)
    parts_of, settings = FOUR_BITS[form]
    tensors = load_file(out / "model.safetensors")
    if lm_head:
        tensors["lm_head.weight"] = tensors["fc.weight"][:96, :128].copy()
        settings = settings | {"ignore": []}
    for name in [name for name, array in tensors.items() if array.ndim == 2]:
        module = name.removesuffix(".weight")
        made = parts_of(tensors.pop(name))
        tensors |= {f"{module}.{part}": array for part, array in made.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text()) | {"quantization_config": settings}
    (out / "config.json").write_text(json.dumps(config))
    return with_dtype(out, "float16")


def eagle_head(folder: Path, form: Literal["plain", "fp8", "static"]) -> Path:
    """A random EAGLE-1 head for the narrow target: plain, fp8 by channels, or static fp8."""
    config: dict[str, Any] = {k: v for k, v in NARROW.items() if k != "dtype"} | {"bias": False}
    config |= {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    source = plain_checkpoint(folder / "source", NARROW, seed=5)
    tensors = {
        name.removeprefix("model."): array
        for name, array in tensors_of(source).items()
        if "layers.0." in name and not name.endswith("input_layernorm.weight")
    }
    tensors["fc.weight"] = np.random.default_rng(6).normal(size=(128, 256)).astype(np.float32) / 16
    if form == "static":
        config["quantization_config"] = STATIC_FP8 | {"modules_to_not_convert": ["fc"]}
    elif form == "fp8":
        config["quantization_config"] = FP8_HEAD
    for projection in PROJECTIONS if form != "plain" else ():
        name = f"layers.0.{projection}.weight"
        if form == "static":
            made = static_fp8(projection, tensors[name], shape=(), inputs=INPUT_SCALES)
            tensors |= {f"layers.0.{projection}.{part}": array for part, array in made.items()}
            continue
        scale = np.abs(tensors[name]).max(axis=1, keepdims=True) / np.float32(448)
        tensors[name] = (tensors[name] / scale).astype(FP8)
        tensors[f"{name}_scale"] = scale
    out = folder / "head"
    out.mkdir()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))
    return out


def eagle3_head(folder: Path) -> Path:
    """A random, plain EAGLE-3 head for the narrow target, which reads two of its layers."""
    out = eagle_head(folder, "plain")
    tensors = load_file(out / "model.safetensors")
    rng = np.random.default_rng(7)
    for name in (f"layers.0.self_attn.{part}_proj.weight" for part in "qkv"):
        tensors[name] = np.concatenate([tensors[name], tensors[name][::-1]], axis=1)
    for name in ("norm", "layers.0.input_layernorm", "layers.0.hidden_norm"):
        tensors[f"{name}.weight"] = (1 + 0.2 * rng.normal(size=128)).astype(np.float32)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [0, 1]
    (out / "config.json").write_text(json.dumps(config))
    return out
