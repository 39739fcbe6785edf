"""Run engines on one device and on several, and compare tokens, counts and log-probabilities.

    python -m tests.parallel.engines_on_devices CASE...

A case is a family, a draft, numbers of devices and settings: "mimo mtp 2,4 rule=block". With
replicas=n, each of n replicas has so many devices. With verify=n, several devices verify at most n
tokens a round, and one device all of them. With adaptive, requests have as many drafts as pay; with
fallback=METHOD, the text drafts where the head does not. With confidence=p, a DSpark head ends
drafts. With fp8, keys and values are fp8. With halves, several devices prefill in halves whose
exchanges hide behind each other. The family "agreeing" has a draft that mostly agrees.
Prints a line for each case and number of devices: "equal", or both results.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax
import numpy as np

from jaxspec import LLM, EngineConfig, SamplingParams, SpeculativeConfig
from jaxspec.config import Ops
from jaxspec.decode import prefill
from jaxspec.drafts import MODEL_FREE
from jaxspec.engine.outputs import RequestOutput
from tests.support.families import family_model
from tests.support.tiny import (
    BLOCK_METHODS,
    Model,
    agreeing_block_model,
    agreeing_model,
    tiny_model,
)

jax.config.update("jax_default_matmul_precision", "highest")
PROMPTS = [[int(t) for t in np.random.default_rng(n).integers(8, 40, n)] for n in (5, 17, 9, 26, 3)]
TEMPERATURES = (0.0, 1.0, 0.7, 1.0, 0.0)
PLAIN: dict[str, Any] = {}
EVERYTHING: dict[str, Any] = dict(
    repetition_penalty=1.2,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={9: 1.0, 30: -1.0},
    top_k=20,
    top_p=0.9,
    min_p=0.02,
    min_tokens=4,
    logprobs=3,
    prompt_logprobs=2,
)
WORDS: dict[str, Any] = dict(
    bad_words_token_ids=[[9, 10], [30]],
    banned_token_ids=[11],
    allowed_token_ids=range(5, 44),
    stop_token_ids=[12, 33],
    ignore_eos=False,
    num_speculative_tokens=2,
    logprobs=-1,
    n=2,
)
# Rows of a chunk that is halved, and tokens of a tile: fewer than a prompt's, or as they are.
SHORT, LONG = (1, property(lambda _: 4)), (prefill.OVERLAPPED_ROWS, Ops.prefill_tile)


@dataclass(frozen=True)
class Outcome:
    """The result of an engine's runs.

    texts: the tokens of each text and the reason of its end
    counts: of drafts and of accepted ones, and what adaptive drafts are chosen by
    scores: log-probabilities, of texts and of prompts, with their token ids
    """

    texts: list[tuple[list[int], str | None]]
    counts: str
    scores: list[tuple[int, float]]

    def equals(self, other: Outcome) -> bool:
        """Whether all is equal, log-probabilities up to rounding."""
        ids, values = zip(*self.scores, strict=True) if self.scores else ((), ())
        other_ids, other_values = zip(*other.scores, strict=True) if other.scores else ((), ())
        return (self.texts, self.counts, ids) == (other.texts, other.counts, other_ids) and bool(
            np.allclose(values, other_values, rtol=1e-4, atol=1e-4)
        )


def texts_of(outputs: Sequence[RequestOutput]) -> list[tuple[list[int], str | None]]:
    return [(list(text.token_ids), text.finish_reason) for o in outputs for text in o.outputs]


def scores_of(outputs: Sequence[RequestOutput]) -> list[tuple[int, float]]:
    of_texts = [text.logprobs for o in outputs for text in o.outputs]
    rows = [
        row for found in (*of_texts, *(o.prompt_logprobs for o in outputs)) for row in found or ()
    ]
    return [(token, row[token].logprob) for row in rows if row for token in sorted(row)]


def sampling(settings: dict[str, str]) -> list[SamplingParams]:
    more = EVERYTHING if "everything" in settings else WORDS if "words" in settings else PLAIN
    common = {"ignore_eos": True, "max_tokens": int(settings.get("tokens", "12"))} | more
    return [
        SamplingParams(temperature=t, seed=i, **(common if t else common | {"n": 1}))
        for i, t in enumerate(TEMPERATURES)
    ]


def all_sampled(params: Sequence[SamplingParams]) -> list[SamplingParams]:
    """Return these with no greedy one, so that fewer programs compile."""
    return [replace(each, temperature=each.temperature or 0.5) for each in params]


def model_of(family: str, method: str, settings: dict[str, str]) -> Model:
    """Return a tiny target and a draft with layers."""
    if family == "agreeing":
        make = agreeing_block_model if method in BLOCK_METHODS else agreeing_model
        model = make(method)
    elif family == "tiny":
        model = tiny_model(method, mapped="mapped" in settings)
    else:
        model = family_model(family, method)
    if "confidence" not in settings:
        return model
    chance = float(settings["confidence"])
    return replace(model, draft=replace(model.draft, confidence_threshold=chance))


def counted(parts: Any, found: list[int]) -> Any:
    """A function of prefill's parts that also notes how many a chunk has."""

    def run(*args: Any) -> Any:
        made = parts(*args)
        found.append(len(made))
        return made

    return run


