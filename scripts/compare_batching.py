"""Decode prompts together and one by one, and count the texts that depend on their neighbours.

python scripts/compare_batching.py --dataset mt_bench.jsonl --dtype bfloat16 --batch-invariant
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from jaxspec import LLM, EngineConfig, SamplingParams, SpeculativeConfig
from jaxspec.engine.inputs import Prompt
from jaxspec.tools import report
from jaxspec.tools.cli import DRAFT, Dtype, OutputJson, Target, run_program
from jaxspec.tools.flags import Flag, Given, flag, flags_of, given_of
from jaxspec.tools.losslessness import Difference, find_differences, with_margins
from jaxspec.tools.prompts import DEMO, read_prompts


@dataclass(frozen=True)
class TextOptions:
    """The prompts, and the texts that follow them."""

    dataset: str | None = flag(
        None, "JSON Lines in MT-bench's form, or a hub id. [default: the demo's prompts]"
    )
    num_prompts: int = flag(64, "At most this many prompts, all in one batch.", least=2)
    max_tokens: int = flag(64, "At most this many tokens a prompt.")
    temperature: float = flag(0.0, "0 is greedy; each prompt has a seed of its own.")


def main(
    options: TextOptions,
    speculative: Annotated[
        SpeculativeConfig, flags_of(SpeculativeConfig, "num_speculative_tokens", model=DRAFT)
    ],
    engine: Annotated[
        Given,
        given_of(
            EngineConfig,
            "quantize",
            "kv_cache_dtype",
            "max_num_batched_tokens",
            "prefill_in_order",
            batch_invariant=Flag(False, names=("--batch-invariant/--batch-buckets",)),
        ),
    ],
    target: Target = None,
    dtype: Dtype = "auto",
    output_json: OutputJson = None,
) -> None:
    """Compare the tokens of requests in a batch with those of the same requests alone.

    With --batch-invariant or in float32, exit with 1 if more than 1 in 64 requests differ, and at
    T = 0 also if one differs by more than a tie. In fp8, float32 keeps bits on a CPU alone.
    """
    dataset, temperature = options.dataset, options.temperature
    texts = (read_prompts(dataset) if dataset is not None else list(DEMO))[: options.num_prompts]
    json_file = report.JsonFile(output_json) if output_json else None
    params = [
        SamplingParams(temperature, seed=i, max_tokens=options.max_tokens)
        for i in range(len(texts))
    ]
    llm = LLM.from_pretrained(
        target,
        speculative=speculative,
        dtype=dtype,
        max_num_seqs=len(texts),
        enable_prefix_caching=False,  # or the second run would find the blocks of the first
        **engine,
    )
    print(llm.describe(), flush=True)
    chats: list[Prompt] = [[{"role": "user", "content": text}] for text in texts]
    together = llm.generate(chats, params)
    alone = [llm.generate([chat], p)[0] for chat, p in zip(chats, params, strict=True)]
    found = find_differences(together, alone)
    if temperature == 0:
        weights, cache_dtype = llm.params["target"], llm.cache_dtype
        found = with_margins(llm.target_config, weights, together, found, cache_dtype=cache_dtype)
    count = f"{len(texts) - len(found)} of {len(texts)} requests"
    try:
        if json_file:
            settings = {
                "dataset": dataset,
                "max_tokens": options.max_tokens,
                "temperature": temperature,
                **engine,
            }
            json_file.write(
                {
                    "settings": settings,
                    "num_prompts": len(texts),
                    "differences": [d.to_dict() for d in found],
                    **report.environment(),
                }
            )
    finally:
        print(f"{count} have the same tokens alone and among the others", *found, sep="\n")
    is_exact = engine["batch_invariant"] or llm.dtype == "float32"
    if is_exact and is_wrong(found, len(texts), temperature):
        raise typer.Exit(1)


def is_wrong(found: list[Difference], num_prompts: int, temperature: float) -> bool:
    """Whether the differences are more than rounding explains."""
    return len(found) > max(1, num_prompts // 64) or (
        temperature == 0 and not all(d.is_tie for d in found)
    )


if __name__ == "__main__":
    run_program(main)
