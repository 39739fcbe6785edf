"""Programs on disk: they come back, damaged files are compiled anew, and writing waits its turn."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable

from jaxspec.loading import executables, program_names
from jaxspec.loading.executables import Store

X = np.ones(3, np.float32)


def compiled(factor: int = 2) -> Any:
    jitted = jax.jit(lambda x: x * jnp.float32(factor))
    program, is_fresh = executables.compile_fresh(lambda: jitted.lower(X).compile())
    assert is_fresh
    return program


def test_a_program_comes_back(tmp_path: Path) -> None:
    store, path = Store(), tmp_path / "new" / "program"
    store.write(path, compiled())
    assert [p.name for p in path.parent.iterdir()] == ["program"]
    np.testing.assert_array_equal(store.read(path, jax.devices()[:1])(X), 2 * X)


def test_a_missing_file_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "none", tmp_path / "file" / "none"):
        assert Store().read(path, jax.devices()[:1]) is None
    assert not caplog.records


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only source that is looked at."""
    path = tmp_path / "source.py"
    path.write_text("a")
    monkeypatch.setattr(program_names, "FILES", {str(path): program_names._written(str(path))})
    return path


def test_nothing_is_written_once_a_source_has_changed(tmp_path: Path, source: Path) -> None:
    """A module that is imported now is not the one that the name knows."""
    store = Store()
    store.write(tmp_path / "program", compiled())
    assert (tmp_path / "program").exists()
    source.write_text("another")
    store.write(tmp_path / "later", compiled())
    assert not (tmp_path / "later").exists() and not store.can_write


def test_a_warm_up_looks_at_the_sources_once_and_names_nothing_if_one_has_changed(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, store = [], Store()
    monkeypatch.setattr(executables, "STORE", store)
    look = program_names.have_sources_changed
    monkeypatch.setattr(
        program_names, "have_sources_changed", lambda: looks.append(1) is None and look()
    )
    with executables.written_at_once():
        for name in ("first", "second"):
            store.add(tmp_path / name, compiled())
        assert not looks and not (tmp_path / "first").exists()  # a killed warm-up leaves nothing
    assert len(looks) == 1 and (tmp_path / "first").exists() and store.can_write
    with executables.written_at_once():
        store.add(tmp_path / "third", compiled())
        source.write_text("another")
        store.add(tmp_path / "fourth", compiled())
    assert sorted(os.listdir(tmp_path)) == ["first", "second", "source.py"]
    assert not store.can_write


@pytest.mark.parametrize("changes", [True, False])
def test_a_write_that_ends_after_the_warm_up_looks_at_the_sources_itself(
    changes: bool, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted warm-up does not wait for its threads."""
    store, serialize = Store(), serialize_executable.serialize

    def serialize_late(compiled: Any) -> Any:
        found = serialize(compiled)
        store.at_once = 0
        store.name_all()
        if changes:
            source.write_text("another")
        return found

    monkeypatch.setattr(serialize_executable, "serialize", serialize_late)
    store.at_once = 1
    store.add(tmp_path / "program", compiled())
    assert sorted(os.listdir(tmp_path)) == [*([] if changes else ["program"]), "source.py"]


def test_reading_keeps_a_file_from_being_the_oldest(tmp_path: Path) -> None:
    path, store = tmp_path / "program", Store()
    store.write(path, compiled())
    os.utime(path, ns=(0, 0))
    assert store.read(path, jax.devices()[:1]) is not None
    assert path.stat().st_mtime > time.time() - 60


def test_a_file_of_another_user_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, store = tmp_path / "program", Store()
    store.write(path, compiled())
    os.chown(path, 12345, -1) if os.getuid() == 0 else monkeypatch.setattr(os, "getuid", lambda: -1)
    assert store.read(path, jax.devices()[:1]) is None
    assert "a file of another user" in caplog.text


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: content[:-200] + bytes([content[-200] ^ 1]) + content[-199:],
        lambda content: bytes([content[0] ^ 1]) + content[1:],
    ],
)
def test_a_damaged_file_is_not_used(
    damage: Callable[[bytes], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, path = Store(), tmp_path / "program"
    store.write(path, compiled())
    path.write_bytes(damage(path.read_bytes()))
    assert store.read(path, jax.devices()[:1]) is None
    assert "it is compiled anew" in caplog.text


def test_a_file_of_another_format_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import hashlib
    import pickle

    content, path = pickle.dumps(("not a program", None, None)), tmp_path / "program"
    path.write_bytes(hashlib.sha256(content).digest() + content)
    assert Store().read(path, jax.devices()[:1]) is None
    assert "it is compiled anew" in caplog.text


def test_a_folder_that_cannot_be_written_keeps_nothing_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = Store()
    store.folder = tmp_path / "file"
    store.at_once = True
    for name in ("program", "another"):
        store.add(store.folder / name, compiled())
    assert caplog.text.count("are not kept") == 1
    assert store.is_used, "rounds that run would be compiled by jit"


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_programs_are_written_when_none_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executables, "QUIET", 0.05)
    store = Store()
    store.last_call = time.monotonic() + 1000  # as if one were called again and again
    store.add(tmp_path / "program", compiled())
    time.sleep(0.3)
    assert not [*tmp_path.iterdir()]
    store.last_call = 0.0
    wait_for(tmp_path / "program")
    store.add(tmp_path / "another", compiled(3))  # the thread may have ended
    wait_for(tmp_path / "another")


def test_a_process_that_is_never_quiet_writes_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executables, "QUIET", 0.05)
    monkeypatch.setattr(executables, "LATEST", 0.5)
    store, began = Store(), time.monotonic()
    store.last_call = began + 1000
    store.add(tmp_path / "program", compiled())
    wait_for(tmp_path / "program")
    assert time.monotonic() > began + 0.5


def test_in_a_warm_up_programs_are_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executables, "STORE", Store())
    store = executables.STORE
    store.last_call = time.monotonic() + 1000
    store.add(tmp_path / "earlier", compiled())
    with executables.written_at_once():
        assert os.listdir(tmp_path) == ["earlier"]
        store.add(tmp_path / "new", compiled())
    assert sorted(os.listdir(tmp_path)) == ["earlier", "new"]
    with executables.written_at_once():
        with executables.written_at_once():
            pass
        store.add(tmp_path / "beside", compiled())
    assert (tmp_path / "beside").exists()
    store.add(tmp_path / "later", compiled())
    assert not (tmp_path / "later").exists()
    store.write_waiting()
