"""What a target's generation_config.json proposes for sampling."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxspec import ConfigError, SamplingParams
from jaxspec.loading.generation_config import default_sampling

pytestmark = pytest.mark.once


def read(folder: Path, **values: object) -> SamplingParams:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return default_sampling(folder, "auto").of_model()


def test_names_are_those_of_transformers(tmp_path: Path) -> None:
    """Llama-3.1-8B-Instruct's file, and the keys that it lacks."""
    assert default_sampling(tmp_path, "auto").of_model() == SamplingParams()
    llama = read(
        tmp_path,
        bos_token_id=128000,
        do_sample=True,
        eos_token_id=[128001, 128008, 128009],
        temperature=0.6,
        top_p=0.9,
        transformers_version="4.42.3",
    )
    assert llama == SamplingParams(temperature=0.6, top_p=0.9)
    found = read(tmp_path, top_k=20, min_p=0.1, repetition_penalty=1.05, max_new_tokens=2048)
    assert found == SamplingParams(top_k=20, min_p=0.1, repetition_penalty=1.05, max_tokens=2048)
    assert read(tmp_path, temperature=None) == SamplingParams()


def test_a_wrong_value_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^generation_config.json: top_p: expected .* got '0.9'"):
        read(tmp_path, top_p="0.9")


@pytest.mark.parametrize(
    ("choice", "of_model", "of_requests"),
    [(None, 0.6, 1.0), ("auto", 0.6, 0.6), ("vllm", 1.0, 1.0)],
)
def test_who_takes_what_is_proposed(
    tmp_path: Path, choice: str | None, of_model: float, of_requests: float
) -> None:
    read(tmp_path, temperature=0.6)
    defaults = default_sampling(tmp_path, choice)
    assert defaults.of_model() == SamplingParams(temperature=of_model)
    assert defaults.of_requests() == SamplingParams(temperature=of_requests)
