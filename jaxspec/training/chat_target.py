"""The target as training meets it: weights, chat template, and its words as token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from jaxspec import models
from jaxspec.config import ConfigError, shown
from jaxspec.layers.params import Params
from jaxspec.loading import Tokenizer, load_tokenizer, resolve
from jaxspec.loading.checkpoint import open_checkpoint
from jaxspec.loading.model import load_target


@dataclass(frozen=True)
class ChatFormat:
    """The target's chat template as token ids.

    A chat is before_user, the user's text, before_answer, the answer, and a stop token. A further
    turn is before_next_user, the user's text, before_answer, the answer, and a stop token.

    before_next_user: what follows the stop token; None for a template without such a place
    """

    before_user: tuple[int, ...]
    before_answer: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    special_token_ids: tuple[int, ...]
    before_next_user: tuple[int, ...] | None = None

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> ChatFormat:
        """Read the template of a tokenizer by rendering a chat around a marker."""
        marker = "@@USER@@"
        text = tokenizer.hf.apply_chat_template(
            [{"role": "user", "content": marker}], tokenize=False, add_generation_prompt=True
        )
        if text.count(marker) != 1:
            raise ConfigError(
                "chat template: expected the user's text once in a rendered chat, "
                f"got {text.count(marker)} times"
            )
        before, after = (
            tuple(tokenizer.hf.encode(part, add_special_tokens=False))
            for part in text.split(marker)
        )
        stops, special = tokenizer.eos_token_ids, tuple(tokenizer.hf.all_special_ids)
        return cls(before, after, stops, special, _before_next_user(tokenizer, stops))


def _before_next_user(
    tokenizer: Tokenizer, stop_token_ids: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return what a template puts between the stop token of an answer and the next user's text."""
    roles = ("user", "assistant", "user")
    texts = [f"@@{i}@@" for i in range(3)]
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
    whole = tokenizer.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    _, found, rest = whole.partition(texts[1])
    between, also_found, _ = rest.partition(texts[2])
    if not (found and also_found):
        return None
    ids = tuple(tokenizer.hf.encode(between, add_special_tokens=False))
    return ids[1:] if ids and ids[0] in stop_token_ids else None


class Words(Protocol):
    """Text to token ids, int32 [n], and back."""

    def encode_chat(self, prompt: str) -> np.ndarray:
        """One user's turn in the chat template, up to where the answer begins."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """The words alone, without a template."""
        ...

    def decode(self, tokens: np.ndarray) -> str: ...


@dataclass(frozen=True)
class ChatTarget:
    """A target with its chats.

    name:          what a head's config calls it
    architectures: as its config.json has them; none if it has none
    """

    name: str
    cfg: models.TargetConfig
    params: Params
    chat: ChatFormat
    words: Words
    architectures: tuple[str, ...]

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of its weights, and of what is computed with them."""
        return self.params["norm"].dtype


@dataclass(frozen=True)
class TokenizerWords:
    """Words as the checkpoint's own tokenizer has them."""

    tokenizer: Tokenizer

    def encode_chat(self, prompt: str) -> np.ndarray:
        return np.asarray(
            self.tokenizer.encode_chat([{"role": "user", "content": prompt}]), np.int32
        )

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self.tokenizer.encode_word(text), np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        return self.tokenizer.decode(tokens.tolist())


def load_chat_target(target: str | None, dtype: Any, *, name: str | None = None) -> ChatTarget:
    """Load a target by its folder, .gguf file or hub id (None: SmolLM2-135M-Instruct).

    name: what a head's config calls it (None: what it was loaded by).
    """
    folder: Path = resolve(target, kind="target")
    tokenizer = load_tokenizer(folder)
    cfg, params = load_target(folder, jnp.dtype(dtype))
    return ChatTarget(
        name or target or folder.name,
        cfg,
        params,
        ChatFormat.from_tokenizer(tokenizer),
        TokenizerWords(tokenizer),
        read_architectures(open_checkpoint(folder).config),
    )


def read_architectures(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the architectures of a config.json, none if it has none."""
    found = config.get("architectures") or []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"architectures: expected a list of names, got {shown(found)}")
    return tuple(found)
