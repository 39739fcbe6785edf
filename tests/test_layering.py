"""Imports go one way, from the engine down to the configuration; the kernels are a leaf that only few modules call."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jaxspec", "pallas_kernels", "scripts", "tests")

# From the top down. A module may import from its own row and from those below it, never from above. A name stands for the module or
# package of that name and everything inside it; the longest name that fits decides.
LAYERS = (
    ("jaxspec",),  # the package's __init__, which only gathers names: nothing inside the package imports it
    ("jaxspec.tools.report", "jaxspec.tools.benchmark", "jaxspec.tools.acceptance"),
    ("jaxspec.llm", "jaxspec.training", "jaxspec.tools.losslessness"),
    ("jaxspec.engine.warmup", "jaxspec.engine.input_processor", "jaxspec.engine.output_processor"),
    ("jaxspec.engine", "jaxspec.engine.inputs", "jaxspec.engine.outputs"),
    ("jaxspec.tools.cli", "jaxspec.engine.runner"),
    ("jaxspec.engine.block_tables",),
    (
        "jaxspec.tools.memory_plan",
        "jaxspec.engine.scheduler",
        "jaxspec.decode.slots",
        "jaxspec.loading",
        "jaxspec.decode.several_rounds",
        "jaxspec.decode.programs",
        "jaxspec.layers.kernels",
    ),
    ("jaxspec.decode", "jaxspec.decode.prefill"),
    ("jaxspec.decode.state",),
    (
        "jaxspec.engine.request",
        "jaxspec.cache.block_pool",
        "jaxspec.cache.group_blocks",
        "jaxspec.engine.detokenizer",
        "jaxspec.drafts.autoregressive",
        "jaxspec.decode.verify",
    ),
    ("jaxspec.cache.pool_sizes", "jaxspec.engine.buckets"),
    ("jaxspec.models", "jaxspec.drafts", "jaxspec.sampling.logits", "jaxspec.sampling.logprobs", "jaxspec.sampling.synthetic"),
    ("jaxspec.sampling", "jaxspec.sampling.rows"),
    ("jaxspec.layers.moe", "jaxspec.layers.mla", "jaxspec.layers.compressed_attention", "jaxspec.layers.hyper_connections"),
    ("jaxspec.layers.decoder_layer",),
    ("jaxspec.layers.attention", "jaxspec.cache.metadata", "jaxspec.layers", "jaxspec.layers.mxfp4"),
    (
        "jaxspec.cache.arrays",
        "jaxspec.layers.params",
        "jaxspec.tools.prompts",
        "jaxspec.sampling.params",
        "jaxspec.config",
        "jaxspec.cache",
    ),
)
LEAVES = (
    "jaxspec.loading.compilation_cache",
    "jaxspec.engine.metrics",
    "jaxspec.engine.progress",
)  # import nothing of jaxspec, and anything may import them
KERNEL_CALLERS = (
    "jaxspec.layers.attention",
    "jaxspec.layers.kernels",
    "jaxspec.layers",
    "jaxspec.sampling.logits",
    "jaxspec.cache.metadata",
    "jaxspec.layers.mla",
    "jaxspec.layers.moe",
    "jaxspec.sampling",
    "jaxspec.decode.verify",
)
KERNEL_IMPORTS = {"jax", "numpy", "pallas_kernels", *sys.stdlib_module_names}


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file, for every Python file of the four source folders."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of everything ``name`` imports, inside functions and type-checking blocks too."""
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


def layer(name: str) -> int | None:
    """Index into LAYERS, counted from the bottom; None for a module that no row names."""
    fits = [(len(entry), rank) for rank, row in enumerate(reversed(LAYERS)) for entry in row if inside(name, entry)]
    length, rank = max(fits, default=(0, None))
    return None if name != "jaxspec" and length == len("jaxspec") else rank


def inside(name: str, entry: str) -> bool:
    return name == entry or name.startswith(entry + ".")


def violations(root: Path) -> list[str]:
    """One sentence for each import that goes the wrong way."""
    known = modules(root)
    found = []
    for name, path in known.items():
        top = name.split(".")[0]
        leaf = any(inside(name, entry) for entry in LEAVES)
        if top == "jaxspec" and not leaf and layer(name) is None:
            found.append(f"{name}: no layer is named for it; add it to LAYERS in tests/test_layering.py")
            continue
        for target, line in imports(name, path, known):
            where = f"{path.relative_to(root)}:{line}: {name} imports {target}"
            target_top = target.split(".")[0]
            if target_top in ("scripts", "tests") and top not in (target_top, "tests"):
                found.append(f"{where}: nothing below imports {target_top}")
            elif top == "pallas_kernels" and target_top not in KERNEL_IMPORTS:
                found.append(f"{where}: pallas_kernels is a leaf and imports jax and numpy only")
            elif top == "jaxspec" and target_top == "pallas_kernels" and not any(inside(name, c) for c in KERNEL_CALLERS):
                found.append(f"{where}: only {' and '.join(KERNEL_CALLERS)} call kernels")
            elif top == "jaxspec" and target_top == "jaxspec":
                if leaf:
                    found.append(f"{where}: a leaf imports nothing of jaxspec")
                elif not any(inside(target, entry) for entry in LEAVES):
                    mine, theirs = layer(name), layer(target)
                    if mine is not None and theirs is not None and theirs > mine:
                        found.append(f"{where}: that is a layer above")
    return found


