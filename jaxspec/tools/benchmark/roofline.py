"""The roofline picture (Williams et al., CACM 2009).

It shows what rounds reach, against what memory and arithmetic allow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Point:
    """A timed part: its floor's operations and bytes, and the seconds it took."""

    label: str
    series: str
    flops: float
    bytes: float
    seconds: float

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flops / self.bytes

    @property
    def rate(self) -> float:
        """Operations a second."""
        return self.flops / self.seconds


def points_of(record: Mapping[str, Any]) -> Iterator[Point]:
    """Yield the whole rounds and plain steps of a record of scripts/bench.py."""
    for case in record["cases"]:
        if "skipped" in case:
            continue
        for part, floor in (("round", "floor"), ("plain", "plain_floor")):
            if part in case["parts"]:
                kind = "round" if part == "round" else "plain step"
                label = f"b{case['batch']}" + (
                    f", {case['context'] // 1024}k" if case["context"] >= 1024 else ""
                )
                flops, moved = case[floor]["flops"], case[floor]["bytes"]
                yield Point(
                    label, f"{case['model']}, {kind}", flops, moved, case["parts"][part]["seconds"]
                )


def roofline_figure(
    points: Sequence[Point], bytes_per_second: float, flops_per_second: float, *, title: str
) -> Any:
    """Draw a matplotlib figure; the roofs are rates that were measured in the points' own run."""
    from matplotlib.figure import Figure  # of the extra "train": nothing else here needs it

    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    ridge = flops_per_second / bytes_per_second
    left, right = (
        min(p.intensity for p in points) / 2,
        max(ridge * 4, max(p.intensity for p in points) * 2),
    )
    x = np.geomspace(left, right, 200)
    roof = np.minimum(x * bytes_per_second, flops_per_second)
    axes.loglog(x, roof / 1e12, color="black", linewidth=1.5)
    axes.text(
        ridge / 8,
        ridge / 8 * bytes_per_second * 1.3 / 1e12,
        f"{bytes_per_second / 1e12:.2f} TB/s",
        fontsize=8,
        ha="right",
    )
    axes.text(
        ridge * 1.1,
        flops_per_second * 1.08 / 1e12,
        f"{flops_per_second / 1e12:.0f} TFLOP/s",
        fontsize=8,
    )
    for series, marker in zip(dict.fromkeys(p.series for p in points), "osD^vP*X", strict=False):
        offset = (5, -9) if "round" in series else (-5, 6)
        mine = [p for p in points if p.series == series]
        axes.scatter(
            [p.intensity for p in mine],
            [p.rate / 1e12 for p in mine],
            marker=marker,
            s=28,
            label=series,
        )
        for label in dict.fromkeys(p.label for p in mine):
            first = next(p for p in mine if p.label == label)
            axes.annotate(
                label,
                (first.intensity, first.rate / 1e12),
                textcoords="offset points",
                xytext=offset,
                fontsize=7,
            )
    axes.set_xlabel("operations a byte that must move")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(title, fontsize=10)
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize=8)
    return figure
