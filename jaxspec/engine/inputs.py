"""Prompts and bad words as callers write them, and their token ids."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence, Set
from typing import Any, Protocol

from jaxspec.config import ConfigError, as_python, items_of, printable, shown
from jaxspec.loading.chat import PLAIN_CHAT, ChatOptions

Message = Mapping[str, Any]  # "role", "content" (a text, text parts or None), "tool_calls", ...
# The mapping is vLLM's {"prompt": ...} or {"prompt_token_ids": ...}.
Prompt = str | Sequence[int] | Sequence[Message] | Mapping[str, Any]

PROMPT_KEYS = ("prompt", "prompt_token_ids")
MULTIMODAL_KEYS = ("mm_processor_kwargs", "multi_modal_data", "multi_modal_uuids")


class Encoder(Protocol):
    """The methods of a tokenizer that prompts and bad words need."""

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[Message], options: ChatOptions = ...) -> list[int]: ...

    def encode_word(self, text: str) -> list[int]: ...


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt, or several, as a list of prompts.

    A text, a list of ids and a list of messages are one prompt each. An array counts as its list.
    """
    prompts = as_python(prompts)
    # Bytes are no prompt, and no list of ids either.
    if isinstance(prompts, str | bytes | bytearray | memoryview | Mapping):
        return [prompts]  # type: ignore[list-item]
    items = None if isinstance(prompts, Set) else items_of(prompts)  # a set has no order
    if items is None:
        raise ConfigError(f"prompts: expected texts, token ids or chats, got {shown(prompts)}")
    first = items[0] if items else None
    if isinstance(first, numbers.Integral) or (isinstance(first, Mapping) and "role" in first):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def as_chats(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Prompt]:
    """Return one chat, or several, as a list of chats.

    ConfigError for a text or token ids: no chat template would apply to them.
    """
    chats = as_list(messages)
    for index, chat in enumerate(chats):
        if not isinstance(chat, list | tuple) or not all(
            isinstance(message, Mapping) for message in chat
        ):
            raise ConfigError(
                f"prompt {index}: expected a list of chat messages with 'role' and 'content', "
                f"got {shown(chat)}"
            )
    return chats


def encode(
    index: int,
    prompt: Prompt,
    tokenizer: Encoder | None,
    chat: ChatOptions = PLAIN_CHAT,
) -> list[int]:
    """Return the token ids of the index-th prompt.

    chat: how a chat is rendered. ConfigError, with the index, if it is no prompt.
    """
    if isinstance(prompt, Mapping):
        unknown = sorted(
            printable(k) if isinstance(k, str) else shown(k)
            for k in prompt
            if k not in PROMPT_KEYS and not _says_nothing(k, prompt[k])
        )
        if unknown and any(k in prompt for k in PROMPT_KEYS):
            raise ConfigError(
                f"prompt {index}: expected the keys {' or '.join(PROMPT_KEYS)} alone, "
                f"got {', '.join(unknown)} too"
            )
        ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
        prompt = ids if ids is not None else text if text is not None else prompt
    prompt = as_python(prompt)
    found = None if isinstance(prompt, Set) else items_of(prompt)
    listed, items = found is not None, found or []
    if set(map(type, items)) == {int}:  # most often, and a prompt may have many
        return items
    if items and all(isinstance(t, numbers.Integral) and not isinstance(t, bool) for t in items):
        return [int(t) for t in items]
    is_chat = bool(items) and all(isinstance(m, Mapping) for m in items)
    if not is_chat and not isinstance(prompt, str):
        if listed and not items:
            return []
        raise ConfigError(
            f"prompt {index}: expected a text, token ids or a list of chat messages, "
            f"got {shown(prompt)}"
        )
    if tokenizer is None:
        raise ConfigError(
            f"prompt {index}: expected token ids (the target comes without a tokenizer), got text"
        )
    try:
        return tokenizer.encode_chat(items, chat) if is_chat else tokenizer.encode(str(prompt))
    except ConfigError as e:
        raise ConfigError(f"prompt {index}: {e}") from e


def _says_nothing(key: object, value: object) -> bool:
    """Return whether a further key of a prompt of vLLM's has no value, nothing in it, or a kind
    of prompt that the keys show anyway."""
    if value is None:
        return True
    if key == "type":
        return isinstance(value, str) and value in ("text", "token")
    return key in MULTIMODAL_KEYS and isinstance(value, Mapping) and not value


def encode_words(words: Sequence[str], tokenizer: Encoder | None) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of bad_words, as vLLM has them.

    A word has those that it has at the beginning of a text. It also has those after a blank where
    they are as many and begin with another token.
    """
    if words and tokenizer is None:
        raise ConfigError(
            "bad_words: expected a target with a tokenizer (or bad_words_token_ids), got none"
        )
    found: list[tuple[int, ...]] = []
    for word in words:
        assert tokenizer is not None
        first, after_blank = (
            tuple(tokenizer.encode_word(blank + word.lstrip())) for blank in ("", " ")
        )
        if not first:
            raise ConfigError(f"bad_words: expected words of at least one token, got {word!r}")
        found.append(first)
        if len(after_blank) == len(first) and after_blank[0] != first[0]:
            found.append(after_blank)
    return tuple(found)
