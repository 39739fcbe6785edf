"""Cases of the benchmark: one round's settings each; presets of them; thresholds of some."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import numpy as np

from jaxspec.config import Compilation, ConfigError, KVCacheDtype, is_number
from jaxspec.config.quantization import FROM_FLOATS
from jaxspec.drafts import BLOCKS
from jaxspec.drafts.draft_model import METHOD as DRAFT_MODEL
from jaxspec.sampling import synthetic
from jaxspec.tools.benchmark.dimensions import MODELS, HeadShape, draft_config

RULES = ("strict", "probabilistic", "block")
METHODS = ("eagle3", "eagle", "mtp", *BLOCKS, DRAFT_MODEL)
# The methods whose heads differ in a dimension.
SHAPED = {
    "draft_layers": tuple(BLOCKS),
    "draft_vocab_size": ("eagle3", *BLOCKS),
    "sample_from_anchor": tuple(BLOCKS),
}


@dataclass(frozen=True)
class Case:
    """One round's settings.

    acceptance_length: the mean that acceptance is forced to, bonus token included; 1 accepts none
    kv_cache_dtype, tensor_parallel_size, enable_expert_parallel: the engine's
    draft_kv_cache_dtype: of the draft's caches; None for kv_cache_dtype
    max_num_verify_tokens: rows of the verify pass, which uneven numbers of drafts fill (`drafts`);
        None for K + 1 of each request
    draft_layers, draft_vocab_size, sample_from_anchor, draft_quantize: the head's (HeadShape)
    """

    model: str = "llama-3-8b"
    method: str = "eagle3"
    batch: int = 1
    context: int = 400
    num_speculative_tokens: int = 3
    temperature: float = 0.0
    rule: str = "probabilistic"
    compilation: str = "round"
    acceptance_length: float = 2.56
    kv_cache_dtype: KVCacheDtype = "auto"
    draft_kv_cache_dtype: KVCacheDtype | None = None
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    draft_layers: int | None = None
    draft_vocab_size: int | None = None
    sample_from_anchor: bool | None = None
    draft_quantize: str | None = None
    max_num_verify_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("model", MODELS),
            ("method", METHODS),
            ("rule", RULES),
            ("compilation", get_args(Compilation)),
            ("kv_cache_dtype", get_args(KVCacheDtype)),
            ("draft_kv_cache_dtype", (None, *get_args(KVCacheDtype))),
            ("draft_quantize", (None, *FROM_FLOATS)),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"--{name.replace('_', '-')}: expected among "
                    f"{', '.join(map(str, allowed))}, got {getattr(self, name)!r}"
                )
        for name in ("batch", "context", "num_speculative_tokens", "tensor_parallel_size"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"--{name.replace('_', '-')}: expected at least 1, got {getattr(self, name)}"
                )
        if not is_number(self.temperature) or self.temperature < 0:
            raise ConfigError(
                f"--temperature: expected a number of at least 0, got {self.temperature}"
            )
        self._check_head()
        most, least = self.max_num_verify_tokens, max(self.num_speculative_tokens + 1, self.batch)
        if most is not None and most < least:
            raise ConfigError(
                f"--max-num-verify-tokens: expected at least {least}, "
                f"a request's K + 1 rows and a row of each request, got {most}"
            )

    def _check_head(self) -> None:
        """Raise ConfigError for a head that the method or the model cannot have."""
        vocab = MODELS[self.model].target.vocab_size
        for name, methods in SHAPED.items():
            value = getattr(self, name)
            if value is not None and self.method not in methods:
                raise ConfigError(
                    f"--{name.replace('_', '-')}: expected a method among {', '.join(methods)}, "
                    f"got {self.method}"
                )
        if self.draft_layers is not None and self.draft_layers < 1:
            raise ConfigError(f"--draft-layers: expected at least 1, got {self.draft_layers}")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= vocab:
            raise ConfigError(
                f"--draft-vocab-size: expected 1 to {vocab}, the size of the target's vocabulary, "
                f"got {self.draft_vocab_size}"
            )
        most = self.head.block_capacity(self.method)
        if self.method in BLOCKS and self.num_speculative_tokens > most:
            raise ConfigError(
                f"--num-speculative-tokens: expected at most {most}, the drafts of the longest "
                f"block, got {self.num_speculative_tokens}"
            )
        draft_config(MODELS[self.model], self.method, self.head)

    @property
    def head(self) -> HeadShape:
        """What the draft differs in from others of its method."""
        return HeadShape(
            self.draft_layers, self.draft_vocab_size, self.sample_from_anchor, self.draft_quantize
        )

    @property
    def drafts(self) -> np.ndarray:
        """The drafts that each request may have in a round, int32 [batch].

        All have K, unless max_num_verify_tokens is too few rows for that. Then their numbers
        differ, from 0 to K, and the rows of all requests are just as many as the pass has.
        """
        shape = (self.batch, self.num_speculative_tokens)
        most = self.max_num_verify_tokens
        if most is None:
            return np.full(self.batch, self.num_speculative_tokens, np.int32)
        drawn = np.random.default_rng(0).permutation(math.prod(shape)).reshape(shape)
        return (drawn < most - self.batch).sum(axis=1, dtype=np.int32)

    @property
    def tokens_a_round(self) -> float:
        """The mean tokens of a request in a round: acceptance_length, less where drafts are few."""
        rates = synthetic.rates_from_length(self.acceptance_length, self.num_speculative_tokens)
        return 1 + sum(sum(rates[:most]) for most in self.drafts) / self.batch

    @property
    def name(self) -> str:
        rule = self.rule if self.temperature else "greedy"  # at temperature 0 the rules are one
        length = (
            f" length {self.acceptance_length:g}"
            if self.acceptance_length != Case.acceptance_length
            else ""
        )
        mode = "" if self.compilation == "round" else f" {self.compilation}"
        if self.kv_cache_dtype != "auto":
            mode += f" KV {self.kv_cache_dtype}"
        if self.draft_kv_cache_dtype is not None:
            mode += f" draft KV {self.draft_kv_cache_dtype}"
        if self.tensor_parallel_size > 1:
            experts = " EP" if self.enable_expert_parallel else ""
            mode += f" TP{self.tensor_parallel_size}{experts}"
        if self.draft_layers is not None:
            mode += f" layers {self.draft_layers}"
        if self.draft_vocab_size is not None:
            mode += f" vocabulary {self.draft_vocab_size}"
        if self.sample_from_anchor is not None:
            mode += " from the anchor" if self.sample_from_anchor else " after the anchor"
        if self.draft_quantize is not None:
            mode += f" draft {self.draft_quantize}"
        if self.max_num_verify_tokens is not None:
            mode += f" rows {self.max_num_verify_tokens}"
        return (
            f"{self.model} {self.method} b{self.batch} ctx {self.context} "
            f"K{self.num_speculative_tokens} T{self.temperature:g} {rule}{mode}{length}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name} | asdict(self)


@dataclass(frozen=True)
class Target:
    """Thresholds of a case in the wall clock of the engine's loop; None: no threshold.

    round_seconds: of a round, at most
    floor_ratio:   floor / round, at least
    plain_seconds: of a step of plain decoding, at most
    """

    round_seconds: float | None = None
    floor_ratio: float | None = None
    plain_seconds: float | None = None


# Thresholds of docs/performance.md: EAGLE-3, K = 3, context about 400, at T = 0 and at T = 1.
TARGETS = {
    ("llama-3-8b", 1): Target(4.8e-3, 0.80, plain_seconds=4.1e-3),
    ("llama-3-8b", 16): Target(5.4e-3, 0.72),
    ("llama-3-8b", 64): Target(9e-3),
    ("smollm2-135m", 1): Target(1.2e-3),
    ("smollm2-135m", 16): Target(1.6e-3),
}
ENGINE_RATIO = 1.02  # engine round / the same round dispatched back to back


def target_of(case: Case) -> Target | None:
    standard = Case(case.model, batch=case.batch, temperature=case.temperature)
    return TARGETS.get((case.model, case.batch)) if case == standard else None


def product(axes: Mapping[str, Iterable[Any]], base: Case | None = None) -> list[Case]:
    """Return every combination of the axes' values; the last axis changes fastest."""
    return [
        replace(base or Case(), **dict(zip(axes, values, strict=True)))
        for values in itertools.product(*axes.values())
    ]


