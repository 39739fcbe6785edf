"""DFlash and DSpark heads against speculators 0.9.0: the logits of every draft over several rounds,
for each layout and switch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.config import ConfigError
from jaxspec.drafts import hidden_width
from tests.parity.block_heads import (
    BlockOracle,
    block_head,
    save_deepspec,
    save_speculators,
    save_zlab,
    share,
    use_zlab_windows,
)
from tests.parity.oracles import LLAMA3_ROPE, TOLERANCE, edit_config, edit_tensors
from tests.parity.ours import TARGET, PagedBlocks, load, shared_weights
from tests.support.slow import slow, slow_unless

pytestmark = pytest.mark.oracle("speculators")

K, WINDOW = 5, 6
LENGTHS = (3, 9, 75)  # of prompts, by chunks of 8 over blocks of 4
ROUNDS = ((K + 1, 1, 3), (2, K + 1, 1))  # tokens that rounds sample; then a last block
LONG = 4000


def text(lengths: Any, width: int, seed: int = 3) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The target's features [T, width] of every position, of unequal size from one layer to the
    next, and the tokens."""
    rng = np.random.default_rng(seed)
    scales = np.repeat([0.5, 2.0, 1.0], 64)[:width]
    features = [(rng.normal(size=(n, width)) * scales).astype(np.float32) for n in lengths]
    return features, [rng.integers(0, TARGET.vocab_size, n) for n in lengths]


def assert_every_draft_equals(
    oracle: BlockOracle,
    cfg: Any,
    params: Any,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    rounds: tuple[tuple[int, ...], ...] = ROUNDS,
    num_speculative_tokens: int = K,
    **paging: Any,
) -> None:
    """Logits of sampled drafts after every round: blocks, their boundaries, uneven batches."""
    room = sum(max(r) for r in rounds) + 2
    features, tokens = text([n + room for n in lengths], hidden_width(cfg, TARGET))
    ours = PagedBlocks(cfg, params, features, tokens, num_speculative_tokens, **paging)
    ours.prefill(lengths)
    anchors, drafts, logits = [], [], []
    for num_sampled in (*rounds, None):
        anchors.append(ours.lens.copy())
        drawn, of_drawn = ours.propose()
        drafts.append(drawn)
        logits.append(of_drawn)
        if num_sampled is not None:
            ours.accept(num_sampled)
    for i, (h, t) in enumerate(zip(features, tokens, strict=True)):
        own = np.stack([d[i] for d in drafts])
        expected, _ = oracle.logits(h, t, [int(a[i]) for a in anchors], own)
        assert set(own.ravel().tolist()) <= set(oracle.to_target.tolist())
        for r, (got, want) in enumerate(zip([x[i] for x in logits], expected, strict=True)):
            np.testing.assert_allclose(got, want, **TOLERANCE, err_msg=f"request {i}, round {r}")


SLIDING = dict(
    layer_types=["sliding_attention", "full_attention"],
    sliding_window=WINDOW,
    use_sliding_window=True,
)
ALL_SLIDING: dict[str, Any] = {**SLIDING, "layer_types": ["sliding_attention"] * 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash": ("dflash", {}),
    "dflash_draft_vocab": ("dflash", dict(draft_vocab=48)),
    "dflash_from_anchor": ("dflash", dict(sample_from_anchor=True)),
    "dflash_window": ("dflash", dict(layer=SLIDING)),
    "dflash_window_non_causal": ("dflash", dict(layer=SLIDING, sliding_window_non_causal=True)),
    "dflash_all_windows": ("dflash", dict(layer=ALL_SLIDING)),
    "dflash_bias": ("dflash", dict(layer=dict(attention_bias=True, num_key_value_heads=1))),
    "dflash_llama3_rope": ("dflash", dict(layer=dict(rope_parameters=LLAMA3_ROPE))),
    "dflash_one_layer": ("dflash", dict(layer=dict(num_hidden_layers=1), aux_layers=(0, 8))),
    "dspark": ("dspark", {}),
    "dspark_gated": ("dspark", dict(markov_head_type="gated")),
    "dspark_rnn": ("dspark", dict(markov_head_type="rnn")),
    "dspark_draft_vocab": ("dspark", dict(draft_vocab=48)),
    "dspark_after_anchor": ("dspark", dict(sample_from_anchor=False)),
    "dspark_rnn_after_anchor": ("dspark", dict(markov_head_type="rnn", sample_from_anchor=False)),
    "dspark_no_markov": (
        "dspark",
        dict(markov_rank=0, enable_confidence_head=False, confidence_head_with_markov=False),
    ),
    "dspark_confidence_alone": ("dspark", dict(confidence_head_with_markov=False)),
    "dspark_window_and_vocab": ("dspark", dict(layer=SLIDING, draft_vocab=48)),
}


