"""Throughput and latency of the engine under load, in the rows of vLLM's benchmark: plain against speculative decoding.

python scripts/bench_throughput.py --concurrency 1,16,64 --input-len 136 --output-len 256     # 8B dimensions, acceptance forced to 2.56
python scripts/bench_throughput.py --model smollm2 --dataset philschmid/mt-bench --num-prompts 80 --temperature 1
python scripts/bench_throughput.py --model tiny --num-prompts 4 --output-len 8                # tries the script out on a CPU
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from jaxspec import LLM, ConfigError, EngineConfig, SamplingParams, SpeculativeConfig
from jaxspec.engine.request import Request
from jaxspec.loading import keep_compiled_programs
from jaxspec.loading.pretrained import DTYPES
from jaxspec.sampling import synthetic
from jaxspec.tools import prompts, report
from jaxspec.tools.benchmark import throughput
from jaxspec.tools.benchmark.cases import Case
from jaxspec.tools.benchmark.dimensions import MODELS, draft_config
from jaxspec.tools.benchmark.machine import describe, environment, measure_rates, print_table
from jaxspec.tools.benchmark.workload import Weights
from jaxspec.tools.cli import errors_as_sentences, option, run_program

METHODS = ("plain", "strict", "probabilistic", "block")
TRAINED = ("smollm2", "smollm2-135m-instruct-eagle3")  # the model that comes with its head
WARM_TOKENS = 8


def main(
    model: Annotated[
        str,
        option(
            f"Random weights at the dimensions of {', '.join(MODELS)}; smollm2: the real target and head."
        ),
    ] = "llama-3-8b",
    target: Annotated[
        str | None, option("A real target instead: folder, .gguf file or hub id.")
    ] = None,
    draft: Annotated[
        str | None, option("Its head: folder, name under checkpoints/ or hub id.")
    ] = None,
    method: Annotated[str, option("eagle or eagle3.")] = "eagle3",
    methods: Annotated[
        str, option(f"Rules to compare, plain among them: {', '.join(METHODS)}.")
    ] = "plain,strict,probabilistic",
    num_speculative_tokens: Annotated[int, option("K.")] = 3,
    acceptance_length: Annotated[
        float, option("Forced with random weights; the bonus token included.")
    ] = 2.56,
    concurrency: Annotated[
        str, option("Requests at a time: a run for each.", "--concurrency", "--max-concurrency")
    ] = "1,8,16,64",
    output_len: Annotated[str, option("Tokens to generate: a run for each.")] = "256",
    input_len: Annotated[int, typer.Option(help="Tokens of each random prompt.", min=1)] = 136,
    dataset: Annotated[
        str | None, option("Prompts from a file or the hub instead; needs a real target.")
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(help="Requests a run. [default: as many as run at a time]", min=1)
    ] = None,
    request_rate: Annotated[
        float, option("Requests a second, Poisson; inf: all at once.")
    ] = math.inf,
    ignore_eos: Annotated[
        bool, option("Go on to output-len.", "--ignore-eos/--stop-at-eos")
    ] = True,
    temperature: Annotated[float, option("0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of prompts, arrivals and sampling.", min=0)] = 0,
    max_num_batched_tokens: Annotated[
        int, option("Of a prefill call; vLLM's default on this GPU.")
    ] = 8192,
    max_model_len: Annotated[int | None, option("[default: what prompts and outputs need]")] = None,
    prefix_caching: Annotated[
        bool, option("Share the blocks of equal prefixes.", "--prefix-caching/--no-prefix-caching")
    ] = True,
    rounds_per_step: Annotated[
        int | None, option("Rounds that one program runs. [default: the engine's choice]")
    ] = None,
    dtype: Annotated[str, option("bfloat16, float32, or auto: bfloat16 on a GPU.")] = "auto",
    output_json: Annotated[
        Path | None, option("Write everything to this file, after every run.")
    ] = None,
) -> None:
    """Run a load for every rule, concurrency and output length, and print vLLM's table. Compilation comes before, and is not counted."""
    with errors_as_sentences():
        rules, sizes, lengths = (
            names(methods),
            numbers("concurrency", concurrency),
            numbers("output-len", output_len),
        )
        if not request_rate > 0:  # nan is neither
            raise ConfigError(
                f"--request-rate: expected requests a second, or inf, got {request_rate}"
            )
        if dtype != "auto" and dtype not in DTYPES:
            raise ConfigError(f"--dtype: expected one of auto, {', '.join(DTYPES)}, got {dtype!r}")
        is_real = target is not None or model == TRAINED[0]
        if model == TRAINED[0] and target is None:
            draft = draft or TRAINED[1]
        check_models(model, target, draft, dataset, rules, is_real)
        json_file = report.JsonFile(output_json) if output_json else None
        keep_compiled_programs()
        texts = prompts.read_prompts(dataset) if dataset is not None else None
        weights = Weights(
            DTYPES[
                ("bfloat16" if jax.default_backend() == "gpu" else "float32")
                if dtype == "auto"
                else dtype
            ]
        )
        settings: dict[str, Any] = {
            "model": model,
            "target": target,
            "draft": draft,
            "method": method,
            "input_len": input_len,
        }
        settings |= {
            "num_speculative_tokens": num_speculative_tokens,
            "acceptance_length": None if is_real else acceptance_length,
        }
        settings |= {
            "dataset": dataset,
            "num_prompts": num_prompts,
            "ignore_eos": ignore_eos,
            "temperature": temperature,
            "seed": seed,
        }
        settings |= {
            "max_num_batched_tokens": max_num_batched_tokens,
            "prefix_caching": prefix_caching,
            "rounds_per_step": rounds_per_step,
        }
        record: dict[str, Any] = (
            environment() | measure_rates() | {"settings": settings, "runs": []}
        )
        print(describe(record), flush=True)
        for rule, size in itertools.product(rules, sizes):
            count = num_prompts or size
            longest = max_model_len or (input_len + max(lengths) if texts is None else 2048)
            engine: dict[str, Any] = {
                "max_model_len": longest,
                "max_num_seqs": min(size, count),
                "batch_buckets": (min(size, count),),
                "max_num_batched_tokens": max_num_batched_tokens,
                "enable_prefix_caching": prefix_caching,
                "rounds_per_step": rounds_per_step,
            }
            if (
                not is_real
            ):  # caches of one size for every concurrency: they share the programs of prefill
                engine["num_gpu_blocks_override"] = max(sizes) * -(
                    -longest // EngineConfig.block_size
                )
            spec = (
                None
                if rule == "plain"
                else SpeculativeConfig(
                    draft, method, num_speculative_tokens, rejection_sample_method=rule
                )
            )
            if is_real:
                llm = LLM.from_pretrained(target, speculative=spec, dtype=dtype, **engine)
            else:
                llm = random_llm(
                    model, method, spec, EngineConfig(**engine), weights, acceptance_length
                )
            for length in lengths:
                llm.engine.reset()  # the prompts are those of the length before: none is in the prefix cache
                # the last `size` prompts are the warm-up's
                inputs: list[Any] = random_prompts(llm, count + size, input_len, seed)
                if texts is not None:
                    chosen = [texts[i % len(texts)] for i in range(count)]
                    inputs = [[{"role": "user", "content": text}] for text in chosen] + inputs[
                        count:
                    ]
                params = [
                    SamplingParams(
                        temperature, seed=seed + i, max_tokens=length, ignore_eos=ignore_eos
                    )
                    for i in range(len(inputs))
                ]
                warm_up(llm, inputs, params, size)
                requests = llm.make_requests(inputs[:count], params[:count])
                found = throughput.run(llm, requests, throughput.Load(request_rate, size, seed))
                record["runs"].append(
                    {"method": rule, "concurrency": size, "output_len": length, "results": found}
                )
                print(line(record["runs"][-1]), flush=True)
                if json_file:
                    json_file.write(record)
            llm.runner.forget()  # the next engine's KV cache takes its place
        for size, length in itertools.product(sizes, lengths):
            print_table(
                table(
                    [
                        r
                        for r in record["runs"]
                        if (r["concurrency"], r["output_len"]) == (size, length)
                    ]
                )
            )


