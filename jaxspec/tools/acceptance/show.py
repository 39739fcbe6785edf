"""A record of scripts/acceptance.py as tables, sentences, Markdown and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from jaxspec.config import ConfigError
from jaxspec.loading.new_file import write_text
from jaxspec.tools.acceptance.summary import (
    Result,
    estimate,
    expected_per_position,
    figures,
    length,
    minus,
    on_the_same_rounds,
    per_position,
    rate,
    standard_error,
)

Record = dict[str, Any]
SCRIPT = "scripts/acceptance.py"


@dataclass(frozen=True)
class Grid:
    """A table before it is laid out."""

    title: str
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def rich(self) -> Table:
        table = Table(title=self.title)
        for heading in self.headings:
            table.add_column(heading, justify="right")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        lines = [self.headings, ("---",) * len(self.headings), *self.rows]
        return "\n".join(
            [f"**{self.title}**", "", *("| " + " | ".join(line) + " |" for line in lines)]
        )


def results(record: Record) -> list[Result]:
    return [Result.from_dict(r) for r in record["results"]]


def tables(record: Record) -> list[Table]:
    return [grid.rich() for grid in grids(record)]


def grids(record: Record) -> list[Grid]:
    """Return the tables of a record that have rows.

    At its K, by prompt length, by K, rules compared, own text.
    """
    made = (_at_k, _by_length, _by_k, _theory, _gains, _own_text)
    return [grid for make in made if (grid := make(record)).rows]


def _percent(values: Sequence[float]) -> str:
    return " / ".join(f"{100 * v:.1f}" for v in values)


def _kind(result: Result) -> tuple[str, str, str]:
    """Temperature, rule and drafts as a table says them."""
    case = result.case
    greedy = case.temperature == 0
    return (
        f"{case.temperature:g}",
        "-" if greedy else case.rule,
        "greedy" if case.drafts == "greedy" or greedy else "sampled",
    )


def _at_k(record: Record) -> Grid:
    K = record["num_speculative_tokens"]
    headings = (
        "prompts",
        "T",
        "rule",
        "drafts",
        "rounds",
        "tokens",
        "length",
        "rate, %",
        "per position, %",
        "expected length",
    )
    rows = []
    for result in results(record):
        if result.case.num_speculative_tokens != K:
            continue
        f = figures(result)
        expected = ("-", "-", "-")
        if result.counts.expected:
            own = f[f"expected_per_position_{result.case.rule}"]
            error = f["measured_minus_expected_length_standard_error"]
            off = f["measured_minus_expected_length"]
            expected = (f"{1 + sum(own):.3f}", _percent(own), f"{off:+.3f} ± {error:.3f}")
        rows.append(
            (
                f"{result.case.dataset} ({f['num_prompts']})",
                *_kind(result),
                str(f["num_rounds"]),
                str(f["num_output_tokens"]),
                f"{f['mean_acceptance_length']:.3f} ± "
                f"{f['mean_acceptance_length_standard_error']:.3f}",
                f"{100 * f['acceptance_rate']:.1f} ± "
                f"{100 * f['acceptance_rate_standard_error']:.1f}",
                _percent(f["per_position"]),
                *expected,
            )
        )
    return Grid(
        f"Acceptance at K = {K}",
        (*headings, "expected per position, %", "measured - expected length"),
        rows,
    )


def _by_length(record: Record) -> Grid:
    """Return what each range of prompt lengths accepts; no rows if all prompts are in one."""
    K = record["num_speculative_tokens"]
    rows, ranges = [], set()
    for result in results(record):
        if result.case.num_speculative_tokens != K:
            continue
        for name, part in figures(result)["by_prompt_length"].items():
            ranges.add(name)
            rows.append(
                (
                    f"{result.case.dataset} ({part['num_prompts']})",
                    *_kind(result),
                    name,
                    str(part["num_rounds"]),
                    f"{part['mean_acceptance_length']:.3f} ± "
                    f"{part['mean_acceptance_length_standard_error']:.3f}",
                    _percent(part["per_position"]),
                )
            )
    headings = ("prompts", "T", "rule", "drafts", "prompt tokens", "rounds", "length")
    return Grid(
        f"Acceptance at K = {K} by prompt length",
        (*headings, "per position, %"),
        rows if len(ranges) > 1 else [],
    )


def _sweeps(record: Record) -> dict[tuple[str, str, str], list[Result]]:
    """The first data set's results that came with several K, by (T, rule, drafts)."""
    found: dict[tuple[str, str, str], list[Result]] = {}
    listed = results(record)
    for result in listed:
        if result.case.dataset == listed[0].case.dataset:
            found.setdefault(_kind(result), []).append(result)
    return {
        kind: sorted(group, key=lambda r: r.case.num_speculative_tokens)
        for kind, group in found.items()
        if len(group) > 1
    }


