"""Safetensors files, one or shards with an index, written one shard at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxspec.loading.checkpoint import INDEX, SINGLE

SHARD_BYTES = 2 * 1024**3


def write_shards(folder: Path, tensors: Iterator[tuple[str, np.ndarray]]) -> None:
    """Write shards of at most SHARD_BYTES, or one file: memory holds one shard, not the model."""
    shards: list[list[str]] = []
    pending: dict[str, np.ndarray] = {}

    def flush() -> None:
        save_file(pending, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, array in tensors:
        if pending and sum(a.nbytes for a in pending.values()) + array.nbytes > SHARD_BYTES:
            flush()
        pending[name] = np.ascontiguousarray(array)
    flush()
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = SINGLE if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{i}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {}, "weight_map": weight_map})


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object as a checkpoint's JSON files have it."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    # Half a character, which a source's JSON may escape, has no UTF-8: it stays escaped.
    path.write_bytes(text.encode("utf-8", "backslashreplace"))
