"""Imports go one way, down the rooms of docs/architecture.md; kernels are a leaf that few rooms
call."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jaxspec", "pallas_kernels", "scripts", "tests")

# The rooms of jaxspec, from the top down. A room imports from itself and from the rooms below it.
# jaxspec/__init__.py only gathers names.
ROOMS = (
    "commands",
    "doctor",
    "training",
    "tools",
    "llm",
    "engine",
    "decode",
    "loading",
    "drafts",
    "models",
    "layers",
    "cache",
    "sampling",
    "config",
    "parallel",
)
KERNEL_CALLERS = ("decode", "layers", "cache", "sampling")  # the rooms that call kernels
# Beside the kernels: static descriptions, and what makes and keeps traces and lowered kernels. Any
# room may name them.
BESIDE_KERNELS = (
    "pallas_kernels.vocab_shards",
    "pallas_kernels.lowered_once",
    "pallas_kernels.lowering_workers",
    "pallas_kernels.traced_once",
)
KERNEL_IMPORTS = {"jax", "numpy", "pallas_kernels", *sys.stdlib_module_names}
MOST_FILES_BESIDE_ROOMS = 4


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file, for every Python file of the four source folders."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of everything ``name`` imports, inside functions and type-checking blocks
    too."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:  # `from jaxspec import config` imports jaxspec.config
                submodule = f"{source}.{alias.name}"
                yield (submodule if submodule in known else source), node.lineno


def room(name: str) -> str:
    """The room of a module of jaxspec: a folder, or a file beside the folders. "jaxspec" for the
    package itself."""
    _, _, inner = name.partition(".")
    return inner.split(".")[0] or name


def is_above(target: str, name: str) -> bool:
    return target == "jaxspec" or ROOMS.index(room(target)) < ROOMS.index(room(name))


def violations(root: Path) -> list[str]:
    """One sentence for each import that goes the wrong way."""
    known = modules(root)
    found = []
    for name, path in known.items():
        top = name.split(".")[0]
        if top == "jaxspec" and name != "jaxspec" and room(name) not in ROOMS:
            found.append(
                f"{name}: expected a module inside one of the rooms {', '.join(ROOMS)}, got "
                f"{room(name)}"
            )
            continue
        for target, line in imports(name, path, known):
            where = f"{path.relative_to(root)}:{line}: {name} imports {target}"
            target_top = target.split(".")[0]
            if target_top in ("scripts", "tests") and top not in (target_top, "tests"):
                found.append(f"{where}: nothing below imports {target_top}")
            elif top == "pallas_kernels" and target_top not in KERNEL_IMPORTS:
                found.append(f"{where}: pallas_kernels is a leaf and imports jax and numpy only")
            elif (
                top == "jaxspec"
                and target_top == "pallas_kernels"
                and target not in BESIDE_KERNELS
                and name.split(".")[1] not in KERNEL_CALLERS
            ):
                found.append(f"{where}: only the rooms {', '.join(KERNEL_CALLERS)} call kernels")
            elif top == target_top == "jaxspec" and name != "jaxspec" and is_above(target, name):
                found.append(f"{where}: {room(target)} is a room above {room(name)}")
    return found


def cycles(root: Path) -> list[str]:
    """The import cycles among jaxspec's modules, each as `a -> b -> a`."""
    known = {name: path for name, path in modules(root).items() if name.split(".")[0] == "jaxspec"}
    edges = {
        name: sorted({t for t, _ in imports(name, path, known) if t in known and t != name})
        for name, path in known.items()
    }
    found: list[str] = []
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            found.append(" -> ".join([*trail[trail.index(name) :], name]))
        elif name not in done:
            for target in edges[name]:
                visit(target, [*trail, name])
            done.add(name)

    for name in edges:
        visit(name, [])
    return found


def test_imports_go_one_way() -> None:
    assert {"jaxspec.config", "pallas_kernels"} <= set(modules(ROOT)), f"no packages under {ROOT}"
    assert violations(ROOT) == []


def test_no_import_cycles() -> None:
    assert cycles(ROOT) == []


