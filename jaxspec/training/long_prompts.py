"""Long prompts, made of texts on this machine: documents, code, and passages to find one in.

A head must see the contexts that it will draft in. Manuals, source trees and package folders are
long texts that every machine has. A prompt is an excerpt and a task; the target writes the answer,
as it does for any prompt of a file (jaxspec/training/generation.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxspec.config import ConfigError
from jaxspec.config.settings import setting
from jaxspec.training.config import check_seed

CODE = {".py": "Python", ".c": "C", ".h": "C", ".js": "JavaScript", ".rs": "Rust", ".sh": "shell"}
PROSE = (".md", ".rst", ".txt")
MOST_BYTES = 1 << 20  # larger files are tables and generated code
LEAST_CHARACTERS = 1500
# Of the vocabularies in use, on English and on code.
CHARACTERS_PER_TOKEN = {"prose": 4.2, "code": 3.3}
JITTER = 0.15  # of a prompt's length

DOCUMENT_TASKS = (
    "Summarise this text in one paragraph.",
    "List the main points of this text.",
    "Explain this text to somebody who is new to the subject.",
    "What does this text say about {subject}?",
    "Write five questions about this text, each with its answer.",
    "Quote the three most important sentences of this text and say why they matter.",
    "Continue this text in the same style.",
    "Rewrite the last part of this text in simpler words.",
)
CODE_TASKS = (
    "Explain what this {language} code does.",
    "Explain `{name}` step by step.",
    "Write `{name}` again with comments.",
    "Repeat the code of `{name}` and rename its local variables.",
    "Write tests for `{name}`.",
    "Which errors can `{name}` raise or return, and when?",
    "List the functions of this file with a sentence about each.",
    "Continue this file.",
)
FACTS = (
    ("the access code of the {place} office", "{number}"),
    ("the phone number of the {place} warehouse", "{number}"),
    ("the budget of the {place} project", "{number} euros"),
    ("the number of visitors of the {place} museum", "{number}"),
)
PLACES = ("Lisbon", "Oslo", "Kyoto", "Lima", "Tunis", "Quebec", "Hanoi", "Tartu", "Porto", "Accra")


@dataclass(frozen=True)
class LongPromptConfig:
    """Settings of the long prompts.

    lengths: tokens of a prompt, about; each prompt has one of them
    """

    count: int = setting(4000, "Prompts to write.")
    lengths: tuple[int, ...] = setting(
        (800, 1200, 2000, 3000, 4500, 6500),
        "Tokens of a prompt, about, with commas between them; each prompt has one of these.",
    )
    seed: int = setting(0, "Seed of everything that is drawn.")

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.count < 1 or not self.lengths or min(self.lengths) < 100:
            raise ConfigError(
                "long prompts: expected a count from 1 and lengths from 100 tokens, "
                f"got {self.count} and {self.lengths}"
            )


@dataclass(frozen=True)
class Text:
    """A text of this machine. language: of code; None for prose."""

    content: str
    language: str | None

    @property
    def characters_per_token(self) -> float:
        return CHARACTERS_PER_TOKEN["code" if self.language else "prose"]


def read_texts(folders: Sequence[Path]) -> list[Text]:
    """Return the code and prose under some folders, in the order of their paths.

    Files that are short, very long, or not UTF-8 are left out. ConfigError if nothing is left.
    """
    found = []
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: expected a folder of texts, got none")
        for path in sorted(folder.rglob("*")):
            known = path.suffix in CODE or path.suffix in PROSE
            if not known or not path.is_file() or path.stat().st_size > MOST_BYTES:
                continue
            try:
                content = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if len(content) >= LEAST_CHARACTERS:
                found.append(Text(content, CODE.get(path.suffix)))
    if not found:
        raise ConfigError(
            f"{', '.join(map(str, folders))}: expected texts ({', '.join([*CODE, *PROSE])}) of at "
            f"least {LEAST_CHARACTERS} characters, got none"
        )
    return found


def long_prompts(cfg: LongPromptConfig, texts: Sequence[Text]) -> Iterator[str]:
    """Yield cfg.count prompts: documents, code and retrieval in turn, as far as the texts go."""
    rng = np.random.default_rng(cfg.seed)
    kinds = [[t for t in texts if not t.language], [t for t in texts if t.language]]
    makers = [
        make for make, of in ((_document, kinds[0]), (_code, kinds[1]), (_retrieval, texts)) if of
    ]
    sources = [of for of in (kinds[0], kinds[1], list(texts)) if of]
    for i in range(cfg.count):
        which = i % len(makers)
        length = int(rng.choice(cfg.lengths) * rng.uniform(1 - JITTER, 1 + JITTER))
        yield makers[which](rng, sources[which], length)


def _pick(rng: np.random.Generator, options: Sequence[str]) -> str:
    return options[int(rng.integers(len(options)))]


def _excerpt(rng: np.random.Generator, texts: Sequence[Text], tokens: int) -> Text:
    """Return about so many tokens from a line's beginning on, of several texts if one is short."""
    first = texts[int(rng.integers(len(texts)))]
    parts, left, text = [], tokens * first.characters_per_token, first
    while left > LEAST_CHARACTERS / 2 or not parts:
        room = max(len(text.content) - int(left), 0)
        begin = text.content.rfind("\n", 0, int(rng.integers(room + 1))) + 1
        parts.append(text.content[begin : begin + int(left)].strip("\n"))
        left -= len(parts[-1]) + 2
        text = texts[int(rng.integers(len(texts)))]
    return Text("\n\n".join(parts), first.language)


def _join(rng: np.random.Generator, task: str, body: str) -> str:
    """Return the task before or behind the text."""
    return f"{task}\n\n{body}" if rng.random() < 0.4 else f"{body}\n\n{task}"


def _document(rng: np.random.Generator, texts: Sequence[Text], tokens: int) -> str:
    excerpt = _excerpt(rng, texts, tokens)
    words = re.findall(r"\b[A-Za-z][a-z]{5,}\b", excerpt.content) or ["this"]
    return _join(rng, _pick(rng, DOCUMENT_TASKS).format(subject=_pick(rng, words)), excerpt.content)


def _code(rng: np.random.Generator, texts: Sequence[Text], tokens: int) -> str:
    excerpt = _excerpt(rng, texts, tokens)
    names = re.findall(r"\b(?:def|class|fn|function|struct) +(\w+)", excerpt.content) or ["main"]
    task = _pick(rng, CODE_TASKS).format(name=_pick(rng, names), language=excerpt.language)
    return _join(rng, task, f"```\n{excerpt.content}\n```")


def _retrieval(rng: np.random.Generator, texts: Sequence[Text], tokens: int) -> str:
    """Passages of several texts, and a question that one of them or a hidden fact answers."""
    passages = []
    while tokens > 0:
        size = int(rng.integers(120, 400))
        passages.append(_excerpt(rng, texts, size).content)
        tokens -= size
    place = _pick(rng, PLACES)
    what, value = FACTS[int(rng.integers(len(FACTS)))]
    what = what.format(place=place)
    which = int(rng.integers(len(passages)))
    if rng.random() < 0.5:
        number = value.format(number=int(rng.integers(10_000, 1_000_000)))
        passages[which] += f"\nNote: {what} is {number}."
        task = f"Answer from the passages above: what is {what}? Name the passage too."
    else:
        task = f"Repeat passage {which + 1} word for word."
    body = "\n\n".join(f"Passage {i + 1}:\n{text}" for i, text in enumerate(passages))
    return f"{body}\n\n{task}"
