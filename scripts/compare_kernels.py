"""Exchange the implementation of one op after the other, and see whether acceptance moves.

python scripts/compare_kernels.py --dataset mt_bench.jsonl --dtype bfloat16 --output-json kernels.json

Drafts are judged by a target whose every norm, product and attention rounds somewhere: implementations that round in another order change
texts at ties, but must not change how well the draft's hidden states fit the target's. Two texts that part at a tie would hide that: on 80
prompts they moved acceptance by one to two points. So every run goes along the same texts, in windows of a few tokens, each of which
starts from what the kernels as chosen have written before it.
"""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from jaxspec import LLM, ConfigError, RequestOutput, SamplingParams, SpeculativeConfig
from jaxspec.config import Kernels
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.tools import report
from jaxspec.tools.cli import errors_as_sentences, run_program
from jaxspec.tools.prompts import DEMO, read_prompts

MOST_POINTS = 1.0  # of acceptance, at any position


def main(
    dataset: Annotated[
        str | None,
        typer.Option(
            help="JSON Lines in MT-bench's form, or a hub id. [default: the demo's prompts]"
        ),
    ] = None,
    target: Annotated[str | None, typer.Option(help="[default: SmolLM2-135M-Instruct]")] = None,
    draft: Annotated[
        str, typer.Option(help="Folder, name under checkpoints/ or hub id.")
    ] = "smollm2-135m-instruct-eagle3",
    num_speculative_tokens: Annotated[int, typer.Option(help="K.")] = 3,
    max_tokens: Annotated[
        int, typer.Option(help="At most this many tokens a prompt.", min=2)
    ] = 256,
    window: Annotated[
        int, typer.Option(help="Tokens after which every run is put back on the same text.", min=2)
    ] = 8,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run together.")] = 16,
    dtype: Annotated[str, typer.Option(help="bfloat16, float32 or auto.")] = "auto",
    kernels: Annotated[
        str,
        typer.Option(
            help="The implementations that are exchanged one by one for reference; see generate.py."
        ),
    ] = "auto",
    ops: Annotated[
        str | None,
        typer.Option(help="Exchange these only, with commas between them. [default: all that run]"),
    ] = None,
    output_json: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None,
) -> None:
    """Exit with 1 if an exchange moves acceptance at any position by more than one point (greedy)."""
    with errors_as_sentences():
        texts = read_prompts(dataset) if dataset is not None else list(DEMO)
        json_file = report.JsonFile(output_json) if output_json else None
        speculative = SpeculativeConfig(model=draft, num_speculative_tokens=num_speculative_tokens)
        engine: dict[str, Any] = {
            "dtype": dtype,
            "max_num_seqs": max_num_seqs,
            "batch_buckets": [max_num_seqs],
        }
        llm = LLM.from_pretrained(target, speculative=speculative, kernels=kernels, **engine)
        print(llm.describe(), flush=True)
        if llm.kernels == Kernels():
            raise ConfigError(
                "kernels: expected an op that is not the reference already, got reference for all (on this device and dtype)"
            )
        exchanged = choose(
            ops, [f.name for f in fields(Kernels) if getattr(llm.kernels, f.name) != "reference"]
        )
        chats = [[{"role": "user", "content": text}] for text in texts]
        starts = windows(llm.generate(chats, SamplingParams(0.0, max_tokens=max_tokens)), window)
        print(f"{len(starts)} windows of {window} tokens from {len(texts)} texts", flush=True)
        runs = {"as chosen": acceptance(llm, llm.kernels, starts, window)}
        for op in exchanged:
            runs[f"{op} reference"] = acceptance(
                llm, replace(llm.kernels, **{op: "reference"}), starts, window
            )
            print(
                f"{op}: moved by {points_moved(runs['as chosen'], runs[f'{op} reference']):+.2f} points",
                flush=True,
            )
        if ops is None:
            runs["all reference"] = acceptance(llm, Kernels(), starts, window)
        show(runs)
        moved = {name: points_moved(runs["as chosen"], metrics) for name, metrics in runs.items()}
        if json_file:
            figures = {
                name: metrics.to_dict() | {"points_moved": moved[name]}
                for name, metrics in runs.items()
            }
            settings = {
                "dataset": dataset,
                "max_tokens": max_tokens,
                "window": window,
                "dtype": llm.dtype.name,
                "kernels": asdict(llm.kernels),
                "ops": exchanged,
            }
            json_file.write(
                {
                    "settings": settings,
                    "num_prompts": len(texts),
                    "runs": figures,
                    **report.environment(),
                }
            )
        if any(abs(points) > MOST_POINTS for points in moved.values()):
            raise typer.Exit(1)


def choose(ops: str | None, there: list[str]) -> list[str]:
    """Of the ops that do not run the reference already, those asked for."""
    asked = there if ops is None else [op.strip() for op in ops.split(",")]
    if unknown := [op for op in asked if op not in there]:
        raise ConfigError(f"--ops: expected among {', '.join(there)}, got {', '.join(unknown)}")
    return asked


def windows(outputs: list[RequestOutput], size: int) -> list[list[int]]:
    """The token ids that each window of the texts starts from: the prompt, and what was written before it."""
    return [
        [*o.prompt_token_ids, *o.token_ids[:i]]
        for o in outputs
        for i in range(0, len(o.token_ids), size)
    ]


def acceptance(
    loaded: LLM, kernels: Kernels, starts: list[list[int]], window: int
) -> SpecDecodeMetrics:
    """The same weights and texts on these kernels."""
    named = ",".join(f"{op}={name}" for op, name in asdict(kernels).items())
    llm = loaded.on_same_weights(kernels=named)
    llm.generate(starts, SamplingParams(0.0, max_tokens=window))
    return llm.metrics


def points_moved(before: SpecDecodeMetrics, after: SpecDecodeMetrics) -> float:
    """The largest change of a position's acceptance, in points, with its sign."""
    pairs = zip(before.per_position_acceptance, after.per_position_acceptance, strict=True)
    return max((100 * (b - a) for a, b in pairs), key=abs)


def show(runs: dict[str, SpecDecodeMetrics]) -> None:
    table = Table(title="Acceptance with one op exchanged")
    for heading in ("kernels", "drafts", "length", "per position, %", "largest change, points"):
        table.add_column(heading, justify="left" if heading == "kernels" else "right")
    for name, metrics in runs.items():
        positions = " / ".join(f"{100 * rate:.1f}" for rate in metrics.per_position_acceptance)
        moved = points_moved(runs["as chosen"], metrics)
        table.add_row(
            name,
            str(metrics.num_drafts),
            f"{metrics.mean_acceptance_length:.3f}",
            positions,
            f"{moved:+.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    run_program(main)
