"""Measure the power that a GPU draws while it reads, multiplies and decodes.

The figures show whether a round runs at the power limit, and how much slower that makes it.

python scripts/bench_power.py --batch 1,64 --output-json power.json
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from rich.table import Table

from jaxspec import ConfigError
from jaxspec.loading import keep_compiled_programs
from jaxspec.tools import report
from jaxspec.tools.benchmark.cases import Case
from jaxspec.tools.benchmark.dimensions import MODELS
from jaxspec.tools.benchmark.machine import describe, environment, measure_rates, print_table
from jaxspec.tools.benchmark.power import PowerMeter
from jaxspec.tools.benchmark.workload import Effort, Weights, Workload, normal
from jaxspec.tools.cli import OutputJson, option, run_program
from jaxspec.tools.flags import flag

AT_ONCE = 20  # calls dispatched before the host waits
PRODUCTS = 8  # each with its own weights, so that none stays in L2
ROUNDS = 32


@dataclass(frozen=True)
class RoundOptions:
    """The rounds that are measured."""

    model: str = flag("llama-3-8b", f"{', '.join(MODELS)}.")
    batch: tuple[int, ...] = flag(
        (1, 16, 64), "Requests of the rounds, with commas between them.", least=1
    )
    temperature: float = flag(0.0, "Temperature of the rounds; 0 is greedy.")


def main(
    rounds: RoundOptions,
    seconds: Annotated[
        float, option("How long each load is measured, after half as long for the warm-up.")
    ] = 2.0,
    output_json: OutputJson = None,
) -> None:
    """Measure streaming reads, large products, products of 256 rows, and whole rounds."""
    if not seconds > 0:
        raise ConfigError(f"--seconds: expected a number above 0, got {seconds}")
    cases = [Case(rounds.model, batch=b, temperature=rounds.temperature) for b in rounds.batch]
    json_file = report.JsonFile(output_json) if output_json else None
    keep_compiled_programs()
    on_gpu = jax.default_backend() == "gpu"
    loads: list[dict[str, Any]] = []
    with PowerMeter() as meter:
        record: dict[str, Any] = environment() | measure_rates() | {"loads": loads}
        print(describe(record), flush=True)

        def measure(load: Load) -> None:
            warm = seconds / 2
            draw = meter.measure(load.call, calls=load.calls, seconds=seconds, warm=warm)
            loads.append({"name": load.name} | draw.to_dict() | load.work)
            figures = f"{draw.watts:.0f} W, {draw.joules:.3f} J, {draw.megahertz:.0f} MHz"
            print(f"{load.name}: {draw.seconds * 1e3:.3f} ms, {figures}", flush=True)

        sizes = (4 << 30, 8192) if on_gpu else (1 << 22, 128)
        for make in REFERENCES:  # one after the other: each frees its arrays before the next
            measure(make(*sizes))
        weights = Weights(jnp.bfloat16 if on_gpu else jnp.float32)
        for case in cases:
            workload = Workload(case, weights, {}, Effort(ROUNDS, 1))
            measure(Load(f"round, {case.name}", workload.run_rounds, ROUNDS, {}))
    try:
        if json_file:
            json_file.write(record)
    finally:
        print_table(table(loads))


@dataclass(frozen=True)
class Load:
    """Work for the GPU.

    call: dispatches it. calls: units of it in a call. work: bytes read or operations of a unit.
    """

    name: str
    call: Callable[[], Any]
    calls: int
    work: dict[str, float]


def several(f: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Return what calls f on these arguments AT_ONCE times, and returns the last result."""
    return lambda: [f(*args) for _ in range(AT_ONCE)][-1]


def keys() -> list[jax.Array]:
    return list(jax.random.split(jax.random.key(0), PRODUCTS))


def reads(num_bytes: int, size: int) -> Load:
    """Return streaming reads of so many bytes."""
    del size
    large = jax.random.bits(jax.random.key(0), (num_bytes // 2,), jnp.uint16)
    work = {"bytes": float(num_bytes)}
    return Load(f"reads of {num_bytes >> 20} MiB", several(jax.jit(jnp.max), large), AT_ONCE, work)


def large_products(num_bytes: int, size: int) -> Load:
    """Return products of square matrices of this size."""
    del num_bytes
    a, b = (normal((size, size), "bfloat16", key) for key in keys()[:2])
    work = {"flops": 2.0 * size**3}
    return Load(f"{size} x {size} x {size}", several(jax.jit(jnp.matmul), a, b), AT_ONCE, work)


def products_of_a_round(num_bytes: int, size: int) -> Load:
    """Return products of 256 rows with PRODUCTS different matrices."""
    del num_bytes
    depth, width = size // 2, size // 2 * 7 // 2
    x = normal((256, depth), "bfloat16", keys()[0])
    ws = [normal((depth, width), "bfloat16", key) for key in keys()]
    product = jax.jit(lambda x, ws: [jnp.matmul(x, w, preferred_element_type=x.dtype) for w in ws])
    work = {"flops": 2.0 * 256 * depth * width}
    return Load(f"256 x {depth} x {width}", several(product, x, ws), AT_ONCE * PRODUCTS, work)


REFERENCES = (reads, large_products, products_of_a_round)


def table(loads: list[dict[str, Any]]) -> Table:
    found = Table(title="Power")
    found.add_column("load")
    for heading in (
        "ms a call",
        "rate",
        "W",
        "J a call",
        "all in",
        "SM clock, MHz",
        "readings at the power limit",
    ):
        found.add_column(heading, justify="right")
    for load in loads:
        unit, per = ("FLOP", "flops") if "flops" in load else ("B", "bytes")
        rate, each = "", ""
        if per in load:
            rate = f"{load[per] / load['seconds'] / 1e12:.3g} T{unit}/s"
            each = f"{load['joules'] / load[per] * 1e12:.3g} pJ/{unit}"
        cells = [
            f"{load['seconds'] * 1e3:.3f}",
            rate,
            f"{load['watts']:.0f}",
            f"{load['joules']:.3f}",
            each,
            f"{load['megahertz']:.0f}",
        ]
        found.add_row(load["name"], *cells, f"{load['capped']:.0%}")
    return found


if __name__ == "__main__":
    run_program(main)
