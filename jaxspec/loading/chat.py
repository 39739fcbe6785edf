"""Chats as callers write them, and as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxspec.config import ConfigError, is_one_of, items_of, shown

# Arguments of transformers' apply_chat_template, and what it makes of them: no free variables of a
# template.
RESERVED = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "documents",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
)


@dataclass(frozen=True)
class ChatOptions:
    """How a chat becomes a prompt, in vLLM's words.

    chat_template: in place of the checkpoint's
    add_generation_prompt: ends the prompt with the start of the assistant's turn
    continue_final_message: leaves the last message open, so that the text continues it
    tools: descriptions of functions, for templates that list them
    chat_template_kwargs: further variables of the template, such as enable_thinking
    """

    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = field(default=None)

    def __post_init__(self) -> None:
        if not isinstance(self.chat_template, str | None):
            raise ConfigError(
                f"chat_template: expected a template's text, got {shown(self.chat_template)}"
            )
        for name in ("add_generation_prompt", "continue_final_message"):
            if not isinstance(getattr(self, name), bool):
                value = shown(getattr(self, name))
                raise ConfigError(f"{name}: expected true or false, got {value}")
        if self.add_generation_prompt and self.continue_final_message:
            raise ConfigError(
                "continue_final_message: expected false, or add_generation_prompt false, got both"
            )
        tools = self.tools
        if tools is not None and not (
            isinstance(tools, list | tuple) and all(isinstance(t, Mapping) for t in tools)
        ):
            raise ConfigError(f"tools: expected a list of objects, got {shown(tools)}")
        given = self.chat_template_kwargs
        if given is not None and not (
            isinstance(given, Mapping) and all(isinstance(name, str) for name in given)
        ):
            raise ConfigError(
                f"chat_template_kwargs: expected variables by name, got {shown(given)}"
            )
        if taken := sorted(set(given or ()) & set(RESERVED)):
            raise ConfigError(
                f"chat_template_kwargs: expected variables of the template, got {taken[0]}"
            )


PLAIN_CHAT = ChatOptions()
RETURNS_OBJECTS = ("tool", "ipython")  # roles whose content may be an object


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as templates read them: texts as content, arguments of calls as objects.

    ConfigError for anything but messages.
    """
    if not messages or not all(
        isinstance(m, Mapping)
        and isinstance(m.get("role"), str)
        and ("content" in m or "tool_calls" in m)
        for m in messages
    ):
        raise ConfigError(
            f"chat: expected a list of objects with 'role' and 'content', got {shown(messages)}"
        )
    return [
        {**message, "content": _text(message.get("content"), message["role"])}
        | (
            {}
            if message.get("tool_calls") is None
            else {"tool_calls": _calls(message["tool_calls"])}
        )
        for message in messages
    ]


def _text(content: object, role: str) -> object:
    """Return a message's text: of None an empty one, of parts their texts on a line each.

    A template gets an object that a tool returned as it is; Llama 3.1's writes JSON of it, for the
    role ipython too.
    ConfigError for any other value, which a template would print as Python does.
    """
    if content is None:
        return ""
    if isinstance(content, str) or (role in RETURNS_OBJECTS and isinstance(content, Mapping)):
        return content
    parts = items_of(content)
    if parts is None:
        raise ConfigError(
            f"chat: expected a text, or a list of parts of type 'text', as content, "
            f"got {shown(content)}"
        )
    texts = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        text = part.get("text") if isinstance(part, Mapping) else part
        if not is_one_of(kind, ["text"]) or not isinstance(text, str):
            raise ConfigError(
                "chat: expected text, or parts of type 'text' with their text, as content, "
                f"got {shown(part)}"
            )
        texts.append(text)
    return "\n".join(texts)


def _calls(calls: object) -> object:
    """Return an assistant's calls with arguments that are JSON texts as objects."""
    listed = items_of(calls)
    if listed is None:
        raise ConfigError(f"chat: expected tool_calls to be a list of objects, got {shown(calls)}")
    found = []
    for call in listed:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise ConfigError(f"chat: expected tool_calls with a 'function', got {shown(call)}")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments else {}
            except (ValueError, RecursionError) as e:
                raise ConfigError(
                    f"chat: expected arguments of tool_calls to be JSON, got {shown(arguments)}"
                ) from e
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found
