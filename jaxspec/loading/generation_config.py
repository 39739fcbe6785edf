"""The generation_config.json of a target: the sampling parameters that its makers propose."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.config import ConfigError
from jaxspec.loading.checkpoint import read_json
from jaxspec.sampling.params import SamplingParams

FILE = "generation_config.json"
# transformers' names -> those of SamplingParams; the same choice as vLLM's.
NAMES = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}


def proposed_sampling(folder: Path) -> dict[str, Any]:
    """Return what a target's folder proposes, by the names of SamplingParams; unchecked."""
    values = read_json(folder / FILE) if (folder / FILE).is_file() else {}
    return {ours: values[name] for name, ours in NAMES.items() if values.get(name) is not None}


def sampling_params(proposed: Mapping[str, Any]) -> SamplingParams:
    """Return these parameters; ConfigError names the file if they are wrong."""
    try:
        return SamplingParams(**proposed)
    except ConfigError as e:
        raise ConfigError(f"{FILE}: {e}") from None