def target_cases() -> list[Case]:
    """Return the cases of TARGETS."""
    return [Case(model, batch=batch, temperature=t) for model, batch in TARGETS for t in (0.0, 1.0)]


MATRIX: dict[str, tuple[Any, ...]] = {
    "model": ("llama-3-8b", "smollm2-135m"),
    "method": ("eagle3", "eagle"),
    "batch": (1, 4, 16, 64),
    "context": (512, 4096, 32768),
    "num_speculative_tokens": (3, 5),
    "temperature": (0.0, 1.0),
    "rule": ("probabilistic", "strict"),
    "compilation": ("round", "step"),
}
SHORT = Case(context=512)
NOTHING_ACCEPTED = replace(SHORT, acceptance_length=1.0)


def full_cases() -> list[Case]:
    """Return the whole matrix, acceptance 0 at batch 1 and 2, and the other models."""
    cases = product(MATRIX)
    cases += product(
        {
            "model": MATRIX["model"],
            "method": MATRIX["method"],
            "batch": (1, 2),
            "temperature": (0.0, 1.0),
        },
        NOTHING_ACCEPTED,
    )
    others = {name: MATRIX[name] for name in ("method", "batch", "temperature")}
    cases += product({"model": ("qwen3-8b", "mimo-7b"), **others}, SHORT)
    return cases


