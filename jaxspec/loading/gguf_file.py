"""llama.cpp's GGUF -> a Hugging Face folder.

The folder has dequantised safetensors, config.json and the tokenizer's files.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from safetensors.numpy import save_file

from jaxspec.config import ConfigError
from jaxspec.loading.checkpoint import INDEX, SINGLE
from jaxspec.loading.gguf_tokenizer import write_tokenizer

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SHARD_BYTES = 2 * 1024**3
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FREQS = "rope_freqs.weight"  # llama3's rope scaling, which a GGUF holds as a tensor


def convert_gguf(gguf_path: str | Path, out_dir: str | Path) -> Path:
    """Convert a llama, qwen2 or qwen3 GGUF into ``out_dir``, which must not exist.

    The folder appears whole or not at all. Weights are float32, the precision that dequantisation
    computes in. ConfigError for anything that would change the maths.
    """
    gguf_path, out_dir = Path(gguf_path), Path(out_dir)
    if out_dir.exists():
        raise ConfigError(
            f"{out_dir}: expected a folder that does not exist yet, got one that does"
        )
    try:
        reader = GGUFReader(gguf_path)
        metadata = {name: f.contents() for name, f in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OSError) as e:
        raise ConfigError(
            f"{gguf_path}: expected a whole GGUF file, got {type(e).__name__}: {e}"
        ) from e
    tensors = {t.name: t for t in reader.tensors}
    config = hf_config(metadata, tensors, str(gguf_path))
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    temp = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        write_tokenizer(metadata, temp, str(gguf_path))
        _write_json(temp / "config.json", config)
        ids = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
        eos = list(dict.fromkeys(i for i in ids if i is not None))
        _write_json(
            temp / "generation_config.json",
            {"bos_token_id": config["bos_token_id"], "eos_token_id": eos},
        )
        _write_weights(temp, hf_tensors(tensors, config, str(gguf_path)))
        for path in (temp, *temp.iterdir()):  # mkdtemp and safetensors let the owner alone read
            path.chmod(0o755 if path.is_dir() else 0o644)
        temp.rename(out_dir)
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise
    return out_dir


def hf_config(
    metadata: dict[str, Any], tensors: dict[str, ReaderTensor], source: str
) -> dict[str, Any]:
    """Return config.json from the metadata, in Hugging Face's keys."""
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ConfigError(
            f"{source}: expected a GGUF of architecture {', '.join(ARCHITECTURES)}, got {arch!r}"
        )

    def key(name: str, *default: Any) -> Any:
        value = metadata.get(f"{arch}.{name}", *default)
        if value is None and not default:
            raise ConfigError(f"{source}: expected the metadata {arch}.{name}, got none")
        return _shortest(value)

    if key("expert_count", 0):
        raise ConfigError(f"{source}: expected a dense model, got {key('expert_count')} experts")
    if key("rope.scaling.type", "none") != "none":
        raise ConfigError(
            f"{source}: expected no rope.scaling.type, got {key('rope.scaling.type')!r}"
        )
    heads, hidden = key("attention.head_count"), key("embedding_length")
    head_dim = (
        key("attention.key_length", None) or key("rope.dimension_count", None) or hidden // heads
    )
    if (
        key("rope.dimension_count", head_dim) != head_dim
        or key("attention.value_length", head_dim) != head_dim
    ):
        raise ConfigError(
            f"{source}: expected rope and values as wide as the head, {head_dim}, got another width"
        )
    config = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": int(tensors["token_embd.weight"].shape[1])
        if "token_embd.weight" in tensors
        else 0,
        "hidden_size": hidden,
        "intermediate_size": key("feed_forward_length"),
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": key("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": key("context_length"),
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon"),
        "rope_theta": key("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }
    if arch != "qwen2":  # qwen2 always has biases, and no such key in its config
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if ROPE_FREQS in tensors:
        factors = np.asarray(tensors[ROPE_FREQS].data, np.float32)
        config["rope_scaling"] = _llama3_scaling(factors, config["rope_theta"], head_dim, source)
    return config


def hf_tensors(
    tensors: dict[str, ReaderTensor], config: dict[str, Any], source: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (Hugging Face name, float32 array) of each tensor, dequantised one at a time."""
    for name, tensor in tensors.items():
        if name == ROPE_FREQS:
            continue
        try:
            array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError as e:
            raise ConfigError(
                f"{source}: expected a quantisation that the gguf library can undo, "
                f"got {e} in {name}"
            ) from e
        if config["model_type"] == "llama" and name.split(".")[-2] in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"]
            array = unpermute(array, heads)
        yield hf_name(name, source), array


def hf_name(name: str, source: str) -> str:
    """Return model.layers.3.self_attn.q_proj.weight for blk.3.attn_q.weight, and so on."""
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in TOP_NAMES:
        return f"{TOP_NAMES[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in BLOCK_NAMES:
        return f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}.{parts[3]}"
    raise ConfigError(
        f"{source}: expected the tensors of a dense llama, qwen2 or qwen3, got {name!r}"
    )


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the rows of q and k, which is for interleaved rotation.

    [heads, hd/2, 2, ...] -> [heads, 2, hd/2, ...].
    """
    return (
        rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def _llama3_scaling(
    factors: np.ndarray, theta: float, head_dim: int, source: str
) -> dict[str, Any]:
    """Return the rope_scaling of these factors; Llama 3.1 to 3.3 differ in ``factor`` only."""
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    if not np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise ConfigError(
            f"{source}: expected {ROPE_FREQS} of llama3 rope scaling with factor {factor}, "
            "got other values"
        )
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
    }
    return scaling | {"original_max_position_embeddings": original}


def _write_weights(folder: Path, tensors: Iterator[tuple[str, np.ndarray]]) -> None:
    """Write shards of at most SHARD_BYTES, or one file: memory holds one shard, not the model."""
    shards: list[list[str]] = []
    pending: dict[str, np.ndarray] = {}

    def flush() -> None:
        save_file(pending, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, array in tensors:
        if pending and sum(a.nbytes for a in pending.values()) + array.nbytes > SHARD_BYTES:
            flush()
        pending[name] = np.ascontiguousarray(array)
    flush()
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = SINGLE if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{i}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        _write_json(folder / INDEX, {"metadata": {}, "weight_map": weight_map})


def _shortest(value: Any) -> Any:
    """Return a float32 as its shortest decimal: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
