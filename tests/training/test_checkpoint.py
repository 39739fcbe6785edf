"""A saved head is what the loader, speculators and a rerun read; its acceptance is measured by the
real propose and verify."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec import models
from jaxspec.commands import train as commands
from jaxspec.commands.train import app
from jaxspec.config import REFERENCE_OPS, ConfigError, RopeConfig, SpeculativeConfig
from jaxspec.drafts import eagle3
from jaxspec.drafts.dflash import DFlashConfig
from jaxspec.drafts.dspark import DSparkConfig
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.layers.params import Weight, init_random
from jaxspec.loading.model import load_draft
from jaxspec.training import evaluation
from jaxspec.training.card import write_card
from jaxspec.training.checkpoint import (
    Verifier,
    join_file,
    save_draft,
    speculators_config,
    split_file,
)
from jaxspec.training.data import OverlapFilter
from jaxspec.training.eagle3 import forward_steps
from jaxspec.training.evaluation import evaluate_acceptance
from jaxspec.training.heads import continued_params, eagle_config, initial_params
from jaxspec.training.run import RunConfig
from jaxspec.training.run_record import earlier_history
from jaxspec.training.target import target_states
from jaxspec.training.trained import trained_specs
from tests.training.conftest import DRAFT_ATTENTION, DRAFT_VOCAB, VOCAB, Pair, make_pair

ROOT = Path(__file__).resolve().parents[2]
VERIFIER = Verifier("tiny", ("Qwen3ForCausalLM",), 256)
SWITCHES = {"norm_before_residual": True, "fc_norm": True, "norm_output": True}


def save(pair: Pair, folder: Path) -> None:
    save_draft(folder, pair.draft_cfg, pair.draft, pair.draft_ids, VERIFIER)


@pytest.mark.parametrize(
    "switches", [{}, SWITCHES, {"sliding_window": 8}], ids=["plain", "switches", "window"]
)
def test_a_saved_head_loads_as_it_was(tmp_path: Path, switches: dict[str, Any]) -> None:
    pair = make_pair(3, **switches)
    save(pair, tmp_path / "head")
    cfg, params = load_draft(
        tmp_path / "head", pair.target_cfg, pair.target, SpeculativeConfig(), jnp.float32
    )
    assert cfg == dataclasses.replace(
        pair.draft_cfg, attention=dataclasses.replace(pair.draft_cfg.attention)
    )
    assert jax.tree.structure(params) == jax.tree.structure(pair.bound)
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), pair.draft)
    own = {name: params[name] for name in expected}
    jax.tree.map(np.testing.assert_array_equal, own, expected)
    for name in ("draft_to_target", "target_to_draft", "embed_tokens"):
        np.testing.assert_array_equal(params[name], pair.bound[name])
    given = SpeculativeConfig(draft_sliding_window=5)
    bounded, _ = load_draft(tmp_path / "head", pair.target_cfg, pair.target, given, jnp.float32)
    assert bounded == dataclasses.replace(pair.draft_cfg, sliding_window=5)


@pytest.mark.parametrize("window", [None, 8])
def test_an_eagle_1_head_is_saved_in_safeais_layout_and_loads_as_it_was(
    tmp_path: Path, window: int | None
) -> None:
    pair = make_pair(3)
    attention = dataclasses.replace(
        pair.target_cfg.attention, rope=RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
    )
    cfg = eagle_config(pair.target_cfg, sliding_window=window)
    cfg = dataclasses.replace(cfg, attention=attention)
    params = initial_params(cfg, pair.target_cfg, pair.target, np.arange(VOCAB), 0)
    save_draft(tmp_path / "head", cfg, params, np.arange(VOCAB), VERIFIER)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    layer = (
        "post_attention_layernorm",
        *(f"self_attn.{x}_proj" for x in "qkvo"),
        *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
    )
    assert set(tensors) == {
        "fc.weight",
        *(f"layers.0.{name}.weight" for name in layer),
    } and tensors["fc.weight"].shape == (32, 64)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert (
        config["architectures"] == ["LlamaForCausalLM"]
        and config["bias"] is False
        and config["rope_theta"] == 5e5
    )
    loaded_cfg, loaded = load_draft(
        tmp_path / "head",
        pair.target_cfg,
        pair.target,
        SpeculativeConfig(method="eagle"),
        jnp.float32,
    )
    assert loaded_cfg == cfg
    given = SpeculativeConfig(method="eagle", draft_sliding_window=5)
    bounded, _ = load_draft(tmp_path / "head", pair.target_cfg, pair.target, given, jnp.float32)
    assert bounded == dataclasses.replace(cfg, sliding_window=5)
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    own = {name: loaded[name] for name in expected}
    jax.tree.map(np.testing.assert_array_equal, own, expected)
    assert loaded["lm_head"].values is pair.target["embed_tokens"]  # tied: the target's own


def test_a_head_that_continues_another_computes_what_it_did() -> None:
    """With a wider MLP and another vocabulary: the old tokens keep their logits."""
    old = make_pair(5)
    wider = dataclasses.replace(
        old.draft_cfg, intermediate_size=56, draft_vocab_size=DRAFT_VOCAB + 4
    )
    ids = np.sort(
        np.concatenate([old.draft_ids[2:], np.setdiff1d(np.arange(VOCAB), old.draft_ids)[:6]])
    )
    fresh = initial_params(wider, old.target_cfg, old.target, ids, 1)
    params = continued_params(wider, fresh, ids, old.draft_cfg, old.draft, old.draft_ids)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, VOCAB, (1, 6)), jnp.int32)
    aux = jnp.asarray(rng.normal(size=(1, 6, 96)), jnp.float32)
    logits = []
    for cfg, weights in ((old.draft_cfg, old.draft), (wider, params)):
        weights = {**weights, "embed_tokens": old.target["embed_tokens"]}
        logits.append(
            eagle3.logits(
                weights, cfg, forward_steps(weights, cfg, tokens, aux, 2)[1], REFERENCE_OPS
            )
        )
    kept = np.isin(ids, old.draft_ids)
    np.testing.assert_allclose(logits[1][..., kept], logits[0][..., 2:], atol=1e-5)
    np.testing.assert_array_equal(
        params["lm_head"].values[:, ~kept], old.target["embed_tokens"][ids[~kept]].T
    )
    with pytest.raises(ConfigError, match="intermediate_size: expected at least the 40"):
        continued_params(
            wider,
            {**fresh, "layers": [narrow(fresh["layers"][0])]},
            ids,
            old.draft_cfg,
            old.draft,
            old.draft_ids,
        )


def narrow(layer: dict[str, Any]) -> dict[str, Any]:
    return {**layer, "down_proj": Weight(layer["down_proj"].values[:8])}


def test_tensors_are_those_of_the_speculators_layout(tmp_path: Path) -> None:
    pair = make_pair(3)
    save(pair, tmp_path / "head")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    layer = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    layer += tuple(f"self_attn.{x}_proj" for x in "qkvo") + tuple(
        f"mlp.{x}_proj" for x in ("gate", "up", "down")
    )
    assert set(tensors) == {
        "d2t",
        "t2d",
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        *(f"layers.0.{name}.weight" for name in layer),
    }
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == bool
    assert {str(x.dtype) for name, x in tensors.items() if name not in ("d2t", "t2d")} == {
        "bfloat16"
    }
    assert tensors["lm_head.weight"].shape == (DRAFT_VOCAB, 32) and tensors["fc.weight"].shape == (
        32,
        96,
    )


@pytest.mark.oracle("speculators")
def test_speculators_reads_the_config_and_computes_the_same_logits(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file as load_torch
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    pair = make_pair(4, **SWITCHES)
    save(pair, tmp_path / "head")
    config = Eagle3SpeculatorConfig.from_pretrained(tmp_path / "head")
    config.transformer_layer_config._attn_implementation = "eager"
    config.speculators_config.verifier.name_or_path = (
        None  # it would look for the verifier's embedding on a hub
    )
    oracle = Eagle3DraftModel(config).float().eval()
    tensors = load_torch(tmp_path / "head" / "model.safetensors")
    state = oracle.state_dict()
    with torch.no_grad():
        state["embed_tokens.weight"].copy_(torch.tensor(np.asarray(pair.target["embed_tokens"])))
        for name, tensor in tensors.items():
            assert state[name].shape == tensor.shape, name
            state[name].copy_(tensor)
    cfg, params = load_draft(
        tmp_path / "head", pair.target_cfg, pair.target, SpeculativeConfig(), jnp.float32
    )
    rng = np.random.default_rng(0)
    tokens, aux = (
        rng.integers(0, VOCAB, (1, 8)).astype(np.int32),
        rng.normal(size=(1, 8, 96)).astype(np.float32),
    )
    found = []
    oracle.lm_head.register_forward_hook(
        lambda module, args, out: found.append(out.detach().numpy())
    )
    shifted = np.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    with torch.no_grad():
        oracle(
            hidden_states=torch.tensor(aux),
            input_ids=torch.tensor(shifted).long(),
            document_ids=torch.zeros(1, 8, dtype=torch.long),
            ttt_steps=2,
        )
    outputs = jax.jit(forward_steps, static_argnums=(1, 4))(
        params, cfg, jnp.asarray(tokens), jnp.asarray(aux), 2
    )
    for step, out in enumerate(outputs):
        np.testing.assert_allclose(
            eagle3.logits(params, cfg, out, REFERENCE_OPS)[:, : 7 - step],
            found[step][:, : 7 - step],
            atol=1e-4,
            rtol=1e-4,
        )


def block_head(pair: Pair, **changes: Any) -> tuple[Any, Any]:
    """Return the config and the weights of a random DSpark head, or a DFlash one."""
    fields: dict[str, Any] = dict(
        target_hidden_size=32,
        hidden_size=32,
        intermediate_size=40,
        attention=dataclasses.replace(DRAFT_ATTENTION, qk_norm=True, rms_norm_eps=1e-5),
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
        draft_vocab_size=DRAFT_VOCAB,
        aux_layers=(1, 2, 4),
        draft_block_size=5,
        mask_token_id=3,
        sample_from_anchor=True,
        windows=(None, None),
        causal=(False, False),
        own_lm_head=True,
        **changes,
    )
    dspark: dict[str, Any] = dict(markov_rank=6, has_confidence=True, confidence_reads_token=True)
    cfg = DFlashConfig(**fields) if "method" in changes else DSparkConfig(**fields | dspark)
    specs = trained_specs(cfg)
    return cfg, init_random(specs, jax.random.key(1), jnp.dtype(jnp.float32))


BLOCK_HEADS: dict[str, dict[str, Any]] = {
    "dspark": {},
    "dflash": {"method": "dflash"},
}


def save_block(cfg: Any, params: Any, pair: Pair, folder: Path) -> None:
    save_draft(folder, cfg, params, pair.draft_ids, VERIFIER)


@pytest.mark.parametrize("changes", BLOCK_HEADS.values(), ids=BLOCK_HEADS)
def test_a_block_head_is_saved_once_and_loads_with_its_context_weights(
    tmp_path: Path, pair: Pair, changes: dict[str, Any]
) -> None:
    cfg, params = block_head(pair, **changes)
    save_block(cfg, params, pair, tmp_path / "head")
    loaded, found = load_draft(
        tmp_path / "head", pair.target_cfg, pair.target, SpeculativeConfig(), jnp.float32
    )
    assert loaded == cfg
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    jax.tree.map(np.testing.assert_array_equal, {n: found[n] for n in expected}, expected)
    qkv = [layer["self_attn"]["qkv_proj"].values for layer in expected["layers"]]
    heads = DRAFT_ATTENTION.num_heads * DRAFT_ATTENTION.head_dim
    np.testing.assert_array_equal(
        found["context_kv"].values, np.concatenate([x[:, heads:] for x in qkv], axis=1)
    )
    np.testing.assert_array_equal(found["draft_to_target"], pair.draft_ids)


def test_a_block_head_continues_with_another_vocabulary(pair: Pair) -> None:
    """Columns of W2 and lm_head go by token, the rest is as it was."""
    old_cfg, old = block_head(pair)
    ids = np.setdiff1d(np.arange(VOCAB), pair.draft_ids)[:DRAFT_VOCAB]
    ids[::2] = pair.draft_ids[::2]
    ids = np.unique(ids)
    cfg = dataclasses.replace(old_cfg, draft_vocab_size=len(ids))
    fresh = init_random(trained_specs(cfg), jax.random.key(9), jnp.dtype(jnp.float32))
    found = continued_params(cfg, fresh, ids, old_cfg, old, pair.draft_ids)
    known = np.isin(ids, pair.draft_ids)
    assert 0 < known.sum() < len(ids)
    for name in ("lm_head", "markov_w2"):
        column = np.searchsorted(pair.draft_ids, ids[known])
        new, had = found[name].values, old[name].values
        np.testing.assert_array_equal(new[:, known], had[:, column])
        np.testing.assert_array_equal(new[:, ~known], fresh[name].values[:, ~known])
    np.testing.assert_array_equal(found["markov_w1"], old["markov_w1"])
    np.testing.assert_array_equal(found["fc"].values, old["fc"].values)


@pytest.mark.oracle("speculators")
@pytest.mark.parametrize("changes", BLOCK_HEADS.values(), ids=BLOCK_HEADS)
def test_a_block_heads_files_are_speculators_own(
    tmp_path: Path, pair: Pair, changes: dict[str, Any]
) -> None:
    """Names, shapes and config of a head of these switches that speculators saves itself.

    It writes its embedding as the target's, too, so ours are the others.
    """
    cfg, params = block_head(pair, **changes)
    save_block(cfg, params, pair, tmp_path / "ours")
    theirs = speculators_head(cfg)
    theirs.save_pretrained(tmp_path / "theirs")
    ours, other = (load_file(tmp_path / n / "model.safetensors") for n in ("ours", "theirs"))
    assert {n: x.shape for n, x in ours.items()} == {n: x.shape for n, x in other.items()}
    ours, other = (
        json.loads((tmp_path / n / "config.json").read_text()) for n in ("ours", "theirs")
    )
    own = {"target_hidden_size", "dtype"}  # theirs are null and float32
    nested = {"transformer_layer_config", "speculators_config"}
    assert set(ours) - set(other) == set()
    for name in set(ours) - own - nested:
        assert ours[name] == other[name], name
    layer, other_layer = ours["transformer_layer_config"], other["transformer_layer_config"]
    for name in set(layer) & set(other_layer):
        assert layer[name] == other_layer[name], name
    proposal, other_proposal = ours["speculators_config"], other["speculators_config"]
    assert proposal["verifier"] == {"name_or_path": "tiny", "architectures": ["Qwen3ForCausalLM"]}
    assert proposal["algorithm"] == other_proposal["algorithm"]
    assert proposal["proposal_methods"] == other_proposal["proposal_methods"]


def speculators_head(cfg: Any) -> Any:
    """Return speculators' module of this shape."""
    import torch

    layer = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=40,
        num_attention_heads=cfg.attention.num_heads,
        num_key_value_heads=cfg.attention.num_kv_heads,
        head_dim=cfg.attention.head_dim,
        rms_norm_eps=1e-5,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": cfg.attention.rope.theta},
    )
    from tests.parity.block_heads import block_head as oracle_head

    switches: dict[str, Any] = {}
    if cfg.method == "dspark":
        switches = dict(
            markov_rank=6, enable_confidence_head=True, confidence_head_with_markov=True
        )
    oracle = oracle_head(
        cfg.method,
        K=cfg.block_capacity,
        layer=layer,
        draft_vocab=DRAFT_VOCAB,
        aux_layers=cfg.aux_layers,
        vocab=VOCAB,
        sample_from_anchor=cfg.sample_from_anchor,
        **switches,
    )
    oracle.module.config.mask_token_id = cfg.mask_token_id
    assert isinstance(oracle.module, torch.nn.Module)
    return oracle.module


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"windows": (4, 8)}, "windows: expected one window that ends at the anchor"),
        (
            {"windows": (4, 4), "windows_from_anchor": False},
            "windows: expected one window that ends at the anchor",
        ),
        ({"causal": (True, False)}, "causal: expected it of all layers with a window"),
    ],
)
def test_a_block_head_that_the_layout_cannot_name_is_one_sentence(
    tmp_path: Path, pair: Pair, changes: dict[str, Any], message: str
) -> None:
    cfg, params = block_head(pair)
    cfg = dataclasses.replace(cfg, **changes)
    with pytest.raises(ConfigError, match=message):
        save_block(cfg, params, pair, tmp_path / "head")


