"""Ways to give a prompt to the target: its chat template, others that fit its vocabulary, none."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from jaxspec.config import ConfigError
from jaxspec.loading.tokenizer import Tokenizer, has_tokenizer, load_tokenizer

TEMPLATE, THINKING = "chat template", "thinking switch"
_TURN = "{% for m in messages %}"
_END = "{% endfor %}"
# Chat templates by name, with a marker that is one token of the vocabularies they belong to.
KNOWN = {
    "ChatML": (
        "<|im_start|>",
        _TURN + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n" + _END
        + "<|im_start|>assistant\n",
    ),
    "Llama 3": (
        "<|start_header_id|>",
        "<|begin_of_text|>"
        + _TURN
        + "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
        + _END
        + "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "Gemma": (
        "<start_of_turn>",
        "<bos>" + _TURN + "<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n" + _END
        + "<start_of_turn>model\n",
    ),
    "Mistral": ("[INST]", "<s>" + _TURN + "[INST] {{ m.content }}[/INST]" + _END),
}  # fmt: skip
# Switches of templates that turn a model's thinking on or off.
THINKING_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True)
class PromptFormat:
    """One way to give a prompt.

    kind:      what it changes: TEMPLATE or THINKING
    name:      for the table
    remedy:    what to set for it
    tokenizer: with this format's template; without one, texts are given raw
    """

    kind: str
    name: str
    remedy: str
    tokenizer: Tokenizer

    def encode(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt in this format."""
        if not self.tokenizer.hf.chat_template:
            return self.tokenizer.encode(prompt)
        return self.tokenizer.encode_chat([{"role": "user", "content": prompt}])


def present_format(tokenizer: Tokenizer) -> PromptFormat:
    """Return the format of LLM.chat, or raw text where the target has no chat template."""
    if tokenizer.hf.chat_template:
        return PromptFormat(TEMPLATE, "the target's own", "keep LLM.chat", tokenizer)
    return PromptFormat(TEMPLATE, "none (raw text)", "keep raw prompts", tokenizer)


def other_formats(tokenizer: Tokenizer, folders: Mapping[str, Path]) -> Iterator[PromptFormat]:
    """Yield the formats to compare with the present one.

    folders: by name, those whose tokenizer may have the template that the head was trained with.
    """
    own = tokenizer.hf.chat_template
    if own:
        yield PromptFormat(
            TEMPLATE,
            "none (raw text)",
            "give raw prompts (LLM.generate) instead of chats",
            _with_template(tokenizer, None),
        )
    for name, folder in folders.items():
        theirs = _template_of(folder)
        if theirs and theirs != own:
            yield PromptFormat(
                TEMPLATE,
                f"{name}'s",
                f"copy chat_template from {folder} to the target's tokenizer_config.json",
                _with_template(tokenizer, theirs),
            )
    vocabulary = tokenizer.hf.get_vocab()
    for name, (marker, template) in KNOWN.items():
        if marker in vocabulary and template != own:
            yield PromptFormat(
                TEMPLATE,
                name,
                f"write {name}'s chat_template into the target's tokenizer_config.json",
                _with_template(tokenizer, template),
            )
    for switch in THINKING_SWITCHES:
        if own and switch in own:
            for value in ("true", "false"):
                yield PromptFormat(
                    THINKING,
                    f"{switch} {value}",
                    f"pass chat_template_kwargs={{'{switch}': {value == 'true'}}} to LLM.chat",
                    _with_template(tokenizer, f"{{% set {switch} = {value} %}}{own}"),
                )


def _template_of(folder: Path) -> str | None:
    """Return a folder's chat template; None without a tokenizer that can be read."""
    try:
        return load_tokenizer(folder).hf.chat_template if has_tokenizer(folder) else None
    except ConfigError:
        return None


def _with_template(tokenizer: Tokenizer, template: str | None) -> Tokenizer:
    hf = copy.copy(tokenizer.hf)
    hf.chat_template = template
    return replace(tokenizer, hf=hf)
