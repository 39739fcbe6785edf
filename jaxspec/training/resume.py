"""Masters, optimiser state and step on disk (orbax), to go on with a run that was killed.

A file beside orbax's describes the head that the arrays belong to. Its vocabulary and the size of
its features come from the chats, and arrays of other chats have the same shapes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxspec.config import ConfigError
from jaxspec.loading.cache import hash_stream
from jaxspec.loading.checkpoint import read_json
from jaxspec.loading.new_file import write_text
from jaxspec.training.loop import TrainState
from jaxspec.training.objective import TrainingPair

CHECKSUMS = "checksums.json"  # beside orbax's files, which have none
HEAD = "head.json"
Shapes = dict[str, tuple[tuple[int, ...], str]]  # name of an array -> its shape and dtype


def save_state(folder: Path, state: TrainState, pair: TrainingPair) -> None:
    """Write the whole state of a pair's head under folder/STEP; the last two are kept."""
    step = int(state.step)
    with ocp.CheckpointManager(
        folder.resolve(), options=ocp.CheckpointManagerOptions(max_to_keep=2)
    ) as manager:
        manager.save(step, args=ocp.args.StandardSave(state))
    saved = folder / str(step)
    write_text(saved / HEAD, json.dumps(_describe(pair), indent=1) + "\n")
    write_text(saved / CHECKSUMS, json.dumps(checksums(saved), indent=1) + "\n")


def restore_state(
    folder: Path, like: TrainState, pair: TrainingPair
) -> tuple[TrainState, TrainingPair]:
    """Return the newest state under folder, bit for bit, and the pair with its feature_scale.

    like: a fresh init_train_state of the same config, whose structure it has
    pair: the pair to train, which has the state's head and vocabulary

    ConfigError for a state that is damaged, or of another head, vocabulary or optimiser. Arrays go
    by their names, so that a state is read whose weights have other containers. One without
    checksums is read as it is.
    """
    steps = sorted(int(p.name) for p in folder.glob("*") if p.name.isdecimal() and p.is_dir())
    if not steps:
        raise ConfigError(
            f"{folder}: expected a training state saved by --keep-state to resume from, got none"
        )
    saved = folder / str(steps[-1])
    other = f"to go on from step {steps[-2]}" if len(steps) > 1 else "to begin anew"
    _check_files(saved, other)
    expected = _by_name(like)
    try:
        with ocp.CheckpointManager(
            folder.resolve(), item_handlers=ocp.StandardCheckpointHandler()
        ) as manager:
            metadata = manager.item_metadata(steps[-1])
            tree = getattr(metadata, "tree", metadata)
            _check_shapes(saved, _shapes(_by_name(tree)), _shapes(expected))
            template = jax.tree_util.tree_map_with_path(
                lambda path, _: _struct(expected[_name(path)]), tree
            )
            found = _by_name(manager.restore(steps[-1], args=ocp.args.StandardRestore(template)))
    except ConfigError:
        raise
    except Exception as e:  # orbax and tensorstore raise anything for damaged files
        raise _damaged(saved, f"{type(e).__name__}: {str(e).strip()}"[:200], other) from e
    state = jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in expected])
    if int(state.step) != steps[-1]:
        raise _damaged(saved, f"step {int(state.step)}", other)
    scale = _read_head(saved, pair, other)
    return state, dataclasses.replace(pair, feature_scale=scale)


def checksums(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file under a folder by its relative path."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != CHECKSUMS:
            with path.open("rb") as f:
                found[name] = hash_stream(f)
    return found


def _check_files(saved: Path, other: str) -> None:
    if not (saved / CHECKSUMS).is_file():
        return
    expected, found = read_json(saved / CHECKSUMS), checksums(saved)
    differing = sorted(
        name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
    )
    if differing:
        raise _damaged(saved, f"others ({len(differing)}: {differing[0]!r:.100})", other)


def _describe(pair: TrainingPair) -> dict[str, Any]:
    """Return the head of a pair as JSON has it."""
    described = {
        "draft": dataclasses.asdict(pair.draft),
        "draft_ids": np.asarray(pair.draft_ids).tolist(),
        "feature_scale": None
        if pair.feature_scale is None
        else np.asarray(pair.feature_scale).tolist(),
    }
    return json.loads(json.dumps(described, default=str))


def _read_head(saved: Path, pair: TrainingPair, other: str) -> jax.Array | None:
    """Return the feature_scale of a state's head; ConfigError if the pair has another head.

    Settings that only one of the two descriptions has are those of another version.
    """
    if not (saved / HEAD).is_file():
        raise ConfigError(
            f"{saved}: expected {HEAD}, which describes the head of the training state, got none; "
            f"delete this folder {other}, or go on from its head with --init"
        )
    found, expected = read_json(saved / HEAD), _describe(pair)
    draft, scale = found.get("draft"), found.get("feature_scale")
    if not isinstance(draft, dict):
        raise _damaged(saved, f"{HEAD} without the head's settings", other)
    for name in expected["draft"].keys() & draft.keys():
        if draft[name] != expected["draft"][name]:
            raise ConfigError(
                f"{saved}: expected the training state of this head, got another: {name} is "
                f"{draft[name]!r:.100}, not {expected['draft'][name]!r:.100}; give the flags and "
                "the chats of the run that it is from"
            )
    if found.get("draft_ids") != expected["draft_ids"]:
        raise ConfigError(
            f"{saved}: expected the training state of a head with these chats' draft vocabulary, "
            "got another vocabulary; give the chats of the run that it is from, or go on from its "
            "head with --init"
        )
    if scale is None or expected["feature_scale"] is None:
        if scale is not expected["feature_scale"]:
            raise _damaged(saved, f"{HEAD} with another kind of feature_scale", other)
        return None
    try:
        scale = jnp.asarray(scale, jnp.float32)
    except (TypeError, ValueError, OverflowError) as e:
        raise _damaged(saved, f"{HEAD} with a feature_scale that is no vector", other) from e
    if scale.shape != (len(expected["feature_scale"]),):
        raise _damaged(saved, f"{HEAD} with a feature_scale of {list(scale.shape)}", other)
    return scale


def _damaged(saved: Path, got: str, other: str) -> ConfigError:
    return ConfigError(
        f"{saved}: expected the files of the training state as they were saved, "
        f"got {' '.join(got.split())}; delete this folder {other}"
    )


def _check_shapes(saved: Path, found: Shapes, expected: Shapes) -> None:
    differing = [
        name
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]
    if differing:
        name = differing[0]
        wanted, got = (_named(shapes.get(name)) for shapes in (expected, found))
        raise ConfigError(
            f"{saved}: expected the training state of this head and optimiser, got another: "
            f"{name} is {got}, not {wanted} ({len(differing)} arrays differ); give the flags "
            "of the run that it is from, or go on from its head with --init if another version of "
            "jaxspec wrote it"
        )


def _named(shape: tuple[tuple[int, ...], str] | None) -> str:
    return "absent" if shape is None else f"{shape[1]} {list(shape[0])}"


def _by_name(tree: object) -> dict[str, jax.Array]:
    """Return the arrays of a state, or of orbax's metadata, by the same names."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {_name(path): x for path, x in leaves}


def _struct(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _name(path: jax.tree_util.KeyPath) -> str:
    """Return params/layers/0/down_proj: without the field of the container that a Weight is."""
    parts = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    return "/".join(part for part in parts if part != "values")


def _shapes(arrays: Mapping[str, jax.Array]) -> Shapes:
    return {name: (tuple(x.shape), str(x.dtype)) for name, x in arrays.items()}