@pytest.mark.parametrize("windows", [(9, 9), (9, None)])
@pytest.mark.parametrize("causal", [False, True])
def test_windows_of_a_block_head_are_read_back(
    tmp_path: Path, pair: Pair, windows: Any, causal: bool
) -> None:
    cfg, params = block_head(pair)
    of_layers = tuple(causal and window is not None for window in windows)
    cfg = dataclasses.replace(cfg, windows=windows, causal=of_layers)
    save_block(cfg, params, pair, tmp_path / "head")
    speculative = SpeculativeConfig()
    loaded, _ = load_draft(
        tmp_path / "head", pair.target_cfg, pair.target, speculative, jnp.float32
    )
    assert loaded == cfg


def test_config_keeps_llama3_rope(pair: Pair) -> None:
    rope = RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
    cfg = dataclasses.replace(
        pair.draft_cfg, attention=dataclasses.replace(pair.draft_cfg.attention, rope=rope)
    )
    layer = json.loads(json.dumps(speculators_config(cfg, VERIFIER)))["transformer_layer_config"]
    assert RopeConfig.from_hf(layer) == rope


def test_a_second_save_replaces_the_first(tmp_path: Path) -> None:
    save(make_pair(3), tmp_path / "head")
    first = (tmp_path / "head" / "model.safetensors").read_bytes()
    save(make_pair(4), tmp_path / "head")
    assert (tmp_path / "head" / "model.safetensors").read_bytes() != first
    assert [p.name for p in tmp_path.iterdir()] == ["head"]


