"""EAGLE-3 heads against speculators 0.9.0 and SpecForge 0.2.0: the logits of every draft step, for
each layout and switch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafts import hidden_width
from tests.parity.oracles import (
    LLAMA3_ROPE,
    SAFEAI_CONFIG,
    TOLERANCE,
    DraftOracle,
    edit_tensors,
    reload_speculators,
    save_flat,
    save_speculators,
    specforge_head,
    speculators_head,
    speculators_training_logits,
)
from tests.parity.ours import TARGET, PagedDraft, load, shared_weights
from tests.support.slow import slow, slow_unless

K = 4
LENGTHS, PENDING = (
    (3, 9, 85),
    (3, 1, K + 1),
)  # nothing in the cache; one row after a rejection; all accepted, across block boundaries
WINDOW = 5

QWEN3 = dict(model_type="qwen3")
SPECULATORS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_own_embedding": dict(own_embedding=True),
    "norm_before_residual": dict(norm_before_residual=True),
    "norm_before_fc": dict(norm_before_fc=True),
    "fc_norm": dict(fc_norm=True),
    "norm_output": dict(norm_output=True),
    "newest_defaults": dict(
        norm_before_residual=True,
        norm_before_fc=True,
        norm_output=True,
        layer={**QWEN3, "sliding_window": WINDOW},
    ),
    "eagle_3_1": dict(norm_before_residual=True, fc_norm=True, norm_output=True),
    "qwen3": dict(layer=QWEN3),
    "qwen3_own_embedding": dict(
        layer={**QWEN3, "num_attention_heads": 8, "attention_bias": True},
        norm_before_residual=True,
        own_embedding=True,
    ),
    "llama_attention_bias": dict(layer=dict(attention_bias=True, num_key_value_heads=1)),
    "llama3_rope": dict(layer=dict(rope_parameters=LLAMA3_ROPE)),
    "rope_theta": dict(
        layer={**QWEN3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    ),
    "sliding_window_llama": dict(layer=dict(sliding_window=WINDOW)),
    "two_layers": dict(layer=dict(num_hidden_layers=2), norm_before_residual=True),
    "two_layers_qwen3_window": dict(
        layer={**QWEN3, "num_hidden_layers": 2, "sliding_window": WINDOW}, norm_output=True
    ),
    "whole_vocabulary": dict(draft_vocab=128),
    "two_aux_layers": dict(aux_layers=(0, 8)),
    "default_aux_layers": dict(aux_layers=None),
}


def make(
    own_embedding: bool = False, layer: dict[str, Any] | None = None, **options: Any
) -> DraftOracle:
    layer = dict(layer or {})
    if layer.get("sliding_window"):
        layer["layer_types"] = ["sliding_attention"] * layer.get("num_hidden_layers", 1)
        layer["use_sliding_window"] = True
    oracle = speculators_head(layer=layer, **options)
    if not own_embedding:
        share_embedding(oracle)
    return oracle


def share_embedding(oracle: DraftOracle) -> None:
    """Most heads leave the embedding out and read the target's."""
    import torch

    oracle.module.embed_tokens.weight.copy_(
        torch.from_numpy(np.array(shared_weights()["embed_tokens"]))
    )


def requests(width: int, seed: int = 3) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The target's hidden states [T, width] of LENGTHS positions, of unequal size from one to the
    next, and the tokens after each."""
    rng = np.random.default_rng(seed)
    scales = np.repeat([0.5, 2.0, 1.0], 64)[:width]
    hidden = [
        (rng.normal(size=(n, width)) * np.resize(scales, width)).astype(np.float32) for n in LENGTHS
    ]
    return hidden, [rng.integers(0, TARGET.vocab_size, n) for n in LENGTHS]


def assert_every_step_equals(
    oracle: DraftOracle, cfg: Any, params: Any, block_size: int = 4, alone: bool = False
) -> None:
    """Greedy drafts and the logits of steps 0 .. K-1: the oracle's, the compiled propose's, and
    draft_step's alone if asked for."""
    hidden, tokens = requests(hidden_width(cfg, TARGET))
    draft = PagedDraft(cfg, params, hidden, tokens, PENDING, K, block_size)
    proposal = draft.propose()
    results = [("propose", np.asarray(proposal.draft_tokens), np.asarray(proposal.draft_logits))]
    if alone:  # propose calls it too: for one head of each kind, as compiling takes seconds
        results.append(("draft_step", *draft.steps()))
    for i, (h, t) in enumerate(zip(hidden, tokens, strict=True)):
        drafts, logits = oracle.chain(h, t, K)
        for what, our_drafts, ours in results:
            for step in range(K):
                np.testing.assert_allclose(
                    ours[i, step],
                    logits[step],
                    **TOLERANCE,
                    err_msg=f"{what}, request {i}, step {step}",
                )
            np.testing.assert_array_equal(our_drafts[i], drafts)