def axes_cases() -> list[Case]:
    """Return cases that cover the matrix at a fraction of its time.

    Each axis varies by itself, from EAGLE-3, K = 3, context 512, T = 1.
    """
    cases: list[Case] = []
    for model in MATRIX["model"]:
        base = replace(SHORT, model=model, temperature=1.0)
        for batch in MATRIX["batch"]:
            cases += product({"batch": (batch,), "temperature": MATRIX["temperature"]}, base)
        for batch in (1, 16):
            at = replace(base, batch=batch)
            for name in ("method", "context", "num_speculative_tokens", "rule", "compilation"):
                cases += product({name: MATRIX[name]}, at)
        cases += product(
            {"batch": (1, 2), "temperature": (0.0, 1.0)}, replace(NOTHING_ACCEPTED, model=model)
        )
    cases.append(replace(SHORT, model="llama-3-8b", batch=64, context=32768, temperature=1.0))
    return cases + product(
        {"model": ("qwen3-8b", "mimo-7b"), "batch": (1, 16), "temperature": (0.0, 1.0)}, SHORT
    )


def hybrid_cases() -> list[Case]:
    """Return EAGLE-3 on gpt-oss-20b and Qwen3-30B-A3B, and GLM-4.7-Flash with its own module."""
    axes = {"batch": (1, 16), "num_speculative_tokens": (3, 5), "temperature": (0.0, 1.0)}
    models = (Case("gpt-oss-20b"), Case("glm-4.7-flash", method="mtp"), Case("qwen3-30b-a3b"))
    return [case for model in models for case in product(axes, model)]


PRESETS = {"targets": target_cases, "axes": axes_cases, "full": full_cases, "hybrid": hybrid_cases}


def select(preset: str | None, given: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Return a preset's cases that the given values admit, or without a preset their product.

    No program comes twice, and a model's cases come together.
    """
    if preset is None:
        cases = product(given)
    else:
        if preset not in PRESETS:
            raise ConfigError(f"--preset: expected one of {', '.join(PRESETS)}, got {preset!r}")
        for name, values in given.items():  # a misspelt model is an error, not an empty selection
            product({name: values})
        cases = [
            case
            for case in PRESETS[preset]()
            if all(getattr(case, name) in values for name, values in given.items())
        ]
        if not cases:
            raise ConfigError(
                f"--preset {preset}: expected settings that some of its cases have, "
                f"got {dict(given)}"
            )
    unique: dict[str, Case] = {}
    for case in cases:
        unique.setdefault(case.name, case)
    return sorted(unique.values(), key=lambda case: list(MODELS).index(case.model))
