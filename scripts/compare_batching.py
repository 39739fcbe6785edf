"""Decode prompts together and one by one, and count whose tokens depend on the neighbours.

python scripts/compare_batching.py --dataset mt_bench.jsonl --dtype bfloat16 --batch-invariant --output-json alone.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from jaxspec import LLM, SamplingParams, SpeculativeConfig
from jaxspec.tools import report
from jaxspec.tools.cli import errors_as_sentences, run_program
from jaxspec.tools.losslessness import Difference, find_differences, with_margins
from jaxspec.tools.prompts import DEMO, read_prompts


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
    num_prompts: Annotated[
        int, typer.Option(help="At most this many prompts, all in one batch.", min=2)
    ] = 64,
    max_tokens: Annotated[int, typer.Option(help="At most this many tokens a prompt.")] = 64,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy; each prompt has a seed of its own.")
    ] = 0.0,
    dtype: Annotated[str, typer.Option(help="bfloat16, float32 or auto.")] = "auto",
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant/--batch-buckets", help="Programs of one batch size.")
    ] = False,
    output_json: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None,
) -> None:
    """With --batch-invariant or in float32, exit with 1 if more than 1 in 64 requests differ, or one by more than a tie (T = 0)."""
    with errors_as_sentences():
        texts = (read_prompts(dataset) if dataset is not None else list(DEMO))[:num_prompts]
        json_file = report.JsonFile(output_json) if output_json else None
        params = [
            SamplingParams(temperature, seed=i, max_tokens=max_tokens) for i in range(len(texts))
        ]
        llm = LLM.from_pretrained(
            target,
            speculative=SpeculativeConfig(
                model=draft, num_speculative_tokens=num_speculative_tokens
            ),
            dtype=dtype,
            max_num_seqs=len(texts),
            batch_invariant=batch_invariant,
            enable_prefix_caching=False,  # or the second run would find what the first one left
        )
        print(llm.describe(), flush=True)
        chats: list[Any] = [[{"role": "user", "content": text}] for text in texts]
        together = llm.generate(chats, params)
        alone = [llm.generate([chat], p)[0] for chat, p in zip(chats, params, strict=True)]
        found = find_differences(together, alone)
        if temperature == 0:
            found = with_margins(llm.target_config, llm.params["target"], together, found)
        verdict = f"{len(texts) - len(found)} of {len(texts)} requests have the same tokens alone and among the others"
        print("\n".join([verdict, *map(str, found)]))
        if json_file:
            settings = {
                "dataset": dataset,
                "max_tokens": max_tokens,
                "temperature": temperature,
                "batch_invariant": batch_invariant,
            }
            differences = [d.to_dict() for d in found]
            json_file.write(
                {
                    "settings": settings,
                    "num_prompts": len(texts),
                    "differences": differences,
                    **report.environment(),
                }
            )
        if (batch_invariant or llm.dtype == "float32") and is_wrong(found, len(texts), temperature):
            raise typer.Exit(1)


def is_wrong(found: list[Difference], num_prompts: int, temperature: float) -> bool:
    """More than rounding explains."""
    return len(found) > max(1, num_prompts // 64) or (
        temperature == 0 and not all(d.is_tie for d in found)
    )


if __name__ == "__main__":
    run_program(main)