def made(case: str) -> BlockOracle:
    method, options = CASES[case]
    oracle = block_head(method, K=K, **options)
    share(oracle, shared_weights())
    return oracle


@pytest.mark.parametrize(
    "case",
    slow_unless(
        [
            "dflash_window",
            "dflash_bias",
            "dspark_gated",
            "dspark_rnn",
            "dspark_rnn_after_anchor",
            "dspark_window_and_vocab",
        ],
        CASES,
    ),
)
def test_every_draft_equals_speculators(case: str, tmp_path: Path) -> None:
    oracle = made(case)
    cfg, params = load(save_speculators(oracle, tmp_path), None, num_speculative_tokens=K)
    assert cfg.method == CASES[case][0]
    assert cfg.aux_layers == tuple(oracle.module.config.aux_hidden_state_layer_ids)
    assert_every_draft_equals(oracle, cfg, params, block_size=16 if "bias" in case else 4)


@pytest.mark.parametrize(
    ("case", "lengths"),
    [
        ("dspark_window_and_vocab", (LONG, LONG - 511)),
        ("dflash", (LONG, 17)),
        slow("dspark_rnn", (LONG, 17)),
        slow("dspark_gated", (17, LONG)),
        slow("dflash_window_non_causal", (LONG - 3, LONG)),
    ],
)
def test_contexts_of_thousands_of_tokens(
    case: str, lengths: tuple[int, int], tmp_path: Path
) -> None:
    oracle = made(case)
    cfg, params = load(save_speculators(oracle, tmp_path), None, num_speculative_tokens=K)
    assert_every_draft_equals(
        oracle,
        cfg,
        params,
        lengths=lengths,
        rounds=((K + 1, 2),),
        block_size=16,
        chunk=512,
        max_model_len=LONG + 32,
    )


@pytest.mark.parametrize("prefix", ["", "model."])
def test_zlab_heads_name_the_layers_whose_output_they_read(prefix: str, tmp_path: Path) -> None:
    oracle = made("dflash")
    folder = save_zlab(oracle, tmp_path / "head", prefix=prefix)
    cfg, params = load(folder, None, num_speculative_tokens=K)
    assert cfg.method == "dflash" and cfg.aux_layers == (2, 4, 7)
    assert not cfg.own_embedding and not cfg.own_lm_head
    assert_every_draft_equals(oracle, cfg, params)


def test_zlab_windows_end_at_each_row(tmp_path: Path) -> None:
    oracle = made("dflash_window")
    use_zlab_windows(oracle)
    folder = save_zlab(oracle, tmp_path / "head")
    cfg, params = load(folder, None, num_speculative_tokens=K)
    assert_every_draft_equals(oracle, cfg, params)


@pytest.mark.parametrize(
    "switches",
    [
        {},
        slow(dict(markov_head_type="gated", layer=SLIDING)),
        slow(dict(markov_head_type="rnn")),
        slow(dict(sample_from_anchor=False, confidence_head_with_markov=False)),
    ],
)
def test_deepspec_heads_have_an_embedding_and_a_head_of_their_own(
    switches: dict[str, Any], tmp_path: Path
) -> None:
    """Windows of flat layouts end at each row."""
    oracle = block_head("dspark", K=K, **switches)
    if "layer" in switches:
        use_zlab_windows(oracle)
    from_anchor = oracle.module.config.sample_from_anchor
    folder = save_deepspec(oracle, tmp_path / "head", sample_from_anchor=from_anchor)
    cfg, params = load(folder, None, num_speculative_tokens=K)
    assert cfg.method == "dspark" and cfg.own_embedding and cfg.own_lm_head
    assert_every_draft_equals(oracle, cfg, params)


