"""scripts/bench_power.py, with a program in nvidia-smi's place that prints readings."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path

import pytest

from jaxspec.tools.benchmark.power import Draw, parse
from scripts import bench_power
from tests.scripts.conftest import runner

run = runner(bench_power.main)


READINGS = (
    r"$t, 700.00, 1500, 0x0000000000000004\n$t, [N/A], 1980, 0x0\n$t, "
    r"500.00, 1900, 0x0000000000000000\n"
)


def put_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Write an nvidia-smi that checks its query and prints readings until it is ended."""
    program = folder / "nvidia-smi"
    queried = 'case "$*" in *timestamp,power.draw.instant,*) ;; *) exit 1 ;; esac'
    program.write_text(
        f'#!/bin/sh\n{queried}\nwhile :; do t=$({moment}); printf "{READINGS}"; sleep 0.02; done\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_loads_and_rounds_are_measured_between_readings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, "date '+%Y/%m/%d %H:%M:%S.%3N'")
    result = run(
        "--model",
        "tiny",
        "--batch",
        "1",
        "--seconds",
        0.8,
        "--output-json",
        tmp_path / "power.json",
    )
    assert result.exit_code == 0, result.output
    loads = json.loads((tmp_path / "power.json").read_text())["loads"]
    assert [load["name"].split(",")[0] for load in loads] == [
        "reads of 4 MiB",
        "128 x 128 x 128",
        "256 x 64 x 224",
        "round",
    ]
    for load in loads:
        assert load["watts"] == pytest.approx(600, abs=20) and load["megahertz"] == pytest.approx(
            1700, abs=40
        )
        assert load["capped"] == pytest.approx(0.5, abs=0.1) and load["joules"] == pytest.approx(
            load["seconds"] * load["watts"]
        )
    assert "pJ/FLOP" in result.output and "pJ/B" in result.output


def test_readings_of_another_time_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, "echo '2026/01/01 00:00:00.000'")
    result = run("--model", "tiny", "--batch", "1", "--seconds", 0.2)
    assert (
        result.exit_code == 2
        and "power: expected readings of nvidia-smi within 0.2 s, got none" in result.stderr
    )


def test_without_nvidia_smi_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = run("--model", "tiny")
    assert result.exit_code == 2 and "power: expected nvidia-smi" in result.stderr


@pytest.mark.parametrize(
    ("flag", "value"), [("--batch", "1,x"), ("--batch", "0"), ("--seconds", "0")]
)
def test_bad_flags_are_one_sentence(flag: str, value: str) -> None:
    result = run("--model", "tiny", flag, value)
    assert result.exit_code == 2 and result.stderr.startswith(f"error: {flag}: expected")


def test_readings() -> None:
    moment = "2026/11/22 07:10:00.250"
    assert parse(f"{moment}, 686.15, 1555, 0x0000000000000004\n") == (
        datetime(2026, 11, 22, 7, 10, 0, 250_000).timestamp(),
        686.15,
        1555.0,
        4,
    )
    assert (
        parse("No devices were found\n") is None and parse(f"{moment}, [N/A], 1980, 0x0\n") is None
    )
    assert Draw(0.009, 700, 1500, 1.0, 9).joules == pytest.approx(6.3)
