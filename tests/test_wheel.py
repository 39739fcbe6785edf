"""The wheel alone, in an empty folder: the README's snippet runs, and so does every command."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import jaxspec
from jaxspec.commands.program import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
PACKAGES = ("jaxspec", "pallas_kernels", "checkpoints")
MOST_BYTES = 40 << 20  # the heads are 34 MB of it
pytestmark = pytest.mark.once


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the declared backend from a copy, so that no build/ is left here."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        shutil.copy2(ROOT / name, source)
    for name in PACKAGES:
        skip = shutil.ignore_patterns("__pycache__", "*.png")
        shutil.copytree(ROOT / name, source / name, ignore=skip)
    pip(source, "wheel", "--no-build-isolation", "--wheel-dir", "dist", ".")
    [found] = (source / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel is installed into; its dependencies are this environment's."""
    folder = tmp_path_factory.mktemp("site")
    pip(folder, "install", "--target", str(folder), str(wheel))
    return folder


def pip(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run(
        [*command, *arguments, "--no-deps", "--no-index"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def run(installed: Path, folder: Path, *arguments: str) -> str:
    """What a program prints in an empty folder, with jaxspec from the wheel."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"PYTHONPATH": str(installed), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def snippet() -> str:
    """The README's first block of Python."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert found
    return found[1]


def test_the_wheel_holds_the_heads_and_what_type_checkers_need(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    heads = {path.parent.name for path in (ROOT / "checkpoints").glob("*/config.json")}
    assert heads
    for head in heads:
        for name in ("config.json", "model.safetensors", "README.md"):
            assert f"jaxspec/checkpoints/{head}/{name}" in names
    assert {"jaxspec/py.typed", "pallas_kernels/py.typed"} <= set(names)
    assert not [n for n in names if n.startswith(("tests/", "scripts/", "checkpoints/"))]
    assert wheel.stat().st_size < MOST_BYTES


def test_the_readmes_snippet_runs_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    where = "\nimport jaxspec\nprint(jaxspec.__file__, jaxspec.__version__)"
    lines = run(installed, tmp_path, "-c", snippet() + where).splitlines()
    text, place = "\n".join(lines[:-1]), lines[-1]
    assert place == f"{installed}/jaxspec/__init__.py {jaxspec.__version__}"
    assert "sky" in text and float(text.split()[-1]) > 1.5, text
    assert list(tmp_path.iterdir()) == []


def test_every_command_runs_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    """One process imports all sub-commands; each prints its help."""
    program = (
        "import sys\nfrom jaxspec.commands.program import main\n"
        "for name in sys.argv[1:] + ['']:\n"
        "    sys.argv = ['jaxspec', *([name] if name else []), '--help']\n"
        "    try:\n        main()\n    except SystemExit as e:\n        assert not e.code, name\n"
        "assert 'gguf' not in sys.modules\n"  # no GGUF file was read
    )
    text = run(installed, tmp_path, "-c", program, *COMMANDS)
    assert all(f"Usage: jaxspec {name} " in text for name in COMMANDS)
    assert "Usage: jaxspec [OPTIONS] COMMAND" in text
    script = installed / "bin" / "jaxspec"
    assert "from jaxspec.commands.program import main" in script.read_text()
