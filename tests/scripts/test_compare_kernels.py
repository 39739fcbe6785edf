"""scripts/compare_kernels.py: one op after the other is exchanged; a change of acceptance is an
error."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxspec import LLM, SamplingParams, SpeculativeConfig, llm
from jaxspec.config import Ops
from jaxspec.layers import op_choice
from scripts import compare_kernels
from tests.scripts.conftest import runner

run = runner(compare_kernels.main)


def test_without_kernels_there_is_nothing_to_exchange(target: Path, draft: Path) -> None:
    result = run("--target", target, "--draft", draft)
    assert (
        result.exit_code != 0
        and "kernels: expected an op that is not the reference already" in result.stderr
    )


def test_each_op_is_exchanged_and_a_moved_acceptance_fails(
    target: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU has one implementation: the engine is told of two others and runs the reference, and
    one of them draws other drafts."""
    asked: list[str] = []
    chosen = Ops(attention="mosaic_gpu", rms_norm="mosaic_gpu")

    class Named(llm.LLM):
        @property
        def kernels(self) -> Ops:
            return chosen

        @kernels.setter
        def kernels(self, _: Ops) -> None: ...

    def choose(requested: str, *_: object, **__: object) -> Ops:
        asked.append(requested)
        return Ops()

    monkeypatch.setattr(op_choice, "choose", choose)
    monkeypatch.setattr(compare_kernels, "LLM", Named)
    monkeypatch.setattr(llm.ModelRunner, "__init__", reference_runner(llm.ModelRunner.__init__))
    args = (
        "--target",
        target,
        "--draft",
        draft,
        "--max-tokens",
        8,
        "--output-json",
        tmp_path / "run.json",
        "--dtype",
        "float32",
    )
    assert run(*args).exit_code == 0
    wanted = [op_choice.parse(text) for text in asked]
    differing = [[op for op, name in w.items() if name == "mosaic_gpu"] for w in wanted[1:]]
    assert differing == [["attention", "rms_norm"], ["rms_norm"], ["attention"], []]
    assert all(
        r["points_moved"] == 0
        for r in json.loads((tmp_path / "run.json").read_text())["runs"].values()
    )
    monkeypatch.setattr(compare_kernels, "MOST_POINTS", -1.0)
    assert run(*args).exit_code == 1
    asked.clear()
    run(*args, "--ops", "rms_norm")
    assert [op_choice.parse(text)["rms_norm"] for text in asked[1:]] == ["mosaic_gpu", "reference"]
    unknown = run(*args, "--ops", "rms_norm,matmul")
    assert (
        unknown.exit_code == 2
        and "--ops: expected among attention, rms_norm, got matmul" in unknown.stderr
    )


def test_windows_start_from_what_the_text_says_before_them() -> None:
    output = lambda prompt, ids: SimpleNamespace(prompt_token_ids=prompt, token_ids=ids)  # noqa: E731
    found = compare_kernels.windows([output([1, 2], [3, 4, 5, 6, 7]), output([8], [9])], 2)
    assert found == [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [8]]


def test_every_run_goes_along_the_text_of_the_kernels_as_chosen(
    target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM.from_pretrained(
        str(target),
        speculative=SpeculativeConfig(model=str(draft), num_speculative_tokens=2),
        dtype="float32",
    )
    [text] = llm.generate(["a b c"], SamplingParams(0.0, max_tokens=12, ignore_eos=True))
    starts = compare_kernels.windows([text], 4)
    asked: list[list[list[int]]] = []
    generate = LLM.generate
    monkeypatch.setattr(
        LLM,
        "generate",
        lambda self, prompts, *rest: asked.append(prompts) or generate(self, prompts, *rest),
    )
    metrics = compare_kernels.acceptance(llm, llm.kernels, starts, 4)
    assert asked == [starts] and len(starts) == 3
    assert (
        3 <= metrics.num_drafts <= 9
    )  # windows of four tokens: the first is prefill's, the others take one to three rounds


def reference_runner(init):
    return lambda self, *args, **kwargs: init(self, *args, **(kwargs | {"ops": Ops()}))


def test_the_largest_change_is_the_one_that_counts() -> None:
    metrics = [compare_kernels.SpecDecodeMetrics(2) for _ in range(2)]
    for m, accepted in zip(metrics, ((2, 1, 0, 0), (2, 2, 2, 1)), strict=True):
        for n in accepted:
            m.observe(n)
    assert (
        compare_kernels.points_moved(*metrics) == pytest.approx(50.0)
        and compare_kernels.points_moved(metrics[0], metrics[0]) == 0
    )