def check_models(
    model: str,
    target: str | None,
    draft: str | None,
    dataset: str | None,
    rules: list[str],
    is_real: bool,
) -> None:
    if not is_real and model not in MODELS:
        raise ConfigError(
            f"--model: expected {TRAINED[0]} or one of {', '.join(MODELS)}, got {model!r}"
        )
    if is_real and draft is None and rules != ["plain"]:
        raise ConfigError(
            f"--draft: expected a draft head for {target} (or --methods plain), got none"
        )
    if dataset is not None and not is_real:
        raise ConfigError(
            "--dataset: expected a real target, whose tokenizer reads it, got random weights"
        )


def names(text: str) -> list[str]:
    found = [part.strip() for part in text.split(",")]
    if unknown := [part for part in found if part not in METHODS]:
        raise ConfigError(
            f"--methods: expected among {', '.join(METHODS)}, got {', '.join(unknown)}"
        )
    return found


def numbers(flag: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) for part in parts):
        raise ConfigError(
            f"--{flag}: expected integers of at least 1 with commas between them, got {text!r}"
        )
    return [int(part) for part in parts]


def random_llm(
    model: str,
    method: str,
    speculative: SpeculativeConfig | None,
    config: EngineConfig,
    weights: Weights,
    acceptance_length: float,
) -> LLM:
    """An engine over random weights. The rule does all its work; then its count of accepted drafts is replaced (force_acceptance)."""
    dimensions = MODELS[model]
    target, draft = weights.get(Case(model, method))
    if speculative is None:
        return LLM((dimensions.target, target), config=config, dtype=weights.dtype)
    llm = LLM(
        (dimensions.target, target),
        (draft_config(dimensions, method), draft),
        speculative,
        config=config,
        dtype=weights.dtype,
    )
    rates = synthetic.rates_from_length(acceptance_length, speculative.num_speculative_tokens)
    llm.runner.configs.override(acceptance_rates=synthetic.conditional_rates(rates))
    return llm


