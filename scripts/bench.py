"""Time rounds of speculative decoding, part by part, against what the device allows: random weights, forced acceptance.

python scripts/bench.py --preset issue --output-json bench.json
python scripts/bench.py --model llama-3-8b --batch 1,16 --context 4096 --temperature 1 --profile /tmp/trace
python scripts/bench.py --model tiny --rounds 8                                   # tries the script out on a CPU
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import jax
from rich.table import Table

from jaxspec import ConfigError, EngineConfig
from jaxspec.loading import keep_compiled_programs
from jaxspec.loading.pretrained import DTYPES
from jaxspec.tools import report
from jaxspec.tools.benchmark.cases import ENGINE_RATIO, PRESETS, Case, select, target_of
from jaxspec.tools.benchmark.dimensions import MODELS
from jaxspec.tools.benchmark.machine import describe, environment, measure_rates, print_table
from jaxspec.tools.benchmark.workload import (
    PARTS,
    Effort,
    Weights,
    Workload,
    does_not_fit,
    implementations,
)
from jaxspec.tools.cli import errors_as_sentences, option, run_program


def main(
    preset: Annotated[
        str | None, option(f"{', '.join(PRESETS)}; the flags below then pick among its cases.")
    ] = None,
    model: Annotated[str | None, option(f"{', '.join(MODELS)}. [default: llama-3-8b]")] = None,
    method: Annotated[
        str | None, option("eagle3, eagle, mtp. [default: eagle3]", "--method", "--draft")
    ] = None,
    batch: Annotated[str | None, option("[default: 1]")] = None,
    context: Annotated[
        str | None,
        option("Tokens each request holds, halfway through timed rounds. [default: 400]"),
    ] = None,
    num_speculative_tokens: Annotated[str | None, option("K. [default: 3]")] = None,
    temperature: Annotated[str | None, option("[default: 0,1]")] = None,
    rule: Annotated[
        str | None, option("probabilistic, strict, block. [default: probabilistic]")
    ] = None,
    compilation: Annotated[str | None, option("round, step. [default: round]")] = None,
    acceptance_length: Annotated[
        str | None, option("Forced mean, bonus token included; 1 accepts nothing. [default: 2.56]")
    ] = None,
    implementation: Annotated[
        str, option("auto (the engine's choice), a name for every op, or op=name,op=name.")
    ] = "auto",
    parts: Annotated[str, option("What to time of each case.")] = ",".join(PARTS),
    rounds: Annotated[int, option("Rounds dispatched back to back.")] = 64,
    repeats: Annotated[int, option("How often; medians are printed.")] = 5,
    rounds_per_step: Annotated[
        int | None, option("Of the engine: rounds that one program runs. [default: its choice]")
    ] = None,
    pause: Annotated[
        float,
        option(
            "Seconds of idling before each repeat of plain, verify and round: no power limit then."
        ),
    ] = 0.0,
    cuda_graphs: Annotated[
        bool | None,
        option("Launch by CUDA graphs or kernel by kernel. [default: the engine's choice]"),
    ] = None,
    dtype: Annotated[str, option("bfloat16, float32, or auto: bfloat16 on a GPU.")] = "auto",
    output_json: Annotated[
        Path | None, option("Write everything to this file, after every case.")
    ] = None,
    profile: Annotated[
        Path | None,
        option("Write a profiler trace of a few rounds of each case here, after the timing."),
    ] = None,
) -> None:
    """Time whole rounds and their parts at the dimensions of real models. Flags take lists with commas; every combination is a case."""
    with errors_as_sentences():
        given = {
            "model": parse_list("model", model, str),
            "method": parse_list("method", method, str),
            "batch": parse_list("batch", batch, int),
            "context": parse_list("context", context, int),
            "num_speculative_tokens": parse_list(
                "num-speculative-tokens", num_speculative_tokens, int
            ),
            "temperature": parse_list(
                "temperature", temperature or (None if preset else "0,1"), float
            ),
            "rule": parse_list("rule", rule, str),
            "compilation": parse_list("compilation", compilation, str),
            "acceptance_length": parse_list("acceptance-length", acceptance_length, float),
        }
        cases = select(
            preset, {name: values for name, values in given.items() if values is not None}
        )
        chosen = implementations(implementation)
        timed = check_parts(parts)
        if rounds < 8 or repeats < 1:
            raise ConfigError(
                f"--rounds, --repeats: expected at least 8 and 1, got {rounds} and {repeats}"
            )
        if not 0 <= pause <= 60:
            raise ConfigError(f"--pause: expected 0 to 60 seconds, got {pause}")
        if dtype != "auto" and dtype not in DTYPES:
            raise ConfigError(f"--dtype: expected one of auto, {', '.join(DTYPES)}, got {dtype!r}")
        EngineConfig(rounds_per_step=rounds_per_step)  # refused here, before anything is measured
        json_file = report.JsonFile(output_json) if output_json else None
        keep_compiled_programs()
        numbers = DTYPES[
            ("bfloat16" if jax.default_backend() == "gpu" else "float32")
            if dtype == "auto"
            else dtype
        ]
        record: dict[str, Any] = environment() | measure_rates()
        print(describe(record), flush=True)
        settings = {
            "preset": preset,
            "implementation": implementation,
            "rounds": rounds,
            "repeats": repeats,
        }
        settings |= {"rounds_per_step": rounds_per_step, "cuda_graphs": cuda_graphs, "pause": pause}
        record |= {"settings": settings, "cases": []}
        weights, effort = (
            Weights(numbers),
            Effort(rounds, repeats, rounds_per_step, cuda_graphs, pause),
        )
        for i, case in enumerate(cases, start=1):
            print(f"[{i}/{len(cases)}] {case.name}", flush=True)
            result = run_case(case, weights, chosen, effort, timed, record, profile)
            record["cases"].append(case.to_dict() | result)
            print("    " + summary(result), flush=True)
            if json_file:
                json_file.write(record)
        print_table(table(record["cases"]))


def parse_list(flag: str, text: str | None, kind: Callable[[str], Any]) -> list[Any] | None:
    try:
        return None if text is None else [kind(part.strip()) for part in text.split(",")]
    except ValueError as e:
        raise ConfigError(
            f"--{flag}: expected numbers with commas between them, got {text!r}"
        ) from e


def check_parts(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if unknown := [part for part in parts if part not in PARTS]:
        raise ConfigError(f"--parts: expected among {', '.join(PARTS)}, got {', '.join(unknown)}")
    return parts


def run_case(
    case: Case,
    weights: Weights,
    chosen: dict[str, str],
    effort: Effort,
    parts: list[str],
    record: dict[str, Any],
    profile: Path | None,
) -> dict[str, Any]:
    """The case's timings and floors, or {"skipped": reason}."""
    if reason := does_not_fit(case, weights.dtype, chosen, effort, record["memory_limit"]):
        return {"skipped": reason}
    try:
        workload = Workload(case, weights, chosen, effort)
        found = workload.measure(parts)
        if profile:
            workload.trace(profile / case.name.replace(" ", "-"))
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        return {"skipped": f"out of device memory: {str(e).splitlines()[0]:.200}"}
    except ValueError as e:  # a kernel that does not support these shapes or this device says so
        if isinstance(e, ConfigError):
            raise
        return {"skipped": str(e)}
    rates = {"bandwidth": record["bytes_per_second"], "matmul_rate": record["flops_per_second"]}
    result: dict[str, Any] = {"implementations": asdict(workload.cfg.kernels), "parts": found}
    result["floor"] = workload.floor(plain=False, **rates)
    result["plain_floor"] = workload.floor(plain=True, **rates)
    if seconds := round_seconds(found):
        result["floor_over_round"] = result["floor"]["seconds"] / seconds
        result["tokens_per_second"] = case.batch * case.acceptance_length / seconds
    result["targets"] = judge_targets(case, result)
    return result


