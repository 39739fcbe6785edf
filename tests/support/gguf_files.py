"""Tiny GGUF files, written with the gguf library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 64, 4, 2, 96, 2
CONTROL = {"<|endoftext|>": 3, "<|im_start|>": 3, "<|im_end|>": 3, "<think>": 4}
MERGES = ["Ġ t", "h e", "Ġt he", "Ġ Ġ", "1 2", "i n", "Ċ Ċ", "e r", "12 3", "in t"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_alphabet() -> list[str]:
    """GPT-2's printable characters for the 256 bytes, in byte order."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in kept else chr(next(others)) for b in range(256)]


def sentencepiece(text: str, merges: int = 60) -> list[tuple[str, float, int]]:
    """(piece, score, llama.cpp's type) of a vocabulary trained on a text, as SentencePiece's BPE
    writes it: unknown and control tokens, the bytes, merged pieces by rank, characters last."""
    words = [["▁", *word] for word in text.split()]
    pieces: list[str] = []
    for _ in range(merges):
        pairs = Counter(pair for word in words for pair in pairwise(word))
        if not pairs:
            break
        (left, right), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        pieces.append(left + right)
        for word in words:
            for i in range(len(word) - 2, -1, -1):
                if i + 1 < len(word) and (word[i], word[i + 1]) == (left, right):
                    word[i : i + 2] = [left + right]
    pieces += sorted({"▁", *text} - {" "})
    learned = [(piece, -float(rank), 1) for rank, piece in enumerate(dict.fromkeys(pieces))]
    control = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    return [
        *control,
        *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
        *learned,
        ("<|im_start|>", 0.0, 3),
        ("<|im_end|>", 0.0, 3),
        ("<think>", 0.0, 4),
    ]


def write_gguf(
    folder: Path,
    arch: str = "llama",
    *,
    pre: str | None = None,  # by default the architecture's own
    tokenizer_model: str = "gpt2",
    tokens: Sequence[str] = (),
    bos: bool = False,
    tied: bool = True,
    head_dim: int = 32,
    rope_dim: int | None = None,
    pieces: Sequence[tuple[str, float, int]] = (),  # a SentencePiece vocabulary instead
    kv: Mapping[str, int | float | str | bool] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write a tiny GGUF with random weights into a folder; return its path."""
    vocabulary = [*CONTROL, *byte_alphabet(), *(m.replace(" ", "") for m in MERGES), *tokens]
    pre = pre or ("qwen2" if arch.startswith("qwen") else "smollm")
    rng = np.random.default_rng(0)
    path = folder / f"{arch}-{pre}.gguf"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if arch == "llama":
        writer.add_rope_dimension_count(rope_dim or head_dim)
    writer.add_rope_freq_base(50000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if pieces:
        vocabulary = [piece for piece, _, _ in pieces]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(vocabulary)
        writer.add_token_scores([score for _, score, _ in pieces])
        writer.add_token_types([kind for _, _, kind in pieces])
        writer.add_unk_token_id(0)
    else:
        writer.add_tokenizer_model(tokenizer_model)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(vocabulary)
        writer.add_token_types([CONTROL.get(t, 1) for t in vocabulary])
        writer.add_token_merges(MERGES)
        writer.add_eot_token_id(0)
        writer.add_add_bos_token(bos)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    for key, value in (kv or {}).items():
        add_value = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }[type(value)]
        add_value(key, value)

    def add(name: str, *shape: int, quantised: bool = True) -> None:
        array = rng.normal(size=shape).astype(np.float32)
        if quantised and len(shape) == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)

    add("token_embd.weight", len(vocabulary), HIDDEN)
    add("output_norm.weight", HIDDEN)
    if not tied:
        add("output.weight", len(vocabulary), HIDDEN)
    for i in range(LAYERS):
        for name, rows in (
            ("attn_q", HEADS * head_dim),
            ("attn_k", KV_HEADS * head_dim),
            ("attn_v", KV_HEADS * head_dim),
        ):
            add(f"blk.{i}.{name}.weight", rows, HIDDEN)
            if arch == "qwen2":
                add(f"blk.{i}.{name}.bias", rows)
        add(f"blk.{i}.attn_output.weight", HIDDEN, HEADS * head_dim)
        add(f"blk.{i}.ffn_gate.weight", INNER, HIDDEN)
        add(f"blk.{i}.ffn_up.weight", INNER, HIDDEN)
        add(f"blk.{i}.ffn_down.weight", HIDDEN, INNER)
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{i}.{name}.weight", HIDDEN)
        if arch == "qwen3":
            add(f"blk.{i}.attn_q_norm.weight", head_dim)
            add(f"blk.{i}.attn_k_norm.weight", head_dim)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
