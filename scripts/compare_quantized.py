"""Compare a target in each quantised form with its plain weights: loss, greedy tokens, acceptance.

The last form has plain weights, and keys and values in fp8.

python scripts/compare_quantized.py --dtype float32 --num-prompts 5 --max-tokens 48
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxspec import LLM, RequestOutput, SamplingParams, SpeculativeConfig
from jaxspec.config import ConfigError
from jaxspec.config.quantization import FROM_FLOATS
from jaxspec.loading.conversion import convert_checkpoint
from jaxspec.loading.resolve import resolve
from jaxspec.tools import report
from jaxspec.tools.cli import DRAFT, Dtype, OutputJson, Target, one_of, run_program
from jaxspec.tools.flags import flag, flags_of
from jaxspec.tools.prompts import DEMO

TEXTS = Path(__file__).parent / "prompts" / "summaries.jsonl"
PLAIN, KEYS_AND_VALUES = "plain", "fp8-kv"
FORMS = (PLAIN, *FROM_FLOATS, KEYS_AND_VALUES)


@dataclass(frozen=True)
class Options:
    """The forms, and the texts that they are compared on."""

    forms: tuple[str, ...] = flag(FORMS, f"{', '.join(FORMS)}; {PLAIN} comes first.")
    group_size: int = flag(64, "Weights that share a scale, for int4.")
    num_texts: int = flag(8, "Texts whose loss is measured.", least=1)
    num_prompts: int = flag(len(DEMO), f"Prompts that are answered, at most {len(DEMO)}.", least=1)
    max_tokens: int = flag(48, "Tokens of each answer.", least=8)


@dataclass(frozen=True)
class Quality:
    """Figures of one form.

    loss:       mean negative log-likelihood of the texts' tokens, in nats
    agreement:  share of the plain model's greedy tokens that are this one's too, after the same
                tokens
    acceptance: mean acceptance length of the head, the bonus token included
    same_text:  speculative text is plain text
    """

    form: str
    loss: float
    agreement: float
    acceptance: float
    same_text: bool


def main(
    options: Options,
    speculative: Annotated[
        SpeculativeConfig, flags_of(SpeculativeConfig, "num_speculative_tokens", model=DRAFT)
    ],
    target: Target = None,
    dtype: Dtype = "auto",
    output_json: OutputJson = None,
) -> None:
    """Print a table of the forms."""
    for form in options.forms:
        one_of("--forms", form, FORMS)
    one_of("--forms (the first)", options.forms[0], (PLAIN,))
    texts = [json.loads(line)["prompt"] for line in TEXTS.read_text().splitlines()]
    for name, count, most in (
        ("--num-texts", options.num_texts, len(texts)),
        ("--num-prompts", options.num_prompts, len(DEMO)),
    ):
        if count > most:
            raise ConfigError(f"{name}: expected at most the {most} that there are, got {count}")
    json_file = report.JsonFile(output_json) if output_json else None
    found: list[Quality] = []
    answers: list[list[int]] = []
    for form, llm in engines(options, speculative, target, dtype):
        measured, given = measure(form, llm, texts[: options.num_texts], options, answers)
        answers = answers or given
        found.append(measured)
        print(measured, flush=True)
        if json_file:
            json_file.write({"forms": [vars(q) for q in found], **report.environment()})
    show(found, Console())


def engines(
    options: Options, speculative: SpeculativeConfig, target: str | None, dtype: str
) -> Iterator[tuple[str, LLM]]:
    """Yield an engine for each form; int4 has groups of its own size, so it is converted first."""
    settings: dict[str, Any] = dict(speculative=speculative, dtype=dtype, max_model_len=512)
    for form in options.forms:
        if form == KEYS_AND_VALUES:
            yield form, LLM.from_pretrained(target, kv_cache_dtype="fp8", **settings)
            continue
        if form != "int4":
            quantize = None if form == PLAIN else form
            yield form, LLM.from_pretrained(target, quantize=quantize, **settings)
            continue
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / form
            source = resolve(target, kind="target")
            convert_checkpoint(source, out, form, group_size=options.group_size)
            yield form, LLM.from_pretrained(str(out), **settings)


def measure(
    form: str, llm: LLM, texts: Sequence[str], options: Options, plain: list[list[int]]
) -> tuple[Quality, list[list[int]]]:
    """Return a form's figures, and its answers with their prompts' tokens.

    plain: those of the plain model; empty for itself
    """
    scored = llm.generate(list(texts), SamplingParams(0, max_tokens=1, prompt_logprobs=0))
    loss = -np.mean([score.logprob for output in scored for score in own_scores(output)])
    chats: list[Any] = [[{"role": "user", "content": t}] for t in DEMO[: options.num_prompts]]
    params = SamplingParams(0, max_tokens=options.max_tokens)
    llm.reset_metrics()
    answers = llm.generate(chats, params)
    acceptance = llm.metrics.mean_acceptance_length
    alone = llm.on_same_weights(speculative=False).generate(chats, params)
    whole = [[*(o.prompt_token_ids or ()), *o.token_ids] for o in answers]
    given = plain or whole
    again = llm.generate(given, SamplingParams(0, max_tokens=1, prompt_logprobs=0))
    starts = [len(o.prompt_token_ids or ()) for o in answers]
    ranks = [
        score.rank
        for output, start in zip(again, starts, strict=True)
        for score in own_scores(output)[start - 1 :]
    ]
    same = [o.token_ids for o in answers] == [o.token_ids for o in alone]
    agreement = float(np.mean([rank == 1 for rank in ranks]))
    return Quality(form, float(loss), agreement, acceptance, same), whole


def own_scores(output: RequestOutput) -> list[Any]:
    """Return the score of each of a prompt's tokens but the first."""
    tokens, scores = output.prompt_token_ids or (), output.prompt_logprobs or ()
    return [each[token] for token, each in zip(tokens, scores, strict=True) if each is not None]


def show(found: Sequence[Quality], console: Console) -> None:
    """Print the table."""
    table = Table("form", "loss", "greedy tokens", "acceptance length", "speculative text")
    for q in found:
        text = "as plain decoding's" if q.same_text else "DIFFERS"
        table.add_row(q.form, f"{q.loss:.4f}", f"{q.agreement:.1%}", f"{q.acceptance:.2f}", text)
    console.print(table)


if __name__ == "__main__":
    run_program(main)
