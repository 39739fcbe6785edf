"""Measure how many drafts of a target and draft pair are accepted, rule by rule and K by K, beside what theory expects.

python scripts/acceptance.py --dataset mt_bench.jsonl --dataset scripts/prompts/code.jsonl --output-json acceptance.json
python scripts/acceptance.py --from-json acceptance.json --plot docs/acceptance.png --markdown docs/acceptance.md

The first data set gets every rule with every K up to --sweep; the others K = --num-speculative-tokens, greedy and probabilistic. Drafts
are the same whatever the rule: seeds are by prompt. One program a (rule, kind of drafts), compiled once, serves every K and data set.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from jaxspec import LLM, ConfigError, SamplingParams, SpeculativeConfig
from jaxspec.tools import prompts, report
from jaxspec.tools.acceptance import show
from jaxspec.tools.acceptance.rounds import Pair, Recorder, Requests
from jaxspec.tools.acceptance.summary import Case, Result
from jaxspec.tools.cli import errors_as_sentences, exact_float32, option, run_program

RULES, DRAFTS = ("strict", "probabilistic", "block"), ("probabilistic", "greedy")


def main(
    dataset: Annotated[
        list[str] | None,
        option("JSON Lines with prompts, or a hub id; several times for several kinds."),
    ] = None,
    target: Annotated[
        str | None,
        option("Folder, .gguf file or hub id of the target. [default: SmolLM2-135M-Instruct]"),
    ] = None,
    draft: Annotated[
        str, option("Folder, name under checkpoints/ or hub id of the EAGLE head.")
    ] = "smollm2-135m-instruct-eagle3",
    method: Annotated[str, option("eagle or eagle3.")] = "eagle3",
    num_speculative_tokens: Annotated[int, option("K of the table.")] = 3,
    sweep: Annotated[
        int, option("On the first data set also every K from 1 to this; 0: no other K.")
    ] = 7,
    temperature: Annotated[
        list[float] | None, option("0 is greedy; several times for several. [default: 0 and 1]")
    ] = None,
    rules: Annotated[
        str, option("Rejection rules above temperature 0, with commas between them.")
    ] = ",".join(RULES),
    drafts: Annotated[
        str, option("probabilistic (sampled), greedy, or both; above temperature 0.")
    ] = ",".join(DRAFTS),
    num_prompts: Annotated[
        int | None, option("At most this many prompts of each data set.")
    ] = None,
    max_tokens: Annotated[int, option("At most this many tokens a prompt.")] = 256,
    max_num_seqs: Annotated[int, option("Requests that run together.")] = 80,
    seed: Annotated[int, option("Of a data set's first prompt; the i-th has seed + i.")] = 0,
    dtype: Annotated[str, option("float32, bfloat16 or auto.")] = "auto",
    kernels: Annotated[str, option("reference, mosaic_gpu or auto.")] = "auto",
    check_engine: Annotated[
        bool, typer.Option("--check-engine", help="Count the greedy case by LLM.generate too.")
    ] = False,
    output_json: Annotated[
        Path | None, option("Write counts of every prompt, figures and environment to this file.")
    ] = None,
    from_json: Annotated[
        list[Path] | None, option("Measure nothing: show these files again, the first in full.")
    ] = None,
    plot: Annotated[Path | None, option("Draw the figures into this .png or .svg file.")] = None,
    markdown: Annotated[
        Path | None, option("Replace the tables between the markers of this file.")
    ] = None,
) -> None:
    """Acceptance per position, measured and expected."""
    with errors_as_sentences():
        json_file = report.JsonFile(output_json) if output_json else None
        if markdown:
            show.check_markers(markdown, show.SCRIPT)
        if from_json:
            records = [read_record(path) for path in from_json]
        else:
            if not dataset:
                raise ConfigError("--dataset: expected at least one (or --from-json), got none")
            ks = {num_speculative_tokens, *range(1, sweep + 1)}
            if min(ks) < 1:
                raise ConfigError(
                    f"--num-speculative-tokens: expected at least 1, got {num_speculative_tokens}"
                )
            sets = read_sets(dataset, num_prompts)
            chosen_rules, chosen_drafts = (
                choose("--rules", rules, RULES),
                choose("--drafts", drafts, DRAFTS),
            )
            cases = plan(
                list(sets),
                temperature or [0.0, 1.0],
                chosen_rules,
                chosen_drafts,
                num_speculative_tokens,
                sorted(ks),
            )
            if dtype == "float32":
                exact_float32()
            speculative = SpeculativeConfig(
                model=draft, method=method, num_speculative_tokens=num_speculative_tokens
            )
            engine: dict[str, Any] = {
                "dtype": dtype,
                "kernels": kernels,
                "max_num_seqs": max_num_seqs,
                "batch_buckets": [max_num_seqs],
            }
            llm = LLM.from_pretrained(target, speculative=speculative, **engine)
            print(llm.describe(), flush=True)
            settings = {
                "draft": draft,
                "method": method,
                "max_tokens": max_tokens,
                "seed": seed,
                **engine,
            }
            record = {
                "description": llm.describe().splitlines(),
                "settings": settings,
                "num_speculative_tokens": num_speculative_tokens,
            }
            record |= {"check": None, **report.environment()}
            for measured in measure(llm, sets, cases, max(ks), max_tokens, seed):
                record |= measured
                if json_file:  # after each case: a run that is cut short leaves what it has
                    json_file.write(record)
            if check_engine:
                record["check"] = compare_with_engine(llm, sets, max_tokens)
                if json_file:
                    json_file.write(record)
            records = [record]
        Console(width=220).print(*show.tables(records[0]))
        print("\n".join(show.sentences(records[0])))
        if markdown:
            show.write_section(markdown, show.SCRIPT, "\n\n".join(map(show.markdown, records)))
        if plot:
            show.draw(plot, records)


def choose(flag: str, text: str, known: Sequence[str]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not set(names) <= set(known):
        raise ConfigError(
            f"{flag}: expected some of {', '.join(known)} with commas between them, got {text!r}"
        )
    return names


def read_sets(datasets: Sequence[str], most: int | None) -> dict[str, list[str]]:
    """Prompts by the name of their data set, its file's without the suffix."""
    if most is not None and most < 1:
        raise ConfigError(f"--num-prompts: expected at least 1, got {most}")
    sets = {Path(name).stem: prompts.read_prompts(name)[:most] for name in datasets}
    if len(sets) != len(datasets):
        raise ConfigError(
            f"--dataset: expected files of different names, got {', '.join(datasets)}"
        )
    return sets


