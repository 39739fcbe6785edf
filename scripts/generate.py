"""Generate text with speculative decoding: prompts from flags, a file or the demo's, on any target and EAGLE draft.

python scripts/generate.py                                      # the demo
python scripts/generate.py --prompt "Why is the sky blue?" --num-speculative-tokens 4
python scripts/generate.py --dataset mt_bench.jsonl --temperature 0.7 --compare --output-json run.json
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from jaxspec import LLM, ConfigError, Interrupted, RequestOutput, SamplingParams, SpeculativeConfig
from jaxspec.loading.default_target import is_default_target
from jaxspec.tools import prompts, report
from jaxspec.tools.cli import errors_as_sentences, exact_float32, option, run_program
from jaxspec.tools.losslessness import find_differences, with_margins

DEFAULT_DRAFT = "smollm2-135m-instruct-eagle3"  # fits the default target only


def main(
    target: Annotated[
        str | None,
        option("Folder, .gguf file or hub id of the target. [default: SmolLM2-135M-Instruct]"),
    ] = None,
    draft: Annotated[
        str | None, option("Folder, name under checkpoints/ or hub id of the EAGLE head.")
    ] = None,
    method: Annotated[
        str | None,
        option("eagle, eagle3, or mtp: the module in the target's own folder. [default: eagle3]"),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, option("K, the draft tokens a round. [default: 3]")
    ] = None,
    rejection_sample_method: Annotated[
        str | None, option("strict, probabilistic, block or synthetic. [default: probabilistic]")
    ] = None,
    draft_sample_method: Annotated[
        str | None, option("greedy or probabilistic. [default: probabilistic]")
    ] = None,
    synthetic_acceptance_rates: Annotated[
        str | None, option("For synthetic: K rates with commas between them.")
    ] = None,
    synthetic_acceptance_length: Annotated[
        float | None, option("For synthetic: the mean acceptance length instead.")
    ] = None,
    speculative_config: Annotated[
        str | None, option("These settings as JSON with vLLM's keys; the flags above go before it.")
    ] = None,
    speculation: Annotated[
        bool, option("Draft, or decode plainly.", "--speculation/--no-speculation")
    ] = True,
    compare: Annotated[
        bool | None,
        option(
            "Decode plainly too: speed-up, same texts? [default: in the demo]",
            "--compare/--no-compare",
        ),
    ] = None,
    prompt: Annotated[list[str] | None, option("A prompt; may be given several times.")] = None,
    dataset: Annotated[
        str | None,
        option(
            "JSON Lines with turns, prompt or question, or a hub id such as philschmid/mt-bench."
        ),
    ] = None,
    num_prompts: Annotated[int | None, option("At most this many of the prompts.")] = None,
    chat_template: Annotated[
        bool, option("Give each prompt as a chat, or raw.", "--chat-template/--no-chat-template")
    ] = True,
    temperature: Annotated[float, option("0 is greedy.")] = 0.0,
    top_p: Annotated[float, option("Sample within this probability mass.")] = 1.0,
    top_k: Annotated[int, option("Sample among this many tokens; 0: all.")] = 0,
    min_p: Annotated[
        float, option("Sample among tokens at least this likely beside the likeliest; 0: all.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, option("Above 1: fewer tokens that the prompt or the text has.")
    ] = 1.0,
    presence_penalty: Annotated[float, option("Above 0: fewer tokens that the text has.")] = 0.0,
    frequency_penalty: Annotated[
        float, option("Above 0: fewer tokens, the more often the text has them.")
    ] = 0.0,
    logit_bias: Annotated[
        str | None, option('What is added to logits, by token id, as JSON: {"42": -1.5}.')
    ] = None,
    allowed_token_ids: Annotated[
        str | None, option("Generate only these token ids, with commas between them.")
    ] = None,
    banned_token_ids: Annotated[str | None, option("Never generate these token ids.")] = None,
    bad_words: Annotated[
        list[str] | None, option("Never generate this word; may be given several times.")
    ] = None,
    max_tokens: Annotated[int, option("At most this many tokens a prompt.")] = 128,
    min_tokens: Annotated[int, option("No end before this many tokens.")] = 0,
    stop: Annotated[
        list[str] | None, option("A string that ends a text; may be given several times.")
    ] = None,
    include_stop_str_in_output: Annotated[
        bool, option("Keep that string.", "--include-stop-str-in-output")
    ] = False,
    stop_token_ids: Annotated[
        str | None, option("Token ids that end a text, beside end-of-text.")
    ] = None,
    ignore_eos: Annotated[bool, option("Go on to max-tokens.", "--ignore-eos")] = False,
    logprobs: Annotated[
        int | None,
        option("With --output-json: of each token and of this many of the likeliest; -1: of all."),
    ] = None,
    prompt_logprobs: Annotated[int | None, option("The same of the prompts' tokens.")] = None,
    n: Annotated[int, option("Texts a prompt.")] = 1,
    seed: Annotated[int, option("Of the first prompt; the i-th has seed + i.")] = 0,
    dtype: Annotated[
        str | None,
        option("float32, bfloat16 or auto. [default: float32 with --compare, else auto]"),
    ] = None,
    max_model_len: Annotated[
        int | None,
        option(
            "Tokens a request may hold, prompt included. [default: 2048, or the target's limit if that is less]"
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None, option("Requests that run together. [default: 8; in the demo 1]")
    ] = None,
    compilation: Annotated[
        str, option("One program a round, one a draft step, or none: round, step or eager.")
    ] = "round",
    rounds_per_step: Annotated[
        int | None,
        option("Rounds that one program runs. [default: 4 for a small target on a GPU, else 1]"),
    ] = None,
    kernels: Annotated[
        str,
        option(
            "reference (plain jnp), mosaic_gpu (Hopper), auto for what runs, or op=name,op=name."
        ),
    ] = "auto",
    output_json: Annotated[
        Path | None, option("Write prompts, tokens, texts, metrics and timings to this file.")
    ] = None,
    quiet: Annotated[bool, option("Print the figures only.", "--quiet")] = False,
) -> None:
    """Generate text with EAGLE speculative decoding. Without prompts this is the demo, which also decodes plainly and compares."""
    with errors_as_sentences():
        flags = {
            "model": draft,
            "method": method,
            "num_speculative_tokens": num_speculative_tokens,
            "rejection_sample_method": rejection_sample_method,
            "draft_sample_method": draft_sample_method,
            "synthetic_acceptance_rates": parse_rates(synthetic_acceptance_rates),
            "synthetic_acceptance_length": synthetic_acceptance_length,
        }
        speculative = read_speculative(speculative_config, flags, target) if speculation else None
        if compare and speculative is None:
            raise ConfigError(
                "--compare: expected speculation to compare with plain decoding, got --no-speculation"
            )
        compare = speculative is not None and (
            not prompt and dataset is None if compare is None else compare
        )
        base = SamplingParams(
            temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=parse_bias(logit_bias),
            allowed_token_ids=parse_ids("--allowed-token-ids", allowed_token_ids),
            banned_token_ids=parse_ids("--banned-token-ids", banned_token_ids) or (),
            bad_words=bad_words or (),
            seed=seed,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            ignore_eos=ignore_eos,
            stop=stop or (),
            include_stop_str_in_output=include_stop_str_in_output,
            stop_token_ids=parse_ids("--stop-token-ids", stop_token_ids) or (),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            n=n,
        )
        texts = choose_prompts(prompt, dataset, num_prompts)
        params = [replace(base, seed=(seed + i) % 2**64) for i in range(len(texts))]
        json_file = report.JsonFile(output_json) if output_json else None
        dtype = dtype or ("float32" if compare else "auto")
        if dtype == "float32":
            exact_float32()
        # The demo shows what one user waits for: a CPU has no arithmetic to spare for the drafts of eight requests at once.
        max_num_seqs = (
            (8 if prompt or dataset is not None else 1) if max_num_seqs is None else max_num_seqs
        )
        engine: dict[str, Any] = {
            "dtype": dtype,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
        }
        engine |= {
            "compilation": compilation,
            "rounds_per_step": rounds_per_step,
            "kernels": kernels,
        }
        llm = LLM.from_pretrained(target, speculative=speculative, **engine)
        if not quiet:
            print(llm.describe(), flush=True)
        inputs = [[{"role": "user", "content": text}] for text in texts] if chat_template else texts
        try:
            outputs = generate(llm, inputs, params, quiet)
        except Interrupted as e:
            show(llm, [texts[output.index] for output in e.outputs], e.outputs, None, quiet)
            raise
        comparison = compare_with_plain(llm, inputs, params, outputs, quiet) if compare else None
        show(llm, texts, outputs, comparison, quiet)
        if json_file:
            json_file.write(
                record(
                    llm, texts, outputs, comparison, {"target": target, **engine, **asdict(base)}
                )
            )
        if comparison and comparison.failed:
            raise typer.Exit(1)


def parse_rates(text: str | None) -> list[float] | None:
    try:
        return None if text is None else [float(rate) for rate in text.split(",")]
    except ValueError as e:
        raise ConfigError(
            f"--synthetic-acceptance-rates: expected numbers with commas between them, got {text!r}"
        ) from e


def parse_ids(flag: str, text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(token) for token in text.split(",")]
    except ValueError as e:
        raise ConfigError(
            f"{flag}: expected token ids with commas between them, got {text!r}"
        ) from e


def parse_bias(text: str | None) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in json.loads(text or "{}").items()}
    except (AttributeError, ValueError) as e:
        raise ConfigError(
            f"--logit-bias: expected a JSON object of numbers by token id, got {text!r}"
        ) from e


def read_speculative(
    text: str | None, flags: dict[str, Any], target: str | None
) -> SpeculativeConfig:
    """The JSON of --speculative-config, the flags over it, and the default draft where neither names one."""
    try:
        values = json.loads(text) if text is not None else {}
        if not isinstance(values, dict):
            raise ConfigError(
                f"--speculative-config: expected a JSON object, got a {type(values).__name__}"
            )
        values |= {key: value for key, value in flags.items() if value is not None}
        if (
            values.get("model") is None and values.get("method") != "mtp"
        ):  # an MTP module is in the target's own folder
            if not is_default_target(target):
                raise ConfigError(
                    f"--draft: expected a draft head for {target} (or --no-speculation), got none"
                )
            values["model"] = DEFAULT_DRAFT
        return SpeculativeConfig.from_dict(values)
    except json.JSONDecodeError as e:
        raise ConfigError(f"--speculative-config: expected JSON, got {e}") from e


def choose_prompts(given: list[str] | None, dataset: str | None, most: int | None) -> list[str]:
    if given and dataset is not None:
        raise ConfigError("--prompt, --dataset: expected one of them, got both")
    if most is not None and most < 1:
        raise ConfigError(f"--num-prompts: expected at least 1, got {most}")
    texts = (
        prompts.check_prompts(given)
        if given
        else list(prompts.DEMO)
        if dataset is None
        else prompts.read_prompts(dataset)
    )
    return texts[:most]


def generate(
    llm: LLM, inputs: Any, params: list[SamplingParams], quiet: bool
) -> list[RequestOutput]:
    """Compile first, so that the timings hold none of it; then run, with a progress bar."""
    with Console(stderr=True, quiet=quiet).status("compiling"):
        llm.warmup_for(inputs, params)
    return llm.generate(inputs, params, progress=not quiet)


def compare_with_plain(
    llm: LLM, inputs: Any, params: list[SamplingParams], outputs: list[RequestOutput], quiet: bool
) -> report.Comparison:
    """The same prompts without speculation, on the same weights."""
    plain = llm.on_same_weights(speculative=False)
    differences = find_differences(outputs, generate(plain, inputs, params, quiet))
    assert llm.speculative is not None
    expected = report.expected_agreement(params[0], llm.speculative)
    if expected == "tokens":
        differences = with_margins(llm.target_config, llm.params["target"], outputs, differences)
    return report.Comparison(expected, llm.timings, plain.timings, differences, len(outputs))


def show(
    llm: LLM,
    texts: list[str],
    outputs: list[RequestOutput],
    comparison: report.Comparison | None,
    quiet: bool,
) -> None:
    """Texts, then the acceptance table, then the figures."""
    for i, (text, output) in enumerate(zip(texts, outputs, strict=True), start=1):
        if not quiet:
            print(f"\n[{i}/{len(texts)}] prompt: {text}")
            for each in output.outputs:
                print(f"text ({len(each.token_ids)} tokens, {each.finish_reason}): {each.text}")
    print()
    if llm.speculative is not None:
        Console().print(report.acceptance_table(llm.metrics))
        print("\n".join(report.metric_lines(llm.timings.num_output_tokens, llm.metrics)))
    else:
        print(f"total_num_output_tokens: {llm.timings.num_output_tokens}")
    print(
        f"{report.tokens_per_second(llm.timings):.1f} tokens/s in {llm.timings.num_rounds} rounds, compilation not counted"
    )
    if comparison:
        print("\n".join(comparison.lines()))


def record(
    llm: LLM,
    texts: list[str],
    outputs: list[RequestOutput],
    comparison: report.Comparison | None,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """What --output-json holds; texts_agree and comparison are null without --compare."""
    return {
        "description": llm.describe().splitlines(),
        "settings": settings
        | {"speculative": asdict(llm.speculative) if llm.speculative else None},
        "total_num_output_tokens": llm.timings.num_output_tokens,
        "metrics": llm.metrics.to_dict(),
        "timings": llm.timings.to_dict(),
        "texts_agree": comparison and comparison.texts_agree,
        "comparison": comparison and comparison.to_dict(),
        "requests": [
            report.request_record(output, text) for output, text in zip(outputs, texts, strict=True)
        ],
        **report.environment(),
    }


if __name__ == "__main__":
    run_program(main)
