"""The doctor names each fault that is planted in the committed heads, and leaves them alone.

A missing chat template is named by the target that the head's config (EAGLE-3) or card (EAGLE-1)
names. Where neither does, it is ChatML, which the vocabulary has tokens for.

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

from jaxspec import ConfigError, SpeculativeConfig
from jaxspec.doctor import diagnosis, formats
from jaxspec.doctor.acceptance import Acceptance, gain, is_better
from jaxspec.doctor.diagnosis import Search, Settings, diagnose
from jaxspec.doctor.head import AUX, D2T, NORMS, ROPE, WINDOW, Reading, open_head
from jaxspec.doctor.texts import Features, Target, Texts, read_features
from jaxspec.loading import load_tokenizer, resolve
from jaxspec.loading.head_conversion import convert_head
from jaxspec.loading.model import load_target
from jaxspec.loading.resolve import CHECKPOINTS
from tests.support.slow import slow

pytestmark = [pytest.mark.once, pytest.mark.optimised]  # the target runs over long texts

HEAD, HEAD_1 = "smollm2-135m-instruct-eagle3", "smollm2-135m-instruct-eagle"
RECORDED = json.loads((Path(__file__).parent / "smollm2_texts.json").read_text())
SHORT = 6  # of the recorded texts: the others are as long as half of these together
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
        own = RECORDED["own"][:SHORT]
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
        source, folder = CHECKPOINTS / name, tmp_path / name
        if d2t:  # numpy has no float8
            source = tmp_path / "plain"
            convert_head(CHECKPOINTS / name, source, "bfloat16")
        folder.mkdir()
        values = json.loads((source / "config.json").read_text())
        if config:
            config(values)
        (folder / "config.json").write_text(json.dumps(values))
        if d2t:
            tensors = load_file(source / "model.safetensors")
            tensors["d2t"] = d2t(tensors["d2t"])
            save_file(tensors, folder / "model.safetensors")
        else:
            shutil.copy(source / "model.safetensors", folder)
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
    "window": (HEAD, dict(config=layer(sliding_window=4)), WINDOW, "widen sliding_window"),
    "window of EAGLE-1": (
        HEAD_1,
        dict(config=top(sliding_window=4)),
        WINDOW,
        "widen sliding_window",
    ),
    "d2t holds ids": (HEAD, dict(d2t=ids), D2T, "d2t - arange"),
    "d2t negated": (HEAD, dict(d2t=np.negative), D2T, "-d2t"),
}
FAST = {
    "aux ids one too low",
    "norm_before_residual",
    "fc_norm",
    "rope of EAGLE-1",
    "window of EAGLE-1",
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
    elif kind == WINDOW:  # these texts are shorter than the right window
        assert reading.cfg == replace(correct.cfg, sliding_window=None)
    else:
        assert reading.cfg == correct.cfg


@pytest.mark.parametrize("name", [HEAD, HEAD_1])
def test_a_correct_head_is_left_alone(name: str, clinic: Clinic) -> None:
    search = clinic.search(name, CHECKPOINTS / name)
    reading, findings = search.run()
    assert (findings, search.head.refused) == ([], ())
    assert reading == search.head.present
    tried = {t.kind for t in search.tried}
    assert tried == ({AUX, NORMS, ROPE} if name == HEAD else {ROPE})  # the window holds the texts
    assert search.measured(reading).length > 1.8


# --- formats of prompts
# --------------------------------------------------------------------------------------------------

PROMPTS = [f"prompt {i}" for i in range(len(RECORDED["own"]))]
RAW = "{{ messages[-1].content }}"


def run(
    clinic: Clinic,
    folder: Path,
    template: str | None,
    monkeypatch: pytest.MonkeyPatch,
    count: int = SHORT,
) -> diagnosis.Diagnosis:
    """Diagnose a head on a target with this chat template, over so many recorded texts."""
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
    speculative = SpeculativeConfig(str(folder))
    return diagnose(clinic.target, tokenizer, folder, speculative, Settings(PROMPTS[:count]))


@pytest.mark.parametrize(
    ("name", "template", "kind", "remedy", "count"),
    [
        (HEAD_1, "thinks", formats.THINKING, "{'enable_thinking': False}", SHORT),
        (HEAD_1, None, formats.TEMPLATE, "copy chat_template from", SHORT),
        *(
            slow(head, *case, len(PROMPTS))
            for head in (HEAD_1, HEAD)
            for case in (
                ("thinks", formats.THINKING, "{'enable_thinking': False}"),
                (None, formats.TEMPLATE, "copy chat_template from"),
                ("own", None, ""),
            )
        ),
    ],
)
def test_a_wrong_prompt_format_is_named(
    name: str,
    template: str | None,
    kind: str | None,
    remedy: str,
    count: int,
    clinic: Clinic,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = clinic.tokenizer.hf.chat_template
    if template == "thinks":  # on unless it is switched off, which the head has not seen
        on = "enable_thinking is not defined or enable_thinking"
        template = f"{{% if {on} %}}{RAW}{{% else %}}{own}{{% endif %}}"
    template = own if template == "own" else template
    found = run(clinic, CHECKPOINTS / name, template, monkeypatch, count)
    assert [f.kind for f in found.findings] == ([] if kind is None else [kind]), found
    assert kind is None or remedy in found.findings[0].remedy
    assert found.ended == (0 if template == own else 4)
    switches = {t.name for t in found.tried if t.kind == formats.THINKING}
    assert switches == ({"enable_thinking false"} if kind == formats.THINKING else set())


# The next test finds it too, for texts that end at once.
@pytest.mark.slow
def test_without_a_card_the_vocabularys_own_format_is_named(
    plant: Callable[..., Path], clinic: Clinic, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(clinic, plant(HEAD_1), None, monkeypatch)
    assert [f.kind for f in found.findings] == [formats.TEMPLATE], found
    assert found.findings[0].remedy.startswith("write ChatML's chat_template into")


def test_a_format_in_which_every_text_ends_at_once_is_named(
    plant: Callable[..., Path], clinic: Clinic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be drafted as it is, and everything in another format."""
    ended = [{**row, "tokens": row["tokens"][: row["prompt"] + 1]} for row in RECORDED["raw"]]
    monkeypatch.setitem(RECORDED, "raw", ended)
    head = plant(HEAD_1)
    found = run(clinic, head, None, monkeypatch)
    assert (found.length, found.ended) == (1.0, SHORT)
    assert [f.kind for f in found.findings] == [formats.TEMPLATE]
    # No card names a target: it is the vocabulary's own format.
    assert found.findings[0].remedy.startswith("write ChatML's chat_template into")
    monkeypatch.setitem(RECORDED, "chatml", ended)
    with pytest.raises(ConfigError, match="expected a target that answers .* 1 tokens at most"):
        run(clinic, head, None, monkeypatch)