def test_few_files_stand_beside_the_rooms() -> None:
    files = sorted(path.name for path in (ROOT / "jaxspec").glob("*.py"))
    assert len(files) <= MOST_FILES_BESIDE_ROOMS, files


def listed_modules(init: Path) -> set[str]:
    """The names that start a line of a room's docstring, separated from their meaning by two
    blanks."""
    text = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
    rows = re.findall(r"^((?:[\w/]+, )*[\w/]+) {2,}\S", text, re.MULTILINE)
    return {name.strip() for row in rows for name in row.split(",")}


def test_each_room_lists_its_modules() -> None:
    for init in sorted((ROOT / "jaxspec").glob("*/__init__.py")):
        folder = init.parent
        files = {path.stem for path in folder.glob("*.py") if path.stem != "__init__"}
        folders = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
        assert listed_modules(init) == files | folders, folder.name


def test_architecture_page_has_the_rooms_in_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `jaxspec/(\w+)(?:/|\.py)` \|", page, re.MULTILINE)
    assert tuple(rows) == ROOMS
    assert [
        path.name
        for path in (ROOT / "jaxspec").iterdir()
        if path.is_dir() and path.name not in (*ROOMS, "__pycache__")
    ] == []
    assert [f.name for f in (ROOT / "scripts").glob("*.*") if f"`{f.name}`" not in page] == []
    ops = [path.parent.name for path in (ROOT / "pallas_kernels").glob("*/reference.py")]
    assert [op for op in ops if f"`{op}/`" not in page] == []


@pytest.mark.parametrize(
    ("file", "source", "reason"),
    [
        (
            "jaxspec/config/round.py",
            "from jaxspec.cache.arrays import KVCache\nfrom jaxspec import config",
            "cache is a room above config",
        ),
        (
            "jaxspec/models/llama.py",
            "def f():\n    import jaxspec.decode.verify",
            "decode is a room above models",
        ),
        (
            "jaxspec/models/llama.py",
            "from ..decode import prefill",
            "decode is a room above models",
        ),
        ("jaxspec/models/llama.py", "from .. import drafts", "drafts is a room above models"),
        ("jaxspec/decode/round.py", "from jaxspec import LLM", "jaxspec is a room above decode"),
        (
            "jaxspec/loading/weights.py",
            "from pallas_kernels.attention import paged_attention",
            "call kernels",
        ),
        ("jaxspec/llm.py", "from scripts.generate import main", "nothing below imports scripts"),
        ("jaxspec/helpers.py", "import math", "expected a module inside one of the rooms"),
        (
            "pallas_kernels/attention/shapes.py",
            "import jaxspec.config",
            "imports jax and numpy only",
        ),
        ("pallas_kernels/attention/shapes.py", "import torch", "imports jax and numpy only"),
        ("scripts/bench.py", "from tests.helpers import tiny", "nothing below imports tests"),
    ],
)
def test_planted_import_is_found(tmp_path: Path, file: str, source: str, reason: str) -> None:
    rooms = [
        f"jaxspec/{name}/__init__.py" for name in ("cache", "config", "decode", "drafts", "models")
    ]
    for name in ("jaxspec/__init__.py", *rooms, "jaxspec/decode/verify.py", file):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [v for v in violations(tmp_path) if "inside one of the rooms" not in v] == []
    (tmp_path / file).write_text(source + "\n", encoding="utf-8")
    found = violations(tmp_path)
    assert len(found) == 1 and reason in found[0], found


def test_planted_cycle_is_found(tmp_path: Path) -> None:
    (tmp_path / "jaxspec" / "cache").mkdir(parents=True)
    (tmp_path / "jaxspec" / "cache" / "arrays.py").write_text(
        "from jaxspec.cache.metadata import build\n", encoding="utf-8"
    )
    (tmp_path / "jaxspec" / "cache" / "metadata.py").write_text(
        "def f():\n    from jaxspec.cache.arrays import PAD_SLOT\n", encoding="utf-8"
    )
    assert violations(tmp_path) == []
    assert cycles(tmp_path) == [
        "jaxspec.cache.arrays -> jaxspec.cache.metadata -> jaxspec.cache.arrays"
    ]
