"""Seeded damage: to bytes, to JSON, to values of Python."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable
from random import Random
from typing import Any

NUMBERS = (0, 1, 2, 3, 7, 8, 31, 32, 255, 256, 2**16, 10**7, 2**31 - 1, 2**31, 2**32 - 1, 2**63)
# What a config, a request or a flag may hold in place of what it should.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 10**7, 2**31, 2**63, -(2**63), 10**400),
    *(0.5, -0.0, 1e-300, 1e308, float("nan"), float("inf"), -float("inf")),
    *("", "0", "1", "false", "none", "auto", "é\0", "\ud800", "x" * 5000, "two\nlines"),
    *([], [0], [[]], [None], ["a"], [1, 2, 3], list(range(300)), {}, {"a": 1}, {"rope_type": []}),
)
DEPTH = 20_000  # of brackets: more than any recursion limit
Path = tuple[str | int, ...]


def mutate_bytes(rng: Random, content: bytes, within: int | None = None) -> bytes:
    """Return damaged bytes; within: only among the first so many."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if content:
            content = rng.choice(BYTES)(rng, content, min(within or len(content), len(content)))
    return content


def _flip(rng: Random, content: bytes, within: int) -> bytes:
    at = rng.randrange(within)
    return content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]


def _overwrite(rng: Random, content: bytes, within: int) -> bytes:
    number = rng.choice(NUMBERS)
    raw = struct.pack("<Q", number)[: rng.choice((1, 2, 4, 8))]
    at = rng.randrange(within)
    return content[:at] + raw + content[at + len(raw) :]


def _truncate(rng: Random, content: bytes, within: int) -> bytes:
    return content[: rng.randrange(within)]


def _remove(rng: Random, content: bytes, within: int) -> bytes:
    at = rng.randrange(within)
    return content[:at] + content[at + rng.choice((1, 2, 4, 8, 100)) :]


def _insert(rng: Random, content: bytes, within: int) -> bytes:
    at = rng.randrange(within)
    return content[:at] + rng.randbytes(rng.choice((1, 2, 4, 8, 100))) + content[at:]


def _repeat(rng: Random, content: bytes, within: int) -> bytes:
    at, length = rng.randrange(within), rng.choice((1, 4, 8, 64))
    return content[: at + length] + content[at:]


BYTES: tuple[Callable[[Random, bytes, int], bytes], ...] = (
    *(_flip, _flip, _overwrite, _overwrite, _truncate, _remove, _insert, _repeat),
)


def mutate_json(rng: Random, text: str) -> bytes:
    """Return a damaged JSON file: mostly other values, at times other bytes."""
    kind = rng.random()
    if kind < 0.15:
        return mutate_bytes(rng, text.encode())
    value = json.loads(text)
    if kind < 0.2:
        return _nested(rng, value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = mutate_value(rng, value)
    return json.dumps(value).encode("utf-8", "surrogatepass")


def mutate_value(rng: Random, value: Any) -> Any:
    """Return a copy of nested containers in which one place is changed, removed or moved."""
    value = copy.deepcopy(value)
    paths = [path for path in places(value) if path]
    if not paths or rng.random() < 0.02:
        return rng.choice(VALUES)
    path: Any = rng.choice(paths)
    parent: Any = _at(value, path[:-1])
    action = rng.random()
    if action < 0.6:
        parent[path[-1]] = rng.choice(VALUES)
    elif action < 0.75:
        del parent[path[-1]]
    elif action < 0.85:  # another place's value
        parent[path[-1]] = copy.deepcopy(_at(value, rng.choice(paths)))
    elif isinstance(parent, list):
        parent.insert(path[-1], copy.deepcopy(parent[path[-1]]))
    elif action < 0.93 and isinstance(path[-1], str):
        parent[path[-1] + rng.choice(("", "s", " ", "_type"))] = parent.pop(path[-1])
    else:
        parent[rng.choice(("no_such_key", "", "quantization_config"))] = rng.choice(VALUES)
    return value


def places(value: Any, path: Path = ()) -> list[Path]:
    """Return the path of each place in nested containers; of long lists only some."""
    found = [path]
    if isinstance(value, dict):
        for key, item in value.items():
            found += places(item, (*path, key))
    elif isinstance(value, list):
        for i in list(range(len(value)))[:8]:
            found += places(value[i], (*path, i))
    return found


def _at(value: Any, path: Path) -> Any:
    for step in path:
        value = value[step]
    return value


def _nested(rng: Random, value: Any) -> bytes:
    mark = "no such text in the file"
    paths = [path for path in places(value) if path]
    if paths:
        path = rng.choice(paths)
        _at(value, path[:-1])[path[-1]] = mark
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}")))
    deep = opening * DEPTH + "1" + closing * DEPTH
    return json.dumps(value).replace(json.dumps(mark), deep).encode()
