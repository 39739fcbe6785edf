"""Heads with the keys and the tensor names of published files: how they are read, and their logits
against the implementation that the files are for."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec import LLM, EngineConfig, SamplingParams, SpeculativeConfig, models
from jaxspec.config import ConfigError
from jaxspec.drafts import eagle3
from jaxspec.drafts.eagle3 import Eagle3Config
from jaxspec.drafts.head_layout import layer_config
from jaxspec.layers.params import init_random
from jaxspec.loading.binding import bind_draft
from tests.parity.hub_heads import HEADS, HubHead
from tests.parity.oracles import DraftOracle, edit_config, edit_tensors
from tests.parity.ours import TARGET, load, shared_weights
from tests.parity.test_eagle3 import assert_every_step_equals, share_embedding

GREEDY = SamplingParams(temperature=0, max_tokens=12)
CASES = [pytest.param(name, marks=pytest.mark.oracle(head.needs)) for name, head in HEADS.items()]


def make(head: HubHead) -> DraftOracle:
    oracle = head.oracle()
    if not any("embed_tokens" in name for name in head.tensors):
        share_embedding(oracle)
    return oracle


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("jaxspec")]


@pytest.mark.parametrize("name", CASES)
def test_a_published_head_is_read_as_its_files_say(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The method from the files alone, every field, and one WARNING for each guess."""
    head = HEADS[name]
    oracle = make(head)
    folder = head.save(oracle, tmp_path / "head")
    assert set(load_file(folder / "model.safetensors")) == set(head.tensors)
    with caplog.at_level(logging.WARNING, "jaxspec"):
        cfg, params = load(folder, None)
    assert {key: getattr(cfg, key) for key in head.expected} == dict(head.expected)
    warned = warnings_of(caplog)
    assert len(warned) == len(head.guesses), warned
    for key in head.guesses:
        assert any(message.startswith(key) for message in warned), (key, warned)
    assert_every_step_equals(oracle, cfg, params)


# --- one head, changed key by key
# --------------------------------------------------------------------------------------------------

NVIDIA_HEAD, PLAIN = "nvidia/gpt-oss-120b-Eagle3-v3", "RedHatAI/Qwen3-8B-speculator.eagle3"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Heads with zero weights, which need no oracle: for what is read before the logits."""
    shapes = {
        "fc": (64, 192),
        "lm_head": (48, 64),
        "embed_tokens": (128, 64),
        "input_norm": (192,),
        "q_proj": (96, 128),
        "k_proj": (48, 128),
        "v_proj": (48, 128),
        "o_proj": (64, 96),
        "gate_proj": (96, 64),
        "up_proj": (96, 64),
        "down_proj": (64, 96),
    }
    found = {}
    for name in (NVIDIA_HEAD, PLAIN):
        folder = tmp_path_factory.mktemp("heads")
        (folder / "config.json").write_text(json.dumps(dict(HEADS[name].config)))
        tensors: dict[str, np.ndarray] = {"d2t": np.zeros(48, np.int64)}
        tensors["t2d"] = np.arange(128) < 48
        for tensor in HEADS[name].tensors:
            if tensor not in tensors:
                short = tensor.removesuffix(".weight").split(".")[-1]
                tensors[tensor] = np.zeros(shapes.get(short, (64,)), np.float32)
        save_file(tensors, folder / "model.safetensors")
        found[name] = folder
    return found


def read(
    folder: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    nested: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray | None] | None = None,
    method: str | None = None,
) -> Any:
    """Our config of a copy of the head; None takes a key or a tensor away."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())

    def change(config: dict[str, Any]) -> None:
        for values, place in ((changes, config), (nested or {}, config.get("eagle_config"))):
            for key, value in values.items():
                place.pop(key, None)
                if value is not None:
                    place[key] = value

    def replace(held: dict[str, np.ndarray]) -> None:
        for key, value in (tensors or {}).items():
            held.pop(key, None)
            if value is not None:
                held[key] = value

    edit_config(copy, change)
    edit_tensors(copy, replace)
    return load(copy, method)[0]