def cycles(root: Path) -> list[str]:
    """The import cycles among jaxspec's modules, each as `a -> b -> a`."""
    known = {name: path for name, path in modules(root).items() if name.split(".")[0] == "jaxspec"}
    edges = {name: sorted({t for t, _ in imports(name, path, known) if t in known and t != name}) for name, path in known.items()}
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


def page_rows(page: str) -> list[list[str]]:
    """The paths that each row of docs/architecture.md names, from the top down; those after a row's first are in the same folder."""
    rows = []
    for line in page.splitlines():
        if line.startswith("| `"):
            first, *others = re.findall(r"`([^`]+)`", line.split("|")[1])
            rows.append([first, *(f"{first.rpartition('/')[0]}/{name}" for name in others)])
    return rows


def test_architecture_page_names_every_module_and_imports_go_down_it() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    row_of_path = [(path, row) for row, paths in enumerate(page_rows(page)) for path in paths if "<op>" not in path]
    paths = [path for path, _ in row_of_path]
    assert sorted(set(paths)) == sorted(paths) and [path for path in paths if not (ROOT / path).exists()] == []
    assert [f.name for f in (ROOT / "scripts").glob("*.*") if f"`{f.name}`" not in page] == []

    known = {name: path for name, path in modules(ROOT).items() if not inside(name, "tests") and name not in PACKAGES}
    rows: dict[str, int] = {}
    for name, file in known.items():
        own = file.relative_to(ROOT).as_posix()
        fits = [(len(path), row) for path, row in row_of_path if own == path or (path.endswith("/") and own.startswith(path))]
        assert fits, f"{own}: no row of docs/architecture.md names it"
        rows[name] = max(fits)[1]
    upwards = [f"{a} imports {b}" for a, file in known.items() for b, _ in imports(a, file, known) if b in rows and rows[b] < rows[a]]
    assert upwards == []


@pytest.mark.parametrize(
    ("file", "source", "reason"),
    [
        ("jaxspec/config/round.py", "from jaxspec.cache.arrays import KVCache\nfrom jaxspec import layers", "a layer above"),
        ("jaxspec/models/llama.py", "def f():\n    import jaxspec.decode.verify", "a layer above"),
        ("jaxspec/models/llama.py", "from ..decode import prefill", "a layer above"),
        ("jaxspec/models/llama.py", "from .. import propose", "a layer above"),
        ("jaxspec/decode/round.py", "from jaxspec import LLM", "a layer above"),
        ("jaxspec/engine/metrics.py", "from jaxspec.config import ConfigError", "a leaf imports nothing"),
        ("jaxspec/layers/params.py", "from pallas_kernels.attention import paged_attention", "call kernels"),
        ("jaxspec/llm.py", "from scripts.generate import main", "nothing below imports scripts"),
        ("jaxspec/helpers.py", "import math", "no layer is named"),
        ("pallas_kernels/attention/shapes.py", "import jaxspec.config", "imports jax and numpy only"),
        ("pallas_kernels/attention/shapes.py", "import torch", "imports jax and numpy only"),
        ("scripts/bench.py", "from tests.helpers import tiny", "nothing below imports tests"),
    ],
)
def test_planted_import_is_found(tmp_path: Path, file: str, source: str, reason: str) -> None:
    for name in ("jaxspec/cache/arrays.py", "jaxspec/layers/products.py", "jaxspec/drafts/autoregressive.py", file):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [v for v in violations(tmp_path) if "no layer" not in v] == []
    (tmp_path / file).write_text(source + "\n", encoding="utf-8")
    found = violations(tmp_path)
    assert len(found) == 1 and reason in found[0], found


def test_planted_cycle_is_found(tmp_path: Path) -> None:
    (tmp_path / "jaxspec").mkdir()
    (tmp_path / "jaxspec" / "kv_cache.py").write_text("from jaxspec.layers.params import Params\n", encoding="utf-8")
    (tmp_path / "jaxspec" / "params.py").write_text("def f():\n    from jaxspec.cache.arrays import PAD_SLOT\n", encoding="utf-8")
    assert violations(tmp_path) == []
    assert cycles(tmp_path) == ["jaxspec.cache.arrays -> jaxspec.layers.params -> jaxspec.cache.arrays"]