def _by_k(record: Record) -> Grid:
    groups = _sweeps(record)
    ks = sorted({r.case.num_speculative_tokens for group in groups.values() for r in group})
    rows = []
    for (temperature, rule, drafts), group in groups.items():
        cells = {}
        for r in group:
            expected = f" ({_expected_length(r):.2f})" if r.counts.expected else ""
            cells[r.case.num_speculative_tokens] = f"{estimate(length, r.counts):.2f}{expected}"
        rows.append((temperature, rule, drafts, *(cells.get(k, "-") for k in ks)))
    return Grid(
        "Mean acceptance length by K, expected in brackets",
        ("T", "rule", "drafts", *(f"K = {k}" for k in ks)),
        rows,
    )


def _expected_length(result: Result) -> float:
    return 1 + float(estimate(expected_per_position(result.case.rule), result.counts).sum())


def _theory(record: Record) -> Grid:
    K = record["num_speculative_tokens"]
    rules = ("strict", "probabilistic", "block")
    rows = []
    for result in results(record):
        if (
            result.case.num_speculative_tokens == K
            and result.counts.expected
            and result.case.drafts == "probabilistic"
        ):
            lengths = [float(estimate(on_the_same_rounds(rule), result.counts)) for rule in rules]
            cells = [f"{n:.3f} ({100 * (n - 1) / K:.1f})" for n in lengths]
            rows.append(
                (result.case.dataset, f"{result.case.temperature:g}", result.case.rule, *cells)
            )
    title = "Expected length (rate, %) of each rule on the same rounds, sampled drafts"
    return Grid(title, ("prompts", "T", "rounds of", *rules), rows)


def _gains(record: Record) -> Grid:
    """Compare rules by acceptance rate, as measured and as theory has it on each one's rounds."""
    K = record["num_speculative_tokens"]
    found = [r for r in results(record) if r.case.num_speculative_tokens == K]
    at_k = {(r.case.dataset, *_kind(r)): r for r in found}
    rows = []
    for better, worse in (("probabilistic", "strict"), ("block", "probabilistic")):
        for (dataset, temperature, rule, drafts), a in at_k.items():
            b = at_k.get((dataset, temperature, worse, drafts))
            if rule == better and b is not None and temperature != "0":
                rules = f"{better} over {worse}"
                rows.append((dataset, temperature, drafts, rules, *_gain(a, b, K)))
    headings = ("measured", "theory, rounds of the first", "theory, rounds of the second")
    return Grid(
        "Acceptance rate of one rule over another, points",
        ("prompts", "T", "drafts", "rules", *headings, "lengths"),
        rows,
    )