def round_seconds(parts: dict[str, Any]) -> float | None:
    """The engine's wall clock where it was measured, else the device's time."""
    return next((parts[name]["seconds"] for name in ("engine", "round") if name in parts), None)


def judge_targets(case: Case, result: dict[str, Any]) -> list[dict[str, Any]]:
    """What issue 3 asks of this case: measured, bound, and whether it is met."""
    target, parts = target_of(case), result["parts"]
    if target is None:
        return []
    checks = [
        ("round, wall clock", round_seconds(parts), target.round_seconds, True),
        ("floor / round", result.get("floor_over_round"), target.floor_ratio, False),
        ("plain step", parts.get("plain", {}).get("seconds"), target.plain_seconds, True),
        (
            "engine / back to back",
            parts.get("engine", {}).get("over_back_to_back"),
            ENGINE_RATIO,
            True,
        ),
    ]
    return [
        {
            "name": name,
            "measured": measured,
            "bound": bound,
            "met": measured <= bound if at_most else measured >= bound,
        }
        for name, measured, bound, at_most in checks
        if measured is not None and bound is not None
    ]


# --- what is printed ------------------------------------------------------------------------------------------------------------------


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def summary(result: dict[str, Any]) -> str:
    """A case on one line."""
    if "skipped" in result:
        return f"skipped: {result['skipped']}"
    parts = "  ".join(
        f"{name} {milliseconds(timing['seconds'])}" for name, timing in result["parts"].items()
    )
    floor = result["floor"]
    line = f"{parts} ms, floor {milliseconds(floor['bytes_seconds'])} (bytes) {milliseconds(floor['arithmetic_seconds'])} (arithmetic)"
    if "floor_over_round" in result:
        line += f", floor / round {result['floor_over_round']:.3f}, {result['tokens_per_second']:.0f} tokens/s"
    share = result["parts"].get("rebuild", {}).get("share_of_round")
    line += "" if share is None else f", metadata {share:.2%} of a round"
    for t in result["targets"]:
        scale, unit = (1e3, " ms") if t["bound"] < 0.1 else (1, "")
        line += f"; {t['name']} {t['measured'] * scale:.3f} of {t['bound'] * scale:.4g}{unit} {'met' if t['met'] else 'MISSED'}"
    return line


def table(cases: list[dict[str, Any]]) -> Table:
    """Milliseconds; round and engine are the device's time and the wall clock of a whole round."""
    columns = ("plain", "draft", "verify", "sampling", "round", "engine")
    found = Table(title="Milliseconds (medians)")
    found.add_column("case", no_wrap=True)
    for heading in (*columns, "floor", "floor / round", "tokens/s"):
        found.add_column(heading, justify="right")
    for case in cases:
        if "skipped" in case:
            found.add_row(case["name"], "skipped")
            continue
        cells = [milliseconds(case["parts"].get(name, {}).get("seconds")) for name in columns]
        ratio, rate = case.get("floor_over_round"), case.get("tokens_per_second")
        cells += [
            milliseconds(case["floor"]["seconds"]),
            "-" if ratio is None else f"{ratio:.3f}",
            "-" if rate is None else f"{rate:.0f}",
        ]
        found.add_row(case["name"], *cells)
    return found


if __name__ == "__main__":
    run_program(main)
