"""Text to token ids and back, by the checkpoint's own tokenizer and chat template."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.config import ConfigError, is_int, shown
from jaxspec.config.reading import MAX_INT32, check_unicode
from jaxspec.loading.chat import PLAIN_CHAT, ChatOptions, template_messages
from jaxspec.loading.checkpoint import read_json


@dataclass(frozen=True)
class Tokenizer:
    """A checkpoint's tokenizer.

    hf: transformers' tokenizer.
    eos_token_ids: every id that ends a text, ascending.
    path: the folder of its files.
    """

    hf: Any
    eos_token_ids: tuple[int, ...]
    path: Path

    def encode(self, text: str) -> list[int]:
        """Encode a plain prompt, with the tokenizer's own special tokens (such as a bos)."""
        return self._ids(text)

    def encode_word(self, text: str) -> list[int]:
        """Encode a piece of a text, without special tokens."""
        return self._ids(text, add_special_tokens=False)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions = PLAIN_CHAT
    ) -> list[int]:
        """Encode a chat, rendered by the chat template up to the start of the assistant's turn."""
        template = options.chat_template or self.hf.chat_template
        if not template:
            raise ConfigError(
                f"{self.path}: expected a chat template in the tokenizer's files, got none; "
                "give a plain prompt instead"
            )
        rendered = template_messages(messages)
        owner = "the request" if options.chat_template else self.path
        from jinja2 import TemplateError

        from jaxspec.loading.template_limits import TemplateLimitError, limited_template

        try:
            with limited_template(str(template)):
                text = self.hf.apply_chat_template(
                    rendered,
                    tokenize=False,
                    tools=list(options.tools) if options.tools else None,
                    chat_template=options.chat_template,
                    add_generation_prompt=options.add_generation_prompt,
                    continue_final_message=options.continue_final_message,
                    **(options.chat_template_kwargs or {}),
                )
        except TemplateLimitError as e:
            raise ConfigError(
                f"chat: expected a chat template in {owner} that ends soon with a text, got {e}"
            ) from e
        except Exception as e:  # the template is a program, which may fail in any way
            says = isinstance(e, TemplateError | TypeError)
            raise ConfigError(
                f"chat: expected messages that the chat template of {owner} accepts, "
                f"got {'' if says else type(e).__name__ + ': '}{e}"
            ) from e
        return self._ids(text, add_special_tokens=False)  # the template writes its own bos

    def _ids(self, text: str, **options: bool) -> list[int]:
        check_unicode(text, "text")
        return list(self.hf.encode(text, **options))

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return self.hf.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )


def has_tokenizer(folder: Path) -> bool:
    """Whether a checkpoint folder has a tokenizer.

    A link that leads nowhere, or a folder of that name, counts: loading then says what is wrong.
    """
    return any(
        os.path.lexists(folder / name)
        for name in ("tokenizer.json", "tokenizer.model", "vocab.json")
    )


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint folder; no code of the folder runs.

    ConfigError if its files are missing or damaged.
    """
    folder = Path(folder)
    # No "PyTorch was not found": it is not needed.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    if not has_tokenizer(folder):
        raise ConfigError(
            f"{folder}: expected a tokenizer (tokenizer.json, tokenizer.model or vocab.json), "
            "got none"
        )
    try:
        hf = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as e:  # tokenizers raises bare Exception for a damaged file
        what, *why = (str(e) or type(e).__name__).splitlines()
        reason = f"{what} {why[0].strip()}" if why and what.rstrip().endswith(":") else what
        raise ConfigError(
            f"{folder}: expected a tokenizer that transformers can read, got {reason}"
        ) from e
    return Tokenizer(hf, eos_token_ids(folder, hf.eos_token_id), folder)


def eos_token_ids(folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Return the ids that end a text, ascending.

    They are those of generation_config.json, else of config.json (an id or a list), and the
    tokenizer's own.
    """
    ids: set[int] = set() if tokenizer_eos is None else {tokenizer_eos}
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        if not all(is_int(i) and 0 <= i <= MAX_INT32 for i in values):
            raise ConfigError(
                f"{folder / name}: expected eos_token_id to be an id or a list of ids, "
                f"got {shown(value)}"
            )
        ids |= set(values)
        break
    return tuple(sorted(ids))
