"""Measure how many drafts of a pair are accepted, by rule and K, beside what theory expects.

jaxspec acceptance --dataset mt_bench.jsonl --output-json acceptance.json
jaxspec acceptance --from-json acceptance.json --markdown docs/acceptance.md

Tables and files tell short prompts from long ones (jaxspec/tools/acceptance/lengths.py).

The first data set gets every rule with every K up to --sweep. The others get
K = --num-speculative-tokens, greedy and probabilistic. Drafts are the same whatever the rule:
seeds are by prompt. One program for each rule and kind of drafts serves every K and data set.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from jaxspec import drafts
from jaxspec.config import ConfigError, EngineConfig, SpeculativeConfig
from jaxspec.drafts.families import layered
from jaxspec.llm import LLM
from jaxspec.sampling.params import SamplingParams
from jaxspec.tools import prompts, report
from jaxspec.tools.acceptance import show
from jaxspec.tools.acceptance.rounds import Pair, Recorder, Requests
from jaxspec.tools.acceptance.summary import Case, Result
from jaxspec.tools.cli import (
    DRAFT,
    Dtype,
    Target,
    command,
    exact_float32,
)
from jaxspec.tools.flags import Flag, Given, flag, flags_of, given_of

# What reading a file of another kind, or a damaged one, may raise.
WRONG_RECORD = (
    OSError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
RULES, DRAFTS = ("strict", "probabilistic", "block"), ("probabilistic", "greedy")


@dataclass(frozen=True)
class TextOptions:
    """The prompts, and the texts that the target writes after them."""

    dataset: list[str] | None = flag(
        None, "JSON Lines with prompts, or a hub id; several times for several kinds."
    )
    num_prompts: int | None = flag(None, "At most this many prompts of each data set.")
    max_tokens: int = flag(256, "At most this many tokens a prompt.")
    seed: int = flag(0, "Seed of a data set's first prompt; the i-th has seed + i.")

    def check(self) -> None:
        """Raise ConfigError for numbers that cannot be."""
        if self.max_tokens < 1:
            raise ConfigError(f"--max-tokens: expected at least 1, got {self.max_tokens}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed: expected an integer from 0 to 2^63 - 1, got {self.seed}")


@dataclass(frozen=True)
class GridOptions:
    """The temperatures, rules and numbers of draft tokens that are measured."""

    sweep: int = flag(7, "On the first data set also every K from 1 to this; 0: no other K.")
    temperature: list[float] | None = flag(
        None, "0 is greedy; several times for several. [default: 0 and 1]"
    )
    rules: tuple[str, ...] = flag(
        RULES, "Rejection rules above temperature 0, with commas between them.", among=RULES
    )
    drafts: tuple[str, ...] = flag(
        DRAFTS, "probabilistic (sampled), greedy, or both; above temperature 0.", among=DRAFTS
    )
    check_engine: bool = flag(False, "Count the greedy case by LLM.generate too.")


@dataclass(frozen=True)
class OutputOptions:
    """The files to write, and records to show in place of measuring."""

    output_json: Path | None = flag(
        None, "Write counts of every prompt, figures and environment to this file."
    )
    from_json: list[Path] | None = flag(
        None, "Measure nothing: show these files again, the first in full."
    )
    plot: Path | None = flag(None, "Draw the figures into this .png or .svg file.")
    markdown: Path | None = flag(None, "Replace the tables between the markers of this file.")


def main(
    texts: TextOptions,
    speculative: Annotated[
        SpeculativeConfig,
        flags_of(
            SpeculativeConfig,
            "method",
            "num_speculative_tokens",
            "draft_sliding_window",
            "draft_quantize",
            "draft_kv_cache_dtype",
            model=DRAFT,
        ),
    ],
    grid: GridOptions,
    engine: Annotated[
        Given,
        given_of(
            EngineConfig,
            "kv_cache_dtype",
            "quantize",
            max_num_seqs=Flag(80),
            kernels=Flag("auto"),
        ),
    ],
    output: OutputOptions,
    target: Target = None,
    dtype: Dtype = "auto",
) -> None:
    """Measure acceptance per position, and compare it with what theory expects."""
    texts.check()
    if grid.sweep < 0:
        raise ConfigError(f"--sweep: expected at least 0, got {grid.sweep}")
    json_file = None
    if output.output_json:
        if output.from_json:
            raise ConfigError(
                "--output-json: expected none with --from-json, which measures nothing"
            )
        json_file = report.JsonFile(output.output_json, texts.dataset or ())
    if output.markdown:
        show.check_markers(output.markdown, show.SCRIPT)
    if output.plot:
        show.check_plot(output.plot)
    if output.from_json:
        records = [read_record(path) for path in output.from_json]
    else:
        settings = {"dtype": dtype, **engine, "batch_buckets": [engine["max_num_seqs"]]}
        records = [run(texts, speculative, grid, target, settings, json_file)]
    try:
        if output.markdown:
            sections = "\n\n".join(map(show.markdown, records))
            show.write_section(output.markdown, show.SCRIPT, sections)
        if output.plot:
            show.draw(output.plot, records)
    finally:
        Console(width=220).print(*show.tables(records[0]))
        print("\n".join(show.sentences(records[0])))


def run(
    texts: TextOptions,
    speculative: SpeculativeConfig,
    grid: GridOptions,
    target: str | None,
    engine: Mapping[str, Any],
    json_file: report.JsonFile | None,
) -> dict[str, Any]:
    """Load the pair, measure every case, and return the record, which the file holds too.

    engine: keywords of LLM.from_pretrained.
    """
    if not texts.dataset:
        raise ConfigError("--dataset: expected at least one (or --from-json), got none")
    sets = read_sets(texts.dataset, texts.num_prompts)
    if engine["dtype"] == "float32":
        exact_float32()
    llm = LLM.from_pretrained(target, speculative=speculative, **engine)
    assert llm.speculative is not None and llm.draft_config is not None
    K, most = llm.speculative.max_k, drafts.block_capacity(llm.draft_config)
    ks = sorted({K, *range(1, (grid.sweep if most is None else min(grid.sweep, most)) + 1)})
    cases = plan(list(sets), grid, K, ks)
    print(llm.describe(), flush=True)
    record: dict[str, Any] = {
        "description": llm.describe().splitlines(),
        "settings": {
            "draft": speculative.model,
            "method": llm.speculative.method,
            "draft_sliding_window": speculative.draft_sliding_window,
            "draft_quantize": speculative.draft_quantize,
            "draft_kv_cache_dtype": speculative.draft_kv_cache_dtype,
            "max_tokens": texts.max_tokens,
            "seed": texts.seed,
            **engine,
            "dtype": llm.dtype.name,
        },
        "num_speculative_tokens": K,
        "check": None,
        "date": time.strftime("%Y-%m-%d"),
        "command": sys.argv[1:],
        **report.environment(),
    }
    for measured in measure(llm, sets, cases, max(ks), texts.max_tokens, texts.seed):
        record |= measured
        if json_file:  # after each case: a run that is cut short leaves what it has
            json_file.write(record)
    if grid.check_engine:
        record["check"] = compare_with_engine(llm, sets, texts.max_tokens)
        if json_file:
            json_file.write(record)
    return record


def read_sets(datasets: Sequence[str], most: int | None) -> dict[str, list[str]]:
    """Return prompts by the name of their data set: its file's without the suffix."""
    if most is not None and most < 1:
        raise ConfigError(f"--num-prompts: expected at least 1, got {most}")
    sets = {Path(name).stem: prompts.read_prompts(name)[:most] for name in datasets}
    if len(sets) != len(datasets):
        raise ConfigError(
            f"--dataset: expected files of different names, got {', '.join(datasets)}"
        )
    return sets


