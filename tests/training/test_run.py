"""A run saves a head that reads the target's features as they are, and loads again."""

from __future__ import annotations

import json
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import ConfigError
from jaxspec.training.config import TrainConfig
from jaxspec.training.data import pack
from jaxspec.training.dry_run import dry_target
from jaxspec.training.evaluation import EvaluationConfig
from jaxspec.training.feature_scale import feature_scale
from jaxspec.training.heads import HeadConfig, load_head
from jaxspec.training.objective import TrainingPair
from jaxspec.training.run import RunConfig, train_head
from jaxspec.training.run_record import RunRecord
from jaxspec.training.target import require_packable
from tests.support.families import target_config


@pytest.mark.usefixtures("standard_promotion")
def test_a_run_saves_a_block_head_with_the_scale_of_its_features(tmp_path: Path) -> None:
    target = dry_target("float32")
    # A stream like a trained target's: some dimensions are hundreds of times as large as others.
    target.params["embed_tokens"] = target.params["embed_tokens"].at[:, :4].multiply(300.0)
    rng = np.random.default_rng(0)
    chats = pack(
        [rng.integers(8, 128, n) for n in rng.integers(10, 25, 24)],
        np.full(24, 3),
        np.zeros(24),
        np.uint16,
    )
    head = HeadConfig("dspark", draft_vocab_size=96, aux_layers=(1, 2), markov_rank=4)
    training = TrainConfig(
        buckets=(48,), tokens_per_batch=96, pack=True, warmup_steps=100, log_every=1
    )
    run = RunConfig(head, training, EvaluationConfig(), held_out=4, max_steps=2)
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
    draft, params = load_head(tmp_path / "head", "dspark", target, jnp.float32)
    pair = TrainingPair(draft, target.cfg, target.params, params["draft_to_target"])
    scale = np.asarray(feature_scale(pair, chats.split(4)[0]))
    assert scale.max() > 50 * np.median(scale)
    spread = np.asarray(params["fc"].values).std(axis=1) * scale * 64**0.5
    assert spread.min() > 0.6 and spread.max() < 1.4  # as drawn: two steps move it little
    entries = json.loads((tmp_path / "training.json").read_text())
    assert entries["head"]["method"] == "dspark" and len(entries["history"]) == 3


def test_rows_are_not_packed_for_a_target_with_chunks() -> None:
    """A chunk begins at a multiple of its size, and a packed document anywhere."""
    require_packable(target_config("gpt_oss"))  # windows
    with pytest.raises(ConfigError, match="pack: expected a target .* chunks of 5 positions"):
        require_packable(target_config("llama4_text"))
