"""Throughput and latency of the engine under load, in the rows of vLLM's benchmark.

jaxspec throughput --concurrency 1,16,64 --output-len 256     # 8B dimensions
jaxspec throughput --model smollm2 --dataset philschmid/mt-bench --temperature 1
jaxspec throughput --model tiny --num-prompts 4 --output-len 8    # on a CPU

With random weights, acceptance is forced to --acceptance-length.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from rich.table import Table

from jaxspec.config import ConfigError, EngineConfig, KVCacheDtype, SpeculativeConfig
from jaxspec.config.cache_dtype import settled_kv_cache_dtype
from jaxspec.config.quantization import Quantize, settled_quantize
from jaxspec.engine.inputs import Prompt
from jaxspec.llm import LLM
from jaxspec.loading import keep_compiled_programs
from jaxspec.sampling import synthetic
from jaxspec.sampling.params import SamplingParams
from jaxspec.tools import prompts, report
from jaxspec.tools.benchmark import throughput
from jaxspec.tools.benchmark.cases import Case
from jaxspec.tools.benchmark.dimensions import MODELS, draft_config
from jaxspec.tools.benchmark.machine import describe, environment, measure_rates, print_table
from jaxspec.tools.benchmark.workload import Weights
from jaxspec.tools.cli import DEFAULT_DRAFT, OutputJson, command, dtype_of
from jaxspec.tools.flags import Flag, Given, flag, given_of

RULES = ("plain", "strict", "probabilistic", "block")
RANDOM_METHOD = "eagle3"
TRAINED = "smollm2"  # the model that comes with its head
WARM_TOKENS = 8


@dataclass(frozen=True)
class PairOptions:
    """The target and its draft: random weights of named dimensions, or real ones."""

    model: str = flag(
        "llama-3-8b",
        f"Random weights at the dimensions of {', '.join(MODELS)}; "
        f"{TRAINED}: the real target and head.",
    )
    target: str | None = flag(None, "A real target instead: folder, .gguf file or hub id.")
    draft: str | None = flag(None, "Its head: folder, name under checkpoints/ or hub id.")
    method: str | None = flag(
        None,
        "As SpeculativeConfig names it. "
        f"[default: the head's; {RANDOM_METHOD} with random weights]",
    )
    num_speculative_tokens: int | None = flag(
        None, "K, the draft tokens a round. [default: the head's own number or block, else 3]"
    )
    adaptive: bool = flag(False, "Give each request as many drafts, up to K, as pay.")
    fallback_method: str | None = flag(
        None, "ngram or suffix: drafts for a request while its head's drafts do not pay."
    )
    draft_quantize: Quantize | None = flag(
        None, "Quantise a real head's plain weights while they load: fp8, fp8-block or int4."
    )
    draft_kv_cache_dtype: KVCacheDtype | None = flag(
        None, "Dtype of the draft's keys and values. [default: --kv-cache-dtype]"
    )
    acceptance_length: float = flag(2.56, "Forced with random weights; the bonus token included.")
    dtype: str = flag("auto", "bfloat16, float32, or auto: bfloat16 on a GPU.")

    @property
    def is_real(self) -> bool:
        """Whether the weights are read from files."""
        return self.target is not None or self.model == TRAINED

    @property
    def head(self) -> str | None:
        """The draft head's folder, name or hub id; None for random weights."""
        own = DEFAULT_DRAFT if self.model == TRAINED and self.target is None else None
        return self.draft or own

    @property
    def random_method(self) -> str:
        """The method of a draft of random weights."""
        return self.method or RANDOM_METHOD

    def speculative(self, rule: str) -> SpeculativeConfig | None:
        """Return what drafts under this rule; None for plain decoding."""
        if rule == "plain":
            return None
        return SpeculativeConfig(
            self.head,
            self.method if self.is_real else self.random_method,
            self.num_speculative_tokens,
            rejection_sample_method=rule,
            adaptive=self.adaptive,
            fallback_method=self.fallback_method,
            draft_quantize=self.draft_quantize,
            draft_kv_cache_dtype=self.draft_kv_cache_dtype,
        )

    def load(self, rule: str, weights: Weights, engine: Mapping[str, Any]) -> LLM:
        """Return an engine with these fields of EngineConfig, on the weights if they are random."""
        speculative = self.speculative(rule)
        if self.is_real:
            return LLM.from_pretrained(
                self.target, speculative=speculative, dtype=self.dtype, **engine
            )
        return random_llm(self, speculative, EngineConfig(**engine), weights)


