"""Compare greedy tokens on several numbers of devices, and speculative with plain decoding on each.

python scripts/compare_devices.py --dataset mt_bench.jsonl --tensor-parallel-size 1,2
python scripts/compare_devices.py --model llama-3-8b --dtype bfloat16       # random weights
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from jaxspec import LLM, EngineConfig, RequestOutput, SamplingParams, SpeculativeConfig
from jaxspec.config import ConfigError
from jaxspec.engine.inputs import Prompt
from jaxspec.loading import keep_compiled_programs
from jaxspec.tools import report
from jaxspec.tools.benchmark.cases import Case
from jaxspec.tools.benchmark.dimensions import MODELS, draft_config
from jaxspec.tools.benchmark.workload import Weights
from jaxspec.tools.cli import (
    DRAFT,
    Dtype,
    OutputJson,
    Target,
    dtype_of,
    exact_float32,
    one_of,
    run_program,
)
from jaxspec.tools.flags import Flag, Given, flag, flags_of, given_of
from jaxspec.tools.losslessness import find_differences
from jaxspec.tools.prompts import DEMO, read_prompts

SHORTEST, LONGEST = 16, 199  # tokens of random prompts
FIRST, LAST = 8, 3  # positions that are printed
Outputs = Sequence[RequestOutput]


@dataclass(frozen=True)
class Options:
    """The numbers of devices, the model if its weights are random, and the prompts."""

    tensor_parallel_size: tuple[int, ...] = flag(
        (1, 2), "Numbers of devices; each is compared with the first.", least=1
    )
    model: str | None = flag(
        None, "Random weights at the dimensions of jaxspec bench's --model, in place of --target."
    )
    dataset: str | None = flag(
        None,
        "JSON Lines in MT-bench's form, or a hub id. [default: the demo's prompts; for --model "
        "random tokens]",
    )
    num_prompts: int = flag(80, "Random prompts; of a data set, at most this many.", least=1)
    max_tokens: int = flag(64, "At most this many tokens a prompt.", least=1)


@dataclass(frozen=True)
class Pair:
    """Two decodings of the same prompts.

    positions: of the first difference of each prompt that has one, ascending; generated tokens
        count from 0
    """

    name: str
    num_prompts: int
    positions: list[int]

    @classmethod
    def of(cls, name: str, outputs: Outputs, others: Outputs) -> Pair:
        found = find_differences(outputs, others)
        return cls(name, len(outputs), sorted(each.position for each in found))

    @property
    def equal(self) -> str:
        return f"{self.num_prompts - len(self.positions)} of {self.num_prompts}"


def main(
    options: Options,
    speculative: Annotated[
        SpeculativeConfig,
        flags_of(SpeculativeConfig, "method", model=DRAFT, num_speculative_tokens=Flag(3)),
    ],
    engine: Annotated[
        Given,
        given_of(
            EngineConfig,
            "max_model_len",
            max_num_seqs=Flag(16),
            enable_expert_parallel=Flag(False),
        ),
    ],
    target: Target = None,
    dtype: Dtype = "auto",
    output_json: OutputJson = None,
) -> None:
    """Print in how many prompts the tokens of each two decodings are equal.

    In float32, exit with 1 if more than 1 in 64 prompts differ (and more than one).
    """
    check(options, target)
    prompts, sizes = make_prompts(options), dict.fromkeys(options.tensor_parallel_size)
    json_file = report.JsonFile(output_json) if output_json else None
    is_exact = dtype_of(dtype) == "float32"
    if is_exact:
        exact_float32()
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    decoded: dict[tuple[int, str], Outputs] = {}
    lengths: dict[int, float] = {}
    for size in sizes:
        settings = {**engine, "tensor_parallel_size": size}
        if options.model is None:
            llm = LLM.from_pretrained(target, speculative=speculative, dtype=dtype, **settings)
        else:
            llm = with_random_weights(options.model, speculative, settings, dtype)
        print(llm.describe(), flush=True)
        llm.warmup_for(prompts, params, progress=True)  # generate would compile one by one
        decoded[size, "speculative"] = llm.generate(prompts, params)
        lengths[size] = llm.metrics.mean_acceptance_length
        llm = llm.on_same_weights(speculative=False)
        llm.warmup_for(prompts, params, progress=True)
        decoded[size, "plain"] = llm.generate(prompts, params)
        del llm
        gc.collect()  # the device may not hold the next one's weights beside these
    pairs = compare(decoded, list(sizes))
    try:
        if json_file:
            json_file.write(
                {
                    "settings": {
                        **vars(options),
                        **engine,
                        "target": target,
                        "draft": speculative.model if options.model is None else None,
                        "num_speculative_tokens": speculative.num_speculative_tokens,
                        "dtype": dtype,
                    },
                    "pairs": [{**vars(pair), "equal": pair.equal} for pair in pairs],
                    "acceptance_lengths": lengths,
                    **report.environment(),
                }
            )
    finally:
        show(pairs, lengths, Console())
    if is_exact and any(len(p.positions) > max(1, p.num_prompts // 64) for p in pairs):
        raise typer.Exit(1)


def check(options: Options, target: str | None) -> None:
    """Raise ConfigError for options that do not go together."""
    if options.model is None:
        return
    one_of("--model", options.model, [*MODELS])
    for name, value in (("--target", target), ("--dataset", options.dataset)):
        if value is not None:
            raise ConfigError(f"{name}: expected it without --model, got {value}")


def make_prompts(options: Options) -> list[Prompt]:
    """Return chats of the data set, or random tokens for a model with random weights."""
    if options.model is None:
        texts = DEMO if options.dataset is None else read_prompts(options.dataset)
        return [[{"role": "user", "content": text}] for text in texts[: options.num_prompts]]
    rng, vocab = np.random.default_rng(0), MODELS[options.model].target.vocab_size
    lengths = rng.integers(SHORTEST, LONGEST + 1, options.num_prompts)
    return [rng.integers(0, vocab, length).tolist() for length in lengths]


def with_random_weights(
    model: str, speculative: SpeculativeConfig, settings: Given, dtype: str
) -> LLM:
    """Return an LLM whose weights are the same numbers on any number of devices.

    They are drawn on one device, which has to hold them all, and then placed: drawn on several
    devices, the same random numbers would be another model's, in the order of the devices' pieces.
    """
    keep_compiled_programs()
    dimensions, method = MODELS[model], speculative.method or "eagle3"
    weights = Weights(dtype_of(dtype))
    target, draft = weights.get(Case(model, method))
    return LLM(
        (dimensions.target, target),
        (draft_config(dimensions, method), draft),
        replace(speculative, model=None, method=method),
        config=EngineConfig(**settings),
        dtype=weights.dtype,
    )


def compare(decoded: dict[tuple[int, str], Outputs], sizes: Sequence[int]) -> list[Pair]:
    """Return speculative against plain decoding, and each number of devices against the first."""
    first, *others = sizes
    pairs = [
        Pair.of(
            f"{named(size)}, speculative / plain",
            decoded[size, "speculative"],
            decoded[size, "plain"],
        )
        for size in (*others, first)
    ]
    return pairs + [
        Pair.of(f"{named(size)} / {first}, {kind}", decoded[size, kind], decoded[first, kind])
        for size in others
        for kind in ("speculative", "plain")
    ]


def named(size: int) -> str:
    return "1 device" if size == 1 else f"{size} devices"


def shortened(positions: Sequence[int]) -> str:
    """Return the first and the last positions."""
    if len(positions) <= FIRST + LAST:
        return ", ".join(map(str, positions)) or "-"
    shown = [*positions[:FIRST], "...", *positions[-LAST:]]
    return ", ".join(map(str, shown))


def show(pairs: Sequence[Pair], lengths: dict[int, float], console: Console) -> None:
    """Print the table."""
    table = Table("pair", "equal", "positions of first differences")
    for pair in pairs:
        table.add_row(pair.name, pair.equal, shortened(pair.positions))
    console.print(table)
    of_each = ", ".join(f"{length:.2f} on {named(size)}" for size, length in lengths.items())
    console.print(f"mean acceptance length: {of_each}")


if __name__ == "__main__":
    run_program(main)
