"""scripts/experiment_draft_logits.py: right logits give the target's text, corrupted ones do not,
and position 0 tells nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxspec.tools.acceptance import show
from scripts import experiment_draft_logits as experiment
from tests.scripts.conftest import runner

pytestmark = pytest.mark.slow
SAMPLES = 6_000
BEGIN, END = show.markers(experiment.SCRIPT)


@pytest.fixture(scope="module")
def tiny():
    return experiment.tiny_experiment(SAMPLES)["conditions"]


def test_right_logits_give_the_targets_text(tiny):
    """Each token's distribution and the texts' within 4.5 standard deviations of what sampling
    alone gives."""
    off = {key: d["standard_deviations_off"] for key, d in tiny["right"]["distances"].items()}
    assert (
        set(off) == {"token 0", "token 1", "token 2", "token 3", "text"} and max(off.values()) < 4.5
    ), off


@pytest.mark.parametrize("name", ["zero", "stale"])
def test_corrupted_logits_are_seen(tiny, name):
    """The text is far off, from the first token that a later position may have drafted; acceptance
    rises there, and not at position 0."""
    distances, acceptance, right = (
        tiny[name]["distances"],
        tiny[name]["acceptance"],
        tiny["right"]["acceptance"],
    )
    assert (
        distances["text"]["standard_deviations_off"] > 7
        and distances["token 2"]["standard_deviations_off"] > 8
    )
    assert distances["token 1"]["standard_deviations_off"] < 4.5
    rise = np.array(acceptance["per_position"]) - right["per_position"]
    error = np.hypot(
        acceptance["per_position_standard_error"], right["per_position_standard_error"]
    )
    assert abs(rise[0]) < 4.5 * error[0] and (rise[1:] > 4.5 * error[1:]).all(), (rise, error)


def test_exact_probabilities_are_a_distribution_with_no_token_left_out():
    pair = experiment.tiny_pair()
    exact = experiment.exact_probabilities(pair)
    assert exact.shape == (experiment.VOCAB,) * experiment.LENGTH and exact.sum() == pytest.approx(
        1.0
    )
    assert exact.sum(axis=(1, 2, 3)).min() > 0.02 and exact.sum(axis=(1, 2, 3)).max() < 0.9


def test_distance_of_exact_samples_is_that_of_sampling_alone():
    rng = np.random.default_rng(1)
    p = rng.dirichlet(np.ones(40)).reshape(5, 8)
    counts = rng.multinomial(5000, p.ravel()).reshape(p.shape)
    assert abs(experiment.distance(counts, p, rng).standard_deviations_off) < 4.5
    counts[0] += 200
    assert experiment.distance(counts, p, rng).standard_deviations_off > 4.5


@pytest.mark.slow
def test_a_real_pair_is_run_and_shown_again(target, draft, tmp_path):
    (tmp_path / "data.jsonl").write_text(
        "\n".join(json.dumps({"prompt": t}) for t in ("Hello there", "Why?"))
    )
    (tmp_path / "page.md").write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    run = runner(experiment.main)
    pair = [
        "--target",
        target,
        "--draft",
        draft,
        "--dataset",
        tmp_path / "data.jsonl",
        "--max-num-seqs",
        2,
        "--dtype",
        "float32",
    ]
    result = run("--samples", 0, *pair, "--max-tokens", 24, "--output-json", tmp_path / "run.json")
    assert result.exit_code == 0, result.output
    model = json.loads((tmp_path / "run.json").read_text())["model"]
    assert (
        set(model) == {"right", "zero", "stale"}
        and len(model["right"]["per_position"]) == experiment.K
    )
    again = run("--from-json", tmp_path / "run.json", "--markdown", tmp_path / "page.md")
    assert again.exit_code == 0 and "2 prompts of data" in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize(
    ("args", "sentence"), [(["--samples", 5], "--samples: expected 0 or at least 100, got 5")]
)
def test_bad_input_is_one_sentence(args, sentence):
    result = runner(experiment.main)(*args)
    assert result.exit_code == 2 and result.stderr.startswith(f"error: {sentence}")
