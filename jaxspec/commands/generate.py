"""Generate text with speculative decoding: from any prompts, on any target and EAGLE draft.

jaxspec generate                                      # the demo
jaxspec generate --prompt "Why is the sky blue?" --num-speculative-tokens 4
jaxspec generate --dataset mt_bench.jsonl --temperature 0.7 --compare

The flags of vLLM's example spec_decode.py work too: --model-dir, --eagle-dir, --method,
--num-spec-tokens, --dataset-path, --num-prompts, --temp, --output-len, --tp and others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import typer
from rich.console import Console

from jaxspec.config import ConfigError, EngineConfig, SpeculativeConfig
from jaxspec.config.keys import ENGINE
from jaxspec.drafts import check_method, needs_model
from jaxspec.drafts.head_layout import is_head
from jaxspec.engine.inputs import Prompt
from jaxspec.engine.outputs import Interrupted, RequestOutput
from jaxspec.llm import LLM
from jaxspec.loading.default_target import is_default_target
from jaxspec.loading.resolve import read_config
from jaxspec.sampling.params import SamplingParams
from jaxspec.tools import prompts, report
from jaxspec.tools.cli import (
    DEFAULT_DRAFTS,
    OutputJson,
    command,
    exact_float32,
    option,
)
from jaxspec.tools.flags import Flag, Given, flag, flags_of, given_of
from jaxspec.tools.losslessness import find_differences, with_margins

ENGINE_FIELDS = (
    "max_model_len",
    "max_num_seqs",
    "compilation",
    "rounds_per_step",
    "kernels",
    "kv_cache_dtype",
    "quantize",
    "tensor_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "gpu_memory_utilization",
)


@dataclass(frozen=True)
class PromptOptions:
    """The prompts, and how they are given to the target."""

    prompt: list[str] | None = flag(None, "A prompt; may be given several times.")
    dataset: str | None = flag(
        None,
        "JSON Lines with turns, prompt or question, or a hub id such as philschmid/mt-bench.",
        "--dataset",
        "--dataset-path",
    )
    num_prompts: int | None = flag(None, "At most this many of the prompts.")
    chat_template: bool = flag(True, "Give each prompt as a chat, or raw.")

    @property
    def is_demo(self) -> bool:
        """Whether the built-in prompts are used."""
        return not self.prompt and self.dataset is None

    def files(self) -> list[str]:
        """Return what is read besides the models."""
        return [] if self.dataset is None else [self.dataset]

    def read(self) -> list[str]:
        """Return the prompts; ConfigError for one that is empty or malformed."""
        if self.prompt and self.dataset is not None:
            raise ConfigError("--prompt, --dataset: expected one of them, got both")
        if self.num_prompts is not None and self.num_prompts < 1:
            raise ConfigError(f"--num-prompts: expected at least 1, got {self.num_prompts}")
        if self.prompt:
            texts = prompts.check_prompts(self.prompt)
        else:
            texts = list(prompts.DEMO) if self.is_demo else prompts.read_prompts(self.dataset or "")
        return texts[: self.num_prompts]


@dataclass(frozen=True)
class VllmOptions:
    """Flags of vLLM's example that change nothing here."""

    dataset_name: str | None = flag(None, "vLLM's; the data set's layout is read from its rows.")
    print_output: bool = flag(False, "vLLM's; texts are printed without it too.")
    enforce_eager: bool = flag(False, "vLLM's; --compilation chooses the programs.")
    enable_chunked_prefill: bool = flag(False, "vLLM's; long prompts are always cut.")
    trust_remote_code: bool = flag(False, "vLLM's; refused, no code of a checkpoint runs here.")

    def check(self) -> None:
        """Raise ConfigError for a flag that would change something."""
        ENGINE.values["trust_remote_code"].check("--trust-remote-code", self.trust_remote_code)


@dataclass(frozen=True)
class SpeculationOptions:
    """Whether to draft, and what to compare with."""

    speculative_config: str | None = flag(
        None, "Speculation's settings as JSON with vLLM's keys; the flags take precedence."
    )
    speculation: bool = flag(True, "Draft, or decode plainly.")
    compare: bool | None = flag(
        None, "Decode plainly too: speed-up, same texts? [default: in the demo]"
    )


