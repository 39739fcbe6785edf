"""llama.cpp's GGUF -> a Hugging Face folder.

The folder has dequantised safetensors, config.json and the tokenizer's files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf.quants import dequantize

from jaxspec import models
from jaxspec.config import ConfigError
from jaxspec.loading.gguf_header import GGUFHeader, read_header
from jaxspec.loading.gguf_tokenizer import read_vocabulary, write_tokenizer
from jaxspec.loading.new_folder import new_folder
from jaxspec.loading.shards import write_json, write_shards
from jaxspec.loading.weights import check_shapes

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
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
    header = read_header(gguf_path)
    vocabulary = read_vocabulary(header.metadata)
    config = hf_config(header, vocabulary.special)
    check_tensors(header, config, len(vocabulary.ids))
    size = sum(4 * math.prod(t.shape) for t in header.tensors.values())
    with new_folder(out_dir, f"{size / 1e9:.1f} GB of converted weights") as folder:
        write_tokenizer(header.metadata, vocabulary, folder)
        write_json(folder / "config.json", config)
        ids = [vocabulary.special[kind] for kind in ("eos", "eot") if kind in vocabulary.special]
        write_json(
            folder / "generation_config.json",
            {"bos_token_id": config["bos_token_id"], "eos_token_id": list(dict.fromkeys(ids))},
        )
        write_shards(folder, hf_tensors(header, config))
    return out_dir


def config_of_gguf(path: Path) -> dict[str, Any]:
    """Return config.json from the header of a file; ConfigError if no model here is like it."""
    header = read_header(path)
    return hf_config(header, read_vocabulary(header.metadata).special)


def hf_config(header: GGUFHeader, special: Mapping[str, int]) -> dict[str, Any]:
    """Return config.json from the metadata, in Hugging Face's keys.

    special: id of each special token that the file names.
    """
    metadata, tensors, source = header.metadata, header.tensors, header.source
    arch = metadata.read("general.architecture", str)
    if arch not in ARCHITECTURES:
        raise ConfigError(
            f"{source}: expected a GGUF of architecture {', '.join(ARCHITECTURES)}, got {arch!r}"
        )

    def count(name: str, default: int | None = None) -> int:
        return metadata.count(f"{arch}.{name}", default)

    if experts := metadata.read(f"{arch}.expert_count", int):
        raise ConfigError(f"{source}: expected a dense model, got {experts} experts")
    scaling = metadata.read(f"{arch}.rope.scaling.type", str)
    if scaling not in (None, "none"):
        raise ConfigError(f"{source}: expected no rope.scaling.type, got {scaling!r}")
    heads, hidden = count("attention.head_count"), count("embedding_length")
    head_dim = count("attention.key_length", count("rope.dimension_count", max(hidden // heads, 1)))
    if {count("rope.dimension_count", head_dim), count("attention.value_length", head_dim)} != {
        head_dim
    }:
        raise ConfigError(
            f"{source}: expected rope and values as wide as the head, {head_dim}, got another width"
        )
    embeddings = tensors.get("token_embd.weight")
    config = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": embeddings.shape[0] if embeddings is not None else 0,
        "hidden_size": hidden,
        "intermediate_size": count("feed_forward_length"),
        "num_hidden_layers": count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": count("context_length"),
        "rms_norm_eps": metadata.positive(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.positive(f"{arch}.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": special.get("bos"),
        "eos_token_id": special.get("eos"),
        "pad_token_id": special.get("padding"),
        "dtype": "float32",
    }
    if arch != "qwen2":  # qwen2 always has biases, and no such key in its config
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if ROPE_FREQS in tensors:
        factors = dequantize(tensors[ROPE_FREQS].data, tensors[ROPE_FREQS].type)
        config["rope_scaling"] = _llama3_scaling(factors, config["rope_theta"], head_dim, source)
    return config


def check_tensors(header: GGUFHeader, config: dict[str, Any], num_tokens: int) -> None:
    """Compare the tensors with the table of the architecture, before anything is written.

    num_tokens: of the tokenizer; the embedding has a row for each.
    """
    source, rows, layers = header.source, config["vocab_size"], config["num_hidden_layers"]
    if rows != num_tokens:
        raise ConfigError(
            f"{source}: expected token_embd.weight with a row for each of {num_tokens} tokens, "
            f"got {rows} rows"
        )
    shapes = {
        hf_name(name, source): tensor.shape
        for name, tensor in header.tensors.items()
        if name != ROPE_FREQS
    }
    # The count alone could be absurd, and the table has an entry for each layer.
    blocks = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
    if blocks != {str(i) for i in range(min(layers, len(blocks) + 1))}:
        raise ConfigError(
            f"{source}: expected tensors of blocks 0 to {layers - 1} (block_count), "
            f"got {len(blocks)} blocks"
        )
    cfg = models.config_from_hf(config)
    check_shapes(models.family(cfg).param_specs(cfg), shapes, source=source)


def hf_tensors(header: GGUFHeader, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (Hugging Face name, float32 array) of each tensor, dequantised one at a time."""
    for name, tensor in header.tensors.items():
        if name == ROPE_FREQS:
            continue
        try:
            array = dequantize(tensor.data, tensor.type).astype(np.float32, copy=False)
        except NotImplementedError as e:
            raise ConfigError(
                f"{header.source}: expected a quantisation that the gguf library can undo, "
                f"got {e} in {name}"
            ) from e
        if config["model_type"] == "llama" and name.split(".")[-2] in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"]
            array = unpermute(array, heads)
        yield hf_name(name, header.source), array


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
    if factors.shape != (head_dim // 2,) or not 0 < factors.min() <= factors.max() < np.inf:
        raise ConfigError(
            f"{source}: expected {head_dim // 2} positive factors in {ROPE_FREQS}, "
            f"got {list(factors.shape)} of {factors.min()} to {factors.max()}"
        )
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
