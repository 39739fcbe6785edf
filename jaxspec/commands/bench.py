"""Time rounds of speculative decoding, part by part, against what the device allows.

Weights are random, and acceptance is forced.

jaxspec bench --preset targets --output-json bench.json
jaxspec bench --model llama-3-8b --batch 1,16 --context 4096 --profile /tmp/trace
jaxspec bench --model tiny --rounds 8              # tries the script out on a CPU
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import jax
from rich.table import Table

from jaxspec.config import ConfigError, EngineConfig, KVCacheDtype
from jaxspec.config.quantization import FROM_FLOATS
from jaxspec.loading import keep_compiled_programs
from jaxspec.tools import report
from jaxspec.tools.benchmark.cases import (
    ENGINE_RATIO,
    METHODS,
    PRESETS,
    Case,
    select,
    target_of,
)
from jaxspec.tools.benchmark.dimensions import MODELS
from jaxspec.tools.benchmark.machine import describe, environment, measure_rates, print_table
from jaxspec.tools.benchmark.workload import (
    OF_A_ROUND,
    PARTS,
    Effort,
    Weights,
    Workload,
    does_not_fit,
    implementations,
    parts_of,
)
from jaxspec.tools.cli import Dtype, command, dtype_of, exact_float32, option
from jaxspec.tools.flags import flag


@dataclass(frozen=True)
class CaseOptions:
    """Lists with commas; every combination is a case."""

    model: tuple[str, ...] | None = flag(None, f"{', '.join(MODELS)}. [default: llama-3-8b]")
    method: tuple[str, ...] | None = flag(
        None, f"{', '.join(METHODS)}. [default: eagle3]", "--method", "--draft"
    )
    batch: tuple[int, ...] | None = flag(None, "Requests of a round. [default: 1]")
    context: tuple[int, ...] | None = flag(
        None, "Tokens each request holds, halfway through timed rounds. [default: 400]"
    )
    num_speculative_tokens: tuple[int, ...] | None = flag(None, "K. [default: 3]")
    temperature: tuple[float, ...] | None = flag(None, "0 is greedy. [default: 0,1]")
    rule: tuple[str, ...] | None = flag(
        None, "probabilistic, strict, block. [default: probabilistic]"
    )
    compilation: tuple[str, ...] | None = flag(None, "round, step. [default: round]")
    acceptance_length: tuple[float, ...] | None = flag(
        None, "Forced mean, bonus token included; 1 accepts nothing. [default: 2.56]"
    )
    kv_cache_dtype: tuple[str, ...] | None = flag(
        None, f"Of keys and values: {', '.join(get_args(KVCacheDtype))}. [default: auto]"
    )
    draft_kv_cache_dtype: tuple[str, ...] | None = flag(
        None, "The same of the draft's. [default: --kv-cache-dtype]"
    )
    tensor_parallel_size: tuple[int, ...] | None = flag(
        None, "Devices that share each model. [default: 1]"
    )
    enable_expert_parallel: tuple[bool, ...] | None = flag(
        None, "Whether each device holds whole experts: false, true. [default: false]"
    )
    draft_layers: tuple[int, ...] | None = flag(None, "Of dflash and dspark. [default: 5]")
    draft_vocab_size: tuple[int, ...] | None = flag(
        None, "Of eagle3, dflash and dspark. [default: the model's head; the target's for blocks]"
    )
    sample_from_anchor: tuple[bool, ...] | None = flag(
        None, "Whether a block's first row drafts too. [default: dspark true, dflash false]"
    )
    draft_quantize: tuple[str, ...] | None = flag(
        None, f"Form of the draft's weights: {', '.join(FROM_FLOATS)}. [default: bfloat16]"
    )
    max_num_verify_tokens: tuple[int, ...] | None = flag(
        None, "Rows of a verify pass, which uneven drafts fill. [default: K + 1 a request]"
    )

    def cases(self, preset: str | None) -> list[Case]:
        """Return the preset's cases that have these settings, or all combinations of them."""
        given = {name: values for name, values in vars(self).items() if values is not None}
        if preset is None:
            given.setdefault("temperature", (0.0, 1.0))
        return select(preset, given)


@dataclass(frozen=True)
class TimingOptions:
    """The parts that are timed, and how often."""

    implementation: str = flag(
        "auto", "auto (the engine's choice), a name for every op, or op=name,op=name."
    )
    parts: tuple[str, ...] = flag(
        OF_A_ROUND,
        "What to time of each case; only blocks have context, only other drafts rebuild. "
        "first_token prefills a prompt of --context tokens for each request of the batch.",
        among=PARTS,
    )
    rounds: int = flag(64, "Rounds dispatched back to back.")
    repeats: int = flag(5, "How often; medians are printed.")
    rounds_per_step: int | None = flag(
        None, "Rounds that one program of the engine runs. [default: the engine's choice]"
    )
    max_num_batched_tokens: int | None = flag(
        None, "Tokens of a prefill call, for first_token. [default: the engine's choice]"
    )
    prefill_in_order: bool | None = flag(
        None,
        "Sum the products of prompts in one order, for first_token. [default: the engine's choice]",
    )
    pause: float = flag(
        0.0, "Seconds of idling before each repeat of plain, verify and round: no power limit then."
    )
    cuda_graphs: bool | None = flag(
        None, "Launch by CUDA graphs or kernel by kernel. [default: the engine's choice]"
    )

    def effort(self) -> Effort:
        """Return how often each part is timed; ConfigError for a number out of range."""
        if self.rounds < 8 or self.repeats < 1:
            raise ConfigError(
                "--rounds, --repeats: expected at least 8 and 1, "
                f"got {self.rounds} and {self.repeats}"
            )
        if not 0 <= self.pause <= 60:
            raise ConfigError(f"--pause: expected 0 to 60 seconds, got {self.pause}")
        EngineConfig(  # refused before anything is measured
            rounds_per_step=self.rounds_per_step,
            max_num_batched_tokens=self.max_num_batched_tokens,
            prefill_in_order=self.prefill_in_order,
        )
        return Effort(
            rounds=self.rounds,
            repeats=self.repeats,
            rounds_per_step=self.rounds_per_step,
            max_num_batched_tokens=self.max_num_batched_tokens,
            prefill_in_order=self.prefill_in_order,
            cuda_graphs=self.cuda_graphs,
            pause=self.pause,
        )