def test_pieces_join_to_the_same_file_and_damage_is_found(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(content := bytes(range(256)) * 5)
    pieces = split_file(tmp_path / "x.bin", tmp_path / "pieces", 500)
    assert [len(p.read_bytes()) for p in pieces] == [500, 500, 280]
    join_file(tmp_path / "pieces", tmp_path / "out" / "x.bin")
    assert (tmp_path / "out" / "x.bin").read_bytes() == content
    assert (
        len(split_file(tmp_path / "x.bin", tmp_path / "pieces", 1000)) == 2
        and len(list((tmp_path / "pieces").iterdir())) == 3
    )
    (tmp_path / "pieces" / "x.bin.001").unlink()
    said = "expected pieces of sha256 '[0-9a-f]{64}', got"
    with pytest.raises(ConfigError, match=f"{said} '[0-9a-f]{{64}}'$"):
        join_file(tmp_path / "pieces", tmp_path / "out" / "x.bin")
    (tmp_path / "pieces" / "x.bin.000").unlink()
    with pytest.raises(
        ConfigError, match="expected pieces of sha256 '[0-9a-f]{64}', got no pieces"
    ):
        join_file(tmp_path / "pieces", tmp_path / "out" / "x.bin")


def test_a_file_to_cut_that_is_absent_leaves_the_pieces_of_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"abc")
    pieces = split_file(tmp_path / "x.bin", tmp_path / "pieces", 2)
    (tmp_path / "x.bin").unlink()
    with pytest.raises(ConfigError, match="x.bin: expected a file to cut, got No such file"):
        split_file(tmp_path / "x.bin", tmp_path / "pieces", 2)
    with pytest.raises(ConfigError, match="expected a file to cut, got Is a directory"):
        split_file(tmp_path, tmp_path / "others", 2)
    assert all(piece.is_file() for piece in pieces) and not (tmp_path / "others").exists()