# --- the statistics
# --------------------------------------------------------------------------------------------------


def acceptance(*lengths: float) -> Acceptance:
    """Ten rows a text, whose mean acceptance length is as given."""
    rows = [[1] * round(10 * (x - 1)) + [0] * (10 - round(10 * (x - 1))) for x in lengths]
    text = np.repeat(np.arange(len(lengths)), 10)
    return Acceptance(np.concatenate(rows), text, np.zeros(len(lengths), bool))


def test_a_gain_counts_if_all_texts_agree() -> None:
    present = acceptance(1.2, 1.5, 1.4, 1.3)
    assert is_better(acceptance(1.4, 1.7, 1.7, 1.5), present, 0.03)
    assert not is_better(acceptance(2.0, 1.4, 1.3, 1.2), present, 0.03)  # one text alone
    assert not is_better(acceptance(1.4, 1.7, 1.7, 1.5), present, 0.3)  # too little
    assert not is_better(present, present, 0.0)


def test_a_text_without_rows_is_left_out() -> None:
    none = np.zeros(3, bool)
    one = Acceptance(np.array([1, 1, 0, 0]), np.array([0, 0, 2, 2]), none)
    other = Acceptance(np.array([2, 2, 1, 1]), np.array([0, 0, 2, 2]), none)
    assert np.isnan(one.lengths()[1])
    assert gain(other, one) == (1.0, 0.0)
    assert gain(one, Acceptance(np.array([1]), np.array([1]), none))[1] == np.inf


def test_a_text_that_ends_at_once_counts_as_length_1_beside_one_with_rows() -> None:
    """Of four texts, the second ends in one format, the third in the other, the last in both."""
    text = np.array([0, 1])
    one = Acceptance(np.array([1, 2]), text, np.array([False, False, True, True]))
    other = Acceptance(np.array([1, 3]), np.array([0, 2]), np.array([False, True, False, True]))
    mean, error = gain(other, one)  # 2 - 2, 1 - 3, 4 - 1
    assert mean == pytest.approx(1 / 3)
    assert error == pytest.approx(np.std([0, -2, 3], ddof=1) / np.sqrt(3))
    assert gain(one, other) == pytest.approx((-mean, error))


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