@pytest.mark.parametrize(
    ("changes", "nested", "expected", "guess"),
    [
        # The last boundary of 8 layers: no layer has that output, so the ids are boundary ids.
        ({}, {}, (4, 6, 8), None),
        # SpecForge's and SGLang's reading, and how to set the other one.
        ({}, {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, (2, 4, 6), "to [1, 3, 5] in the"),
        # Both readings agree that this is the default.
        ({}, {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, (2, 4, 5), None),
        # Beside eagle_config the ids are boundary ids, whatever eagle_config says.
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]},
            {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]},
            (1, 4, 6),
            None,
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]},
            {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
            (2, 4, 6),
            None,
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]},
            {"eagle_aux_hidden_state_layer_ids": [0, 4, 5]},
            (2, 4, 6),
            "taken as the boundary ids [2, 4, 6]",
        ),
        (
            {},
            {"eagle_aux_hidden_state_layer_ids": None},
            (2, 4, 5),
            "the default [2, 4, 5], boundary ids of 8 layers",
        ),
    ],
)
def test_both_conventions_of_aux_layer_ids(
    changes: dict[str, Any],
    nested: dict[str, Any],
    expected: tuple[int, ...],
    guess: str | None,
    folders: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "jaxspec"):
        cfg = read(folders[NVIDIA_HEAD], tmp_path, changes, nested)
    assert cfg.aux_layers == expected
    warned = warnings_of(caplog)
    assert len(warned) == (guess is not None), warned
    assert guess is None or guess in warned[0]


