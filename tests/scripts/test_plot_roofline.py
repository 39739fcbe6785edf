"""The roofline picture: points from a benchmark's record, under the roofs of the same run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxspec.tools.benchmark.roofline import points_of, roofline_figure
from scripts import plot_roofline
from tests.scripts.conftest import runner

pytest.importorskip("matplotlib", reason="the picture needs the extra train")


def record() -> dict[str, Any]:
    floors = {
        "floor": {"flops": 4e12, "bytes": 2e10},
        "plain_floor": {"flops": 1e10, "bytes": 1e10},
    }
    timed = {
        "model": "m",
        "batch": 64,
        "context": 4096,
        "parts": {"round": {"seconds": 0.01}, "plain": {"seconds": 0.005}},
    } | floors
    case = {"model": "m", "batch": 1, "context": 400, "parts": {"draft": {"seconds": 1.0}}} | floors
    devices, versions = [{"kind": "H200"}], {"jax": "0.11.2"}
    return {
        "cases": [timed, case, {"skipped": "too large", "model": "m"}],
        "bytes_per_second": 4e12,
        "flops_per_second": 7e14,
        "devices": devices,
        "versions": versions,
    }


def test_points_are_the_timed_rounds_and_plain_steps() -> None:
    whole, plain = points_of(record())
    assert (whole.label, whole.series, whole.intensity, whole.rate) == (
        "b64, 4k",
        "m, round",
        200.0,
        4e14,
    )
    assert (plain.series, plain.intensity, plain.rate) == ("m, plain step", 1.0, 2e12)


def test_the_roof_is_the_lower_of_both_rates() -> None:
    figure = roofline_figure(list(points_of(record())), 4e12, 7e14, title="H200")
    (roof,) = figure.axes[0].lines
    for x, y in zip(roof.get_xdata(), roof.get_ydata(), strict=True):
        assert y == pytest.approx(min(4.0 * x, 700.0))


def test_the_script_writes_the_picture(tmp_path) -> None:
    (tmp_path / "bench.json").write_text(json.dumps(record()))
    result = run(tmp_path / "bench.json", tmp_path / "roofline.svg")
    assert result.exit_code == 0 and "2 points" in result.stdout
    assert "<svg" in (tmp_path / "roofline.svg").read_text()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[1]", "expected the JSON of scripts/bench.py, got other JSON"),
        ("{", "expected the JSON of scripts/bench.py, got Expecting"),
        (json.dumps(record() | {"cases": []}), "expected timed rounds or plain steps, got none"),
    ],
)
def test_other_files_are_one_sentence(tmp_path, text: str, sentence: str) -> None:
    (tmp_path / "bench.json").write_text(text)
    result = run(tmp_path / "bench.json", tmp_path / "roofline.png")
    assert (
        result.exit_code != 0
        and sentence in result.stderr
        and not (tmp_path / "roofline.png").exists()
    )


run = runner(plot_roofline.main)
