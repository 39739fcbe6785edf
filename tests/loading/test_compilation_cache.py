"""The folder of compiled programs stays within its limit, and is written without reading it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest

from jaxspec import LLM, ConfigError
from jaxspec.commands.train import app as train
from jaxspec.loading import cache, compilation_cache, executables, keep_compiled_programs
from pallas_kernels import lowered_once

PROGRAM = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from jaxspec.loading import compilation_cache, keep_compiled_programs
from pallas_kernels import lowered_once
compilation_cache.use(Path(sys.argv[1]))
@jax.jit
def triple(x):
    return 3 * x

print(triple(jnp.arange(4)).sum())
"""


def test_the_files_written_longest_ago_make_room(tmp_path: Path) -> None:
    for age, name in enumerate("dacb"):  # the first is the newest
        (tmp_path / name).write_bytes(bytes(10))
        os.utime(tmp_path / name, ns=(0, 1_000 - age))
    compilation_cache.trim(tmp_path, 40)
    assert len(list(tmp_path.iterdir())) == 4
    compilation_cache.trim(tmp_path, 29)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "d"]
    compilation_cache.trim(tmp_path / "not there yet", 0)


def test_a_file_that_another_process_removes_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").write_bytes(bytes(10))
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self / "gone", self / "kept"]))
    compilation_cache.trim(tmp_path, 10)
    assert (tmp_path / "kept").exists()


def test_an_incomplete_entry_of_a_killed_process_stops_no_other_from_being_written(
    tmp_path: Path,
) -> None:
    """As JAX before 0.11 did where its own limit was set."""
    (tmp_path / "jit_killed-0123-cache").write_bytes(b"half")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "18" and "cache" not in run.stderr
    assert [p for p in tmp_path.iterdir() if p.name.startswith("jit_triple-")]


@pytest.fixture
def chosen() -> Iterator[str]:
    """The folder that the tests have chosen, which comes back after a test that changes it."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    yield before["jax_compilation_cache_dir"]
    for name, value in before.items():
        jax.config.update(name, value)


def load_missing_model() -> None:
    with pytest.raises(ConfigError, match="no such model"):
        LLM.from_pretrained("./no such model")


def train_for_missing_model() -> None:
    with pytest.raises(SystemExit):
        train(["train", "--target", "./no such model", "--output", "head"])


@pytest.mark.parametrize("start", [load_missing_model, train_for_missing_model])
def test_programs_are_kept_where_the_user_says(
    start: Callable[[], None], chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))

    def folder() -> str:
        start()
        return jax.config.values["jax_compilation_cache_dir"]

    def kernels() -> Path | None:
        return lowered_once._EXPORTS.folder

    monkeypatch.setattr(lowered_once, "_EXPORTS", lowered_once.Exports())
    monkeypatch.setattr(executables, "STORE", executables.Store())
    assert folder() == chosen
    assert kernels() == Path(chosen) / "jaxspec-kernels"
    assert executables.STORE.folder == Path(chosen) / "jaxspec-executables"
    jax.config.update("jax_compilation_cache_dir", None)
    for _ in range(2):  # what the first call chose is not the user's choice
        assert folder() == str(tmp_path / "compiled")
        assert kernels() == tmp_path / "kernels"
        assert executables.STORE.folder == tmp_path / "executables"


@pytest.mark.parametrize("place", ["", "gs://bucket/programs"])
def test_kernels_are_kept_in_folders_alone(
    place: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowered_once, "_EXPORTS", lowered_once.Exports())
    monkeypatch.setattr(executables, "STORE", executables.Store())
    jax.config.update("jax_compilation_cache_dir", chosen)
    keep_compiled_programs()
    assert lowered_once._EXPORTS.folder is not None
    assert executables.STORE.is_used
    jax.config.update("jax_compilation_cache_dir", place)
    keep_compiled_programs()
    assert lowered_once._EXPORTS.folder is None
    assert not executables.STORE.is_used


def test_without_jax_s_cache_nothing_is_kept(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowered_once, "_EXPORTS", lowered_once.Exports())
    monkeypatch.setattr(executables, "STORE", executables.Store())
    jax.config.update("jax_compilation_cache_dir", chosen)
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        keep_compiled_programs()
        assert lowered_once._EXPORTS.folder is None and not executables.STORE.is_used
    finally:
        jax.config.update("jax_enable_compilation_cache", True)


def test_each_start_trims_what_is_kept(
    chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowered_once, "_EXPORTS", lowered_once.Exports())
    monkeypatch.setattr(executables, "STORE", executables.Store())
    monkeypatch.setattr(cache, "MOST_EXECUTABLE_BYTES", 15)
    folder = tmp_path / "jaxspec-executables"
    folder.mkdir()
    for i, name in enumerate(("old", "new")):
        (folder / name).write_bytes(bytes(10))
        os.utime(folder / name, (i, i))
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    keep_compiled_programs()
    assert os.listdir(folder) == ["new"]


def test_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "program").write_bytes(b"x")
    compilation_cache.trim(tmp_path, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
