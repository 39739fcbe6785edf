"""The machine that a benchmark runs on: what it is, what it can do at best, and how results are shown on it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from jaxspec.tools import report
from jaxspec.tools.benchmark.timing import measure_bandwidth, measure_matmul_rate


def environment() -> dict[str, Any]:
    """report.environment(), with the driver, the flags and the memory that JAX may use."""
    device = jax.devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    flags = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(("XLA_", "JAX_"))
    }
    return report.environment() | {"driver": driver(), "flags": flags, "memory_limit": limit}


def driver() -> str | None:
    """GPU, driver, clocks and power limit as nvidia-smi gives them; None without one."""
    query = "name,driver_version,clocks.max.sm,clocks.max.mem,power.limit"
    try:
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        return (
            subprocess.run(
                command, capture_output=True, text=True, timeout=20, check=True
            ).stdout.strip()
            or None
        )
    except (OSError, subprocess.SubprocessError):
        return None


def measure_rates() -> dict[str, float]:
    """Read bandwidth over 4 GiB and the rate of 8192^3 products; on a CPU, where they only try the script out, far less."""
    large = jax.default_backend() == "gpu"
    return {
        "bytes_per_second": measure_bandwidth(4 << 30 if large else 16 << 20),
        "flops_per_second": measure_matmul_rate(8192 if large else 128),
    }


def describe(record: Mapping[str, Any]) -> str:
    """Three lines of environment() | measure_rates()."""
    versions, device = record["versions"], record["devices"][0]
    memory = f"{record['memory_limit'] / 1e9:.1f} GB" if record["memory_limit"] else "not limited"
    rates = f"reads {record['bytes_per_second'] / 1e12:.3f} TB/s, bfloat16 products {record['flops_per_second'] / 1e12:.1f} TFLOP/s"
    return (
        f"{device['kind']} ({record['driver'] or device['platform']}), jax {versions['jax']}, Python {versions['python']}\n"
        f"commit {versions['git_commit']}, flags {record['flags'] or 'none'}, device memory {memory}\nmeasured: {rates}"
    )


def print_table(table: Table) -> None:
    """Drawn for a terminal; into a file or a pipe as Markdown, for docs/performance.md, however wide: a cut or wrapped row is none."""
    console = Console()
    if not console.is_terminal:
        table.box, console = box.MARKDOWN, Console(width=10_000)
    console.print(table)
