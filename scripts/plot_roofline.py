"""Draw what scripts/bench.py measured against the roofline of the device that it ran on.

python scripts/plot_roofline.py bench.json docs/roofline.png
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxspec import ConfigError
from jaxspec.tools.benchmark.roofline import points_of, roofline_figure
from jaxspec.tools.cli import run_program


def main(
    records: Annotated[
        list[Path],
        typer.Argument(help="JSON files of scripts/bench.py --output-json, of one machine."),
    ],
    picture: Annotated[
        Path,
        typer.Argument(help="The picture to write; its ending says the format (png, svg, pdf)."),
    ],
) -> None:
    """Plot rounds and plain steps under the two roofs that were measured.

    Points are operations a byte against operations a second.
    """
    runs = [read_record(path) for path in records]
    found = [point for run in runs for point in points_of(run)]
    if not found:
        raise ConfigError(
            f"{', '.join(map(str, records))}: expected timed rounds or plain steps, got none"
        )
    figure = roofline_figure(
        found,
        mean(runs, "bytes_per_second"),
        mean(runs, "flops_per_second"),
        title=device_of(runs),
    )
    figure.savefig(picture, dpi=150, bbox_inches="tight")
    print(f"{picture}: {len(found)} points")


def read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: expected the JSON of scripts/bench.py, got {e}") from e
    if (
        not isinstance(record, dict)
        or not {"cases", "bytes_per_second", "flops_per_second"} <= record.keys()
    ):
        raise ConfigError(f"{path}: expected the JSON of scripts/bench.py, got other JSON")
    return record


def mean(runs: Sequence[dict[str, Any]], name: str) -> float:
    return sum(run[name] for run in runs) / len(runs)


def device_of(runs: Sequence[dict[str, Any]]) -> str:
    kinds = sorted({run["devices"][0]["kind"] for run in runs})
    return f"{', '.join(kinds)}, jax {runs[0]['versions']['jax']}"


if __name__ == "__main__":
    run_program(main)
