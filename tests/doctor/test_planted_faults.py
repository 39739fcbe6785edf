"""The doctor names each fault that is planted in the committed heads, and leaves them alone.

A missing chat template is named where the head's folder or its verifier has the right one. Without
either (the EAGLE-1 head) ChatML is tried, and eight prompts do not show its gain surely.

smollm2_texts.json has the target's greedy texts for eight prompts in three formats, so that nothing
is decoded here. Readings that faults share are measured once.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec import SpeculativeConfig
from jaxspec.doctor import diagnosis, formats
from jaxspec.doctor.acceptance import Acceptance, gain, is_better
from jaxspec.doctor.diagnosis import Search, Settings, diagnose
from jaxspec.doctor.head import AUX, D2T, NORMS, ROPE, Reading, open_head
from jaxspec.doctor.texts import Features, Target, Texts, read_features
from jaxspec.loading import load_tokenizer, resolve
from jaxspec.loading.model import load_target
from jaxspec.loading.resolve import CHECKPOINTS
from tests.support.slow import slow

pytestmark = [pytest.mark.once, pytest.mark.optimised]  # the target runs over long texts

HEAD, HEAD_1 = "smollm2-135m-instruct-eagle3", "smollm2-135m-instruct-eagle"
RECORDED = json.loads((Path(__file__).parent / "smollm2_texts.json").read_text())
STEPS = 3


def texts_of(rows: list[list[int]], prompts: list[int]) -> Texts:
    width = -(-max(map(len, rows)) // 64) * 64
    tokens = np.zeros((len(rows), width), np.int32)
    for row, text in zip(tokens, rows, strict=True):
        row[: len(text)] = text
    return Texts(tokens, np.array(prompts), np.array([len(row) for row in rows]))


class Clinic:
    """The target, its recorded texts, its hidden states over them, and all measurements."""

    def __init__(self) -> None:
        folder = resolve(None, kind="target")
        self.tokenizer = load_tokenizer(folder)
        cfg, params = load_target(folder, jnp.float32)
        self.target = Target(cfg, params, self.tokenizer.eos_token_ids, jnp.float32)
        own = RECORDED["own"]
        self.texts = texts_of([r["tokens"] for r in own], [r["prompt"] for r in own])
        layers = {b + by for b in (2, 15, 27) for by in (-2, -1, 0, 1)}
        self.states = read_features(self.target, self.texts, sorted(layers))
        self.measured: dict[str, dict[Reading, Acceptance]] = {HEAD: {}, HEAD_1: {}}

    def search(self, name: str, folder: Path) -> Search:
        head = open_head(folder, self.target, SpeculativeConfig(str(folder)))
        search = Search(head, self.texts, STEPS, lambda line: None)
        search._features, search.measurements = self.states, self.measured[name]
        return search


@pytest.fixture(scope="module")
def clinic() -> Iterator[Clinic]:
    yield Clinic()


@pytest.fixture
def plant(tmp_path: Path) -> Callable[..., Path]:
    """plant(head, config=change, d2t=change) -> a copy of a committed head with a fault."""

    def copy(
        name: str,
        config: Callable[[dict[str, Any]], Any] | None = None,
        d2t: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        values = json.loads((CHECKPOINTS / name / "config.json").read_text())
        if config:
            config(values)
        (folder / "config.json").write_text(json.dumps(values))
        if d2t:
            tensors = load_file(CHECKPOINTS / name / "model.safetensors")
            tensors["d2t"] = d2t(tensors["d2t"])
            save_file(tensors, folder / "model.safetensors")
        else:
            shutil.copy(CHECKPOINTS / name / "model.safetensors", folder)
        return folder

    return copy


def layer(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config["transformer_layer_config"].update(changes)


def top(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config.update(changes)


def ids(d2t: np.ndarray) -> np.ndarray:
    return d2t + np.arange(len(d2t))


THETA = {"rope_theta": 1000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}
# The fault, what is found, and the remedy's main part.
FAULTS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "aux ids one too low": (
        HEAD,
        dict(config=top(eagle_aux_hidden_state_layer_ids=[1, 14, 26])),
        AUX,
        "eagle_aux_hidden_state_layer_ids=[2, 15, 27]",
    ),
    "aux ids one too high": (
        HEAD,
        dict(config=top(eagle_aux_hidden_state_layer_ids=[3, 16, 28])),
        AUX,
        "eagle_aux_hidden_state_layer_ids=[2, 15, 27]",
    ),
    "norm_before_residual": (
        HEAD,
        dict(config=top(norm_before_residual=False)),
        NORMS,
        "norm_before_residual=True",
    ),
    "norm_output": (HEAD, dict(config=top(norm_output=False)), NORMS, "norm_output=True"),
    "fc_norm": (HEAD, dict(config=top(fc_norm=False)), NORMS, "fc_norm=True"),
    "norm_before_fc": (HEAD, dict(config=top(norm_before_fc=True)), NORMS, "norm_before_fc=False"),
    "rope": (HEAD, dict(config=layer(**THETA)), ROPE, "rope_theta: "),
    "rope of EAGLE-1": (HEAD_1, dict(config=top(rope_theta=1000.0)), ROPE, "rope_theta: "),
    "d2t holds ids": (HEAD, dict(d2t=ids), D2T, "d2t - arange"),
    "d2t negated": (HEAD, dict(d2t=np.negative), D2T, "-d2t"),
}
FAST = {
    "aux ids one too low",
    "norm_before_residual",
    "fc_norm",
    "rope of EAGLE-1",
    "d2t holds ids",
}


@pytest.mark.parametrize("case", [name if name in FAST else slow(name) for name in FAULTS])
def test_a_planted_fault_is_named(case: str, plant: Callable[..., Path], clinic: Clinic) -> None:
    name, fault, kind, remedy = FAULTS[case]
    search = clinic.search(name, plant(name, **fault))
    reading, findings = search.run()
    refused = [(k, r) for k, _, r in search.head.refused]
    found = [*refused, *((f.kind, f.remedy) for f in findings)]
    assert [k for k, _ in found] == [kind], found
    assert remedy in found[0][1]
    correct = clinic.search(name, CHECKPOINTS / name).head.present
    if kind == ROPE:  # the search has a few bases, and neighbours of the right one are as good
        assert gain(search.measured(correct), search.measured(reading))[0] < 0.1
    else:
        assert reading.cfg == correct.cfg


@pytest.mark.parametrize("name", [HEAD, HEAD_1])
def test_a_correct_head_is_left_alone(name: str, clinic: Clinic) -> None:
    search = clinic.search(name, CHECKPOINTS / name)
    reading, findings = search.run()
    assert (findings, search.head.refused) == ([], ())
    assert reading == search.head.present
    tried = {t.kind for t in search.tried}
    assert tried == ({AUX, NORMS, ROPE} if name == HEAD else {ROPE})
    assert search.measured(reading).length > 1.8


# --- formats of prompts
# --------------------------------------------------------------------------------------------------

PROMPTS = [f"prompt {i}" for i in range(len(RECORDED["own"]))]
RAW = "{{ messages[-1].content }}"


def run(
    clinic: Clinic, name: str, template: str | None, monkeypatch: pytest.MonkeyPatch
) -> diagnosis.Diagnosis:
    """Diagnose a committed head on a target with this chat template, over recorded texts."""
    own = clinic.tokenizer.hf.chat_template
    known = {"own": own, "raw": None, "chatml": formats.KNOWN["ChatML"][1]}
    tokenizer = formats._with_template(clinic.tokenizer, template)
    recorded: dict[tuple[int, ...], list[int]] = {}
    for key, each in known.items():
        form = formats.PromptFormat("", "", "", formats._with_template(clinic.tokenizer, each))
        for prompt, row in zip(PROMPTS, RECORDED[key], strict=True):
            recorded[tuple(form.encode(prompt))] = [row["prompt"], *row["tokens"]]

    def write_texts(target: Target, prompts: list[list[int]], max_tokens: int) -> Texts:
        rows = [recorded[tuple(prompt)] for prompt in prompts]
        return texts_of([row[1:] for row in rows], [row[0] for row in rows])

    monkeypatch.setattr(diagnosis, "write_texts", write_texts)
    monkeypatch.setattr(diagnosis, "_decode", lambda *args: 2.0)
    folder = CHECKPOINTS / name
    speculative = SpeculativeConfig(str(folder))
    return diagnose(clinic.target, tokenizer, folder, speculative, Settings(PROMPTS))


@pytest.mark.parametrize(
    ("name", "template", "kind", "remedy"),
    [
        pytest.param(HEAD_1, "thinks", formats.THINKING, "{'enable_thinking': False}"),
        slow(HEAD, None, formats.TEMPLATE, "copy chat_template from"),
        slow(HEAD, "own", None, ""),
        slow(HEAD_1, "own", None, ""),
    ],
)
def test_a_wrong_prompt_format_is_named(
    name: str,
    template: str | None,
    kind: str | None,
    remedy: str,
    clinic: Clinic,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = clinic.tokenizer.hf.chat_template
    if template == "thinks":  # on unless it is switched off, which the head has not seen
        on = "enable_thinking is not defined or enable_thinking"
        template = f"{{% if {on} %}}{RAW}{{% else %}}{own}{{% endif %}}"
    found = run(clinic, name, own if template == "own" else template, monkeypatch)
    assert [f.kind for f in found.findings] == ([] if kind is None else [kind]), found
    assert kind is None or remedy in found.findings[0].remedy


# --- the statistics
# --------------------------------------------------------------------------------------------------


def acceptance(*lengths: float) -> Acceptance:
    """Ten rows a text, whose mean acceptance length is as given."""
    rows = [[1] * round(10 * (x - 1)) + [0] * (10 - round(10 * (x - 1))) for x in lengths]
    text = np.repeat(np.arange(len(lengths)), 10)
    return Acceptance(np.concatenate(rows), text, len(lengths))


def test_a_gain_counts_if_all_texts_agree() -> None:
    present = acceptance(1.2, 1.5, 1.4, 1.3)
    assert is_better(acceptance(1.4, 1.7, 1.7, 1.5), present, 0.03)
    assert not is_better(acceptance(2.0, 1.4, 1.3, 1.2), present, 0.03)  # one text alone
    assert not is_better(acceptance(1.4, 1.7, 1.7, 1.5), present, 0.3)  # too little
    assert not is_better(present, present, 0.0)


def test_a_text_without_rows_is_left_out() -> None:
    one = Acceptance(np.array([1, 1, 0, 0]), np.array([0, 0, 2, 2]), 3)
    other = Acceptance(np.array([2, 2, 1, 1]), np.array([0, 0, 2, 2]), 3)
    assert np.isnan(one.lengths()[1])
    assert gain(other, one) == (1.0, 0.0)
    assert gain(one, Acceptance(np.array([1]), np.array([1]), 3))[1] == np.inf


def test_rows_that_go_in_circles_do_not_count() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7]
    drafted = texts_of([text], [2]).drafted(2)[0]
    rows = np.flatnonzero(drafted)
    assert rows.tolist() == [1, 2, 3, 4, 5]  # tokens 2 .. 6 follow; from row 6 on three repeat


def test_hidden_states_are_joined_in_the_order_of_the_layers() -> None:
    states = Features(jnp.zeros((1, 2, 3)), {i: jnp.full((1, 2, 3), i) for i in (1, 4)})
    assert states.of_layers((1, 4))[0, 0].tolist() == [1, 1, 1, 4, 4, 4]
    assert states.of_layers(()).shape == (1, 2, 3)
    assert replace(states).of(slice(0, 1)).boundary.keys() == {1, 4}