def test_cutting_removes_no_other_files(tmp_path: Path) -> None:
    """Not an index, a backup or a folder beside the pieces, whatever the name's characters."""
    name = "a[1].bin"
    (tmp_path / name).write_bytes(b"abcdef")
    others = [tmp_path / f"{name}{end}" for end in (".index.json", ".bak", ".0000")]
    for other in others:
        other.write_text("mine")
    (tmp_path / f"{name}.d").mkdir()
    assert len(split_file(tmp_path / name, tmp_path, 2)) == 3
    assert len(split_file(tmp_path / name, tmp_path, 4)) == 2
    assert not (tmp_path / f"{name}.002").exists()
    assert all(other.read_text() == "mine" for other in others)
    join_file(tmp_path, tmp_path / "out" / name)
    assert (tmp_path / "out" / name).read_bytes() == b"abcdef"
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="empty: expected a file to cut, got an empty one"):
        split_file(tmp_path / "empty", tmp_path, 4)


def test_a_head_that_is_not_finite_replaces_none(tmp_path: Path) -> None:
    pair = make_pair(3)
    save(pair, tmp_path / "head")
    first = (tmp_path / "head" / "model.safetensors").read_bytes()
    pair.draft["norm"] = pair.draft["norm"].at[0].set(jnp.nan)
    with pytest.raises(ConfigError, match=r"head: expected a head of finite numbers, got norm"):
        save(pair, tmp_path / "head")
    assert (tmp_path / "head" / "model.safetensors").read_bytes() == first
    assert [p.name for p in tmp_path.iterdir()] == ["head"]


