"""Find out why a head's drafts are rejected: try other readings of its files, and measure each.

jaxspec doctor meta-llama/Llama-3.1-8B-Instruct path/to/eagle3-head
jaxspec doctor HuggingFaceTB/SmolLM2-135M-Instruct smollm2-135m-instruct-eagle3
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from jaxspec.config import ConfigError, SpeculativeConfig
from jaxspec.doctor.diagnosis import Diagnosis, Settings, diagnose
from jaxspec.doctor.texts import Target
from jaxspec.loading.cache import keep_compiled_programs
from jaxspec.loading.model import load_target
from jaxspec.loading.pair import resolve_pair
from jaxspec.loading.tokenizer import load_tokenizer
from jaxspec.tools import prompts, report
from jaxspec.tools.cli import Dtype, OutputJson, command, dtype_of, exact_float32, option

# Beside the demo's: short questions, and a long text, which shows faults of the rotation.
STORY = (
    "The lighthouse stood at the end of a long and narrow road. Every evening the keeper climbed "
    "its two hundred steps, lit the lamp and wrote the weather into a book. In winter the road was "
    "often under water, and no visitor came for weeks. In spring the village sent a boat with "
    "flour, oil and letters. The keeper read the letters slowly, one a day, so that they lasted "
    "until the next boat. One year the boat brought a child, who was to stay for a month and "
    "stayed for nine years. The child learned to read from the letters and from the weather book, "
    "and later wrote into it, first small drawings of clouds and then whole pages about the sea."
)
LEAST_PROMPTS = 4
PROMPTS = (
    *prompts.DEMO,
    "Why do cats purr?",
    "What is 17 times 23? Show your steps.",
    "Give me a recipe for pancakes.",
    "Who was Marie Curie?",
    "Write a short poem about the sea.",
    "How do I learn to play the guitar?",
    "What is a black hole?",
    "List five healthy breakfasts.",
    "Explain recursion to a child.",
    f"Summarise this text in three sentences: {STORY}",
    f"Who are the people in this story, and what do they do? {STORY}",
)


def main(
    target: Annotated[str, typer.Argument(help="Folder, .gguf file or hub id of the target.")],
    head: Annotated[
        str, typer.Argument(help="Folder, name under checkpoints/ or hub id of the head.")
    ],
    prompt: Annotated[
        list[str] | None, option("A prompt in place of the built-in ones; several times.")
    ] = None,
    max_tokens: Annotated[int, option("Tokens of each text.", least=8)] = 64,
    num_speculative_tokens: Annotated[int, option("K, the draft tokens a round.", least=1)] = 3,
    dtype: Dtype = "auto",
    output_json: OutputJson = None,
) -> None:
    """Say which setting of a head costs acceptance, and what to set. Exit code 1 if one does."""
    json_file = report.JsonFile(output_json) if output_json else None
    texts = prompts.check_prompts(prompt) if prompt else list(PROMPTS)
    if len(texts) < LEAST_PROMPTS:
        raise ConfigError(
            f"--prompt: expected at least {LEAST_PROMPTS} prompts to compare over, got {len(texts)}"
        )
    if num_speculative_tokens >= max_tokens:
        raise ConfigError(
            f"--num-speculative-tokens: expected fewer than --max-tokens {max_tokens}, "
            f"got {num_speculative_tokens}"
        )
    keep_compiled_programs()
    if dtype == "float32":
        exact_float32()
    pair = resolve_pair(target, SpeculativeConfig(head))
    assert pair.head is not None and pair.speculative is not None
    tokenizer = load_tokenizer(pair.target)
    cfg, params = load_target(pair.target, dtype_of(dtype))
    console = Console()
    with Console(stderr=True).status("loading") as status:
        found = diagnose(
            Target(cfg, params, tokenizer.eos_token_ids, dtype_of(dtype)),
            tokenizer,
            pair.head,
            pair.speculative,
            Settings(texts, max_tokens, num_speculative_tokens),
            log=status.update,
        )
    show(found, console)
    if json_file:
        json_file.write({**record(found), **report.environment()})
    if found.findings:
        raise typer.Exit(1)


def show(found: Diagnosis, console: Console) -> None:
    """Print a table of everything that was tried, and a line for each finding."""
    title = "acceptance, teacher-forced: length over all places, gain the mean of the texts"
    table = Table("what", "tried", "length", "gain", "", title=title)
    for column in table.columns[2:4]:
        column.justify = "right"
    ended = f" ({found.ended} texts end with their first token)" * (found.ended > 0)
    table.add_row("present", f"as LLM reads it{ended}", f"{found.length:.2f}", "", "")
    for tried in found.tried:
        gain = f"{tried.gain:+.2f} ± {tried.error:.2f}"
        table.add_row(
            tried.kind, tried.name, f"{tried.length:.2f}", gain, "better" * tried.is_better
        )
    console.print(table)
    for finding in found.findings:
        figures = ""
        if finding.before is not None and finding.after is not None:
            figures = f" (length {finding.before:.2f} -> {finding.after:.2f})"
        console.print(f"{finding.kind}: {finding.name}{figures}: {finding.remedy}", soft_wrap=True)
    before, after = found.decoded
    if before is not None:
        console.print(f"decoding as it is: mean acceptance length {before:.2f}")
    if after is not None:
        console.print(f"decoding with these settings: mean acceptance length {after:.2f}")
    if not found.findings:
        console.print("nothing found: no other reading of this head is surely accepted more")


def record(found: Diagnosis) -> dict[str, Any]:
    """Return the contents of --output-json."""
    return {
        "length": found.length,
        "ended": found.ended,
        "tried": [vars(each) for each in found.tried],
        "findings": [vars(each) for each in found.findings],
        "decoded": list(found.decoded),
    }


app = command(main)