# Each switch alone; two of newest_defaults, eagle_3_1, qwen3_own_embedding and
# two_layers_qwen3_window have it too.
ALONE = {
    "llama_own_embedding",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "qwen3",
    "sliding_window_llama",
    "two_layers",
}


@pytest.mark.oracle("speculators")
@pytest.mark.parametrize("case", slow_unless(SPECULATORS.keys() - ALONE, SPECULATORS))
def test_every_step_equals_speculators(case: str, tmp_path: Path) -> None:
    options = SPECULATORS[case]
    oracle = make(**options)
    save_speculators(oracle, tmp_path, own_embedding=options.get("own_embedding", False))
    cfg, params = load(tmp_path)
    assert cfg.own_embedding == options.get("own_embedding", False)
    block_size = {"llama": 1, "newest_defaults": 16}.get(case, 4)
    assert_every_step_equals(
        oracle, cfg, params, block_size, alone=case in ("llama", "two_layers_qwen3_window")
    )


@pytest.mark.oracle("speculators")
@pytest.mark.parametrize(
    "case",
    [
        "llama",
        slow("norm_before_residual"),
        slow("norm_output"),
        "newest_defaults",
        slow("two_layers"),
    ],
)
def test_steps_equal_speculators_own_training_forward(case: str, tmp_path: Path) -> None:
    """Its training-time test runs three steps with the real tokens as drafts: another path to the
    same logits, and its own recycling."""
    oracle = make(**SPECULATORS[case])
    cfg, params = load(save_speculators(oracle, tmp_path, own_embedding=False))
    steps, length = 3, WINDOW  # its mask keeps the window of step 0, so the window must not bind
    hidden, tokens = (x[2][:length] for x in requests(oracle.module.fc.weight.shape[1]))
    logits = speculators_training_logits(oracle, hidden, tokens, steps)
    rows = range(
        length - steps + (cfg.sliding_window is None)
    )  # row i drafts with tokens[i+1], ... forced
    draft = PagedDraft(
        cfg,
        params,
        [hidden[: i + 1] for i in rows],
        [tokens[: i + 1] for i in rows],
        [1 for _ in rows],
        steps,
    )
    forced = np.array([[*tokens[i + 1 : i + steps], 0] for i in rows])
    _, ours = draft.steps(forced)
    for i in rows:
        np.testing.assert_allclose(ours[i], logits[:, i], **TOLERANCE, err_msg=f"row {i}")


@pytest.mark.oracle("speculators")
def test_the_origin_of_positions_is_immaterial() -> None:
    """speculators counts from 1, SafeAI and we from 0 (the position of the hidden state): rotary
    attention sees differences only."""
    oracle = make(layer=dict(rope_parameters=LLAMA3_ROPE))
    hidden, tokens = (x[2] for x in requests(oracle.module.fc.weight.shape[1]))
    from_one, from_zero = (
        speculators_training_logits(oracle, hidden, tokens, 3, first) for first in (1, 0)
    )
    assert np.abs(from_one - from_zero).max() < 1e-5


@pytest.mark.oracle("speculators")
def test_a_head_without_embedding_reads_in_speculators_once_it_is_injected(tmp_path: Path) -> None:
    oracle = make(norm_before_residual=True)
    save_speculators(oracle, tmp_path, own_embedding=False)
    edit_tensors(
        tmp_path,
        lambda tensors: tensors.update(
            {"embed_tokens.weight": np.array(shared_weights()["embed_tokens"])}
        ),
    )
    cfg, params = load(tmp_path)
    assert cfg.own_embedding
    assert_every_step_equals(reload_speculators(tmp_path, oracle.to_target), cfg, params)


# --- SafeAI / SpecForge
# --------------------------------------------------------------------------------------------------

SPECFORGE: dict[str, dict[str, Any]] = {
    "no_rope_theta": {},
    "rope_theta": dict(rope_theta=1e6),
    "llama3_rope": dict(
        rope_theta=500.0, rope_scaling={k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}
    ),
    "head_dim": dict(head_dim=24),
    "fc_norm": dict(fc_norm=True),
}


@pytest.mark.oracle("specforge")
@pytest.mark.parametrize(
    ("case", "own_embedding"), [*((case, False) for case in SPECFORGE), ("no_rope_theta", True)]
)
def test_every_step_equals_specforge(case: str, own_embedding: bool, tmp_path: Path) -> None:
    config = {**SAFEAI_CONFIG, **SPECFORGE[case]}
    oracle = specforge_head(config)
    if not own_embedding:
        share_embedding(oracle)
    cfg, params = load(save_flat(oracle, config, tmp_path / "draft", own_embedding=own_embedding))
    assert cfg.attention.rope.theta == config.get("rope_theta", 10000.0)
    assert_every_step_equals(oracle, cfg, params, alone=case == "fc_norm")


