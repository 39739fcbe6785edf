"""Requests of random sampling features, and a soak of an engine with them."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec import LLM
from jaxspec.config import ConfigError
from jaxspec.sampling.params import SamplingParams


@dataclass
class Soak:
    """The measurements of a soak.

    host_bytes, device_bytes: resident memory of the process, and of JAX's arrays, at each fifth
    step_seconds: the time of each step that ran a program, in which the process had a processor
    reasons: how many requests ended for each reason
    """

    host_bytes: list[int] = field(default_factory=list)
    device_bytes: list[int] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def longest_over_median(self) -> float:
        return max(self.step_seconds) / float(np.median(self.step_seconds))


def soak(llm: LLM, vocab: int, count: int, *, seed: int) -> Soak:
    """Run so many random requests, up to twice the batch at a time; one of twenty is cancelled."""
    rng, engine, found = np.random.default_rng(seed), llm.engine, Soak()
    live: list[Any] = []
    num_made = 0
    while num_made < count or engine.has_requests:
        while num_made < count and len(live) < 2 * llm.config.max_num_seqs and rng.random() < 0.7:
            prompt, params = random_request(rng, vocab)
            live += (made := llm.make_requests([prompt], params))
            engine.add(made[0])
            num_made += 1
            if num_made % (count // 5) == 0:
                gc.collect()
                found.host_bytes.append(_resident_bytes())
                found.device_bytes.append(sum(x.nbytes for x in jax.live_arrays()))
        begin = time.process_time()
        engine.step()
        found.step_seconds.append(time.process_time() - begin)
        if live and rng.random() < 0.01:
            engine.cancel(live[rng.integers(len(live))])
        for request in [r for r in live if r.finish_reason is not None]:
            live.remove(request)
            reason = request.finish_reason
            found.reasons[reason] = found.reasons.get(reason, 0) + 1
    return found


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def random_request(
    rng: np.random.Generator, vocab: int, *, longest: int = 100
) -> tuple[list[int], SamplingParams]:
    """Return a prompt of a vocabulary's ids, and parameters with any mixture of features.

    longest: tokens of prompt and text together at most
    """
    prompt = rng.integers(0, vocab, rng.integers(1, longest // 2)).tolist()
    while True:
        try:
            params = SamplingParams(**_features(rng, vocab, longest))
            params.check_vocabulary(vocab, range(vocab // 2))
        except ConfigError:  # no token would be left to some text
            continue
        return prompt, params


def _features(rng: np.random.Generator, vocab: int, longest: int) -> dict[str, Any]:

    def some(share: float) -> bool:
        return bool(rng.random() < share)

    def ids(most: int) -> list[int]:
        return rng.integers(0, vocab, rng.integers(1, most + 1)).tolist()

    features: dict[str, Any] = {
        "temperature": 0.0 if some(0.4) else float(rng.uniform(0.5, 1.5)),
        "top_k": int(rng.choice([0, 5])),
        "top_p": float(rng.choice([1.0, 0.9])),
        "min_p": float(rng.choice([0.0, 0.05])),
        "ignore_eos": some(0.5),
        "num_speculative_tokens": [None, None, 0, 1][rng.integers(4)],
        "max_tokens": int(rng.integers(1, longest // 3)),
        "seed": int(rng.integers(2**40)),
    }
    if some(0.2):
        features["repetition_penalty"] = 1.2
    if some(0.2):
        features["presence_penalty"], features["frequency_penalty"] = 0.5, 0.1
    if some(0.2):
        features["logit_bias"] = dict.fromkeys(ids(3), 2.0)
    if some(0.1):
        features["banned_token_ids"] = ids(3)
    if some(0.1):
        features["allowed_token_ids"] = range(vocab // 2)
    if some(0.2):
        features["min_tokens"] = features["max_tokens"] // 2
    if some(0.3):
        features["stop_token_ids"] = ids(6)
    if some(0.1):
        features["stop_token_ids"] = [int(i) for i in range(min(vocab // 3, 128))]
    if some(0.2):
        count, shortest = [(2, 1), (40, 2), (900, 3)][rng.integers(3)]
        features["bad_words_token_ids"] = [
            rng.integers(0, vocab, rng.integers(shortest, 5)).tolist() for _ in range(count)
        ]
    if some(0.2):
        features["logprobs"] = int(rng.choice([0, 3, 20, -1]))
    if some(0.1):
        features["prompt_logprobs"] = int(rng.choice([0, 3]))
    return features
