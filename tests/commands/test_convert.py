"""jaxspec convert: a quantised folder that jaxspec generate reads, or one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxspec.commands import convert
from tests.commands.conftest import Run, runner

run = runner(convert.main)


def test_a_converted_folder_generates(target: Path, tmp_path: Path, run_generate: Run) -> None:
    result = run(target, tmp_path / "fp8")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{tmp_path / 'fp8'}: fp8, 0.00 GB of weights")
    flags = "--prompt", "Hello", "--max-tokens", 4, "--max-model-len", 64
    result = run_generate("--target", tmp_path / "fp8", "--method", "ngram", *flags)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--format", "fp4"], "--format: expected one of fp8, fp8-block, int4, bfloat16, got"),
        (["--format", "bfloat16"], "model: expected a draft head, with fc.weight (EAGLE-1)"),
        (["--group-size", 64], "group_size: expected one of 32, 64, 128 with format 'int4'"),
    ],
)
def test_what_cannot_be_converted_is_one_sentence(
    flags: list[object], sentence: str, target: Path, tmp_path: Path
) -> None:
    result = run(target, tmp_path / "out", *flags)
    assert result.exit_code == 2 and result.stderr.startswith(f"error: {sentence}"), result.output
    assert not (tmp_path / "out").exists()
