"""Exchange the implementation of one op after the other, and see whether acceptance moves.

python scripts/compare_kernels.py --dataset mt_bench.jsonl --dtype bfloat16

Implementations that round in another order change texts where the target's logits tie. They must
not change how well the draft's hidden states fit the target's. Two texts that part at a tie would
hide that: on 80 prompts they moved acceptance by one to two points. So every run follows the same
texts, in windows of a few tokens. Each window starts from the text of the kernels as chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from jaxspec import LLM, ConfigError, EngineConfig, RequestOutput, SamplingParams, SpeculativeConfig
from jaxspec.config import Ops
from jaxspec.engine.inputs import Prompt
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.tools import report
from jaxspec.tools.cli import DRAFT, Dtype, OutputJson, Target, run_program
from jaxspec.tools.flags import Flag, Given, flag, flags_of, given_of, split_names
from jaxspec.tools.prompts import DEMO, read_prompts

MOST_POINTS = 1.0  # of acceptance, at any position


@dataclass(frozen=True)
class WindowOptions:
    """The texts, their windows, and the ops to exchange."""

    dataset: str | None = flag(
        None, "JSON Lines in MT-bench's form, or a hub id. [default: the demo's prompts]"
    )
    max_tokens: int = flag(256, "At most this many tokens a prompt.", least=2)
    window: int = flag(8, "Tokens after which every run returns to the same text.", least=2)
    ops: str | None = flag(
        None, "Exchange these only, with commas between them. [default: all that run]"
    )


def main(
    options: WindowOptions,
    speculative: Annotated[
        SpeculativeConfig, flags_of(SpeculativeConfig, "num_speculative_tokens", model=DRAFT)
    ],
    engine: Annotated[
        Given,
        given_of(
            EngineConfig,
            max_num_seqs=Flag(16),
            kernels=Flag(
                "auto", "Implementations to exchange one by one for reference; see generate.py."
            ),
        ),
    ],
    target: Target = None,
    dtype: Dtype = "auto",
    output_json: OutputJson = None,
) -> None:
    """Measure acceptance with one op exchanged after the other (greedy).

    Exit with 1 if an exchange moves acceptance at any position by more than one point.
    """
    texts = read_prompts(options.dataset) if options.dataset is not None else list(DEMO)
    json_file = report.JsonFile(output_json) if output_json else None
    buckets = [engine["max_num_seqs"]]
    llm = LLM.from_pretrained(
        target, speculative=speculative, dtype=dtype, batch_buckets=buckets, **engine
    )
    print(llm.describe(), flush=True)
    if llm.kernels == Ops():
        raise ConfigError(
            "kernels: expected an op that is not the reference already, "
            "got reference for all (on this device and dtype)"
        )
    others = [op for op, name in llm.kernels.names().items() if name != "reference"]
    ops = others if options.ops is None else split_names("--ops", options.ops, others)
    chats: list[Prompt] = [[{"role": "user", "content": text}] for text in texts]
    params = SamplingParams(0.0, max_tokens=options.max_tokens)
    starts = windows(llm.generate(chats, params), options.window)
    print(f"{len(starts)} windows of {options.window} tokens from {len(texts)} texts", flush=True)
    runs = exchange(llm, ops, starts, options.window)
    if options.ops is None:
        runs["all reference"] = acceptance(llm, Ops(), starts, options.window)
    moved = {name: points_moved(runs["as chosen"], metrics) for name, metrics in runs.items()}
    try:
        if json_file:
            figures = {
                name: metrics.to_dict() | {"points_moved": moved[name]}
                for name, metrics in runs.items()
            }
            settings = {
                "dataset": options.dataset,
                "max_tokens": options.max_tokens,
                "window": options.window,
                "dtype": llm.dtype.name,
                "kernels": llm.kernels.names(),
                "ops": list(ops),
            }
            json_file.write(
                {
                    "settings": settings,
                    "num_prompts": len(texts),
                    "runs": figures,
                    **report.environment(),
                }
            )
    finally:
        show(runs)
    if any(abs(points) > MOST_POINTS for points in moved.values()):
        raise typer.Exit(1)


def exchange(
    llm: LLM, ops: Sequence[str], starts: list[list[int]], window: int
) -> dict[str, SpecDecodeMetrics]:
    """Measure acceptance with the kernels as chosen, and with the reference of each op."""
    runs = {"as chosen": acceptance(llm, llm.kernels, starts, window)}
    for op in ops:
        kernels = replace(llm.kernels, **{op: "reference"})
        found = runs[f"{op} reference"] = acceptance(llm, kernels, starts, window)
        print(f"{op}: moved by {points_moved(runs['as chosen'], found):+.2f} points", flush=True)
    return runs


def windows(outputs: list[RequestOutput], size: int) -> list[list[int]]:
    """Return the token ids that each window starts from: the prompt and the text before it."""
    return [
        [*o.prompt_token_ids, *o.token_ids[:i]]
        for o in outputs
        for i in range(0, len(o.token_ids), size)
    ]


def acceptance(
    loaded: LLM, kernels: Ops, starts: list[list[int]], window: int
) -> SpecDecodeMetrics:
    """Measure acceptance of the same weights and texts on these kernels."""
    named = ",".join(f"{op}={name}" for op, name in kernels.names().items())
    llm = loaded.on_same_weights(kernels=named)
    llm.generate(starts, SamplingParams(0.0, max_tokens=window))
    return llm.metrics


def points_moved(before: SpecDecodeMetrics, after: SpecDecodeMetrics) -> float:
    """Return the largest change of a position's acceptance, in points, with its sign."""
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
