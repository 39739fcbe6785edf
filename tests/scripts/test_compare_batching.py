"""scripts/compare_batching.py: requests together and alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec import LLM
from jaxspec.tools.losslessness import Difference
from scripts import compare_batching
from tests.scripts.conftest import runner

run = runner(compare_batching.main)


def arguments(target: Path, draft: Path) -> tuple[Any, ...]:
    return (
        "--target",
        target,
        "--draft",
        draft,
        "--num-prompts",
        3,
        "--max-tokens",
        12,
        "--dtype",
        "float32",
        "--batch-invariant",
    )


def test_tokens_do_not_depend_on_neighbours_in_float32(
    target: Path, draft: Path, tmp_path: Path
) -> None:
    result = run(
        *arguments(target, draft), "--temperature", 1, "--output-json", tmp_path / "run.json"
    )
    assert result.exit_code == 0, result.output
    assert "3 of 3 requests have the same tokens alone and among the others" in result.stdout
    assert json.loads((tmp_path / "run.json").read_text())["differences"] == []


def test_takes_the_forms_of_a_target(target: Path, draft: Path, tmp_path: Path) -> None:
    forms = ("--quantize", "fp8", "--kv-cache-dtype", "fp8", "--max-num-batched-tokens", 96)
    given = arguments(target, draft)
    result = run(*given[:-1], *forms, "--output-json", tmp_path / "run.json")
    assert result.exit_code == 0, result.output
    settings = json.loads((tmp_path / "run.json").read_text())["settings"]
    assert settings["quantize"] == settings["kv_cache_dtype"] == "fp8"
    assert settings["max_num_batched_tokens"] == 96 and not settings["batch_invariant"]


def test_a_token_that_a_neighbour_changed_fails(
    target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = LLM.generate

    def wrong(self: LLM, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = decode(self, prompts, *args, **kwargs)
        if len(prompts) > 1:
            outputs[1].token_ids[5] ^= 1
        return outputs

    monkeypatch.setattr(LLM, "generate", wrong)
    result = run(*arguments(target, draft))
    assert (
        result.exit_code == 1
        and "2 of 3 requests" in result.stdout
        and "prompt 1, token 5:" in result.stdout
    )


def test_what_is_wrong() -> None:
    tie, other = Difference(0, 1, 2, 3, 0.01, 0.1), Difference(0, 1, 2, 3, 0.2, 0.1)
    assert not compare_batching.is_wrong([tie], 64, 0.0) and compare_batching.is_wrong(
        [other], 64, 0.0
    )
    assert compare_batching.is_wrong([tie, tie], 64, 0.0) and not compare_batching.is_wrong(
        [other], 64, 1.0
    )