def read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        record["results"]
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(
            f"--from-json {path}: expected a file that --output-json wrote, got another"
        ) from e
    return record


def plan(
    datasets: list[str],
    temperatures: list[float],
    rules: list[str],
    drafts: list[str],
    K: int,
    ks: list[int],
) -> list[Case]:
    """The first data set: every K when greedy and with sampled drafts, K with greedy ones. The others: K, greedy and probabilistic."""
    cases = []
    for temperature, (i, name) in itertools.product(temperatures, enumerate(datasets)):
        if temperature == 0:
            cases += [
                Case(name, 0.0, "probabilistic", "greedy", k) for k in (ks if i == 0 else [K])
            ]
        elif i == 0:
            cases += [
                Case(name, temperature, r, d, k)
                for d in drafts
                for r in rules
                for k in (ks if d == "probabilistic" else [K])
            ]
        else:
            cases.append(Case(name, temperature, "probabilistic", "probabilistic", K))
    return cases


def measure(
    llm: LLM,
    sets: dict[str, list[str]],
    cases: list[Case],
    max_drafts: int,
    max_tokens: int,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """Run every case on one set of weights; after each a line on the screen, and what is known so far for the record."""
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
        llm.draft_config,
        llm.params,
        max_drafts,
        stop_token_ids=llm.eos_token_ids,
        dtype=llm.dtype,
        kernels=llm.kernels,
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
        print(
            f"{case.name}: length {accepted:.3f} in {counts.rounds.sum()} rounds, {time.perf_counter() - start:.1f} s",
            flush=True,
        )
        seconds = round(time.perf_counter() - began, 1)
        yield {"results": results, "num_programs": recorder.num_programs, "seconds": seconds}


def compare_with_engine(llm: LLM, sets: dict[str, list[str]], max_tokens: int) -> dict[str, Any]:
    """The greedy case of the first data set, counted by LLM.generate: what schedules, buckets and reads rounds is not in this script's."""
    chats = [[{"role": "user", "content": text}] for text in next(iter(sets.values()))]
    llm.reset_metrics()
    llm.generate(chats, SamplingParams(temperature=0, max_tokens=max_tokens))
    return {"engine": llm.metrics.to_dict()}


if __name__ == "__main__":
    run_program(main)
