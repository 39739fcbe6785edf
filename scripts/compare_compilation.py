"""Decode a data set in the three compilation modes and check that tokens and acceptance counts are identical.

python scripts/compare_compilation.py --dataset mt_bench.jsonl --output-json modes.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from jaxspec import LLM, RequestOutput, SamplingParams, SpeculativeConfig
from jaxspec.tools import losslessness, report
from jaxspec.tools.cli import errors_as_sentences, exact_float32, run_program
from jaxspec.tools.prompts import read_prompts

MODES = ("round", "step", "eager")
COUNTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "accepted_per_position")


def main(
    dataset: Annotated[str, typer.Option(help="JSON Lines in MT-bench's form, or a hub id.")],
    target: Annotated[str | None, typer.Option(help="[default: SmolLM2-135M-Instruct]")] = None,
    draft: Annotated[
        str, typer.Option(help="Folder, name under checkpoints/ or hub id.")
    ] = "smollm2-135m-instruct-eagle3",
    num_speculative_tokens: Annotated[int, typer.Option(help="K.")] = 5,
    num_prompts: Annotated[
        int | None, typer.Option(help="At most this many prompts.", min=1)
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="At most this many tokens a prompt.")] = 64,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run together.")] = 8,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens a request may hold, prompt included.")
    ] = None,
    output_json: Annotated[
        Path | None, typer.Option(help="Write the figures of every mode here.")
    ] = None,
) -> None:
    """Exit with 1 unless round, step and eager decode the same tokens with the same acceptance counts (greedy, float32)."""
    with errors_as_sentences():
        texts = read_prompts(dataset)[:num_prompts]
        json_file = report.JsonFile(output_json) if output_json else None
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        speculative = SpeculativeConfig(model=draft, num_speculative_tokens=num_speculative_tokens)
        exact_float32()
        llm = LLM.from_pretrained(
            target,
            speculative=speculative,
            dtype="float32",
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
        )
        print(llm.describe(), flush=True)
        runs = {mode: run_mode(llm, mode, texts, params) for mode in MODES}
        show(runs)
        differences = find_differences(runs)
        if json_file:
            settings = {
                "dataset": dataset,
                "num_prompts": len(texts),
                "max_tokens": max_tokens,
                "dtype": "float32",
                "temperature": 0.0,
            }
            modes = {
                mode: engine.metrics.to_dict() | {"timings": engine.timings.to_dict()}
                for mode, (engine, _) in runs.items()
            }
            record = {
                "identical": not differences,
                "differences": differences,
                "modes": modes,
                "settings": settings,
            }
            json_file.write(
                {"description": llm.describe().splitlines(), **record, **report.environment()}
            )
        if differences:
            print("\n".join(["the modes differ:", *differences]))
            raise typer.Exit(1)
        print(f"the modes agree in every token and count of {len(texts)} prompts")


def run_mode(
    loaded: LLM, mode: str, texts: list[str], params: SamplingParams
) -> tuple[LLM, list[RequestOutput]]:
    """The same weights, draft included, in an engine of another compilation mode; timed warm."""
    llm = loaded.on_same_weights(compilation=mode)
    chats = [[{"role": "user", "content": text}] for text in texts]
    llm.warmup_for(chats, params)
    return llm, llm.generate(chats, params, progress=True)


def find_differences(runs: dict[str, tuple[LLM, list[RequestOutput]]]) -> list[str]:
    """A sentence for every count, and for the first token, in which a mode is unlike the first one."""
    found = []
    (first, (expected, expected_outputs)), *others = runs.items()
    for mode, (engine, outputs) in others:
        for name in COUNTS:
            a, b = getattr(expected.metrics, name), getattr(engine.metrics, name)
            if a != b:
                found.append(f"{name}: {first} {a}, {mode} {b}")
        for d in losslessness.find_differences(expected_outputs, outputs)[:1]:
            found.append(
                f"prompt {d.prompt}, token {d.position}: {first} {d.speculative_token_id}, {mode} {d.plain_token_id}"
            )
    return found


def show(runs: dict[str, tuple[LLM, list[RequestOutput]]]) -> None:
    table = Table(title="Compilation modes")
    for heading in (
        "mode",
        "tokens",
        "drafts",
        "draft tokens",
        "accepted",
        "accepted per position",
        "tokens/s",
    ):
        table.add_column(heading, justify="right")
    for mode, (engine, _) in runs.items():
        m = engine.metrics
        per_position = " ".join(map(str, m.accepted_per_position))
        counts = (
            engine.timings.num_output_tokens,
            m.num_drafts,
            m.num_draft_tokens,
            m.num_accepted_tokens,
        )
        table.add_row(
            mode, *map(str, counts), per_position, f"{report.tokens_per_second(engine.timings):.1f}"
        )
    Console().print(table)


if __name__ == "__main__":
    run_program(main)
