"""A training state comes back bit for bit, or one sentence says what is wrong with it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import ConfigError
from jaxspec.layers.params import Weight
from jaxspec.training.config import TrainConfig
from jaxspec.training.loop import TrainState, init_train_state
from jaxspec.training.objective import TrainingPair
from tests.training.conftest import Pair, make_pair

pytest.importorskip("orbax.checkpoint")

from jaxspec.training.resume import CHECKSUMS, HEAD, restore_state, save_state

CFG = TrainConfig()


def training_pair(pair: Pair) -> TrainingPair:
    ids, scale = jnp.asarray(pair.draft_ids), jnp.linspace(0.1, 3.0, 96, dtype=jnp.float32)
    return TrainingPair(pair.draft_cfg, pair.target_cfg, pair.target, ids, scale)


PAIR = training_pair(make_pair(2))


def restore(folder: Path, like: TrainState, pair: TrainingPair = PAIR) -> TrainState:
    return restore_state(folder, like, pair)[0]


@pytest.fixture(scope="module")
def state() -> TrainState:
    pair = make_pair(2)
    return dataclasses.replace(init_train_state(CFG, pair.draft_cfg, pair.draft), step=jnp.int32(7))


@pytest.fixture(scope="module")
def saved(state: TrainState, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "state"
    for step in (4, 7):
        save_state(folder, dataclasses.replace(state, step=jnp.int32(step)), PAIR)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "state")


def test_the_newest_state_comes_back_to_the_bit(folder: Path, state: TrainState) -> None:
    jax.tree.map(np.testing.assert_array_equal, restore(folder, state), state)


def test_a_state_without_checksums_is_still_read(folder: Path, state: TrainState) -> None:
    """The checksums are written last, so a process that is killed can leave a state without."""
    (folder / "7" / CHECKSUMS).unlink()
    jax.tree.map(np.testing.assert_array_equal, restore(folder, state), state)


def test_a_state_whose_weights_have_no_container_is_read(tmp_path: Path, state: TrainState) -> None:
    """Arrays go by their names: a matrix may be bare, or in a Weight."""
    bare = jax.tree.map(
        lambda x: x.values if isinstance(x, Weight) else x,
        state,
        is_leaf=lambda x: isinstance(x, Weight),
    )
    assert jax.tree.structure(bare) != jax.tree.structure(state)
    save_state(tmp_path / "state", bare, PAIR)
    jax.tree.map(np.testing.assert_array_equal, restore(tmp_path / "state", state), state)


def test_one_flipped_bit_in_any_file_is_found(folder: Path, state: TrainState) -> None:
    files = sorted(p for p in (folder / "7").rglob("*") if p.is_file() and p.stat().st_size)
    assert len(files) > 5
    for path in files:
        content = path.read_bytes()
        damaged = bytearray(content)
        damaged[len(damaged) // 2] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="7.*: expected") as caught:
            restore(folder, state)
        assert "\n" not in str(caught.value)
        path.write_bytes(content)
    restore(folder, state)


def test_a_damaged_state_says_how_to_go_on(folder: Path, state: TrainState) -> None:
    (folder / "7" / "_CHECKPOINT_METADATA").write_bytes(b"{")
    with pytest.raises(ConfigError, match="delete this folder to go on from step 4"):
        restore(folder, state)
    shutil.rmtree(folder / "7")
    assert int(restore(folder, state).step) == 4


@pytest.mark.parametrize(
    ("name", "checksums"),
    [("default", True), ("default", False), ("default/manifest.ocdbt", True)],
)
def test_what_is_missing_is_one_sentence(
    folder: Path, state: TrainState, name: str, checksums: bool
) -> None:
    path = folder / "7" / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if not checksums:
        (folder / "7" / CHECKSUMS).unlink()
    with pytest.raises(ConfigError, match=f"{folder / '7'}: expected") as caught:
        restore(folder, state)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("cfg", "changes", "message"),
    [
        (CFG, {"draft_vocab_size": 44}, r"lm_head is float32 \[32, 40\], not float32 \[32, 44\]"),
        (
            CFG,
            {"intermediate_size": 48},
            r"down_proj is float32 \[40, 32\], not float32 \[48, 32\]",
        ),
        (CFG, {"fc_norm": True}, "fc_norm.* is absent"),
        (TrainConfig(optimizer="muon"), {}, "arrays differ"),
    ],
)
def test_another_head_or_optimiser_is_named(
    folder: Path, cfg: TrainConfig, changes: dict[str, object], message: str
) -> None:
    other: Pair = make_pair(2, **changes)
    with pytest.raises(ConfigError, match="of this head and optimiser, got another") as caught:
        restore(folder, init_train_state(cfg, other.draft_cfg, other.draft), training_pair(other))
    assert caught.match(message) and "\n" not in str(caught.value)


def test_the_size_of_the_features_is_that_of_the_run(folder: Path, state: TrainState) -> None:
    """Other chats have another, and fc is learned for features divided by it."""
    assert PAIR.feature_scale is not None
    other = dataclasses.replace(PAIR, feature_scale=2 * PAIR.feature_scale)
    _, pair = restore_state(folder, state, other)
    np.testing.assert_array_equal(pair.feature_scale, PAIR.feature_scale)


def test_the_vocabulary_of_other_chats_is_refused(folder: Path, state: TrainState) -> None:
    ids = np.array(PAIR.draft_ids)
    ids[7] = np.setdiff1d(np.arange(ids[6], ids[8] + 40), ids)[0]
    other = dataclasses.replace(PAIR, draft_ids=jnp.asarray(ids))
    with pytest.raises(ConfigError, match="these chats' draft vocabulary, got another") as caught:
        restore_state(folder, state, other)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aux_layers": (1, 3, 4)}, r"aux_layers is \[1, 2, 4\], not \[1, 3, 4\]"),
        ({"norm_output": True}, "norm_output is False, not True"),
    ],
)
def test_settings_that_no_shape_tells_are_refused(
    folder: Path, state: TrainState, changes: dict[str, object], message: str
) -> None:
    other = training_pair(make_pair(2, **changes))
    with pytest.raises(ConfigError, match=f"of this head, got another: {message}"):
        restore_state(folder, state, other)


@pytest.mark.parametrize(
    "damage",
    [
        lambda head: {},
        lambda head: {**head, "feature_scale": None},
        lambda head: {**head, "feature_scale": [1.0]},
        lambda head: {**head, "feature_scale": ["a"] * 96},
        lambda head: {**head, "draft": 3},
        None,
    ],
)
def test_a_state_without_its_head_is_one_sentence(
    folder: Path, state: TrainState, damage: Callable[[dict[str, object]], object] | None
) -> None:
    path = folder / "7" / HEAD
    if damage is None:
        path.unlink()
    else:
        path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    (folder / "7" / CHECKSUMS).unlink()
    with pytest.raises(
        ConfigError, match=f"{folder / '7'}: expected .*delete this folder to go on"
    ):
        restore_state(folder, state, PAIR)