def random_prompts(llm: LLM, count: int, length: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, llm.target_config.vocab_size, (count, length)).tolist()


def warm_up(llm: LLM, inputs: list[Any], params: list[SamplingParams], size: int) -> None:
    """Compile what the run needs, then run the last `size` prompts, which are not the run's: a program's first runs are slower."""
    with Console(stderr=True).status("compiling"):
        llm.warmup_for(inputs, params)
    requests: list[Request] = llm.make_requests(inputs[-size:], params[-size:])
    for request in requests:
        request.max_tokens = min(request.max_tokens, WARM_TOKENS)
    throughput.run(llm, requests, throughput.Load(math.inf, size))


# --- what is printed ------------------------------------------------------------------------------------------------------------------


def cell(value: Any) -> str:
    return (
        "-"
        if value is None
        else f"{value:,.2f}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )


def line(run: dict[str, Any]) -> str:
    found = run["results"]
    shown = (
        "benchmark duration (s)",
        "output token throughput (tok/s)",
        "duration / rounds (ms)",
        "mean TTFT (ms)",
        "mean TPOT (ms)",
    )
    figures = ", ".join(f"{name} {cell(found[name])}" for name in shown)
    return (
        f"{run['method']}, concurrency {run['concurrency']}, {run['output_len']} tokens: {figures}"
    )


def table(runs: list[dict[str, Any]]) -> Table:
    """A row a figure, a column a run: all in one table would be wider than a terminal."""
    found = Table(title="Throughput")
    found.add_column("")
    for run in runs:
        found.add_column(
            f"{run['method']} c{run['concurrency']} out {run['output_len']}", justify="right"
        )
    for name in dict.fromkeys(name for run in runs for name in run["results"]):
        found.add_row(name, *(cell(run["results"].get(name)) for run in runs))
    return found


if __name__ == "__main__":
    run_program(main)
