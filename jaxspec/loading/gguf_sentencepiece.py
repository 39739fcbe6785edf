"""A SentencePiece vocabulary of a GGUF file (Llama 2, TinyLlama, Mistral) -> a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tokenizers import Tokenizer

NORMAL = 1  # llama.cpp's token type: a piece that merges may make


def build_sentencepiece(
    tokens: Mapping[str, int],
    scores: np.ndarray,
    types: np.ndarray,
    *,
    unknown: str | None,
    space_prefix: bool,
) -> Tokenizer:
    """Return the BPE of a SentencePiece vocabulary, with transformers' spaces, bytes and decoder.

    tokens:       piece -> id, in the order of ids
    scores:       float [vocab], of each piece
    types:        int [vocab], llama.cpp's token types
    unknown:      the piece for what has neither pieces nor byte tokens
    space_prefix: whether a text begins with a space that it lacks
    """
    from transformers import LlamaTokenizer

    # A name that is given, and is no token, would be added to the vocabulary: None adds nothing.
    named: dict[str, Any] = {"unk_token": unknown, "bos_token": None, "eos_token": None}
    tokenizer = LlamaTokenizer(
        vocab=dict(tokens),
        merges=merges_of(tokens, scores, types),
        add_prefix_space=space_prefix,
        **named,
    )
    return tokenizer.backend_tokenizer


def merges_of(
    tokens: Mapping[str, int], scores: np.ndarray, types: np.ndarray
) -> list[tuple[str, str]]:
    """Return the pairs of pieces whose union is a piece, those of the best score first.

    SentencePiece stores no merges: it always joins the neighbours whose union scores best.
    """
    pairs: list[tuple[float, str, str]] = []
    for piece, i in tokens.items():
        if types[i] != NORMAL:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in tokens and right in tokens:
                pairs.append((float(scores[i]), left, right))
    # Pairs of one score in transformers' order: the longer left piece first.
    pairs.sort(key=lambda pair: (pair[0], len(pair[1]), len(pair[2])), reverse=True)
    return [(left, right) for _, left, right in pairs]
