"""Prompts for the scripts: the demo's, and data sets in MT-bench's form."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxspec.config import ConfigError
from jaxspec.config.reading import check_unicode
from jaxspec.loading.resolve import as_path, split_revision

DEMO: tuple[str, ...] = (
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Explain in simple words why the sky is blue.",
    "List five tips for learning a new language.",
    "Write a Python function that checks whether a word is a palindrome, and explain how it works.",
    "Summarise the plot of Romeo and Juliet in one paragraph.",
)
# The first of these keys that a row has holds its prompt (MT-bench and its copies); of several
# turns the first is taken.
KEYS = ("turns", "prompt", "question")


def read_prompts(dataset: str, flag: str = "--dataset") -> list[str]:
    """Return the prompts of a JSON Lines file, or of a data set on the hub.

    dataset: a path, or the hub's id, e.g. philschmid/mt-bench
    flag:    the option that names it, for messages
    """
    path = as_path(dataset, flag, "a .jsonl file or the id of a data set on the hub")
    if path.is_file():
        return read_jsonl(path)
    if (
        path.exists()
        or path.suffix in (".jsonl", ".json")
        or dataset.count("/") != 1
        or not all(dataset.split("/"))
    ):
        got = "something else than a file" if path.exists() else "no such file"
        raise ConfigError(
            f"{flag} {dataset}: expected a .jsonl file or the id of a data set on the hub, "
            f"got {got}"
        )
    return _read_hub(dataset, flag)


def dataset_name(dataset: str) -> str:
    """Return what a data set is called in records: its file's name, or its id on the hub."""
    path = Path(dataset).expanduser()
    return path.name if path.is_file() else dataset


def read_jsonl(path: Path) -> list[str]:
    """Read one prompt a line and skip blank lines; ConfigError names a malformed line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as e:
        raise ConfigError(f"{path}: expected a JSON Lines file, got {e.strerror or e}") from e
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise ConfigError(f"{path}, line {number}: expected valid JSON, got {e}") from e
        prompts.append(_prompt(row, f"{path}, line {number}"))
    return _at_least_one(prompts, str(path))


def check_prompts(prompts: Iterable[str]) -> list[str]:
    """Return prompts from the command line; ConfigError for an empty one."""
    return [_text(prompt, f"--prompt {i}") for i, prompt in enumerate(prompts)]


def _prompt(row: Any, where: str) -> str:
    key = next((k for k in KEYS if k in row), None) if isinstance(row, Mapping) else None
    if key is None:
        got = f"the keys {sorted(row)}" if isinstance(row, Mapping) else f"a {type(row).__name__}"
        raise ConfigError(f"{where}: expected an object with one of {', '.join(KEYS)}, got {got}")
    value = row[key][0] if isinstance(row[key], list) and row[key] else row[key]
    return _text(value, f"{where}, {key}")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        got = (
            "an empty one" if isinstance(value, str) or value == [] else f"a {type(value).__name__}"
        )
        raise ConfigError(f"{where}: expected a prompt, got {got}")
    check_unicode(value, where)
    return value


def _at_least_one(prompts: list[str], where: str) -> list[str]:
    if not prompts:
        raise ConfigError(f"{where}: expected at least one prompt, got none")
    return prompts


def _read_hub(name: str, flag: str) -> list[str]:
    """Read a repository's only .jsonl file.

    Other layouts are read by the datasets package, where it is installed.
    """
    import huggingface_hub

    try:
        repository, revision = split_revision(name)
        files = huggingface_hub.list_repo_files(repository, repo_type="dataset", revision=revision)
        tables = [f for f in files if f.endswith(".jsonl")]
        if len(tables) == 1:
            return read_jsonl(
                Path(
                    huggingface_hub.hf_hub_download(
                        repository, tables[0], repo_type="dataset", revision=revision
                    )
                )
            )
        if importlib.util.find_spec("datasets"):
            import datasets

            splits = datasets.load_dataset(repository, revision=revision)
            rows = splits[next(iter(splits))]
            return _at_least_one(
                [_prompt(row, f"{name}, row {i}") for i, row in enumerate(rows)], name
            )
    except ConfigError:
        raise
    except Exception as e:  # no network, no such repository, a gated one, an unknown layout
        reason = next((line for line in str(e).splitlines() if line.strip()), type(e).__name__)
        raise ConfigError(
            f"{flag} {name}: expected a .jsonl file, or a data set on a hub that can be "
            f"reached, got {reason}"
        ) from e
    raise ConfigError(
        f"{flag} {name}: expected one .jsonl file in it (or the datasets package installed), "
        f"got {sorted(files)[:8]}"
    )
