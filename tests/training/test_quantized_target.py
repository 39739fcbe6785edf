"""A head is trained on the hidden states of the quantised target that it will draft for."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import models
from jaxspec.config import ConfigError
from jaxspec.config.quantization import with_form
from jaxspec.layers.params import init_random
from jaxspec.loading.conversion import convert_checkpoint
from jaxspec.loading.model import load_target
from jaxspec.training.chat_target import ChatTarget
from jaxspec.training.config import TrainConfig
from jaxspec.training.data import pack
from jaxspec.training.dry_run import CHAT, HashedWords
from jaxspec.training.evaluation import EvaluationConfig
from jaxspec.training.heads import HeadConfig, load_head
from jaxspec.training.run import RunConfig, train_head
from jaxspec.training.run_record import RunRecord
from jaxspec.training.target import greedy_tokens, require_plain_head, target_states
from tests.parity.ours import PagedTarget, by_position
from tests.support import quantized
from tests.support.families import TARGETS
from tests.support.slow import slow_unless
from tests.support.tiny import VOCAB


def test_a_quantised_lm_head_is_refused_in_one_sentence(tmp_path: Path) -> None:
    plain = quantized.plain_checkpoint(tmp_path / "plain")
    folder = convert_checkpoint(plain, tmp_path / "fp8", "fp8")
    _, params = load_target(folder, jnp.float32)
    require_plain_head(params)
    quantised = params["layers"][0]["self_attn"]["o_proj"]
    with pytest.raises(ConfigError, match="target: expected an lm_head that is not quantised"):
        require_plain_head({**params, "lm_head": quantised})


def test_training_reads_the_states_that_decoding_makes(tmp_path: Path) -> None:
    plain = quantized.plain_checkpoint(tmp_path / "plain")
    folder = convert_checkpoint(plain, tmp_path / "fp8", "fp8")
    cfg, params = load_target(folder, jnp.float32)
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, 12)
    hidden, aux = target_states(
        params, cfg, jnp.asarray(tokens)[None], jnp.array([12]), aux_layers=(0, 1, 2)
    )
    decoded = PagedTarget(cfg, params, 1, block_size=4, aux_layers=(0, 1, 2))
    for position in range(12):
        decoded.feed(1, [position], [[int(tokens[position])]])
    np.testing.assert_allclose(hidden[0], by_position(decoded.hidden[0]), rtol=1e-4, atol=1e-4)
    assert aux is not None
    np.testing.assert_allclose(aux[0], by_position(decoded.aux[0]), rtol=1e-4, atol=1e-4)
    greedy = greedy_tokens(params, cfg, hidden)[0]
    np.testing.assert_array_equal(greedy, by_position(decoded.logits[0]).argmax(-1))
    other_cfg, other = load_target(plain, jnp.float32)
    unlike, _ = target_states(
        other, other_cfg, jnp.asarray(tokens)[None], jnp.array([12]), aux_layers=()
    )
    assert np.abs(np.asarray(hidden) - np.asarray(unlike)).max() > 0.02


# Attention of published heads.
PUBLISHED = {"qk_norm": False, "qkv_bias": False, "o_bias": False, "sinks": False}


def experts_target(form: Any) -> ChatTarget:
    """A random target with quantised experts, and gpt-oss's sinks in MXFP4."""
    cfg: Any
    if form == "mxfp4":
        sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        config = {**TARGETS["gpt_oss"], **sizes, "vocab_size": VOCAB, "model_type": "gpt_oss"}
        cfg = replace(models.config_from_hf(config), mxfp4="packed")
    else:
        config = quantized.EXPERTS | {"vocab_size": VOCAB}
        cfg = with_form(models.config_from_hf(config), form, config)
    params = init_random(models.family(cfg).param_specs(cfg), jax.random.key(0), jnp.dtype("f4"))
    return ChatTarget(form, cfg, params, CHAT, HashedWords(cfg.vocab_size), ())


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("form", slow_unless(("mxfp4",), ("mxfp4", "fp8", "fp8-block", "int4")))
def test_a_head_is_trained_for_quantised_experts(form: str, tmp_path: Path) -> None:
    """The head that is written has the shape of published ones, and loads for its target."""
    target = experts_target(form)
    rng = np.random.default_rng(0)
    lengths = rng.integers(10, 20, 8)
    sequences = [rng.integers(8, target.cfg.vocab_size, n) for n in lengths]
    chats = pack(sequences, np.full(8, 3), np.zeros(8), np.uint16)
    head = HeadConfig("eagle3", draft_vocab_size=40, aux_layers=(1, 2))
    training = TrainConfig(buckets=(32,), tokens_per_batch=64, num_steps=2, log_every=1)
    run = RunConfig(head, training, EvaluationConfig(), held_out=2, max_steps=2)
    record = RunRecord(tmp_path / "training.json", [], time.monotonic())
    train_head(
        run,
        target,
        chats,
        tmp_path,
        deadline=time.monotonic() + 1e6,
        record=record,
        log=lambda line: None,
    )
    history = json.loads((tmp_path / "training.json").read_text())["history"]
    assert np.isfinite(history[-1]["held_out_loss"]).all(), history
    draft, _ = load_head(tmp_path / "head", "eagle3", target, jnp.float32)
    attention: Any = target.cfg.attention
    assert draft.attention == replace(attention, **PUBLISHED)
