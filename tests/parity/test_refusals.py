"""Draft checkpoints that do not fit the target, or whose tensors contradict their config: one
sentence that names what is wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.config import ConfigError
from tests.parity.oracles import (
    EAGLE1_CONFIG,
    eagle1_head,
    edit_config,
    edit_tensors,
    save_flat,
    save_speculators,
    speculators_head,
)
from tests.parity.ours import load, shared_weights


def config(**changes: Any) -> Callable[[Path], Path]:
    return lambda folder: edit_config(folder, lambda c: c.update(changes))


def layer(**changes: Any) -> Callable[[Path], Path]:
    return lambda folder: edit_config(
        folder, lambda c: c["transformer_layer_config"].update(changes)
    )


def without(key: str) -> Callable[[Path], Path]:
    return lambda folder: edit_config(folder, lambda c: c.pop(key))


def layer_without(key: str) -> Callable[[Path], Path]:
    return lambda folder: edit_config(folder, lambda c: c["transformer_layer_config"].pop(key))


def tensors(**changes: Any) -> Callable[[Path], Path]:
    """By the short names of NAMES or in full; None removes, an array replaces or adds."""

    def change(held: dict[str, np.ndarray]) -> None:
        for key, value in changes.items():
            name = NAMES.get(key, key)
            held.pop(name, None)
            if value is not None:
                held[name] = value

    return lambda folder: edit_tensors(folder, change)


NAMES = {
    "fc": "fc.weight",
    "input_norm": "input_norm.weight",
    "q_norm": "layers.0.self_attn.q_norm.weight",
    "q_proj": "layers.0.self_attn.q_proj.weight",
    "k_proj": "layers.0.self_attn.k_proj.weight",
    "q_bias": "layers.0.self_attn.q_proj.bias",
    "down_proj": "layers.0.mlp.down_proj.weight",
    "midlayer_norm": "midlayer.hidden_norm.weight",
    "extra": "layers.1.mlp.up_proj.weight",
    "lm_head": "lm_head.weight",
    "fc_bias": "fc.bias",
}


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


EAGLE3: dict[str, tuple[Callable[[Path], Path], dict[str, Any], str]] = {
    "aux_id_out_of_range": (
        config(eagle_aux_hidden_state_layer_ids=[2, 4, 9]),
        {},
        r"aux layer ids: expected .* 0\.\.8 .*got \[2, 4, 9\]",
    ),
    "aux_id_negative": (
        config(eagle_aux_hidden_state_layer_ids=[-1, 4, 7]),
        {},
        r"aux layer ids: .*got \[-1, 4, 7\]",
    ),
    "aux_ids_twice": (
        config(eagle_aux_hidden_state_layer_ids=[2, 4, 4]),
        {},
        r"aux layer ids: .*got \[2, 4, 4\]",
    ),
    "aux_id_out_of_range_by_override": (
        config(),
        dict(eagle_aux_hidden_state_layer_ids=(2, 4, 99)),
        r"aux layer ids: .*99",
    ),
    "aux_id_out_of_range_nested": (
        lambda f: edit_config(
            f,
            lambda c: c.update(
                eagle_aux_hidden_state_layer_ids=None,
                eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 9]},
            ),
        ),
        {},
        r"aux layer ids: .*got \[2, 4, 10\]",
    ),
    "another_number_of_aux_ids": (
        config(eagle_aux_hidden_state_layer_ids=[2, 7]),
        {},
        r"fc\.weight: expected .*2 x 64.*got \[64, 192\]",
    ),
    "target_hidden_size": (config(target_hidden_size=96), {}, r"target_hidden_size 64 .*got 96"),
    "target_hidden_size_by_fc": (
        tensors(fc=zeros(64, 96)),
        {},
        r"fc\.weight: expected .*got \[64, 96\]",
    ),
    "vocab_size": (layer(vocab_size=256), {}, r"vocab_size 128 .*got 256"),
    "missing_d2t": (tensors(d2t=None), {}, r"d2t: expected it .* 48 .*got none"),
    "misshapen_d2t": (tensors(d2t=zeros(47, dtype=np.int64)), {}, r"d2t: expected 48"),
    "d2t_as_a_map": (tensors(d2t=np.arange(80, 128)), {}, r"d2t: expected offsets"),
    "d2t_contradicts_t2d": (tensors(d2t=zeros(48, dtype=np.int64)), {}, r"t2d: expected"),
    "draft_vocab_size": (config(draft_vocab_size=40), {}, r"lm_head\.weight"),
    "missing_lm_head": (tensors(lm_head=None), {}, r"lm_head\.weight: expected it .*got none"),
    "input_norm_against_config": (
        tensors(input_norm=zeros(192)),
        {},
        r"unexpected: input_norm\.weight",
    ),
    "norm_before_fc_without_input_norm": (
        config(norm_before_fc=True),
        {},
        r"missing: input_norm\.weight",
    ),
    "norm_before_fc_by_override": (
        config(),
        dict(norm_before_fc=True),
        r"missing: input_norm\.weight",
    ),
    "fc_norm_without_tensors": (
        config(fc_norm=True),
        {},
        r"missing: fc_norm\.0\.weight, fc_norm\.1",
    ),
    "q_norm_in_a_llama_layer": (
        tensors(q_norm=zeros(24)),
        {},
        r"unexpected: layers\.0\.self_attn\.q_norm\.weight",
    ),
    "qwen3_layer_without_q_norm": (
        layer(model_type="qwen3"),
        {},
        r"missing: .*k_norm\.weight, .*q_norm\.weight",
    ),
    "bias_against_config": (
        tensors(q_bias=zeros(96)),
        {},
        r"unexpected: layers\.0\.self_attn\.q_proj\.bias",
    ),
    "misshapen_q_proj_rows": (
        tensors(q_proj=zeros(90, 128)),
        {},
        r"q_proj\.weight: expected 4 heads of 24 rows .*got 90",
    ),
    "misshapen_q_proj_input": (
        tensors(q_proj=zeros(96, 64)),
        {},
        r"misshapen: .*q_proj\.weight \(expected \(96, 128\), got \(96, 64\)\)",
    ),
    "misshapen_k_proj": (
        tensors(k_proj=zeros(96, 128)),
        {},
        r"k_proj\.weight: expected 2 heads of 24 rows .*got 96",
    ),
    "missing_tensor": (tensors(down_proj=None), {}, r"missing: layers\.0\.mlp\.down_proj\.weight"),
    "extra_tensor": (
        tensors(extra=zeros(96, 64)),
        {},
        r"unexpected: layers\.1\.mlp\.up_proj\.weight",
    ),
    "two_names_for_one": (
        tensors(midlayer_norm=zeros(64)),
        {},
        r"expected one tensor named layers\.0\.hidden_norm\.weight",
    ),
    "fc_bias_misshapen": (tensors(fc_bias=zeros(65)), {}, r"misshapen: fc\.bias"),
    "activation": (layer(hidden_act="gelu"), {}, r"hidden_act: expected 'silu' .*got 'gelu'"),
    "mixed_windows": (
        layer(layer_types=["chunked_attention"]),
        {},
        r"layer_types: expected .*chunked",
    ),
    "rope_type": (
        layer(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}),
        {},
        r"rope_type: expected .*got 'longrope'",
    ),
    "missing_key": (
        lambda f: edit_config(f, lambda c: c["transformer_layer_config"].pop("intermediate_size")),
        {},
        r"expected intermediate_size to be an integer",
    ),
    "not_this_method": (
        config(),
        dict(method="eagle"),
        r"method: expected 'eagle3', which this head is by its files .*got 'eagle'",
    ),
}


@pytest.fixture(scope="module")
def eagle3_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_speculators(
        speculators_head(), tmp_path_factory.mktemp("eagle3"), own_embedding=True
    )


@pytest.fixture(scope="module")
def eagle1_head_without_bias(tmp_path_factory: pytest.TempPathFactory) -> Path:
    oracle = eagle1_head(EAGLE1_CONFIG, np.array(shared_weights()["lm_head"].values.T), bias=False)
    return save_flat(
        oracle, EAGLE1_CONFIG, tmp_path_factory.mktemp("eagle1") / "draft", own_embedding=False
    )


@pytest.mark.oracle("speculators")
@pytest.mark.parametrize("case", EAGLE3)
def test_a_head_that_does_not_fit_is_refused(case: str, eagle3_head: Path, tmp_path: Path) -> None:
    damage, overrides, message = EAGLE3[case]
    load(eagle3_head)  # it fits before it is damaged
    folder = damage(Path(shutil.copytree(eagle3_head, tmp_path / "draft")))
    with pytest.raises(ConfigError, match=message) as error:
        load(folder, **overrides)
    assert "\n" not in str(error.value)


EAGLE1: dict[str, tuple[Callable[[Path], Path], dict[str, Any], str]] = {
    "bias_said_but_absent": (config(bias=True), {}, r"fc\.bias: .*bias True.*got none"),
    "bias_denied_but_there": (
        lambda f: tensors(fc_bias=zeros(64))(config(bias=False)(f)),
        {},
        r"fc\.bias: .*bias False.*got one",
    ),
    "hidden_size": (config(hidden_size=96), {}, r"hidden_size 64 .*got 96"),
    "vocab_size": (config(vocab_size=256), {}, r"vocab_size 128 .*got 256"),
    "eagle3_switch": (
        config(),
        dict(norm_output=True),
        r"norm_output: expected it only with method 'eagle3'",
    ),
    "aux_ids": (
        config(),
        dict(eagle_aux_hidden_state_layer_ids=(1, 2)),
        r"eagle_aux_hidden_state_layer_ids: expected it only with",
    ),
    "input_layernorm": (
        tensors(**{"layers.0.input_layernorm.weight": zeros(64)}),
        {},
        r"unexpected: layers\.0\.input_layernorm\.weight",
    ),
    "misshapen_fc": (tensors(fc=zeros(64, 192)), {}, r"misshapen: fc\.weight"),
    "missing_key": (
        without("num_attention_heads"),
        {},
        r"expected num_attention_heads to be an integer",
    ),
}


@pytest.mark.oracle("eagle")
@pytest.mark.parametrize("case", EAGLE1)
def test_an_eagle1_head_that_does_not_fit_is_refused(
    case: str, eagle1_head_without_bias: Path, tmp_path: Path
) -> None:
    damage, overrides, message = EAGLE1[case]
    load(eagle1_head_without_bias, "eagle")
    folder = damage(Path(shutil.copytree(eagle1_head_without_bias, tmp_path / "draft")))
    with pytest.raises(ConfigError, match=message) as error:
        load(folder, "eagle", **overrides)
    assert "\n" not in str(error.value)
