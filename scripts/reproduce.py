"""Measure public heads of Llama-3.1-8B and Qwen3-8B beside the figures published for them.

python scripts/reproduce.py
python scripts/reproduce.py --pairs qwen3-8b-redhat --output-json reproduced.json

For each pair: MT-bench's first turns, greedy, with drafts and without, on one set of weights. It
prints acceptance beside the published figures, and tokens per second. Weights come from the hub
(Llama's need a login); a folder may stand in for either (--target, --head).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from jaxspec import LLM, ConfigError, SamplingParams
from jaxspec.tools import prompts, report
from jaxspec.tools.cli import Dtype, OutputJson, command, option, run_program
from jaxspec.tools.losslessness import find_differences


@dataclass(frozen=True)
class PublicPair:
    """A target and a public head, with what is published for K = 3 on MT-bench, greedy.

    length:    mean acceptance length, bonus token included
    positions: acceptance of each position; empty if only the length is published
    source:    where the figures are
    """

    target: str
    head: str
    length: float
    positions: tuple[float, ...]
    source: str


LLAMA, QWEN = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-8B"
VLLM_TESTS = "vLLM's in-tree expectations, 256 tokens of 80 prompts"
PAIRS = {
    "llama-3.1-8b-redhat": PublicPair(
        LLAMA,
        "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
        2.60,
        (0.7296, 0.5208, 0.3545),
        VLLM_TESTS,
    ),
    "llama-3.1-8b-eagle3": PublicPair(
        LLAMA, "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", 2.79, (), "vLLM #20780"
    ),
    "llama-3.1-8b-eagle": PublicPair(
        LLAMA, "yuhuili/EAGLE-LLaMA3.1-Instruct-8B", 2.29, (), "vLLM #20780"
    ),
    "qwen3-8b-redhat": PublicPair(
        QWEN, "RedHatAI/Qwen3-8B-speculator.eagle3", 2.26, (0.6541, 0.3993, 0.2020), VLLM_TESTS
    ),
}
K = 3


def main(
    pairs: Annotated[str, option(f"With commas: {', '.join(PAIRS)}.")] = ",".join(PAIRS),
    dataset: Annotated[
        str, option("JSON Lines with MT-bench's turns, or a hub id.")
    ] = "philschmid/mt-bench",
    num_prompts: Annotated[int, option("At most this many prompts.", least=1)] = 80,
    max_tokens: Annotated[int, option("Tokens of each text.", least=1)] = 256,
    max_num_seqs: Annotated[int, option("Requests that run together.", least=1)] = 1,
    target: Annotated[str | None, option("A folder in place of the pairs' target.")] = None,
    head: Annotated[str | None, option("A folder in place of the pairs' head.")] = None,
    dtype: Dtype = "auto",
    output_json: OutputJson = None,
) -> None:
    """Compare public heads with what is published for them."""
    names = [name.strip() for name in pairs.split(",")]
    if unknown := [name for name in names if name not in PAIRS]:
        raise ConfigError(f"--pairs: expected among {', '.join(PAIRS)}, got {', '.join(unknown)}")
    json_file = report.JsonFile(output_json) if output_json else None
    texts = prompts.read_prompts(dataset)[:num_prompts]
    settings = {"dtype": dtype, "max_num_seqs": max_num_seqs}
    records: list[dict[str, Any]] = []
    for name in names:
        pair = PAIRS[name]
        record = measure(target or pair.target, head or pair.head, texts, max_tokens, settings)
        records.append({"pair": name, "published": vars(pair), **record})
        if json_file:  # after each pair: a run that is cut short leaves what it has
            json_file.write({"pairs": records, **report.environment()})
        Console(width=120).print(table(records[-1:]))
    if len(records) > 1:
        Console(width=120).print(table(records))


def measure(
    target: str, head: str, texts: Sequence[str], max_tokens: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Decode the prompts with drafts and without, on one set of weights."""
    speculative = {"model": head, "num_speculative_tokens": K}
    llm = LLM.from_pretrained(target, speculative=speculative, **settings)
    print(llm.describe(), flush=True)
    chats = [[{"role": "user", "content": text}] for text in texts]
    params = [SamplingParams(temperature=0, max_tokens=max_tokens)] * len(chats)
    found, outputs = {}, []
    for kind, engine in (("drafts", llm), ("plain", llm.on_same_weights(speculative=False))):
        engine.warmup_for(chats, params)
        engine.reset_metrics()
        outputs.append(engine.generate(chats, params, progress=True))
        found[kind] = report.tokens_per_second(engine.timings)
    differences = find_differences(*outputs)
    return {
        "description": llm.describe().splitlines(),
        "metrics": llm.metrics.to_dict(),
        "tokens_per_second": found,
        "texts_that_differ": len(differences),
        "num_texts": len(texts),
    }


def table(records: Sequence[dict[str, Any]]) -> Table:
    """Return what was measured beside what is published."""
    made = Table("pair", "", "length", "by position", "tokens/s", "plain", "speed-up", "same texts")
    for record in records:
        published, metrics = record["published"], record["metrics"]
        speed, plain = (record["tokens_per_second"][kind] for kind in ("drafts", "plain"))
        same = record["num_texts"] - record["texts_that_differ"]
        made.add_row(
            record["pair"],
            "here",
            f"{metrics['mean_acceptance_length']:.2f}",
            _positions(metrics["per_position_acceptance"]),
            f"{speed:.0f}",
            f"{plain:.0f}",
            f"{speed / plain:.2f}",
            f"{same} of {record['num_texts']}",
        )
        made.add_row(
            "", "published", f"{published['length']:.2f}", _positions(published["positions"])
        )
    return made


def _positions(rates: Sequence[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates) or "-"


app = command(main)

if __name__ == "__main__":
    run_program(app)