@dataclass(frozen=True)
class GridOptions:
    """Lists with commas; every combination is a run."""

    methods: tuple[str, ...] = flag(
        ("plain", "strict", "probabilistic"),
        f"Rules to compare, plain among them: {', '.join(RULES)}.",
        among=RULES,
    )
    concurrency: tuple[int, ...] = flag(
        (1, 8, 16, 64),
        "Requests at a time: a run for each.",
        "--concurrency",
        "--max-concurrency",
        least=1,
    )
    output_len: tuple[int, ...] = flag((256,), "Tokens to generate: a run for each.", least=1)


@dataclass(frozen=True)
class LoadOptions:
    """The requests of a run."""

    input_len: int = flag(136, "Tokens of each random prompt.", least=1)
    dataset: str | None = flag(None, "Prompts from a file or the hub instead; needs a real target.")
    num_prompts: int | None = flag(
        None, "Requests a run. [default: as many as run at a time]", least=1
    )
    request_rate: float = flag(math.inf, "Requests a second, Poisson; inf: all at once.")
    ignore_eos: bool = flag(True, "Go on to output-len.", "--ignore-eos/--stop-at-eos")
    temperature: float = flag(0.0, "0 is greedy.")
    seed: int = flag(0, "Seed of prompts, arrivals and sampling.", least=0)

    def inputs(self, llm: LLM, texts: Sequence[str] | None, count: int, size: int) -> list[Prompt]:
        """Return the prompts of a run, and `size` random ones for its warm-up at the end."""
        inputs: list[Prompt] = [*random_prompts(llm, count + size, self.input_len, self.seed)]
        if texts is not None:
            chosen = [texts[i % len(texts)] for i in range(count)]
            inputs[:count] = [[{"role": "user", "content": text}] for text in chosen]
        return inputs

    def sampling(self, count: int, length: int) -> list[SamplingParams]:
        """Return the parameters of so many requests, each with a seed of its own."""
        return [
            SamplingParams(
                self.temperature,
                seed=self.seed + i,
                max_tokens=length,
                ignore_eos=self.ignore_eos,
            )
            for i in range(count)
        ]


def main(
    pair: PairOptions,
    grid: GridOptions,
    load: LoadOptions,
    engine: Annotated[
        Given,
        given_of(
            EngineConfig,
            "rounds_per_step",
            "kv_cache_dtype",
            "quantize",
            "tensor_parallel_size",
            "data_parallel_size",
            "enable_expert_parallel",
            max_model_len=Flag(
                help="Tokens a request may hold. [default: what prompts and outputs need]"
            ),
            max_num_batched_tokens=Flag(
                8192, "Tokens of one prefill call, as in the recorded runs of vLLM."
            ),
            enable_prefix_caching=Flag(True, names=("--prefix-caching/--no-prefix-caching",)),
        ),
    ],
    output_json: OutputJson = None,
) -> None:
    """Run a load for every rule, concurrency and output length, and print vLLM's table.

    Programs are compiled before the clock starts. The file is written after every run.
    """
    check(pair, grid, load, engine)
    weights = Weights(dtype_of(pair.dtype))
    json_file = report.JsonFile(output_json) if output_json else None
    keep_compiled_programs()
    texts = prompts.read_prompts(load.dataset) if load.dataset is not None else None
    settings = vars(pair) | vars(load) | {"draft": pair.head, "rounds_per_step": None, **engine}
    settings["request_rate"] = str(load.request_rate)  # JSON has no infinity
    if pair.is_real:
        settings["acceptance_length"] = None
    record: dict[str, Any] = environment() | measure_rates() | {"settings": settings, "runs": []}
    print(describe(record), flush=True)
    for rule, size in itertools.product(grid.methods, grid.concurrency):
        count = load.num_prompts or size
        llm = pair.load(rule, weights, engine_of(engine, pair, grid, load, min(size, count)))
        if llm.speculative is not None:  # what None stands for
            settings["method"] = llm.speculative.method
            settings["num_speculative_tokens"] = llm.speculative.max_k
        for length in grid.output_len:
            llm.serving.reset()  # the next length's prompts are the same: no prefix may be cached
            inputs = load.inputs(llm, texts, count, size)
            params = load.sampling(len(inputs), length)
            warm_up(llm, inputs, params, size)
            requests = llm.make_requests(inputs[:count], params[:count])
            arrivals = throughput.Load(load.request_rate, size, load.seed)
            found = throughput.run(llm, requests, arrivals)
            record["runs"].append(
                {"method": rule, "concurrency": size, "output_len": length, "results": found}
            )
            if json_file:
                json_file.write(record)
            print(line(record["runs"][-1]), flush=True)
        for each in llm.engines:
            each.runner.resident.forget()  # the next engine's KV cache takes its place
    for size, length in itertools.product(grid.concurrency, grid.output_len):
        of_table = [
            r for r in record["runs"] if (r["concurrency"], r["output_len"]) == (size, length)
        ]
        print_table(table(of_table))