@pytest.mark.oracle("speculators")
def test_the_layouts_name_the_same_head(tmp_path: Path) -> None:
    """speculators' layers.0.* is SafeAI's midlayer.*; SGLang's older aux norms are fc_norm.*:
    renamed, they give the same parameters."""
    oracle = make(fc_norm=True)
    save_speculators(oracle, tmp_path, own_embedding=False)
    cfg, _ = load(tmp_path)

    def rename(tensors: dict[str, np.ndarray]) -> None:
        old_norms = {
            "fc_norm.0": "aux_norm_low",
            "fc_norm.1": "aux_norm_mid",
            "fc_norm.2": "aux_norm_high",
        }
        for name in list(tensors):
            new = name.replace("layers.0.", "midlayer.")
            for ours, theirs in old_norms.items():
                new = new.replace(ours, theirs)
            tensors[new] = tensors.pop(name)

    edit_tensors(tmp_path, rename)
    renamed_cfg, renamed = load(tmp_path)
    assert renamed_cfg == cfg
    assert_every_step_equals(oracle, renamed_cfg, renamed)


# --- which target layers
# --------------------------------------------------------------------------------------------------


@pytest.mark.oracle("specforge")
@pytest.mark.parametrize(
    ("fields", "aux_layers"),
    [
        ({}, (2, 4, 5)),  # 2, n // 2, n - 3 of the 8 layers
        ({"eagle_aux_hidden_state_layer_ids": None}, (2, 4, 5)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, (2, 4, 5)),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 4, 8]},
            (1, 4, 8),
        ),  # boundary ids, as vLLM reads them
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}},
            (2, 4, 8),
        ),  # SpecForge: layers whose output is read
    ],
)
def test_aux_layer_ids_become_boundary_ids(
    fields: dict[str, Any], aux_layers: tuple[int, ...], tmp_path: Path
) -> None:
    oracle = specforge_head(dict(SAFEAI_CONFIG))
    folder = save_flat(oracle, {**SAFEAI_CONFIG, **fields}, tmp_path / "draft", own_embedding=False)
    assert load(folder)[0].aux_layers == aux_layers
    assert load(folder, eagle_aux_hidden_state_layer_ids=(0, 3, 6))[0].aux_layers == (0, 3, 6)


# --- precision
# --------------------------------------------------------------------------------------------------


@pytest.mark.oracle("speculators")
def test_bfloat16_heads_keep_float32_logits(tmp_path: Path) -> None:
    """A cast of the logits to bfloat16 anywhere on their way makes ties, and all of them
    representable."""
    oracle = make(norm_before_residual=True)
    save_speculators(oracle, tmp_path, own_embedding=False)
    shared = jax.tree.map(lambda x: x.astype(jnp.bfloat16), shared_weights())
    cfg, params = load(tmp_path, dtype=jnp.bfloat16, shared=shared)
    assert {params[name].values.dtype for name in ("lm_head", "fc")} | {
        params["embed_tokens"].dtype
    } == {jnp.dtype(jnp.bfloat16)}
    hidden, tokens = requests(oracle.module.fc.weight.shape[1])
    draft = PagedDraft(cfg, params, hidden, tokens, PENDING, K, dtype=jnp.bfloat16)
    proposal = draft.propose()
    for logits in (np.asarray(proposal.draft_logits), draft.steps()[1]):
        assert logits.dtype == np.float32
        rounded = np.asarray(jnp.asarray(logits).astype(jnp.bfloat16).astype(jnp.float32))
        for step in range(K):
            assert (rounded[:, step] != logits[:, step]).mean() > 0.9


@pytest.mark.oracle("speculators")
def test_bfloat16_heads_stay_near_the_float32_oracle(tmp_path: Path) -> None:
    oracle = make(norm_before_residual=True)
    save_speculators(oracle, tmp_path, own_embedding=False)
    shared = jax.tree.map(lambda x: x.astype(jnp.bfloat16), shared_weights())
    cfg, params = load(tmp_path, dtype=jnp.bfloat16, shared=shared)
    hidden, tokens = requests(oracle.module.fc.weight.shape[1])
    drafts = np.stack([oracle.chain(h, t, K)[0] for h, t in zip(hidden, tokens, strict=True)])
    _, ours = PagedDraft(cfg, params, hidden, tokens, PENDING, K, dtype=jnp.bfloat16).steps(
        forced=drafts
    )
    for i, (h, t) in enumerate(zip(hidden, tokens, strict=True)):
        expected = oracle.chain(h, t, K)[1]
        assert (
            np.abs(ours[i] - expected).max() < 0.15 * np.abs(expected).max()
        )  # 8 bits of mantissa through a layer and four steps
