"""Decode a data set in the three compilation modes, and compare tokens and acceptance counts.

python scripts/compare_compilation.py --dataset mt_bench.jsonl --output-json modes.json
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from jaxspec import LLM, EngineConfig, RequestOutput, SamplingParams, SpeculativeConfig
from jaxspec.tools import losslessness, report
from jaxspec.tools.cli import DRAFT, OutputJson, Target, exact_float32, option, run_program
from jaxspec.tools.flags import Flag, Given, flags_of, given_of
from jaxspec.tools.prompts import read_prompts

MODES = ("round", "step", "eager")
COUNTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "accepted_per_position")


def main(
    speculative: Annotated[
        SpeculativeConfig,
        flags_of(SpeculativeConfig, model=DRAFT, num_speculative_tokens=Flag(5)),
    ],
    engine: Annotated[
        Given,
        given_of(
            EngineConfig,
            "max_num_seqs",
            max_model_len=Flag(help="Tokens a request may hold, prompt included."),
        ),
    ],
    dataset: Annotated[str, option("JSON Lines in MT-bench's form, or a hub id.")],
    target: Target = None,
    num_prompts: Annotated[int | None, option("At most this many prompts.", least=1)] = None,
    max_tokens: Annotated[int, option("At most this many tokens a prompt.")] = 64,
    output_json: OutputJson = None,
) -> None:
    """Compare round, step and eager compilation (greedy, float32).

    Exit with 1 unless all decode the same tokens with the same acceptance counts.
    """
    texts = read_prompts(dataset)[:num_prompts]
    json_file = report.JsonFile(output_json) if output_json else None
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    exact_float32()
    llm = LLM.from_pretrained(target, speculative=speculative, dtype="float32", **engine)
    print(llm.describe(), flush=True)
    runs = {mode: run_mode(llm, mode, texts, params) for mode in MODES}
    differences = find_differences(runs)
    try:
        if json_file:
            modes = {
                mode: run.metrics.to_dict() | {"timings": run.timings.to_dict()}
                for mode, (run, _) in runs.items()
            }
            json_file.write(
                {
                    "description": llm.describe().splitlines(),
                    "identical": not differences,
                    "differences": differences,
                    "modes": modes,
                    "settings": {
                        "dataset": dataset,
                        "num_prompts": len(texts),
                        "max_tokens": max_tokens,
                        "dtype": "float32",
                        "temperature": 0.0,
                    },
                    **report.environment(),
                }
            )
    finally:
        show(runs)
    if differences:
        print("\n".join(["the modes differ:", *differences]))
        raise typer.Exit(1)
    print(f"the modes agree in every token and count of {len(texts)} prompts")


def run_mode(
    loaded: LLM, mode: str, texts: list[str], params: SamplingParams
) -> tuple[LLM, list[RequestOutput]]:
    """Decode in another mode on the same weights; programs compile before the timing."""
    llm = loaded.on_same_weights(compilation=mode)
    chats = [[{"role": "user", "content": text}] for text in texts]
    llm.warmup_for(chats, params)
    return llm, llm.generate(chats, params, progress=True)


def find_differences(runs: dict[str, tuple[LLM, list[RequestOutput]]]) -> list[str]:
    """Return a sentence for each count, and for the first token, in which a mode differs.

    Modes are compared with the first one.
    """
    found = []
    (first, (expected, expected_outputs)), *others = runs.items()
    for mode, (engine, outputs) in others:
        for name in COUNTS:
            a, b = getattr(expected.metrics, name), getattr(engine.metrics, name)
            if a != b:
                found.append(f"{name}: {first} {a}, {mode} {b}")
        for d in losslessness.find_differences(expected_outputs, outputs)[:1]:
            tokens = f"{first} {d.speculative_token_id}, {mode} {d.plain_token_id}"
            found.append(f"prompt {d.prompt}, token {d.position}: {tokens}")
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