def check(pair: PairOptions, grid: GridOptions, load: LoadOptions, engine: Given) -> None:
    """Raise ConfigError for options that do not go together."""
    if not load.request_rate > 0:  # nan is neither
        raise ConfigError(
            f"--request-rate: expected requests a second, or inf, got {load.request_rate}"
        )
    if not pair.is_real and pair.model not in MODELS:
        raise ConfigError(
            f"--model: expected {TRAINED} or one of {', '.join(MODELS)}, got {pair.model!r}"
        )
    if pair.is_real and pair.head is None and grid.methods != ("plain",):
        raise ConfigError(
            f"--draft: expected a draft head for {pair.target} (or --methods plain), got none"
        )
    if engine.get("quantize") is not None and not pair.is_real:
        raise ConfigError(
            "--quantize: expected a real target, got random weights, whose form is part of --model"
        )
    settled_quantize("--draft-quantize", pair.draft_quantize)
    if pair.draft_kv_cache_dtype is not None:
        settled_kv_cache_dtype("--draft-kv-cache-dtype", pair.draft_kv_cache_dtype)
    if pair.draft_quantize is not None and not pair.is_real:
        raise ConfigError("--draft-quantize: expected a real head, got random weights")
    if load.dataset is not None and not pair.is_real:
        raise ConfigError(
            "--dataset: expected a real target, whose tokenizer reads it, got random weights"
        )


def engine_of(
    given: Given, pair: PairOptions, grid: GridOptions, load: LoadOptions, batch: int
) -> dict[str, Any]:
    """Return the fields of EngineConfig for runs of one batch size."""
    needed = load.input_len + max(grid.output_len) if load.dataset is None else 2048
    fields = {"max_model_len": needed, **given, "max_num_seqs": batch, "batch_buckets": (batch,)}
    if not pair.is_real:  # caches of one size for every concurrency: they share prefill's programs
        pages = -(-fields["max_model_len"] // EngineConfig.block_size)
        fields["num_gpu_blocks_override"] = max(grid.concurrency) * pages
    return fields


def random_llm(
    pair: PairOptions,
    speculative: SpeculativeConfig | None,
    config: EngineConfig,
    weights: Weights,
) -> LLM:
    """Return an engine over random weights.

    The rule does all its work; then its count of accepted drafts is replaced by the forced one.
    """
    dimensions = MODELS[pair.model]
    target, draft = weights.get(Case(pair.model, pair.random_method))
    if speculative is None:
        return LLM((dimensions.target, target), config=config, dtype=weights.dtype)
    llm = LLM(
        (dimensions.target, target),
        (draft_config(dimensions, pair.random_method), draft),
        speculative,
        config=config,
        dtype=weights.dtype,
    )
    assert llm.speculative is not None
    rates = synthetic.rates_from_length(pair.acceptance_length, llm.speculative.max_k)
    for engine in llm.engines:
        engine.runner.configs.override(acceptance_rates=synthetic.conditional_rates(rates))
    return llm


def random_prompts(llm: LLM, count: int, length: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, llm.target_config.vocab_size, (count, length)).tolist()


def warm_up(llm: LLM, inputs: list[Prompt], params: list[SamplingParams], size: int) -> None:
    """Compile what the run needs, then run the last `size` prompts: first runs are slower.

    The run itself does not have these prompts.
    """
    llm.warmup_for(inputs, params, progress=True)
    requests = llm.make_requests(inputs[-size:], params[-size:])
    for request in requests:
        request.max_tokens = min(request.max_tokens, WARM_TOKENS)
    throughput.run(llm, requests, throughput.Load(math.inf, size))


# --- what is printed ---


def cell(value: Any) -> str:
    """Return a figure as it is printed; None as a dash."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


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
    about = f"{run['method']}, concurrency {run['concurrency']}, {run['output_len']} tokens"
    return f"{about}: {figures}"


def table(runs: list[dict[str, Any]]) -> Table:
    """Return a table with a row for each figure and a column for each run."""
    found = Table(title="Throughput")
    found.add_column("")
    for run in runs:
        found.add_column(
            f"{run['method']} c{run['concurrency']} out {run['output_len']}", justify="right"
        )
    for name in dict.fromkeys(name for run in runs for name in run["results"]):
        found.add_row(name, *(cell(run["results"].get(name)) for run in runs))
    return found


app = command(main)
