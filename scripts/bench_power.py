"""What a GPU draws while it reads, multiplies and decodes: whether a round is at the power limit, and what that limit leaves of it.

python scripts/bench_power.py --batch 1,64 --output-json power.json
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
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
from jaxspec.tools.benchmark.power import Draw, PowerMeter
from jaxspec.tools.benchmark.workload import Effort, Weights, Workload, normal
from jaxspec.tools.cli import errors_as_sentences, option, run_program

AT_ONCE = 20  # dispatched before one is waited for
PRODUCTS = 8  # weights of their own, so that none stays in L2
ROUNDS = 32


def main(
    model: Annotated[str, option(f"{', '.join(MODELS)}.")] = "llama-3-8b",
    batch: Annotated[str, option("Requests of the rounds, with commas between them.")] = "1,16,64",
    temperature: Annotated[float, option("Of the rounds.")] = 0.0,
    seconds: Annotated[
        float, option("That each load is measured, after half as many that do not count.")
    ] = 2.0,
    output_json: Annotated[Path | None, option("Write the figures here.")] = None,
) -> None:
    """Streaming reads, large products, products of a round of 256 rows, and whole rounds."""
    with errors_as_sentences():
        cases = [
            Case(model, batch=int(part), temperature=temperature)
            for part in batch.split(",")
            if part.strip().isdigit()
        ]
        if not cases or len(cases) != len(batch.split(",")) or seconds <= 0:
            raise ConfigError(
                f"--batch, --seconds: expected numbers above 0 with commas between them, got {batch!r} and {seconds}"
            )
        json_file = report.JsonFile(output_json) if output_json else None
        keep_compiled_programs()
        on_gpu = jax.default_backend() == "gpu"
        loads: list[dict[str, Any]] = []
        with PowerMeter() as meter:
            record: dict[str, Any] = environment() | measure_rates() | {"loads": loads}
            print(describe(record), flush=True)

            def note(name: str, draw: Draw, **work: float) -> None:
                loads.append({"name": name} | draw.to_dict() | work)
                print(
                    f"{name}: {draw.seconds * 1e3:.3f} ms, {draw.watts:.0f} W, {draw.joules:.3f} J, {draw.megahertz:.0f} MHz",
                    flush=True,
                )

            for name, call, calls, work in references(
                4 << 30 if on_gpu else 1 << 22, 8192 if on_gpu else 128
            ):
                note(
                    name,
                    meter.measure(call, calls=calls, seconds=seconds, warm=seconds / 2),
                    **work,
                )
                del call  # and with it its arrays, before the next ones are made
            weights = Weights(jnp.bfloat16 if on_gpu else jnp.float32)
            for case in cases:
                rounds = Workload(case, weights, {}, Effort(ROUNDS, 1))
                draw = meter.measure(
                    rounds.run_rounds, calls=ROUNDS, seconds=seconds, warm=seconds / 2
                )
                note(f"round, {case.name}", draw)
        print_table(table(loads))
        if json_file:
            json_file.write(record)


def references(
    num_bytes: int, size: int
) -> Iterator[tuple[str, Callable[[], Any], int, dict[str, float]]]:
    """Name, load, calls of it a load, and what one call reads or computes."""
    several = lambda f, *args: lambda: [f(*args) for _ in range(AT_ONCE)][-1]  # noqa: E731
    keys = list(jax.random.split(jax.random.key(0), PRODUCTS))
    large = jax.random.bits(jax.random.key(0), (num_bytes // 2,), jnp.uint16)
    yield (
        f"reads of {num_bytes >> 20} MiB",
        several(jax.jit(jnp.max), large),
        AT_ONCE,
        {"bytes": float(num_bytes)},
    )
    del large
    a, b = (normal((size, size), "bfloat16", key) for key in keys[:2])
    yield (
        f"{size} x {size} x {size}",
        several(jax.jit(jnp.matmul), a, b),
        AT_ONCE,
        {"flops": 2.0 * size**3},
    )
    del a, b
    depth, width = size // 2, size // 2 * 7 // 2
    x, ws = (
        normal((256, depth), "bfloat16", keys[0]),
        [normal((depth, width), "bfloat16", key) for key in keys],
    )
    product = jax.jit(lambda x, ws: [jnp.matmul(x, w, preferred_element_type=x.dtype) for w in ws])
    work = {"flops": 2.0 * 256 * depth * width}
    yield f"256 x {depth} x {width}", several(product, x, ws), AT_ONCE * PRODUCTS, work


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
