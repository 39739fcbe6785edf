"""What pyproject.toml declares: both bounds of each dependency, and the safe ones."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RUNTIME = [Requirement(line) for line in PROJECT["dependencies"]]


@pytest.mark.parametrize("requirement", RUNTIME, ids=lambda r: r.name)
def test_a_dependency_has_both_bounds_and_the_tested_version_lies_between(
    requirement: Requirement,
) -> None:
    assert {each.operator for each in requirement.specifier} == {">=", "<"}
    assert requirement.specifier.contains(metadata.version(requirement.name))


# Imports of an extra, and of a package that is used where it is installed (README's data sets).
OF_EXTRAS = {"torch": "pickle", "orbax": "train", "matplotlib": "train"}
WHERE_INSTALLED = {"datasets"}


def imported(package: str) -> set[str]:
    """The top-level names that a package imports, without its own and the standard library's."""
    found = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    return found - {"jaxspec", "pallas_kernels", "_typeshed"} - sys.stdlib_module_names


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_direct_import_is_declared() -> None:
    names = (imported("jaxspec") | imported("pallas_kernels")) - WHERE_INSTALLED
    assert {"jax", "numpy", "ml_dtypes", "tokenizers"} <= names
    declared = {canonical(r.name) for r in RUNTIME}
    distributions = metadata.packages_distributions()
    for name in sorted(names):
        if name in OF_EXTRAS:
            extra = PROJECT["optional-dependencies"][OF_EXTRAS[name]]
            assert any(Requirement(line).name.startswith(name) for line in extra), name
        else:
            assert declared & {canonical(d) for d in distributions[name]}, name


def test_versions_with_known_holes_are_not_allowed() -> None:
    """jinja2's sandbox (CVE-2025-27516), and torch.load with weights_only (CVE-2025-32434)."""
    allowed: dict[str, SpecifierSet] = {r.name: r.specifier for r in RUNTIME}
    for line in PROJECT["optional-dependencies"]["pickle"]:
        allowed |= {(r := Requirement(line)).name: r.specifier}
    for name, unsafe, safe in (("jinja2", "3.1.5", "3.1.6"), ("torch", "2.5.1", "2.6.0")):
        assert not allowed[name].contains(unsafe) and allowed[name].contains(safe)
