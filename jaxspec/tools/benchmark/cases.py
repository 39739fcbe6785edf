"""Cases of the benchmark: one round's settings each; presets of them; thresholds of some."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from jaxspec.config import Compilation, ConfigError, KVCacheDtype, is_number
from jaxspec.tools.benchmark.dimensions import MODELS

RULES = ("strict", "probabilistic", "block")


@dataclass(frozen=True)
class Case:
    """One round's settings.

    acceptance_length: the mean that acceptance is forced to, bonus token included; 1 accepts none
    kv_cache_dtype, tensor_parallel_size, enable_expert_parallel: the engine's
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
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("model", MODELS),
            ("method", ("eagle", "eagle3", "mtp")),
            ("rule", RULES),
            ("compilation", get_args(Compilation)),
            ("kv_cache_dtype", get_args(KVCacheDtype)),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"--{name.replace('_', '-')}: expected among {', '.join(allowed)}, "
                    f"got {getattr(self, name)!r}"
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
        if self.tensor_parallel_size > 1:
            experts = " EP" if self.enable_expert_parallel else ""
            mode += f" TP{self.tensor_parallel_size}{experts}"
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
