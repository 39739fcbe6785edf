"""The machine of a benchmark: its description, its best rates, and how results are shown."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from jaxspec.parallel.gpus import first_gpu
from jaxspec.tools import report
from jaxspec.tools.benchmark.timing import measure_bandwidth, measure_matmul_rate


def environment() -> dict[str, Any]:
    """report.environment(), with the driver, the flags and the memory that JAX may use."""
    common = report.environment()  # a sentence without a device
    device = jax.devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    flags = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(("XLA_", "JAX_"))
    }
    return common | {"driver": first_gpu(), "flags": flags, "memory_limit": limit}


def measure_rates() -> dict[str, float]:
    """Measure the read bandwidth over 4 GiB and the rate of 8192^3 products.

    On a CPU, where they only try the script out, the sizes are far smaller.
    """
    large = jax.default_backend() == "gpu"
    return {
        "bytes_per_second": measure_bandwidth(4 << 30 if large else 16 << 20),
        "flops_per_second": measure_matmul_rate(8192 if large else 128),
    }


def describe(record: Mapping[str, Any]) -> str:
    """Return three lines of environment() | measure_rates()."""
    versions, device = record["versions"], record["devices"][0]
    memory = f"{record['memory_limit'] / 1e9:.1f} GB" if record["memory_limit"] else "not limited"
    bandwidth, products = record["bytes_per_second"] / 1e12, record["flops_per_second"] / 1e12
    return (
        f"{device['kind']} ({record['driver'] or device['platform']}), jax {versions['jax']}, "
        f"Python {versions['python']}\n"
        f"commit {versions['git_commit']}, flags {record['flags'] or 'none'}, "
        f"device memory {memory}\n"
        f"measured: reads {bandwidth:.3f} TB/s, bfloat16 products {products:.1f} TFLOP/s"
    )


def print_table(table: Table) -> None:
    """Draw a table in a terminal; print it as Markdown into a file or a pipe.

    Markdown is as wide as it must be: a cut or wrapped row would be no row of a table.
    """
    console = Console()
    if not console.is_terminal:
        table.box, console = box.MARKDOWN, Console(width=10_000)
    console.print(table)