@pytest.mark.parametrize(
    ("head", "changes", "nested", "field", "value", "guess"),
    [
        # Nested alone, as NVIDIA's files have it (vLLM #42143 and llama.cpp read no nested key).
        (NVIDIA_HEAD, {}, {}, "norm_before_fc", True, None),
        (NVIDIA_HEAD, {"norm_before_fc": True}, {}, "norm_before_fc", True, None),
        (NVIDIA_HEAD, {"norm_before_fc": False}, {}, "norm_before_fc", True, "True in the head's"),
        # Unsaid, but the tensor is there.
        (NVIDIA_HEAD, {}, {"norm_before_fc": None}, "norm_before_fc", True, "input_norm.weight"),
        (NVIDIA_HEAD, {}, {"return_hidden_post_norm": True}, "norm_output", True, "norm_output in"),
        (NVIDIA_HEAD, {}, {}, "norm_before_residual", False, None),
        (PLAIN, {"norm_before_residual": None}, None, "norm_before_residual", True, "vLLM's"),
        (PLAIN, {"norm_before_residual": False}, None, "norm_before_residual", False, None),
    ],
)
def test_switches_are_read_from_their_place_and_guesses_are_warnings(
    head: str,
    changes: dict[str, Any],
    nested: dict[str, Any] | None,
    field: str,
    value: bool,
    guess: str | None,
    folders: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if head == PLAIN:
        changes = changes | {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    with caplog.at_level(logging.WARNING, "jaxspec"):
        cfg = read(folders[head], tmp_path, changes, nested)
    assert getattr(cfg, field) is value
    warned = warnings_of(caplog)
    assert len(warned) == (guess is not None), warned
    assert guess is None or guess in warned[0]


@pytest.mark.parametrize(
    ("changes", "nested", "tensors", "method", "message"),
    [
        ({}, {}, {}, "eagle", r"method: expected 'eagle3', which this head is .*got 'eagle'"),
        (
            {},
            {},
            {"midlayer.hidden_norm.weight": None},
            "eagle3",
            r"method: expected 'eagle', which this head is .*got 'eagle3'",
        ),
        (
            {"speculators_config": {"algorithm": "peagle"}},
            {},
            {},
            None,
            r"speculators_config.algorithm: expected one of eagle, eagle3, dflash, dspark, "
            r"got 'peagle'",
        ),
        ({}, {"use_aux_hidden_state": False}, {}, None, "norm_before_fc: expected false in a head"),
        (
            {},
            {"use_aux_hidden_state": False, "norm_before_fc": False},
            {"input_norm.weight": None},
            None,
            r"unexpected: fc\.weight",
        ),
        ({}, {"use_mtp_layernorm": True}, {}, None, "use_mtp_layernorm: expected False, got True"),
        (
            {},
            {"eagle_aux_hidden_state_layer_ids": None, "layer_ids": ["1"]},
            {},
            None,
            r"eagle_config.layer_ids: expected a list of integers, got \['1'\]",
        ),
        ({"attention_bias": "false"}, {}, {}, None, "attention_bias to be true or false, got"),
        ({"partial_rotary_factor": 0.5}, {}, {}, None, "partial_rotary_factor: expected 1.0"),
        (
            {},
            {"parallel_draft_step": 4},
            {},
            None,
            "eagle_config.parallel_draft_step: expected 1, got 4",
        ),
    ],
)
def test_another_kind_of_head_is_one_sentence(
    changes: dict[str, Any],
    nested: dict[str, Any],
    tensors: dict[str, np.ndarray | None],
    method: str | None,
    message: str,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read(folders[NVIDIA_HEAD], tmp_path, changes, nested, tensors, method)
    assert "\n" not in str(error.value)


def small_head(**values: Any) -> Eagle3Config:
    """A head of one layer for TARGET."""
    return Eagle3Config(
        target_hidden_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_layers=1,
        attention=TARGET.attention,
        rms_norm_eps=1e-5,
        vocab_size=TARGET.vocab_size,
        **values,
    )


def test_a_whole_vocabulary_is_not_mapped() -> None:
    """Neither at loading, nor by an identity that every step would gather through."""
    for size in (TARGET.vocab_size, 48):
        cfg = small_head(draft_vocab_size=size, aux_layers=(2, 4, 5), own_embedding=True)
        params = dict.fromkeys(("embed_tokens", "lm_head"))
        bound = bind_draft(cfg, params, {}, None if size == TARGET.vocab_size else np.arange(48))
        has_map = {"draft_to_target", "target_to_draft"} & bound.keys()
        assert bool(has_map) == cfg.maps_vocabulary == (size == 48)


def test_a_rotation_table_in_the_file_is_no_weight(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    table = {"midlayer.self_attn.rotary_emb.inv_freq": np.ones(12, np.float32)}
    assert read(folders[NVIDIA_HEAD], tmp_path, {}, tensors=table).method == "eagle3"


@pytest.mark.oracle("eagle")
def test_an_eagle1_head_may_bring_its_lm_head(tmp_path: Path) -> None:
    head = HEADS["yuhuili/EAGLE-LLaMA3-Instruct-8B"]
    oracle = make(head)
    folder = head.save(oracle, tmp_path / "head")
    lm_head = np.array(shared_weights()["lm_head"].values.T)
    edit_tensors(folder, lambda held: held.update({"lm_head.weight": lm_head}))
    cfg, params = load(folder, None, shared=shared_weights(seed=9))
    assert cfg.own_lm_head and not cfg.tied_lm_head
    assert params["lm_head"].values.shape == (64, TARGET.vocab_size)
    assert_every_step_equals(oracle, cfg, params)


def test_a_head_without_aux_layers_drafts_in_the_engine() -> None:
    """Prefill and rounds keep the target's last hidden state for it; the text is the target's."""
    cfg = small_head(draft_vocab_size=TARGET.vocab_size, aux_layers=(), own_lm_head=False)
    target = init_random(models.family(TARGET).param_specs(TARGET), jax.random.key(0), jnp.float32)
    head = init_random(eagle3.param_specs(cfg), jax.random.key(1), jnp.float32)
    llm = LLM(
        (TARGET, target),
        (cfg, bind_draft(cfg, head, target, None)),
        SpeculativeConfig(num_speculative_tokens=2),
        config=EngineConfig(max_model_len=64, max_num_seqs=2, block_size=16),
    )
    texts = [
        [output.token_ids for output in each.generate([[1, 2, 3], [4] * 9], GREEDY)]
        for each in (llm, llm.on_same_weights(speculative=False))
    ]
    assert texts[0] == texts[1] and llm.metrics.num_drafts > 0


def test_a_name_under_model_is_no_config_of_a_layer() -> None:
    config = {"model": "meta-llama/Llama-3.1-8B", "hidden_size": 8}
    assert layer_config(config) == config
    nested = {"hidden_size": 8, "model": {"hidden_size": 16, "vocab_size": None}}
    assert layer_config(nested)["hidden_size"] == 16 and "vocab_size" not in layer_config(nested)
