"""A GGUF's tokenizer metadata -> tokenizer.json and tokenizer_config.json.

transformers reads a GGUF's tokenizer only with torch, and 5.23 does not know the pre-tokenizer of
SmolLM, so it is built here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
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
from jaxspec.loading.gguf_metadata import Metadata
from jaxspec.loading.gguf_sentencepiece import build_sentencepiece

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6  # llama.cpp's token types, which end at BYTE
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"  # tokenizer.ggml.model
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


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a GGUF file.

    ids:     token -> id, in the order of ids.
    types:   int [vocab], llama.cpp's token types.
    special: id of each special token that the file names: bos, eos, eot, unknown, padding.
    """

    ids: dict[str, int]
    types: np.ndarray
    special: dict[str, int]

    def token(self, name: str) -> str | None:
        """Return the special token of a name, or None if the file names none."""
        return list(self.ids)[self.special[name]] if name in self.special else None

    def of_type(self, *types: int) -> list[str]:
        """Return the tokens of some types, in the order of ids."""
        return [t for t, kind in zip(self.ids, self.types.tolist(), strict=True) if kind in types]


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """Return the tokens; ConfigError if they are no vocabulary."""
    source = metadata.source
    tokens = metadata.need("tokenizer.ggml.tokens", list[str])
    # llama.cpp gives a token without text the same name.
    ids = {text or f"[EMPTY_{i}]": i for i, text in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(text for i, text in enumerate(tokens) if ids.get(text, i) != i)
        raise ConfigError(
            f"{source}: expected tokenizer.ggml.tokens to differ, got {twice!r} twice"
        )
    types = _per_token(metadata, "tokenizer.ggml.token_type", len(tokens), "integers")
    if len(types) and not 0 <= types.min() <= types.max() <= BYTE:
        raise metadata.wrong("tokenizer.ggml.token_type", f"types from 0 to {BYTE}")
    special = {}
    for name in ("bos", "eos", "eot", "unknown", "padding"):
        key = f"tokenizer.ggml.{name}_token_id"
        if (token_id := metadata.read(key, int)) is not None:
            if not 0 <= token_id < len(tokens):
                raise metadata.wrong(key, f"an id below {len(tokens)}")
            special[name] = token_id
    return Vocabulary(ids, types, special)


def write_tokenizer(metadata: Metadata, vocabulary: Vocabulary, folder: Path) -> None:
    """Write the files that AutoTokenizer.from_pretrained(folder) reads, chat template included."""
    tokenizer = build_tokenizer(metadata, vocabulary)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    tokens = {name: vocabulary.token(key) for name, key in names.items()}
    config: dict[str, Any] = {name: token for name, token in tokens.items() if token is not None}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    architecture = metadata.need("general.architecture", str)
    config["model_max_length"] = metadata.count(f"{architecture}.context_length")
    if (template := metadata.read("tokenizer.chat_template", str)) is not None:
        config["chat_template"] = template
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def build_tokenizer(metadata: Metadata, vocabulary: Vocabulary) -> Tokenizer:
    """Return the tokenizer that the metadata describes."""
    kind = metadata.need("tokenizer.ggml.model", str)
    if kind == BYTE_LEVEL:
        style = _pre_tokenizer_style(metadata)
        tokenizer = _byte_level(vocabulary, _merges(metadata, vocabulary), style)
        special, adds_bos = [CONTROL], style == LLAMA3
    elif kind == SENTENCEPIECE and metadata.need("general.architecture", str) == "llama":
        prefix = metadata.read("tokenizer.ggml.add_space_prefix", bool)
        tokenizer = build_sentencepiece(
            vocabulary.ids,
            _per_token(metadata, "tokenizer.ggml.scores", len(vocabulary.ids), "numbers"),
            vocabulary.types,
            unknown=vocabulary.token("unknown"),
            space_prefix=prefix is not False,
        )
        special, adds_bos = [UNKNOWN, CONTROL], True
    else:
        raise ConfigError(
            f"{metadata.source}: expected a byte-level BPE tokenizer ({BYTE_LEVEL!r}), or "
            f"SentencePiece ({SENTENCEPIECE!r}) for a llama, got {kind!r}"
        )
    tokenizer.add_special_tokens(_added(vocabulary.of_type(*special), special=True))
    tokenizer.add_tokens(_added(vocabulary.of_type(USER_DEFINED), special=False))
    said = metadata.read("tokenizer.ggml.add_bos_token", bool)
    if adds_bos if said is None else said:
        bos = vocabulary.token("bos")
        if bos is None:
            metadata.need("tokenizer.ggml.bos_token_id", int)
        assert bos is not None
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, vocabulary.special["bos"])]
        )
    return tokenizer


def _per_token(metadata: Metadata, key: str, count: int, kind: str) -> np.ndarray:
    """Return an array of one finite number a token."""
    values = metadata.need(key, np.ndarray)
    is_kind = np.issubdtype(values.dtype, np.integer if kind == "integers" else np.floating)
    if len(values) != count or not is_kind or not np.isfinite(values).all():
        raise ConfigError(
            f"{metadata.source}: expected {key} to be {count} finite {kind}, "
            f"got {len(values)} of {values.dtype}"
        )
    return values


def _added(tokens: Sequence[str], *, special: bool) -> list[AddedToken]:
    return [AddedToken(token, normalized=False, special=special) for token in tokens]


def _pre_tokenizer_style(metadata: Metadata) -> str:
    pre = metadata.need("tokenizer.ggml.pre", str)
    if pre not in PRE_TOKENIZERS:
        raise ConfigError(
            f"{metadata.source}: expected a tokenizer.ggml.pre among {', '.join(PRE_TOKENIZERS)}, "
            f"got {pre!r:.100}"
        )
    style = PRE_TOKENIZERS[pre]
    # AutoTokenizer splits the text of every qwen2 model as Qwen does.
    if metadata.need("general.architecture", str) == "qwen2" and style != QWEN2:
        raise ConfigError(
            f"{metadata.source}: expected tokenizer.ggml.pre 'qwen2' for a qwen2 model, got {pre!r}"
        )
    return style


def _merges(metadata: Metadata, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return the merges, each of two tokens that make a third."""
    pairs: list[tuple[str, str]] = []
    for merge in metadata.need("tokenizer.ggml.merges", list[str]):
        left, _, right = merge.partition(" ")
        if not all(token in vocabulary.ids for token in (left, right, left + right)):
            raise ConfigError(
                f"{metadata.source}: expected each of tokenizer.ggml.merges to join two tokens "
                f"into a third, got {merge!r:.100}"
            )
        pairs.append((left, right))
    return pairs


def _byte_level(vocabulary: Vocabulary, merges: list[tuple[str, str]], style: str) -> Tokenizer:
    # llama-bpe keeps a word that is a token whole, before any merge, as tiktoken does.
    bpe = models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=style == LLAMA3)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = _pre_tokenizer(style)
    tokenizer.decoder = decoders.ByteLevel()
    if style == QWEN2:  # as in Qwen's own tokenizer.json; llama.cpp leaves it out
        tokenizer.normalizer = normalizers.NFC()
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
