"""Recorded measurements as tables of a page.

A page holds a section for each table:

    <!-- begin: scripts/measurements.py load DATE-MACHINE.json DATE-MACHINE-vllm.json -->
    ... (written by the script)
    <!-- end: scripts/measurements.py -->

The first line names the kind of table and the files that it is made from, in the folder
`measurements` beside the page. If two files hold the same case, the first one counts. A file's
name begins with the date of its run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxspec.config import ConfigError

Record = dict[str, Any]  # the JSON of scripts/bench.py or scripts/bench_throughput.py
SCRIPT = "scripts/measurements.py"
SECTION = re.compile(
    rf"<!-- begin: {re.escape(SCRIPT)} (?P<kind>\S+) (?P<files>[^>]*?) -->\n(?P<body>.*?)"
    rf"<!-- end: {re.escape(SCRIPT)} -->",
    re.DOTALL,
)
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
PLAIN, SPECULATIVE = "plain step", "round"


@dataclass(frozen=True)
class Point:
    """The case that a time belongs to.

    model: name of the dimensions, with the form of the draft's weights if the draft is quantised
    step: "round" or "plain step"
    batch: requests that run together
    temperature: of every request
    input_len: tokens of each prompt; None where rounds were timed without prefill
    devices: that share the model
    whole_experts: whether each of them holds whole experts, instead of a piece of every expert
    """

    model: str
    step: str
    batch: int
    temperature: float
    input_len: int | None = None
    devices: int = 1
    whole_experts: bool = False

    @property
    def on_one_device(self) -> Point:
        return replace(self, devices=1, whole_experts=False)


@dataclass(frozen=True)
class Timing:
    """A measured time.

    seconds: of a round or plain step
    floor_seconds: the least that the device allows, or None
    tokens_per_second: output tokens of all requests, or None
    """

    seconds: float
    floor_seconds: float | None = None
    tokens_per_second: float | None = None


Timings = dict[Point, Timing]


@dataclass(frozen=True)
class Source:
    """One file: its run in a line, what it timed, and what another server needed for the same."""

    description: str
    timings: Timings
    other_server: Timings


def read_source(path: Path) -> Source:
    """Read a record of scripts/bench.py, of scripts/bench_throughput.py, or of another server.

    Raises ConfigError if the file holds none of them, or if its name does not begin with a date.
    """
    date = DATE.match(path.name)
    if date is None:
        raise ConfigError(f"{path}: expected a name that begins with a date, got {path.name!r}")
    try:
        record: Record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: expected the JSON of a benchmark, got {e}") from e
    try:
        if "server" in record:
            return Source("", {}, dict(_server_timings(record)))
        timings = dict(_round_timings(record) if "cases" in record else _load_timings(record))
    except (KeyError, TypeError) as e:
        raise ConfigError(f"{path}: expected the JSON of a benchmark, got none ({e!r})") from e
    return Source(f"{date.group()}, {_machine(record)}", timings, {})


def _round_timings(record: Record) -> Iterator[tuple[Point, Timing]]:
    """Yield the rounds and plain steps of a record of scripts/bench.py."""
    for case in record["cases"]:
        if "skipped" in case:
            continue
        point = Point(
            case["model"],
            SPECULATIVE,
            case["batch"],
            case["temperature"],
            devices=case.get("tensor_parallel_size", 1),
            whole_experts=case.get("enable_expert_parallel", False),
        )
        parts = case["parts"]
        whole = parts.get("engine") or parts.get("round")
        if whole:
            floor, draft = case.get("floor", {}).get("seconds"), case.get("draft_quantize")
            name = f"{point.model} with a draft in {draft}" if draft else point.model
            yield replace(point, model=name), Timing(whole["seconds"], floor)
        if "plain" in parts:
            floor = case.get("plain_floor", {}).get("seconds")
            yield replace(point, step=PLAIN), Timing(parts["plain"]["seconds"], floor)


def _load_timings(record: Record) -> Iterator[tuple[Point, Timing]]:
    """Yield the runs of a record of scripts/bench_throughput.py."""
    settings = record["settings"]
    for run in record["runs"]:
        step = PLAIN if run["method"] == "plain" else SPECULATIVE
        point = Point(
            settings["model"],
            step,
            run["concurrency"],
            settings["temperature"],
            settings["input_len"],
        )
        found = run["results"]
        tokens_per_second = found["output token throughput (tok/s)"]
        seconds = found["duration / rounds (ms)"] / 1e3
        yield point, Timing(seconds, tokens_per_second=tokens_per_second)


def _server_timings(record: Record) -> Iterator[tuple[Point, Timing]]:
    """Yield the runs of another server under load."""
    for run in record["runs"]:
        point = Point(run["model"], run["step"], run["batch"], run["temperature"], run["input_len"])
        yield point, Timing(run["seconds"], tokens_per_second=run["tokens_per_second"])


def _machine(record: Record) -> str:
    """Describe device, versions and measured rates of a record."""
    versions, commit = record["versions"], record["versions"]["git_commit"]
    parts = [record["devices"][0]["kind"], f"jax {versions['jax']}"]
    if commit:
        dirty = "-dirty" if commit.endswith("-dirty") else ""
        parts.append(f"commit {commit[:7]}{dirty}")
    if record.get("bytes_per_second"):
        parts.append(f"reads {record['bytes_per_second'] / 1e12:.2f} TB/s")
    if record.get("flops_per_second"):
        parts.append(f"products {record['flops_per_second'] / 1e12:.0f} TFLOP/s")
    return ", ".join(parts) + (" (transcribed)" if "transcribed" in record else "")


# --- tables ---


def rounds_table(sources: Sequence[Source]) -> str:
    """Return rounds and plain steps on one device, without prefill, beside their floors."""
    headings = ("case", "T", "ms", "floor, ms", "floor / time")
    rows = {}
    for point, timing in merged(s.timings for s in sources).items():
        if point.devices > 1:
            continue
        floor = timing.floor_seconds
        rows[point] = (
            f"{point.model}, {point.step}, batch {point.batch}",
            f"{point.temperature:g}",
            milliseconds(timing.seconds),
            milliseconds(floor),
            "-" if floor is None else f"{floor / timing.seconds:.2f}",
        )
    return table(sources, headings, rows)


def load_table(sources: Sequence[Source]) -> str:
    """Return the engine under load beside another server: wall clock over rounds, with prefill."""
    ours, theirs = merged(s.timings for s in sources), merged(s.other_server for s in sources)
    headings = (
        "model, requests at a time",
        "prompt tokens",
        "T",
        "ms a round",
        "tokens/s",
        "vLLM 0.24, ms",
        "vLLM, tokens/s",
        "ms, vLLM / jaxspec",
        "tokens/s, jaxspec / vLLM",
    )
    rows = {}
    for point, timing in ours.items():
        server = theirs.get(point)
        plain = " (plain)" if point.step == PLAIN else ""
        rows[point] = (
            f"{point.model}, {point.batch}{plain}",
            f"{point.input_len:,}",
            f"{point.temperature:g}",
            milliseconds(timing.seconds),
            rate(timing),
            milliseconds(server.seconds if server else None),
            rate(server),
            ratio(server, timing),
            rate_ratio(timing, server),
        )
    return table(sources, headings, rows)


def devices_table(sources: Sequence[Source]) -> str:
    """Return rounds and plain steps on several devices beside those on one."""
    ours = merged(s.timings for s in sources)
    headings = ("case", "T", "devices", "ms", "ms on one", "ratio", "floor / time")
    rows = {}
    for point, timing in ours.items():
        if point.devices == 1:
            continue
        floor, one = timing.floor_seconds, ours.get(point.on_one_device)
        rows[point] = (
            f"{point.model}, {point.step}, batch {point.batch}",
            f"{point.temperature:g}",
            f"{point.devices}{', whole experts' if point.whole_experts else ''}",
            milliseconds(timing.seconds),
            milliseconds(one.seconds if one else None),
            "-" if one is None else f"{timing.seconds / one.seconds:.3f}",
            "-" if floor is None else f"{floor / timing.seconds:.2f}",
        )
    return table(sources, headings, rows)


TABLES: dict[str, Callable[[Sequence[Source]], str]] = {
    "rounds": rounds_table,
    "load": load_table,
    "devices": devices_table,
}


def merged(timings: Iterable[Timings]) -> Timings:
    """Return all timings, sorted as a table has them; of a case in several files, the first one."""
    found: Timings = {}
    for each in timings:
        found |= {point: timing for point, timing in each.items() if point not in found}
    models = list(dict.fromkeys(point.model for point in found))

    def place(point: Point) -> tuple[int, int, bool, int, float, int, bool]:
        is_plain = point.step == PLAIN
        return (
            models.index(point.model),
            point.input_len or 0,
            is_plain,
            point.batch,
            point.temperature,
            point.devices,
            point.whole_experts,
        )

    return {point: found[point] for point in sorted(found, key=place)}


def table(
    sources: Sequence[Source], headings: Sequence[str], rows: Mapping[Point, Sequence[str]]
) -> str:
    """Return a line for each run, with the models that it adds, and the table below.

    Of several runs, a last column has the number of the run of a row's own time.
    """
    run_of: dict[Point, str] = {}
    for source in sources:
        run_of = dict.fromkeys(source.timings, source.description) | run_of
    models: dict[str, set[str]] = {source.description: set() for source in sources}
    for point in rows:
        models[run_of[point]].add(point.model)
    numbers = {run: str(i) for i, run in enumerate(filter(models.get, models), 1)}
    lines = [
        f"{f'{number}.' if len(numbers) > 1 else '-'} {', '.join(sorted(models[run]))}: {run}"
        for run, number in numbers.items()
    ]
    if len(numbers) > 1:
        headings = (*headings, "run")
        rows = {point: (*row, numbers[run_of[point]]) for point, row in rows.items()}
    return "\n".join((*lines, "", *markdown(headings, list(rows.values()))))


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = (headings, ("---",) * len(headings), *rows)
    return ["| " + " | ".join(line) + " |" for line in lines]


def milliseconds(seconds: float | None) -> str:
    """Return milliseconds with three digits or more: 0.084, 4.63, 22.0."""
    if seconds is None:
        return "-"
    ms = 1e3 * seconds
    return f"{ms:.{3 if ms < 0.1 else 2 if ms < 20 else 1}f}"


def rate(timing: Timing | None) -> str:
    tokens = timing.tokens_per_second if timing else None
    return "-" if tokens is None else f"{tokens:,.0f}"


def ratio(server: Timing | None, ours: Timing) -> str:
    return "-" if server is None else f"{server.seconds / ours.seconds:.2f}"


def rate_ratio(ours: Timing, server: Timing | None) -> str:
    if server is None or not (ours.tokens_per_second and server.tokens_per_second):
        return "-"
    return f"{ours.tokens_per_second / server.tokens_per_second:.2f}"


# --- the page ---


def with_tables(page: Path) -> str:
    """Return the page's text with every section made anew from its files.

    Raises ConfigError if the page has no section, or one of a kind that does not exist.
    """
    text = page.read_text(encoding="utf-8")
    if not SECTION.search(text):
        raise ConfigError(
            f"{page}: expected a line `<!-- begin: {SCRIPT} KIND FILE... -->`, got none"
        )
    folder = page.parent / "measurements"

    def section(found: re.Match[str]) -> str:
        kind, files = found["kind"], found["files"].split()
        if kind not in TABLES:
            raise ConfigError(f"{page}: expected one of {', '.join(TABLES)}, got {kind!r}")
        table = TABLES[kind]([read_source(folder / name) for name in files])
        begin = found.group().splitlines()[0]
        return f"{begin}\n\n{table}\n\n<!-- end: {SCRIPT} -->"

    return SECTION.sub(section, text)
