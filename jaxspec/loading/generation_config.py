"""The generation_config.json of a target: the sampling parameters that its makers propose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxspec.config import ConfigError, is_one_of, shown
from jaxspec.loading.checkpoint import read_json
from jaxspec.sampling.params import SamplingParams

FILE = "generation_config.json"
CHOICES = ("auto", "vllm")
# transformers' names -> those of SamplingParams; the same choice as vLLM's.
NAMES = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True)
class DefaultSampling:
    """The sampling parameters of requests that bring none.

    proposed:     what the target's makers propose, by the names of SamplingParams; unchecked
    for_requests: whether requests without parameters take it; else they take SamplingParams()
    """

    proposed: Mapping[str, Any] = field(default_factory=dict)
    for_requests: bool = False

    def of_model(self) -> SamplingParams:
        """Return new parameters with what is proposed; ConfigError for a wrong value."""
        try:
            return SamplingParams(**self.proposed)
        except ConfigError as e:
            raise ConfigError(f"{FILE}: {e}") from None

    def of_requests(self) -> SamplingParams:
        """Return new parameters of a request that brings none."""
        return self.of_model() if self.for_requests else SamplingParams()


def check_choice(choice: object) -> None:
    """Raise ConfigError unless `generation_config` of LLM is "auto", "vllm" or None."""
    if choice is not None and not is_one_of(choice, CHOICES):
        raise ConfigError(
            f"generation_config: expected None, {' or '.join(map(repr, CHOICES))}, "
            f"got {shown(choice)}"
        )


def default_sampling(folder: Path, choice: str | None) -> DefaultSampling:
    """Return the defaults of a target's folder.

    choice: "auto" hands what is proposed to requests, "vllm" ignores the file. None reads it for
        LLM.get_default_sampling_params alone.
    """
    if choice == "vllm" or not (folder / FILE).is_file():
        return DefaultSampling()
    values = read_json(folder / FILE)
    proposed = {ours: values[name] for name, ours in NAMES.items() if values.get(name) is not None}
    return DefaultSampling(proposed, for_requests=choice == "auto")
