"""Time the start of a process: import, weights, first token, warm-up; then requests one at a time.

Two processes start one after the other: with no compiled programs on disk, and with the first
one's. Weights are random.

python scripts/bench_startup.py --output-json startup.json
python scripts/bench_startup.py --model tiny --max-num-seqs 2 --stages single    # on a CPU
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table

from jaxspec import ConfigError
from jaxspec.tools import report
from jaxspec.tools.benchmark.dimensions import MODELS
from jaxspec.tools.benchmark.machine import environment, print_table
from jaxspec.tools.benchmark.startup import STAGES, Figures, Start, measure
from jaxspec.tools.cli import Dtype, OutputJson, dtype_of, option, run_program
from jaxspec.tools.flags import flag

STARTS = ("cold", "cached")


@dataclass(frozen=True)
class StartOptions:
    """The engine, and what each process does after its first answer."""

    model: str = flag("llama-3-8b", f"{', '.join(MODELS)}.")
    max_num_seqs: int = flag(64, "Requests that run together at most.", least=1)
    prompt: int = flag(136, "Tokens of each prompt.", least=1)
    output: int = flag(64, "Tokens of each answer.", least=1)
    requests: int = flag(40, "Requests that come one at a time.", least=1)
    executables: bool = flag(True, "Keep executables that are found without a trace, or none.")
    stages: tuple[str, ...] = flag(
        STAGES, "What follows the first answer, in this order.", among=STAGES
    )

    def start(self, dtype: str) -> Start:
        """Return what a process does; ConfigError for an unknown model."""
        if self.model not in MODELS:
            raise ConfigError(f"--model: expected one of {', '.join(MODELS)}, got {self.model!r}")
        batches = tuple(n for n in (1, 16, 64) if n <= self.max_num_seqs)
        return Start(**vars(self) | {"batches": batches, "dtype": dtype})


def main(
    options: StartOptions,
    dtype: Dtype = "auto",
    timeout: Annotated[float, option("Seconds after which a process is stopped.")] = 1800.0,
    output_json: OutputJson = None,
) -> None:
    """Start two processes, and print the seconds and the number of programs of each."""
    start = options.start(dtype_of(dtype).name)
    json_file = report.JsonFile(output_json) if output_json else None
    record: dict[str, Any] = environment() | {"settings": asdict(start), "starts": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name in STARTS:
            record["starts"][name] = measure(start, Path(folder), timeout=timeout)
            if json_file:
                json_file.write(record)
    print_table(table(record["starts"]))
    failed = [name for name, found in record["starts"].items() if "failed" in found]
    if failed:
        raise SystemExit(f"error: expected starts that succeed, got one that failed: {failed[0]}")


def table(starts: dict[str, Figures]) -> Table:
    """Return a row for each figure, and a column for each start."""
    found = Table(title="Start of a process")
    found.add_column("")
    for name in starts:
        found.add_column(name, justify="right")
    for name in dict.fromkeys(name for figures in starts.values() for name in figures):
        found.add_row(name.replace("_", " "), *(cell(each.get(name)) for each in starts.values()))
    return found


def cell(value: Any) -> str:
    """Return a figure as it is printed: milliseconds, seconds, or numbers of programs."""
    if value is None:
        return "-"
    if isinstance(value, dict) and "first_token" in value:
        return "; ".join(f"{key.replace('_', ' ')} {cell(of)}" for key, of in value.items())
    if isinstance(value, dict) and "median" in value:
        return f"{1e3 * value['median']:.2f} ms (p99 {1e3 * value['p99']:.2f})"
    if isinstance(value, dict):
        return ", ".join(f"{n} {part} ({of:.1f} s)" for part, (n, of) in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"{1e3 * sorted(value)[len(value) // 2]:.3f} ms"
    return f"{value:.2f} s" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    run_program(main)