def main(
    speculative: Annotated[
        Given,
        given_of(
            SpeculativeConfig,
            "method",
            "rejection_sample_method",
            "draft_sample_method",
            "adaptive",
            "fallback_method",
            "synthetic_acceptance_rates",
            "synthetic_acceptance_length",
            "draft_sliding_window",
            "draft_quantize",
            "draft_kv_cache_dtype",
            "draft_tensor_parallel_size",
            "prompt_lookup_max",
            "prompt_lookup_min",
            num_speculative_tokens=Flag(names=("--num-speculative-tokens", "--num-spec-tokens")),
            model=Flag(names=("--draft", "--eagle-dir", "--draft-model")),
        ),
    ],
    speculation: SpeculationOptions,
    inputs: PromptOptions,
    sampling: Annotated[
        SamplingParams,
        flags_of(
            SamplingParams,
            leaving_out=("bad_words_token_ids", "num_speculative_tokens"),
            temperature=Flag(0.0, names=("--temperature", "--temp")),
            max_tokens=Flag(128, names=("--max-tokens", "--output-len")),
            seed=Flag(0, "Seed of the first prompt; the i-th has seed + i."),
            logprobs=Flag(
                help="With --output-json: log-probabilities of each token and of this many of the "
                "likeliest; -1: of all."
            ),
        ),
    ],
    engine: Annotated[
        Given,
        given_of(
            EngineConfig,
            *ENGINE_FIELDS,
            max_model_len=Flag(
                help="Tokens a request may hold, prompt included. "
                "[default: 2048, or the target's limit if that is less]"
            ),
            max_num_seqs=Flag(help="Requests that run together. [default: 8; in the demo 1]"),
            tensor_parallel_size=Flag(names=("--tensor-parallel-size", "--tp")),
        ),
    ],
    vllm: VllmOptions,
    target: Annotated[
        str | None,
        option(
            "Folder, .gguf file or hub id of the target. [default: SmolLM2-135M-Instruct]",
            "--target",
            "--model",
            "--model-dir",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        option("float32, bfloat16 or auto. [default: float32 with --compare, else auto]"),
    ] = None,
    output_json: OutputJson = None,
    quiet: Annotated[bool, option("Print the figures only.", "--quiet")] = False,
) -> None:
    """Generate text with EAGLE speculative decoding.

    Without prompts this is the demo, which also decodes plainly and compares.
    """
    vllm.check()
    compare = speculation.compare
    drafts = None
    if speculation.speculation:
        drafts = read_speculative(speculation.speculative_config, speculative, target)
    elif compare:
        raise ConfigError(
            "--compare: expected speculation to compare with plain decoding, got --no-speculation"
        )
    compare = drafts is not None and (inputs.is_demo if compare is None else compare)
    texts = inputs.read()
    params = [replace(sampling, seed=((sampling.seed or 0) + i) % 2**64) for i in range(len(texts))]
    json_file = report.JsonFile(output_json, inputs.files()) if output_json else None
    dtype = dtype or ("float32" if compare else "auto")
    if dtype == "float32":
        exact_float32()
    # The demo shows the wait of one user: a CPU cannot draft for eight requests at once.
    engine = {"max_num_seqs": 1 if inputs.is_demo else 8, **engine}
    llm = LLM.from_pretrained(target, speculative=drafts, dtype=dtype, **engine)
    if not quiet:
        print(llm.describe(), flush=True)
    given: list[Prompt] = list(texts)
    if inputs.chat_template:
        given = [[{"role": "user", "content": text}] for text in texts]
    try:
        outputs = generate(llm, given, params, quiet)
    except Interrupted as e:
        show(llm, [texts[output.index] for output in e.outputs], e.outputs, None, quiet)
        raise
    comparison = compare_with_plain(llm, given, params, outputs, quiet) if compare else None
    try:
        if json_file:
            settings = {"target": target, "dtype": dtype, **asdict(sampling)}
            settings |= {name: getattr(llm.config, name) for name in ENGINE_FIELDS}
            json_file.write(record(llm, texts, outputs, comparison, settings))
    finally:  # what a full disk does not take can be read
        show(llm, texts, outputs, comparison, quiet)
    if comparison and comparison.failed:
        raise typer.Exit(1)


def read_speculative(
    text: str | None, flags: Mapping[str, Any], target: str | None
) -> SpeculativeConfig:
    """Return the settings of --speculative-config with the flags over them.

    The default target gets the committed head of the method if neither names one. A target that is
    a head itself, which names its target, needs none.
    """
    try:
        values = json.loads(text) if text is not None else {}
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"--speculative-config: expected JSON, got {e}") from e
    if not isinstance(values, dict):
        raise ConfigError(
            f"--speculative-config: expected a JSON object, got a {type(values).__name__}"
        )
    values |= flags
    config = SpeculativeConfig.from_dict(values)
    check_method(config.method)
    if config.model is None and needs_model(config.method):
        method = config.method or "eagle3"
        if is_default_target(target) and method in DEFAULT_DRAFTS:
            return replace(config, model=DEFAULT_DRAFTS[method])
        if is_default_target(target) or not is_head(read_config(str(target))):
            raise ConfigError(
                f"--draft: expected a draft head for {target or 'the default target'} (or "
                "--no-speculation), got none"
            )
    return config


def generate(
    llm: LLM, inputs: list[Prompt], params: list[SamplingParams], quiet: bool
) -> list[RequestOutput]:
    """Compile first, which the timings must not hold; then run, with a progress bar."""
    llm.warmup_for(inputs, params, progress=not quiet)
    return llm.generate(inputs, params, progress=not quiet)


def compare_with_plain(
    llm: LLM,
    inputs: list[Prompt],
    params: list[SamplingParams],
    outputs: list[RequestOutput],
    quiet: bool,
) -> report.Comparison:
    """Compare with plain decoding of the same prompts on the same weights."""
    plain = llm.on_same_weights(speculative=False)
    differences = find_differences(outputs, generate(plain, inputs, params, quiet))
    assert llm.speculative is not None
    expected = report.expected_agreement(params[0], llm.speculative)
    if expected == "tokens":
        target = llm.target_config, llm.params["target"]
        differences = with_margins(*target, outputs, differences, cache_dtype=llm.cache_dtype)
    return report.Comparison(expected, llm.timings, plain.timings, differences, len(outputs))


def show(
    llm: LLM,
    texts: list[str],
    outputs: list[RequestOutput],
    comparison: report.Comparison | None,
    quiet: bool,
) -> None:
    """Print the texts, then the acceptance table, then the figures."""
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
    speed = f"{report.tokens_per_second(llm.timings):.1f} tokens/s"
    print(f"{speed} in {llm.timings.num_rounds} rounds, compilation not counted")
    if comparison:
        print("\n".join(comparison.lines()))


def record(
    llm: LLM,
    texts: list[str],
    outputs: list[RequestOutput],
    comparison: report.Comparison | None,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Return the contents of --output-json.

    texts_agree and comparison are null without --compare.
    """
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


app = command(main)
