"""Time single ops of pallas_kernels on their named shapes.

Bytes moved are compared with the measured read bandwidth. Arithmetic is compared with the measured
rate of products if the op's shapes module counts it (`flops`) and it takes longer.

python scripts/bench_kernels.py --output-json kernels.json
python scripts/bench_kernels.py --op attention --shape "batch 16, context 4k"
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from rich.table import Table

import pallas_kernels
from jaxspec import ConfigError
from jaxspec.loading import keep_compiled_programs
from jaxspec.tools import report
from jaxspec.tools.benchmark.machine import describe, environment, measure_rates, print_table
from jaxspec.tools.benchmark.timing import smallest, time_chained
from jaxspec.tools.cli import option, run_program
from jaxspec.tools.flags import split_names

L2_BYTES = 60e6  # of an H200
# Calls in one program: enough to hide its launch, few enough to compile.
CALLS, MOST_CALLS = 16, 64
COPIES_BYTES = 16e9


@dataclass(frozen=True)
class Op:
    """An op of pallas_kernels.

    name: of its folder, with the function's behind a dot if the folder has several ops
    function: its public function. implementations: their names. shapes: its shapes module.
    """

    name: str
    function: Callable[..., Any]
    implementations: tuple[str, ...]
    shapes: ModuleType

    def bytes_moved(self, shape: Any) -> int:
        """Return the fewest bytes of a call. Ops that share a folder may differ in them."""
        count = self.shapes.bytes_moved
        named = (
            {"op": self.function.__name__} if "op" in inspect.signature(count).parameters else {}
        )
        return int(count(shape, **named))


def main(
    op: Annotated[
        str | None,
        option(
            "Ops or folders of ops, with commas between them. [default: all that have named shapes]"
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        option("A shape's name or a part of it; may be given several times. [default: all]"),
    ] = None,
    implementation: Annotated[str | None, option("Implementations. [default: all]")] = None,
    repeats: Annotated[int, option("How often each is timed; medians are printed.")] = 5,
    output_json: Annotated[
        Path | None, option("Write everything to this file, after every op and shape.")
    ] = None,
) -> None:
    """Time many calls chained in one program.

    Inputs rotate through more memory than the L2 cache holds.
    """
    found = pick_ops(discover(), op)
    runs = [
        (o, name, i)
        for o in found
        for name in pick_shapes(o, shape)
        for i in pick_implementations(o, implementation)
    ]
    if not runs:
        raise ConfigError(
            "--op, --shape, --implementation: expected some that go together, "
            f"got {op}, {shape} and {implementation}"
        )
    if repeats < 1:
        raise ConfigError(f"--repeats: expected at least 1, got {repeats}")
    json_file = report.JsonFile(output_json) if output_json else None
    keep_compiled_programs()
    record: dict[str, Any] = environment() | measure_rates() | {"kernels": []}
    print(describe(record), flush=True)
    for o, name, i in runs:
        result = {"op": o.name, "shape": name, "implementation": i} | time_op(
            o, name, i, repeats, record
        )
        record["kernels"].append(result)
        if json_file:
            json_file.write(record)
        print(f"{o.name} {name} {i}: {summary(result)}", flush=True)
    print_table(table(record["kernels"]))


def discover() -> list[Op]:
    """Return the ops of the packages that have a shapes module."""
    found = []
    for module in pkgutil.iter_modules(pallas_kernels.__path__):
        name = f"pallas_kernels.{module.name}"
        if module.ispkg and find_spec(f"{name}.shapes"):
            package, shapes = (
                importlib.import_module(name),
                importlib.import_module(f"{name}.shapes"),
            )
            functions = public_ops(package)
            found += [
                Op(
                    module.name if len(functions) == 1 else f"{module.name}.{function.__name__}",
                    function,
                    tuple(package.IMPLEMENTATIONS),
                    shapes,
                )
                for function in functions
            ]
    return found


def public_ops(package: ModuleType) -> list[Callable[..., Any]]:
    """Return the package's own functions that take implementation= by keyword only.

    Of a package that has Inputs, those that need nothing else. Without those that need other
    devices (all_reduce: scripts/experiment_all_reduce.py times it).
    """
    own = [
        f
        for _, f in inspect.getmembers(package, inspect.isfunction)
        if f.__module__ == package.__name__
    ]
    return [f for f in own if _is_op(f, takes_inputs=hasattr(package, "Inputs"))]


def _is_op(function: Callable[..., Any], *, takes_inputs: bool) -> bool:
    parameters = dict(inspect.signature(function).parameters)
    implementation = parameters.pop("implementation", None)
    if implementation is None or implementation.kind is not implementation.KEYWORD_ONLY:
        return False
    needed = [name for name, p in parameters.items() if p.default is p.empty]
    return "peers" not in parameters and (not takes_inputs or needed == ["inputs"])


def pick_ops(ops: list[Op], names: str | None) -> list[Op]:
    """Return the ops of these names or folders, or all; ConfigError for an unknown name."""
    if names is None:
        return ops
    folders = {op: op.name.partition(".")[0] for op in ops}
    known = dict.fromkeys(name for op in ops for name in (folders[op], op.name))
    wanted = split_names("--op", names, list(known) or ["no op (none has shapes)"])
    return [op for op in ops if op.name in wanted or folders[op] in wanted]


def pick_shapes(op: Op, parts: list[str] | None) -> list[str]:
    return [name for name in op.shapes.SHAPES if not parts or any(part in name for part in parts)]


def pick_implementations(op: Op, names: str | None) -> list[str]:
    wanted = op.implementations if names is None else split_names("--implementation", names)
    return [name for name in op.implementations if name in wanted]


def time_op(
    op: Op, shape_name: str, implementation: str, repeats: int, rates: dict[str, Any]
) -> dict[str, Any]:
    """Return seconds a call without the chain's own, bytes, bytes a second and share of bandwidth.

    Arithmetic likewise, where it takes longer than the bytes; or {"skipped": reason}.
    rates: the figures of measure_rates.
    """
    shape = op.shapes.SHAPES[shape_name]
    moved = op.bytes_moved(shape)
    inputs = op.shapes.make_inputs(shape, 0)
    is_object = is_dataclass(inputs)  # an op of few arguments takes them one by one
    fields = vars(inputs) if is_object else inputs
    leaves = {name: jax.tree.leaves(x) for name, x in fields.items()}  # of a tuple: several
    arrays = {
        name: jax.tree.map(jnp.asarray, fields[name])
        for name, found in leaves.items()
        if found and hasattr(found[0], "nbytes")
    }

    def call(**arrays: Any) -> Any:
        if is_object:
            return op.function(replace(inputs, **arrays), implementation=implementation)
        return op.function(**inputs | arrays, implementation=implementation)

    # The same values at other addresses: no copy is in the cache when its turn comes again.
    copies = [
        arrays,
        *(jax.tree.map(jnp.copy, arrays) for _ in range(count_copies(arrays, moved) - 1)),
    ]
    calls = len(copies)
    try:
        timing = time_chained(call, copies, repeats=repeats).to_dict(calls)
        chain = time_chained(smallest, copies, repeats=repeats).to_dict(calls)
    except (ValueError, NotImplementedError) as e:  # the kernel's reason for not running here
        return {"skipped": " ".join(str(e).split())}
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        return {"skipped": f"out of device memory: {str(e).splitlines()[0]:.200}"}
    seconds = max(timing["seconds"] - chain["seconds"], 1e-9)
    rate = moved / seconds
    result = {
        "seconds": seconds,
        "bytes": moved,
        "bytes_per_second": rate,
        "share_of_bandwidth": rate / rates["bytes_per_second"],
    }
    flops = op.shapes.flops(shape) if hasattr(op.shapes, "flops") else 0
    if flops / rates["flops_per_second"] > moved / rates["bytes_per_second"]:
        result |= {
            "flops": flops,
            "flops_per_second": flops / seconds,
            "share_of_products": flops / seconds / rates["flops_per_second"],
        }
    return result | {"with_chain": timing, "chain": chain, "copies": calls}


def count_copies(arrays: dict[str, Any], moved: int) -> int:
    """Return the copies that fill the L2 cache twice and make enough calls for one program.

    They take at most COPIES_BYTES.
    """
    if jax.default_backend() != "gpu":
        return 2
    fit = int(COPIES_BYTES // sum(x.nbytes for x in jax.tree.leaves(arrays)))
    return max(2, min(fit, max(CALLS, min(-(-int(2 * L2_BYTES) // moved), MOST_CALLS))))


def summary(result: dict[str, Any]) -> str:
    if "skipped" in result:
        return f"skipped: {result['skipped']}"
    figures = [f"{result['seconds'] * 1e6:.1f} us"]
    if "flops" in result:
        figures += [
            f"{result['flops_per_second'] / 1e12:.0f} TFLOP/s",
            f"{result['share_of_products']:.1%} of the rate of products",
        ]
    figures += [
        f"{result['bytes'] / 1e6:.1f} MB",
        f"{result['bytes_per_second'] / 1e12:.2f} TB/s",
        f"{result['share_of_bandwidth']:.1%} of the bandwidth",
    ]
    chain = f"{result['chain']['seconds'] * 1e6:.1f} us"
    return f"{', '.join(figures)} (the chain's own {chain} taken off)"


def table(kernels: list[dict[str, Any]]) -> Table:
    found = Table(title="Ops")
    for heading in ("op", "shape", "implementation"):
        found.add_column(heading, no_wrap=True)
    for heading in ("us", "MB", "TB/s", "of bandwidth", "TFLOP/s"):
        found.add_column(heading, justify="right")
    for k in kernels:
        cells = ["skipped"]
        if "skipped" not in k:
            cells = [
                f"{k['seconds'] * 1e6:.1f}",
                f"{k['bytes'] / 1e6:.1f}",
                f"{k['bytes_per_second'] / 1e12:.2f}",
            ]
            cells.append(f"{k['share_of_bandwidth']:.1%}")
            cells.append(f"{k['flops_per_second'] / 1e12:.0f}" if "flops" in k else "")
        found.add_row(k["op"], k["shape"], k["implementation"], *cells)
    return found


if __name__ == "__main__":
    run_program(main)