def outcome(family: str, method: str, size: int, settings: dict[str, str]) -> Outcome:
    """Tokens, and the counts of drafts, of an engine on `size` devices."""
    K = int(settings.get("K", "3"))
    prefill.OVERLAPPED_ROWS, Ops.prefill_tile = SHORT if "halves" in settings else LONG  # type: ignore[misc]
    model = model_of(family, "eagle3" if method in MODEL_FREE else method, settings)
    draft: dict[str, Any] = dict(
        model=None if method in ("mtp", *MODEL_FREE) else "none",
        method=method.partition(":")[0],
        num_speculative_tokens=K,
        rejection_sample_method=settings.get("rule", "probabilistic"),
    )
    if "adaptive" in settings:
        draft["adaptive"] = True
    if "fallback" in settings:
        draft["fallback_method"] = settings["fallback"] or "ngram"
        if draft["fallback_method"] == "ngram":
            draft["prompt_lookup_min"] = 1
    if settings.get("rule") == "synthetic":
        draft["synthetic_acceptance_length"] = 2.0
    if "replicated" in settings and size > 1:
        draft["draft_tensor_parallel_size"] = 1
    if "verify" in settings and size > 1:
        draft["max_num_verify_tokens"] = int(settings["verify"])
    drafts = method != "none" and K > 0
    config = EngineConfig(
        max_model_len=64,
        max_num_seqs=4,
        block_size=4,
        max_num_batched_tokens=16,  # prompts are prefilled in chunks
        batch_buckets=(4,),
        rounds_per_step=int(settings.get("rounds", "1")),
        num_gpu_blocks_override=int(settings.get("blocks", "64")),  # few: requests are preempted
        compilation=settings.get("compilation", "round"),  # type: ignore[arg-type]
        tensor_parallel_size=size,
        data_parallel_size=int(settings.get("replicas", "1")) if size > 1 else 1,
        enable_expert_parallel="expert" in settings and size > 1,
        kv_cache_dtype="fp8" if "fp8" in settings else "auto",
    )
    speculative = SpeculativeConfig(**draft) if drafts else None
    drafting: Any = (model.draft, model.params["draft"]) if drafts else None
    if speculative is not None and method in MODEL_FREE:
        drafting = (MODEL_FREE[method].config(model.target, speculative), {})
    llm = LLM(
        (model.target, model.params["target"]),
        drafting,
        speculative,
        config=config,
        eos_token_ids=(7,),
    )
    count = 2 if "few" in settings else len(PROMPTS)
    chunks: list[int] = []  # the parts of each
    with mock.patch.object(prefill, "_parts", counted(prefill._parts, chunks)):
        outputs = llm.generate(PROMPTS[:count], sampling(settings)[:count])
    assert (2 in chunks) == ("halves" in settings and size > 1)
    if "again" in settings:  # prefixes are in the cache now
        outputs += llm.generate(PROMPTS, sampling(settings))
        assert llm.scheduling.num_prefix_hits > 0
    if "blocks" in settings:
        assert llm.scheduling.num_preemptions > 0
    assert (llm.metrics.num_lookups > 0) == ("fallback" in settings)
    assert (llm.scheduling.num_waits > 0) == ("max_num_verify_tokens" in draft)
    texts, scores = texts_of(outputs), scores_of(outputs)
    if "streams" in settings:
        texts += [
            ([t for increment in llm.stream(p, s) for t in increment.token_ids], None)
            for p, s in zip(PROMPTS[:2], sampling(settings)[:2], strict=True)
        ]
    counts = str(llm.metrics)
    if (choice := llm.engines[0].choice) is not None:  # the K of greedy rounds follows their times
        sampled = [o.metrics for o, t in zip(outputs, TEMPERATURES, strict=False) if t]
        counts = f"{choice.begin(greedy=False, batch=4)} {sampled}"
    return Outcome(texts, counts, scores)


def main() -> None:
    for case in sys.argv[1:]:
        family, method, sizes, *pairs = case.split()
        settings = {key: value for key, _, value in (pair.partition("=") for pair in pairs)}
        expected = outcome(family, method, 1, settings)
        for size in map(int, sizes.split(",")):
            got = outcome(family, method, size, settings)
            print(case, size, "equal" if got.equals(expected) else f"{expected} {got}", flush=True)


if __name__ == "__main__":
    main()