def test_saving_a_head_removes_no_other_files(tmp_path: Path) -> None:
    for name in ("head", "head.old", "head.new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("mine")
    for name in ("model.safetensors.index.json", "README.md", "training.json"):
        (tmp_path / "head" / name).write_text("of an earlier head")
    for seed in (3, 4):
        save(make_pair(seed), tmp_path / "head")
    for name in ("head", "head.old", "head.new"):
        assert (tmp_path / name / "mine.txt").read_text() == "mine"
    assert sorted(p.name for p in (tmp_path / "head").iterdir()) == [
        "config.json",
        "mine.txt",
        "model.safetensors",
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["head", "head.new", "head.old"]


def test_a_save_that_died_while_it_moved_other_files_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(make_pair(3), tmp_path / "real")
    (tmp_path / "real" / "mine.txt").write_text("mine")
    (tmp_path / "head").symlink_to("real")
    replace = os.replace

    def die(source: Any, target: Any) -> None:
        if Path(source).name == "mine.txt":
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "replace", die)
        save(make_pair(4), tmp_path / "head")
    for seed in (5, 6):
        save(make_pair(seed), tmp_path / "head")
        assert (tmp_path / "head" / "mine.txt").read_text() == "mine"
    assert (tmp_path / "head").is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["head", "real"]


def test_pieces_without_their_checksum_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"abc")
    split_file(tmp_path / "x.bin", tmp_path / "pieces", 2)
    for damage in (
        lambda digest: digest.write_bytes(b"\xff\xfe\n"),
        lambda digest: digest.unlink(),
    ):
        damage(tmp_path / "pieces" / "x.bin.sha256")
        with pytest.raises(ConfigError, match="expected pieces of sha256"):
            join_file(tmp_path / "pieces", tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_save_after_one_that_died_between_two_renames_keeps_the_old_head_till_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(make_pair(3), tmp_path / "head")
    first = (tmp_path / "head" / "model.safetensors").read_bytes()
    (tmp_path / "head").rename(tmp_path / ".head.old")

    def die(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("jaxspec.training.checkpoint.save_file", die)
        save(make_pair(4), tmp_path / "head")
    assert (tmp_path / "head" / "model.safetensors").read_bytes() == first


def test_evaluation_writes_the_targets_greedy_text_and_counts_what_it_saved(pair: Pair) -> None:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, VOCAB, n).astype(np.int32) for n in (3, 9, 5)]
    metrics, by_length, answers = evaluate_acceptance(
        pair.target_cfg,
        pair.target,
        pair.draft_cfg,
        pair.bound,
        prompts,
        stop_token_ids=[2],
        num_speculative_tokens=2,
        max_tokens=12,
        dtype=jnp.float32,
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        sequence = np.concatenate([prompt, answer])
        padded = jnp.zeros((1, 24), jnp.int32).at[0, : len(sequence)].set(sequence)
        hidden, _ = target_states(
            pair.target, pair.target_cfg, padded, jnp.asarray([len(sequence)], jnp.int32), ()
        )
        greedy = np.argmax(
            models.family(pair.target_cfg).logits(
                pair.target, pair.target_cfg, hidden, REFERENCE_OPS
            ),
            axis=-1,
        )[0]
        assert answer.tolist() == greedy[len(prompt) - 1 : len(sequence) - 1].tolist()
        assert len(answer) == 12 or answer[-1] == 2
    assert by_length == {"below 512": metrics}
    # A round yields its accepted drafts and one token; the first token is prefill's. What ran past
    # the end is not in the answers.
    written = sum(map(len, answers)) - len(prompts)
    assert (
        metrics.num_accepted_tokens + metrics.num_drafts
        >= written
        > metrics.num_accepted_tokens + metrics.num_drafts - 3 * len(prompts)
    )


def test_evaluation_counts_each_range_of_prompt_lengths_by_itself(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted = ([2, 0], [1, 1, 1], [0])  # of each round of each prompt

    class Engine:
        """An engine that has counted these rounds."""

        metrics = SpecDecodeMetrics(2)

        def __init__(self, *models: object, **settings: object) -> None:
            pass

        def generate(self, prompts: list[list[int]], params: object) -> list[SimpleNamespace]:
            return [
                SimpleNamespace(metrics=counted(rounds), token_ids=[len(prompt)])
                for prompt, rounds in zip(prompts, accepted, strict=True)
            ]

    def counted(rounds: list[int]) -> SpecDecodeMetrics:
        metrics = SpecDecodeMetrics(2)
        for number in rounds:
            metrics.observe(number)
        return metrics

    monkeypatch.setattr(evaluation, "LLM", Engine)
    _, by_length, answers = evaluate_acceptance(
        pair.target_cfg,
        pair.target,
        pair.draft_cfg,
        pair.bound,
        [np.zeros(n, np.int32) for n in (511, 2000, 3)],
        stop_token_ids=[],
        num_speculative_tokens=2,
        max_tokens=12,
        dtype=jnp.float32,
    )
    expected = {"below 512": counted([2, 0, 0]), "1024 to 2047": counted([1, 1, 1])}
    assert by_length == expected and list(by_length) == list(expected)
    assert [x.tolist() for x in answers] == [[511], [2000], [3]]


def test_counts_of_requests_add_up() -> None:
    total, parts = SpecDecodeMetrics(2), [SpecDecodeMetrics(2) for _ in range(3)]
    whole = SpecDecodeMetrics(2)
    for part, accepted in zip(parts, ([0, 2], [1], [2, 2, 1]), strict=True):
        for number in accepted:
            part.observe(number)
            whole.observe(number)
        total.add(part)
    assert total == whole and total.mean_acceptance_length == 1 + 8 / 6


def test_dry_run_trains_saves_and_evaluates(tmp_path: Path) -> None:
    """The whole command, in a process of its own, as a newcomer runs it.

    float32, since the rounding of bfloat16 on a CPU changes with XLA's fusions, and so the chats.
    """
    command = [
        sys.executable,
        "docs/examples/train_head.py",
        "--dry-run",
        "--dtype",
        "float32",
        "--output",
        str(tmp_path),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((tmp_path / "training.json").read_text())
    losses = [entry["loss"] for entry in record["history"] if "loss" in entry]
    assert len(losses) == 3 and losses[-1] < losses[0]
    measured = record["evaluation"]
    assert (measured["prompts_from"], measured["max_tokens"]) == (None, 16)
    assert record["evaluation"]["num_drafts"] > 0 and record["generation"][0]["num_chats"] >= 48
    assert (tmp_path / "chats.npz").is_file() and (
        tmp_path / "head" / "model.safetensors"
    ).is_file()
    assert {p.name for p in (tmp_path / "pieces").iterdir()} == {
        "config.json",
        "model.safetensors.000",
        "model.safetensors.sha256",
    }


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what the command writes to stderr when it ends with code 2."""
    with pytest.raises(SystemExit) as stopped:
        app(list(arguments))
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_a_missing_target_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = ("--target", str(tmp_path), "--output", str(tmp_path / "out"))
    error = refusal(capsys, "train", *folders)
    assert error.startswith(f"error: {tmp_path}") and len(error.splitlines()) == 1


def test_wrong_evaluation_prompts_are_found_before_anything_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not when the first head has been trained and saved."""
    prompts = tmp_path / "none.jsonl"
    files = ("--output", str(tmp_path / "out"), "--eval-prompts", str(prompts))
    error = refusal(capsys, "train", "--dry-run", *files)
    said = f"error: --eval-prompts {prompts}: expected a .jsonl file or the id of a data set on"
    assert error.startswith(said) and len(error.splitlines()) == 1


def test_an_evaluation_is_named_by_the_file_of_its_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[RunConfig] = []
    monkeypatch.setattr(commands, "run_stage", lambda *args, run, **rest: made.append(run))
    (tmp_path / "own.jsonl").write_text('{"prompt": "a b"}')
    arguments = ("evaluate", "--output", str(tmp_path), "--eval-tokens", "9")
    with pytest.raises(SystemExit) as stopped:
        app([*arguments, "--eval-prompts", str(tmp_path / "own.jsonl")])
    assert stopped.value.code == 0
    found = made[0].evaluation
    assert (found.prompts, found.prompts_from, found.max_tokens) == (("a b",), "own.jsonl", 9)


def test_chats_keep_out_the_prompts_that_measure_and_choose_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[OverlapFilter] = []
    monkeypatch.setattr(
        commands, "run_stage", lambda *args, kept_out, **rest: made.append(kept_out)
    )
    flags = ["generate", "--output", str(tmp_path / "out")]
    for flag, word in (("--eval-prompts", "one"), ("--keep-out", "two"), ("--keep-out", "three")):
        (tmp_path / f"{word}.jsonl").write_text(json.dumps({"prompt": f"say {word}"}))
        flags += [flag, str(tmp_path / f"{word}.jsonl")]
    with pytest.raises(SystemExit) as stopped:
        app(flags)
    assert stopped.value.code == 0
    words = ("one", "two", "three", "four")
    assert [made[0].admits(f"Say {word}!") for word in words] == [False, False, False, True]
    assert made[0].sources == ("one.jsonl", "two.jsonl", "three.jsonl")


def test_a_method_that_cannot_be_trained_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("all", "--dry-run", "--method", "mtp", "--output", str(tmp_path / "out"))
    error = refusal(capsys, *arguments)
    expected = "error: --method: expected one of dflash, dspark, eagle, eagle3, got 'mtp'\n"
    assert error == expected and not (tmp_path / "out").exists()


def test_a_run_that_is_gone_on_with_keeps_its_record_up_to_there(tmp_path: Path) -> None:
    recorded = [{"step": 50, "loss": 3.0}, {"step": 100, "loss": 2.0}, {"step": 150, "loss": 1.9}]
    (tmp_path / "training.json").write_text(json.dumps({"history": recorded}))
    assert earlier_history(tmp_path / "training.json", 100) == recorded[:2]
    assert earlier_history(tmp_path / "nothing.json", 100) == []


@pytest.mark.parametrize(
    "content", ["[", '{"history": [1]}', '{"history": [{}]}', '{"history": 3}']
)
def test_a_damaged_record_is_one_sentence(tmp_path: Path, content: str) -> None:
    path = tmp_path / "training.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"{path}: expected"):
        earlier_history(path, 100)
    with pytest.raises(ConfigError, match=f"{path}: expected"):
        write_card(tmp_path)
    assert path.read_text() == content