def main(
    options: CaseOptions,
    timing: TimingOptions,
    preset: Annotated[
        str | None, option(f"{', '.join(PRESETS)}; the flags above then pick among its cases.")
    ] = None,
    dtype: Dtype = "auto",
    output_json: Annotated[
        Path | None, option("Write everything to this file, after every case.")
    ] = None,
    profile: Annotated[
        Path | None,
        option("Write a profiler trace of a few rounds of each case here, after the timing."),
    ] = None,
) -> None:
    """Time whole rounds and their parts at the dimensions of real models.

    Flags of a case take lists with commas; every combination is a case. Acceptance is forced, so
    no number of drafts can adapt to it: `jaxspec throughput --adaptive` times that.
    """
    cases = options.cases(preset)
    chosen, effort = implementations(timing.implementation), timing.effort()
    weights = Weights(dtype_of(dtype))
    if weights.dtype.name == "float32":
        exact_float32()
    json_file = report.JsonFile(output_json) if output_json else None
    if profile is not None and profile.exists() and not profile.is_dir():
        raise ConfigError(f"--profile {profile}: expected a folder, got something else")
    keep_compiled_programs()
    record: dict[str, Any] = environment() | measure_rates()
    print(describe(record), flush=True)
    settings = {"preset": preset, "implementation": timing.implementation, **asdict(effort)}
    record |= {"settings": settings, "cases": []}
    for i, case in enumerate(cases, start=1):
        print(f"[{i}/{len(cases)}] {case.name}", flush=True)
        result = run_case(case, weights, chosen, effort, timing.parts, record, profile)
        record["cases"].append(case.to_dict() | result)
        if json_file:
            json_file.write(record)
        print("    " + summary(result), flush=True)
    print_table(table(record["cases"]))


def run_case(
    case: Case,
    weights: Weights,
    chosen: dict[str, str],
    effort: Effort,
    parts: Sequence[str],
    record: dict[str, Any],
    profile: Path | None,
) -> dict[str, Any]:
    """Return the case's timings and floors, or {"skipped": reason}."""
    if not set(parts) & set(parts_of(case)):
        return {"skipped": f"has none of the parts: {', '.join(parts)}"}
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
    result: dict[str, Any] = {"implementations": workload.cfg.ops.names(), "parts": found}
    result["floor"] = workload.floor(plain=False, **rates)
    result["plain_floor"] = workload.floor(plain=True, **rates)
    if seconds := round_seconds(found):
        result["floor_over_round"] = result["floor"]["seconds"] / seconds
        result["tokens_per_second"] = case.batch * case.tokens_a_round / seconds
    result["targets"] = check_targets(case, result)
    return result


def round_seconds(parts: dict[str, Any]) -> float | None:
    """Return the engine's wall clock where it was measured, else the device's time."""
    return next((parts[name]["seconds"] for name in ("engine", "round") if name in parts), None)


def check_targets(case: Case, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare the case with its thresholds: the figure, the bound, and whether it is met."""
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


# --- what is printed ---


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def summary(result: dict[str, Any]) -> str:
    """Return a case on one line."""
    if "skipped" in result:
        return f"skipped: {result['skipped']}"
    parts = "  ".join(
        f"{name} {milliseconds(timing['seconds'])}" for name, timing in result["parts"].items()
    )
    floor = result["floor"]
    line = f"{parts} ms, floor of a round {milliseconds(floor['bytes_seconds'])} (bytes)"
    line += f" {milliseconds(floor['arithmetic_seconds'])} (arithmetic)"
    if "floor_over_round" in result:
        line += f", floor / round {result['floor_over_round']:.3f}"
        line += f", {result['tokens_per_second']:.0f} tokens/s"
    share = result["parts"].get("rebuild", {}).get("share_of_round")
    line += "" if share is None else f", metadata {share:.2%} of a round"
    for t in result["targets"]:
        scale, unit = (1e3, " ms") if t["bound"] < 0.1 else (1, "")
        line += f"; {t['name']} {t['measured'] * scale:.3f} of {t['bound'] * scale:.4g}{unit}"
        line += " met" if t["met"] else " MISSED"
    return line


def table(cases: list[dict[str, Any]]) -> Table:
    """Return the table of milliseconds.

    round and engine are the device's time and the wall clock of a whole round. First tokens have a
    column if some case has them.
    """
    columns = ["plain", "draft", "context", "verify", "sampling", "round", "engine"]
    if any("first_token" in case.get("parts", {}) for case in cases):
        columns.append("first_token")
    found = Table(title="Milliseconds (medians)")
    found.add_column("case", no_wrap=True)
    for heading in (*columns, "floor of a round", "floor / round", "tokens/s"):
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


app = command(main)