def _gain(a: Result, b: Result, K: int) -> tuple[str, str, str, str]:
    """Return the points that a is over b: measured, by theory on a's rounds and on b's; lengths."""
    points = 100 * float(estimate(rate, a.counts) - estimate(rate, b.counts))
    error = 100 * float(standard_error(rate, a.counts, b.counts))
    gain = minus(on_the_same_rounds(a.case.rule), on_the_same_rounds(b.case.rule))
    theory = [
        f"{100 * estimate(gain, x.counts) / K:+.2f} ± "
        f"{100 * standard_error(gain, x.counts) / K:.2f}"
        for x in (a, b)
    ]
    lengths = [float(estimate(length, x.counts)) for x in (a, b)]
    return (
        f"{points:+.2f} ± {error:.2f}",
        theory[0],
        theory[1],
        f"{lengths[0]:.3f}, {lengths[1]:.3f}",
    )


def _own_text(record: Record) -> Grid:
    """Check the text against the target: its mean surprise is the entropy of p."""
    K = record["num_speculative_tokens"]
    rows = []
    for result in results(record):
        if result.case.num_speculative_tokens == K and result.counts.expected:
            f = figures(result)
            difference = f"{f['surprise_minus_entropy']:+.4f}"
            errors = f"{f['surprise_minus_entropy_standard_errors']:+.1f}"
            rows.append((result.case.dataset, *_kind(result), difference, errors))
    return Grid(
        "-log p of the text less the entropy of p, a token; 0 for the target's own text",
        ("prompts", "T", "rule", "drafts", "difference", "in standard errors"),
        rows,
    )


# --- sentences ------------------------------------------------------------------------------------


def sentences(record: Record) -> list[str]:
    """The comparisons that the tables are read for."""
    found, K = results(record), record["num_speculative_tokens"]
    at_k = {(r.case.dataset, *_kind(r)): r for r in found if r.case.num_speculative_tokens == K}
    first = found[0].case.dataset
    lines = []
    for (dataset, temperature, rule, drafts), r in at_k.items():
        base = at_k.get((first, temperature, rule, drafts))
        if dataset != first and base is not None:
            ours, theirs = (float(estimate(length, x.counts)) for x in (r, base))
            share = f"{100 * (ours / theirs - 1):+.1f} %"
            lines.append(
                f"{r.case.name}: length {ours:.3f}, {share} against {theirs:.3f} on {first}"
            )
    if record["check"]:
        lines += _check(record, found[0].case.dataset)
    return [
        *lines,
        f"{record['num_programs']} programs compiled, {record['seconds']} s for {len(found)} case"
        f"{'s' if len(found) > 1 else ''}, compilation included",
    ]


def _check(record: Record, dataset: str) -> list[str]:
    """The greedy case as the engine counts it."""
    engine = record["check"]["engine"]["mean_acceptance_length"]
    own = [
        r
        for r in results(record)
        if r.case.temperature == 0
        and r.case.num_speculative_tokens == record["num_speculative_tokens"]
    ]
    here = float(estimate(length, own[0].counts)) if own else None
    return [
        f"{dataset}, T = 0: LLM.generate has length {engine:.3f}"
        + (f", this script {here:.3f}" if here is not None else "")
    ]


# --- Markdown -------------------------------------------------------------------------------------


def markers(script: str) -> tuple[str, str]:
    """The lines between which a script's output stands."""
    return f"<!-- begin: {script} -->", f"<!-- end: {script} -->"


def check_markers(path: Path, script: str) -> None:
    begin, end = markers(script)
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--markdown {path}: expected a page in UTF-8, got {e}") from e
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ConfigError(
            f"--markdown {path}: expected a file with the lines {begin} and {end}, got none or not "
            "in this order"
        )


def write_section(path: Path, script: str, section: str) -> None:
    """Replace what stands between the markers."""
    begin, end = markers(script)
    text = path.read_bytes().decode("utf-8")  # with the page's own ends of lines
    before, after = text[: text.index(begin) + len(begin)], text[text.index(end) :]
    write_text(path, f"{before}\n\n{section}\n\n{after}")


def check_plot(path: Path) -> None:
    """Raise ConfigError for a picture that cannot be written there."""
    if path.suffix.lower() not in (".png", ".svg") or path.is_dir() or not path.parent.is_dir():
        raise ConfigError(
            f"--plot {path}: expected a .png or .svg file in a folder that exists, got another path"
        )


