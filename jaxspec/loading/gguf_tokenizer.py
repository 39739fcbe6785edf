"""A GGUF's tokenizer metadata -> tokenizer.json and tokenizer_config.json (byte-level BPE).

transformers reads a GGUF's tokenizer only with torch, and 5.23 does not know the pre-tokenizer of
SmolLM, so it is built here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from jaxspec.config import ConfigError

CONTROL, USER_DEFINED = 3, 4  # llama.cpp's token types
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2, SMOLLM, QWEN2, LLAMA3 = ("gpt2", "smollm", "qwen2", "llama3")
# tokenizer.ggml.pre (llama.cpp's src/llama-vocab.cpp) -> how text is split before merging
PRE_TOKENIZERS = {
    "gpt-2": GPT2,
    "smollm": SMOLLM,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "llama-bpe": LLAMA3,
}


def write_tokenizer(metadata: dict[str, Any], folder: Path, source: str) -> None:
    """Write the files that AutoTokenizer.from_pretrained(folder) reads, chat template included."""
    tokenizer = build_tokenizer(metadata, source)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    config: dict[str, Any] = {name: tokens[i] for name, i in ids.items() if i is not None}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config["model_max_length"] = metadata[f"{metadata['general.architecture']}.context_length"]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def build_tokenizer(metadata: dict[str, Any], source: str) -> Tokenizer:
    """Return the byte-level BPE that the metadata describes."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ConfigError(f"{source}: expected a byte-level BPE tokenizer ('gpt2'), got {kind!r}")
    if pre not in PRE_TOKENIZERS:
        raise ConfigError(
            f"{source}: expected a tokenizer.ggml.pre among {', '.join(PRE_TOKENIZERS)}, "
            f"got {pre!r}"
        )
    style = PRE_TOKENIZERS[pre]
    # AutoTokenizer splits the text of every qwen2 model as Qwen does.
    if metadata["general.architecture"] == "qwen2" and style != QWEN2:
        raise ConfigError(
            f"{source}: expected tokenizer.ggml.pre 'qwen2' for a qwen2 model, got {pre!r}"
        )
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    # llama-bpe keeps a word that is a token whole, before any merge, as tiktoken does.
    bpe = models.BPE(
        vocab={t: i for i, t in enumerate(tokens)}, merges=pairs, ignore_merges=style == LLAMA3
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = _pre_tokenizer(style)
    tokenizer.decoder = decoders.ByteLevel()
    if style == QWEN2:  # as in Qwen's own tokenizer.json; llama.cpp leaves it out
        tokenizer.normalizer = normalizers.NFC()
    types = list(zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, kind in types if kind == CONTROL]
    )
    tokenizer.add_tokens(
        [
            AddedToken(t, normalized=False, special=False)
            for t, kind in types
            if kind == USER_DEFINED
        ]
    )
    if metadata.get("tokenizer.ggml.add_bos_token", style == LLAMA3):
        bos_id = metadata["tokenizer.ggml.bos_token_id"]
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, bos_id)]
        )
    return tokenizer


def _pre_tokenizer(style: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if style == GPT2:
        return byte_level
    # Each digit by itself, then GPT-2's pattern: as in SmolLM's tokenizer.json and in llama.cpp.
    if style == SMOLLM:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    numbers = r"\p{N}" if style == QWEN2 else r"\p{N}{1,3}"
    split = pre_tokenizers.Split(Regex(CONTRACTION + numbers + REST), behavior="isolated")
    return pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
