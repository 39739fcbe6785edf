"""A training state comes back bit for bit, or one sentence says what is wrong with it."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import ConfigError
from jaxspec.layers.params import Weight
from jaxspec.training.config import TrainConfig
from jaxspec.training.loop import TrainState, init_train_state
from tests.training.conftest import Pair, make_pair

pytest.importorskip("orbax.checkpoint")

from jaxspec.training.resume import CHECKSUMS, restore_state, save_state

CFG = TrainConfig()


@pytest.fixture(scope="module")
def state() -> TrainState:
    pair = make_pair(2)
    return init_train_state(CFG, pair.draft_cfg, pair.draft).replace(step=jnp.int32(7))


@pytest.fixture(scope="module")
def saved(state: TrainState, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "state"
    for step in (4, 7):
        save_state(folder, state.replace(step=jnp.int32(step)))
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "state")


def test_the_newest_state_comes_back_to_the_bit(folder: Path, state: TrainState) -> None:
    jax.tree.map(np.testing.assert_array_equal, restore_state(folder, state), state)


def test_a_state_without_checksums_is_still_read(folder: Path, state: TrainState) -> None:
    """The checksums are written last, so a process that is killed can leave a state without."""
    (folder / "7" / CHECKSUMS).unlink()
    jax.tree.map(np.testing.assert_array_equal, restore_state(folder, state), state)


def test_a_state_whose_weights_have_no_container_is_read(tmp_path: Path, state: TrainState) -> None:
    """Arrays go by their names: a matrix may be bare, or in a Weight."""
    bare = jax.tree.map(
        lambda x: x.values if isinstance(x, Weight) else x,
        state,
        is_leaf=lambda x: isinstance(x, Weight),
    )
    assert jax.tree.structure(bare) != jax.tree.structure(state)
    save_state(tmp_path / "state", bare)
    jax.tree.map(np.testing.assert_array_equal, restore_state(tmp_path / "state", state), state)


def test_one_flipped_bit_in_any_file_is_found(folder: Path, state: TrainState) -> None:
    files = sorted(p for p in (folder / "7").rglob("*") if p.is_file() and p.stat().st_size)
    assert len(files) > 5
    for path in files:
        content = path.read_bytes()
        damaged = bytearray(content)
        damaged[len(damaged) // 2] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="7.*: expected") as caught:
            restore_state(folder, state)
        assert "\n" not in str(caught.value)
        path.write_bytes(content)
    restore_state(folder, state)


def test_a_damaged_state_says_how_to_go_on(folder: Path, state: TrainState) -> None:
    (folder / "7" / "_CHECKPOINT_METADATA").write_bytes(b"{")
    with pytest.raises(ConfigError, match="delete this folder to go on from step 4"):
        restore_state(folder, state)
    shutil.rmtree(folder / "7")
    assert int(restore_state(folder, state).step) == 4


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
        restore_state(folder, state)
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
        restore_state(folder, init_train_state(cfg, other.draft_cfg, other.draft))
    assert caught.match(message) and "\n" not in str(caught.value)
