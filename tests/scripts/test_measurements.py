"""scripts/measurements.py: tables of a page are those of the committed records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec.config import ConfigError
from jaxspec.tools.measurements import milliseconds, read_source
from scripts import measurements
from tests.scripts.conftest import runner

run = runner(measurements.main)
VERSIONS = {"jax": "0.11.2", "git_commit": "0123456789abcdef"}
RUN: dict[str, Any] = {
    "versions": VERSIONS,
    "devices": [{"kind": "H200"}],
    "bytes_per_second": 4.4e12,
    "flops_per_second": 7e14,
}


def case(seconds: float, **changes: Any) -> dict[str, Any]:
    parts = {"round": {"seconds": 2 * seconds}, "engine": {"seconds": seconds}}
    return {
        "model": "m",
        "batch": 1,
        "temperature": 0.0,
        "parts": parts,
        "floor": {"seconds": 0.004},
    } | changes


SERVER = {
    "server": "vLLM",
    "runs": [
        {
            "model": "m",
            "step": "round",
            "batch": 1,
            "temperature": 0.0,
            "input_len": input_len,
            "seconds": seconds,
            "tokens_per_second": 100.0,
        }
        for input_len, seconds in ((136, 0.0075), (4096, 0.03))
    ],
}
KINDS = ("devices", "rounds")
LOAD = RUN | {
    "settings": {"model": "m", "temperature": 0.0, "input_len": 4096},
    "runs": [
        {
            "method": "probabilistic",
            "concurrency": 1,
            "results": {"output token throughput (tok/s)": 1234.5, "duration / rounds (ms)": 24.0},
        }
    ],
}


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A page with both kinds of table, made from records of few cases."""
    folder = tmp_path / "measurements"
    folder.mkdir()
    plain = case(0.005, parts={"plain": {"seconds": 0.002}}, plain_floor={"seconds": 0.001})
    skipped = {"model": "m", "skipped": "too large"}
    records = {
        "2026-01-02-new.json": RUN | {"cases": [case(0.005), plain, skipped]},
        "2026-01-01-old.json": RUN | {"cases": [case(0.006), case(0.00008, batch=16)]},
        "2026-01-01-load.json": LOAD,
        "2026-01-01-server.json": SERVER,
    }
    for name, record in records.items():
        (folder / name).write_text(json.dumps(record), encoding="utf-8")
    path = tmp_path / "page.md"
    rounds = "2026-01-02-new.json 2026-01-01-old.json"
    path.write_text(
        f"""# Before
<!-- begin: scripts/measurements.py rounds {rounds} -->
<!-- end: scripts/measurements.py -->
between
<!-- begin: scripts/measurements.py load 2026-01-01-load.json 2026-01-01-server.json -->
stale
<!-- end: scripts/measurements.py -->
after
""",
        encoding="utf-8",
    )
    return path


def test_the_committed_page_is_made_from_the_committed_records() -> None:
    result = run("--check")
    assert result.exit_code == 0, result.output


def test_a_page_gets_its_tables_and_keeps_its_text(page: Path) -> None:
    assert run("--page", page, "--check").exit_code == 1
    assert run("--page", page).exit_code == 0
    text = page.read_text(encoding="utf-8")
    # The last column has the number of a row's run.
    assert "1. m: 2026-01-02, H200, jax 0.11.2, commit 0123456, reads 4.40 TB/s" in text
    assert "\n2. m: 2026-01-01, H200" in text and "\n- m: 2026-01-01, H200" in text
    assert "| m, round, batch 1 | 0 | 5.00 | 4.00 | 0.80 | 1 |\n" in text
    assert "| m, plain step, batch 1 | 0 | 2.00 | 1.00 | 0.50 | 1 |\n" in text
    assert "| m, round, batch 16 | 0 | 0.080 | 4.00 | 50.00 | 2 |\n" in text
    assert "| m, 1 | 4,096 | 0 | 24.0 | 1,234 | 30.0 | 100 | 1.25 | 12.35 |" in text
    assert text.startswith("# Before\n<!-- begin") and text.endswith("-->\nafter\n")
    assert "\nbetween\n" in text and "stale" not in text
    assert run("--page", page, "--check").exit_code == 0
    page.write_text(text.replace("5.00", "4.99"), encoding="utf-8")
    assert run("--page", page, "--check").exit_code == 1
    assert "4.99" in page.read_text(encoding="utf-8")


def test_rounds_of_several_devices_stand_beside_those_of_one(page: Path) -> None:
    shared = case(0.0035, tensor_parallel_size=2)
    experts = case(0.003, tensor_parallel_size=2, enable_expert_parallel=True, model="n")
    record = RUN | {"cases": [experts, shared, case(0.005)]}
    (page.parent / "measurements" / "2026-01-03-two.json").write_text(json.dumps(record))
    begin = "<!-- begin: scripts/measurements.py {} 2026-01-03-two.json -->\nold\n"
    sections = [begin.format(kind) + "<!-- end: scripts/measurements.py -->" for kind in KINDS]
    page.write_text("\n".join(sections))
    assert run("--page", page).exit_code == 0
    several, one = page.read_text().split("<!-- end: scripts/measurements.py -->")[:2]
    assert several.count("| m, ") == several.count("| n, ") == 1
    assert "| m, round, batch 1 | 0 | 2 | 3.50 | 5.00 | 0.700 | 1.14 |" in several
    assert "| n, round, batch 1 | 0 | 2, whole experts | 3.00 | - | - | 1.33 |" in several
    assert one.count("| m, ") == 1 and "| m, round, batch 1 | 0 | 5.00 | 4.00 |" in one


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("rounds", "circles", "expected one of rounds, load, devices, got 'circles'"),
        ("2026-01-02-new.json", "2026-01-03-none.json", "expected the JSON of a benchmark, got"),
        ("begin", "start", "expected a line `<!-- begin"),
    ],
)
def test_a_wrong_section_is_one_sentence(page: Path, old: str, new: str, sentence: str) -> None:
    page.write_text(page.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    result = run("--page", page)
    assert result.exit_code == 2 and sentence in result.stderr


@pytest.mark.parametrize(
    ("name", "record", "sentence"),
    [
        ("new.json", RUN | {"cases": []}, "expected a name that begins with a date"),
        ("2026-01-01.json", {"some": "other"}, "expected the JSON of a benchmark, got none"),
    ],
)
def test_other_files_are_one_sentence(
    tmp_path: Path, name: str, record: Any, sentence: str
) -> None:
    (tmp_path / name).write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(ConfigError, match=sentence):
        read_source(tmp_path / name)


def test_milliseconds_have_three_digits() -> None:
    assert [milliseconds(s) for s in (84e-6, 4.634e-3, 0.022, None)] == [
        "0.084",
        "4.63",
        "22.0",
        "-",
    ]


def test_a_quantised_draft_has_rows_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "2026-01-01-drafts.json"
    parts = {"round": {"seconds": 0.004}, "plain": {"seconds": 0.002}}
    cases = [case(0.005, draft_quantize=None), case(0, draft_quantize="fp8", parts=parts)]
    path.write_text(json.dumps(RUN | {"cases": cases}), encoding="utf-8")
    found = {(p.model, p.step): timing.seconds for p, timing in read_source(path).timings.items()}
    assert found == {
        ("m", "round"): 0.005,
        ("m with a draft in fp8", "round"): 0.004,
        ("m", "plain step"): 0.002,  # which has no draft
    }