def read_record(path: Path) -> dict[str, Any]:
    """Return what a run wrote, this version's or 0.1.0's; ConfigError for anything else."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not show.results(record):
            raise ValueError("no results")
        show.tables(record)
        show.markdown(record)
    except WRONG_RECORD as e:
        got = e.strerror if isinstance(e, OSError) and e.strerror else "another"
        if isinstance(e, KeyError):
            got = f"another, without the key {e}"
        raise ConfigError(
            f"--from-json {path}: expected a file that --output-json wrote, got {got}"
        ) from e
    return record


def plan(datasets: Sequence[str], grid: GridOptions, K: int, ks: Sequence[int]) -> list[Case]:
    """Return the cases to measure.

    The first data set: every K with greedy decoding and with sampled drafts, K alone with greedy
    drafts. The others: K alone, greedy decoding and the probabilistic rule.
    """
    cases = []
    for temperature, (i, name) in itertools.product(
        grid.temperature or (0.0, 1.0), enumerate(datasets)
    ):
        if temperature == 0:
            cases += [
                Case(name, 0.0, "probabilistic", "greedy", k) for k in (ks if i == 0 else [K])
            ]
        elif i == 0:
            cases += [
                Case(name, temperature, r, d, k)
                for d in grid.drafts
                for r in grid.rules
                for k in (ks if d == "probabilistic" else [K])
            ]
        else:
            cases.append(Case(name, temperature, "probabilistic", "probabilistic", K))
    return cases


def measure(
    llm: LLM,
    sets: dict[str, list[str]],
    cases: list[Case],
    max_k: int,
    max_tokens: int,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """Run every case on one set of weights.

    Prints a line after each case, and yields the results so far for the record.
    """
    began = time.perf_counter()
    if llm.tokenizer is None:
        raise ConfigError("--target: expected a folder with a tokenizer, got none")
    encoded = {
        name: [llm.tokenizer.encode_chat([{"role": "user", "content": t}]) for t in texts]
        for name, texts in sets.items()
    }
    longest = max(len(ids) for prompts in encoded.values() for ids in prompts)
    pair = Pair(
        llm.target_config,
        layered(llm.draft_config),
        llm.params,
        max_k,
        stop_token_ids=llm.eos_token_ids,
        dtype=llm.dtype,
        kv_cache_dtype=llm.config.kv_cache_dtype,
        draft_cache_dtype=llm.draft_cache_dtype,
        ops=llm.kernels,
    )
    recorder = Recorder(pair, max_num_seqs=llm.config.max_num_seqs, max_tokens=longest + max_tokens)
    for case in cases:
        recorder.announce(case.rule, case.drafts, sampled=case.temperature > 0)
    results: list[dict[str, Any]] = []
    for case in cases:
        start = time.perf_counter()
        requests = Requests(encoded[case.dataset], case.temperature, max_tokens, seed)
        counts, _ = recorder.run(requests, case.rule, case.drafts, case.num_speculative_tokens)
        results.append(Result(case, counts).to_dict())
        accepted = 1 + counts.accepted.sum() / counts.rounds.sum()
        figures = f"length {accepted:.3f} in {counts.rounds.sum()} rounds"
        print(f"{case.name}: {figures}, {time.perf_counter() - start:.1f} s", flush=True)
        seconds = round(time.perf_counter() - began, 1)
        yield {"results": results, "num_programs": recorder.num_programs, "seconds": seconds}


def compare_with_engine(llm: LLM, sets: dict[str, list[str]], max_tokens: int) -> dict[str, Any]:
    """Count the greedy case of the first data set by LLM.generate.

    The engine schedules, batches and reads rounds by code that this script's own rounds lack.
    """
    chats = [[{"role": "user", "content": text}] for text in next(iter(sets.values()))]
    llm.reset_metrics()
    llm.generate(chats, SamplingParams(temperature=0, max_tokens=max_tokens))
    return {"engine": llm.metrics.to_dict()}


app = command(main)
