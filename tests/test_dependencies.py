"""What pyproject.toml declares: both bounds of each dependency, and the safe ones."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
RUNTIME = [Requirement(line) for line in PROJECT["dependencies"]]


@pytest.mark.parametrize("requirement", RUNTIME, ids=lambda r: r.name)
def test_a_dependency_has_both_bounds_and_the_tested_version_lies_between(
    requirement: Requirement,
) -> None:
    assert {each.operator for each in requirement.specifier} == {">=", "<"}
    assert requirement.specifier.contains(metadata.version(requirement.name))


def test_versions_with_known_holes_are_not_allowed() -> None:
    """jinja2's sandbox (CVE-2025-27516), and torch.load with weights_only (CVE-2025-32434)."""
    allowed: dict[str, SpecifierSet] = {r.name: r.specifier for r in RUNTIME}
    for line in PROJECT["optional-dependencies"]["pickle"]:
        allowed |= {(r := Requirement(line)).name: r.specifier}
    for name, unsafe, safe in (("jinja2", "3.1.5", "3.1.6"), ("torch", "2.5.1", "2.6.0")):
        assert not allowed[name].contains(unsafe) and allowed[name].contains(safe)
