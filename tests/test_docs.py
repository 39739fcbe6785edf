"""Pages name what exists: options with their defaults, families, methods, files."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from jaxspec import LLM, EngineConfig, SamplingParams, SpeculativeConfig, drafts, models
from jaxspec.config import Ops
from jaxspec.engine.outputs import CompletionOutput, RequestOutput

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    path
    for pattern in ("*.md", "docs/**/*.md", "checkpoints/*/*.md")
    for path in sorted(ROOT.glob(pattern))
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
OPTION = re.compile(r"^\| `(\w+)` \| `([^|]*)` \|", re.MULTILINE)


def options(heading: str) -> dict[str, object]:
    """Return option -> default from the table below a heading of docs/options.md."""
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    _, _, rest = page.partition(f"# {heading}\n")
    section = re.split(r"\n##+ ", rest)[0]
    return {name: ast.literal_eval(default) for name, default in OPTION.findall(section)}


@pytest.mark.parametrize("config", [EngineConfig, SpeculativeConfig, SamplingParams])
def test_the_options_page_has_every_field_and_its_default(config: type) -> None:
    expected = {}
    for field in fields(config):
        factory = field.default_factory
        expected[field.name] = field.default if factory is MISSING else factory()
    assert options(config.__name__) == expected


def test_the_options_page_has_the_arguments_of_from_pretrained() -> None:
    parameters = inspect.signature(LLM.from_pretrained).parameters.values()
    named = {p.name: p.default for p in parameters if p.default is not p.empty}
    assert options("LLM.from_pretrained") == named


def test_the_options_page_has_the_methods_of_llm() -> None:
    """Each name exists; keywords with their defaults."""
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    _, _, rest = page.partition("## Methods of LLM\n")
    rows = [row.split("|")[1] for row in re.split(r"\n##+ ", rest)[0].splitlines() if "`" in row]
    calls = [call for row in rows for call in re.findall(r"`(\w+)(?:\(([^`]*)\))?`", row)]
    assert len(calls) >= len(rows) > 8
    for name, arguments in calls:
        if name == "repr":
            continue
        method = getattr(LLM, name)
        for keyword, default in re.findall(r"(\w+)=(\w+)", arguments):
            parameter = inspect.signature(method).parameters[keyword]
            assert parameter.default == ast.literal_eval(default), (name, keyword)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_page_has_no_gap_to_fill(path: Path) -> None:
    assert not re.findall(r"\b(?:TODO|TBD|FIXME|XXX+|NNN+)\b|\?\?\?", path.read_text("utf-8"))


def test_the_options_page_has_the_defaults_that_differ_from_vllms() -> None:
    parameters = inspect.signature(LLM.from_pretrained).parameters.values()
    known = {f.name: f.default for c in (EngineConfig, SpeculativeConfig) for f in fields(c)}
    known = {p.name: p.default for p in parameters} | known
    listed = options("Defaults that differ")
    assert listed and listed == {name: known[name] for name in listed}


def test_the_options_page_names_every_op() -> None:
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    [row] = [line for line in page.splitlines() if line.startswith("| `kernels` |")]
    assert [op for op in Ops().names() if f"`{op}`" not in row] == []


def test_the_options_page_has_every_field_of_an_output() -> None:
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    for output in (RequestOutput, CompletionOutput):
        [row] = [line for line in page.splitlines() if line.startswith(f"| `{output.__name__}` |")]
        public = {f.name for f in fields(output)} - {"index"}
        assert [name for name in sorted(public) if f"`{name}`" not in row] == []


def test_the_readme_has_every_family_and_method() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tables = [line for line in readme.splitlines() if line.startswith("|")]
    for name in (*models.FAMILIES, *drafts.METHODS):
        assert any(f"| `{name}` |" in line for line in tables), name


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"\]\([^)\s]*\n.*", text) == []  # a target over two lines is no link
    targets = LINK.findall(text)
    local = [t.partition("#")[0] for t in targets if "://" not in t]
    assert [t for t in local if t and not (page.parent / t).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(
        r"`((?:jaxspec|pallas_kernels|scripts|tests|docs)/[\w./-]+)(?:::\w+)?`", text
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_pages_that_the_code_names_exist() -> None:
    named = {
        (path.relative_to(ROOT).as_posix(), page)
        for package in ("jaxspec", "pallas_kernels", "scripts", "tests")
        for path in (ROOT / package).rglob("*.py")
        for page in re.findall(r"\bdocs/[\w/-]+\.\w+", path.read_text(encoding="utf-8"))
    }
    assert named
    assert [(path, page) for path, page in sorted(named) if not (ROOT / page).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_tests_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    missing = [
        f"{file}::{test}"
        for file, test in named
        if f"\ndef {test}(" not in (ROOT / file).read_text(encoding="utf-8")
    ]
    assert missing == []


def test_known_problems_each_have_a_test() -> None:
    """Every row of the page has an upstream number and a test of ours."""
    page = (ROOT / "docs" / "known-problems.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| [")]
    numbers = {number for row in rows for number in re.findall(r"^\| \[[\w-]+ #(\d+)\]", row)}
    assert numbers == {
        *("47386", "50438", "53670", "52522", "53436", "42744", "34497", "52258", "53458"),
        *("31", "613", "2819"),
    }
    assert [row for row in rows if not re.search(r"`tests/[\w/]+\.py::\w+`", row)] == []