def ran_on(record: Record) -> str:
    """Hardware, versions and settings of a run, in a line; date and commit if they are known."""
    s, devices, versions = record["settings"], record["devices"], record["versions"]
    device = f"{len(devices)} x {devices[0]['kind']}" if devices else "no device"
    known = [device, s["dtype"], f"jax {versions['jax']}"]
    if "date" in record:  # 0.1.0 wrote none
        known.insert(0, record["date"])
    if versions["git_commit"] is not None:
        known.append(f"commit {versions['git_commit'][:12]}")
    return (
        f"{', '.join(known)}; at most {s['max_tokens']} tokens a prompt, "
        f"{s['max_num_seqs']} requests together, seed {s['seed']} and on."
    )


def markdown(record: Record) -> str:
    s = record["settings"]
    described = "\n".join(f"    {line}" for line in record["description"])
    bullets = "\n".join(f"- {line}" for line in sentences(record))
    head = [f"### {s['draft']} ({s['method']})", ran_on(record), described]
    return "\n\n".join([*head, *(grid.markdown() for grid in grids(record)), bullets])


# --- the figure -----------------------------------------------------------------------------------

COLOURS = {"-": "black", "strict": "tab:red", "probabilistic": "tab:blue", "block": "tab:green"}


def draw(path: Path, records: Sequence[Record]) -> None:
    """Draw mean length over K (left, theory as rings) and acceptance by position (right).

    Records after the first contribute T = 0 only.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as e:
        raise ConfigError(
            "--plot: expected the package matplotlib, got none; "
            "`pip install 'jaxspec[train]'` brings it"
        ) from e
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, record in enumerate(records):
        style = ("-", "--", ":")[i % 3]
        for (temperature, rule, drafts), group in _sweeps(record).items():
            if i and temperature != "0":
                continue
            ks = [r.case.num_speculative_tokens for r in group]
            lengths = [float(estimate(length, r.counts)) for r in group]
            name = f"{record['settings']['method']}, T = {temperature}" + (
                "" if temperature == "0" else f", {rule}, {drafts} drafts"
            )
            left.plot(ks, lengths, style, marker=".", color=COLOURS[rule], label=name)
            if group[0].counts.expected:
                left.plot(
                    ks,
                    [_expected_length(r) for r in group],
                    "o",
                    fillstyle="none",
                    color=COLOURS[rule],
                )
    left.set(
        xlabel="K, drafts a round",
        ylabel="mean acceptance length",
        title="Mean acceptance length (rings: expected)",
    )
    _draw_positions(right, records[0])
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def _draw_positions(axis: Any, record: Record) -> None:
    K, listed = record["num_speculative_tokens"], results(record)
    first = listed[0].case.dataset
    chosen = [
        r
        for r in listed
        if r.case.dataset == first
        and r.case.num_speculative_tokens == K
        and (_kind(r)[2] == "sampled" or not r.counts.expected)
    ]
    width = 0.8 / max(len(chosen), 1)
    for i, r in enumerate(chosen):
        x = np.arange(K) + (i - (len(chosen) - 1) / 2) * width
        temperature, rule, _ = _kind(r)
        name = f"T = {temperature}" + ("" if temperature == "0" else f", {rule}")
        axis.bar(
            x,
            estimate(per_position, r.counts),
            width,
            yerr=standard_error(per_position, r.counts),
            color=COLOURS[rule],
            alpha=0.6,
            label=name,
        )
        if r.counts.expected:
            axis.plot(
                x,
                estimate(expected_per_position(r.case.rule), r.counts),
                "_",
                color="black",
                markersize=14,
            )
    axis.set(
        xlabel="position",
        ylabel="share of rounds that accept it",
        title=f"Acceptance by position, K = {K} (dashes: expected)",
    )
    axis.set_xticks(range(K))