@pytest.mark.parametrize(
    "case",
    slow_unless(
        ["dspark", "dspark_confidence_alone"],
        [
            "dspark",
            "dspark_confidence_alone",
            "dspark_gated",
            "dspark_rnn",
            "dspark_after_anchor",
            "dspark_window_and_vocab",
        ],
    ),
)
def test_confidence_equals_speculators_and_ends_a_requests_drafts(
    case: str, tmp_path: Path
) -> None:
    """In every round, the drafts of a block end before the first whose chance, together with those
    before it, is below the threshold."""
    oracle = made(case)
    folder = save_speculators(oracle, tmp_path)
    threshold = 0.2
    features, tokens = text([n + 12 for n in LENGTHS], len(oracle.module.fc.weight[0]))
    found = []
    for chance in (None, threshold):
        own = load(folder, None, num_speculative_tokens=K, draft_confidence_threshold=chance)
        ours = PagedBlocks(*own, features, tokens, K)
        ours.prefill(LENGTHS)
        anchors, drafted = [], []
        for num_sampled in ROUNDS:
            anchors.append(ours.lens.copy())
            drafted.append(ours.propose()[0])
            ours.accept(num_sampled)
        found.append(np.stack(drafted, axis=1))
    counts = set()
    for i, (whole, ended) in enumerate(zip(*found, strict=True)):
        starts = [int(a[i]) for a in anchors]
        _, chances = oracle.logits(features[i], tokens[i], starts, whole)
        assert chances is not None
        for r, row in enumerate(chances):
            kept = int((np.cumprod(row) >= threshold).sum())
            expected = np.where(np.arange(K) < kept, whole[r], -1)
            np.testing.assert_array_equal(ended[r], expected, err_msg=f"request {i}, round {r}")
            counts.add(kept)
    assert len(counts) > 1, counts  # some end, and not all at one place


@pytest.mark.parametrize("K_of_request", [1, 3])
def test_fewer_drafts_than_the_block_holds_are_a_shorter_block(
    K_of_request: int, tmp_path: Path
) -> None:
    oracle = made("dspark")
    cfg, params = load(save_speculators(oracle, tmp_path), None, num_speculative_tokens=1)
    oracle.module.block_size = K_of_request
    sampled = ((K_of_request + 1, 1, 1),)
    assert_every_draft_equals(
        oracle, cfg, params, rounds=sampled, num_speculative_tokens=K_of_request
    )


# --- errors
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token_id": 128}, "mask_token_id: expected an id below the target's 128, got 128"),
        ({"mask_token_id": None}, "expected mask_token_id to be an integer"),
        (
            {"aux_hidden_state_layer_ids": [2, 9]},
            "aux_hidden_state_layer_ids: expected increasing ids within 0..8",
        ),
        (
            {"aux_hidden_state_layer_ids": None},
            "aux_hidden_state_layer_ids: expected a list of the target's layers, got None",
        ),
        ({"markov_head_type": "deep"}, "markov_head_type: expected one of vanilla, gated, rnn"),
        (
            {"block_size": 4},
            "num_speculative_tokens: expected at most 4, the drafts of this head's",
        ),
        ({"markov_rank": 0}, "markov_rank: expected W1's width in a head with markov_w1, got none"),
        ({"draft_vocab_size": 60}, "d2t and lm_head.weight: expected both in a draft whose"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ],
)
def test_what_does_not_fit_is_one_sentence(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = save_speculators(made("dspark"), tmp_path)
    edit_config(folder, lambda config: config.update(change))
    with pytest.raises(ConfigError) as error:
        load(folder, None, num_speculative_tokens=K)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        "markov_head.markov_w2.weight",
        "confidence_head.proj.bias",
        "layers.1.self_attn.k_norm.weight",
    ],
)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    folder = save_speculators(made("dspark"), tmp_path)
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ConfigError, match=name):
        load(folder, None, num_speculative_tokens=K)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_target_layers": 9}, "expected num_target_layers 8 as the target has, got 9"),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 7]}},
            "target_layer_ids: expected increasing ids within -1..6",
        ),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types: expected full_attention or"),
    ],
)
def test_what_does_not_fit_in_zlabs_layout_is_one_sentence(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = save_zlab(made("dflash"), tmp_path / "head")
    edit_config(folder, lambda config: config.update(change))
    with pytest.raises(ConfigError, match=message):
        load(folder, None, num_speculative_tokens=K)


def test_a_method_that_is_not_the_heads_and_a_threshold_without_a_confidence_head(
    tmp_path: Path,
) -> None:
    folder = save_zlab(made("dflash"), tmp_path / "head")
    with pytest.raises(ConfigError, match="method: expected 'dflash', which this head is"):
        load(folder, "dspark", num_speculative_tokens=K)
    with pytest.raises(ConfigError, match="draft_confidence_threshold: expected it only with a"):
        load(folder, None, num_speculative_tokens=K, draft_confidence_threshold=0.5)
