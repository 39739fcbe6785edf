"""A run saves a head that reads the target's features as they are, and loads again."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.commands.train import app
from jaxspec.config import ConfigError
from jaxspec.training.chat_target import ChatTarget
from jaxspec.training.config import TrainConfig
from jaxspec.training.data import Chats, pack
from jaxspec.training.dry_run import dry_target
from jaxspec.training.evaluation import EvaluationConfig
from jaxspec.training.feature_scale import feature_scale
from jaxspec.training.heads import HeadConfig, load_head
from jaxspec.training.objective import TrainingPair
from jaxspec.training.run import RunConfig, train_head
from jaxspec.training.run_record import RunRecord
from jaxspec.training.target import require_packable
from tests.commands.conftest import write_target
from tests.support.families import target_config


def random_chats(seed: int) -> Chats:
    rng = np.random.default_rng(seed)
    texts = [rng.integers(8, 128, n) for n in rng.integers(10, 25, 24)]
    return pack(texts, np.full(24, 3), np.zeros(24), np.uint16)


def run_in(folder: Path, run: RunConfig, target: ChatTarget, chats: Chats) -> None:
    train_head(
        run,
        target,
        chats,
        folder,
        deadline=time.monotonic() + 1e6,
        record=RunRecord(folder / "training.json", [], time.monotonic()),
        log=lambda line: None,
    )


@pytest.mark.usefixtures("standard_promotion")
def test_a_run_saves_a_block_head_with_the_scale_of_its_features(tmp_path: Path) -> None:
    target = dry_target("float32")
    # A stream like a trained target's: some dimensions are hundreds of times as large as others.
    target.params["embed_tokens"] = target.params["embed_tokens"].at[:, :4].multiply(300.0)
    chats = random_chats(0)
    head = HeadConfig("dspark", draft_vocab_size=96, aux_layers=(1, 2), markov_rank=4)
    training = TrainConfig(
        buckets=(48,), tokens_per_batch=96, pack=True, warmup_steps=100, log_every=1
    )
    run = RunConfig(head, training, EvaluationConfig(), held_out=4, max_steps=2)
    run_in(tmp_path, run, target, chats)
    draft, params = load_head(tmp_path / "head", "dspark", target, jnp.float32)
    pair = TrainingPair(draft, target.cfg, target.params, params["draft_to_target"])
    scale = np.asarray(feature_scale(pair, chats.split(4)[0]))
    assert scale.max() > 50 * np.median(scale)
    spread = np.asarray(params["fc"].values).std(axis=1) * scale * 64**0.5
    assert spread.min() > 0.6 and spread.max() < 1.4  # as drawn: two steps move it little
    entries = json.loads((tmp_path / "training.json").read_text())
    assert entries["head"]["method"] == "dspark" and len(entries["history"]) == 3


@pytest.mark.usefixtures("standard_promotion")
def test_a_run_does_not_go_on_with_other_chats(tmp_path: Path) -> None:
    """Their vocabulary has the same size, so each array has the same shape."""
    pytest.importorskip("orbax.checkpoint")
    target = dry_target("float32")
    head = HeadConfig(draft_vocab_size=96, aux_layers=(1, 2, 3), intermediate_size=16)
    training = TrainConfig(num_steps=1, buckets=(48,), tokens_per_batch=96, log_every=1)
    run = RunConfig(head, training, EvaluationConfig(), held_out=4, max_steps=1, keep_state=True)
    run_in(tmp_path, run, target, random_chats(0))
    run = dataclasses.replace(run, resume=True)
    with pytest.raises(ConfigError, match="draft vocabulary, got another"):
        run_in(tmp_path, run, target, random_chats(1))
    run_in(tmp_path, run, target, random_chats(0))  # its own


@pytest.mark.parametrize("name", ["keep_state", "resume"])
def test_a_state_without_orbax_is_refused_before_any_work(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = HeadConfig(draft_vocab_size=96, aux_layers=(1, 2, 3), intermediate_size=16)
    values = head, TrainConfig(), EvaluationConfig()
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None)
    RunConfig(*values)
    sentence = rf"^{name}: expected orbax-checkpoint \(pip install '.\[train\]'\), got none"
    with pytest.raises(ConfigError, match=sentence):
        RunConfig(*values, **{name: True})


@pytest.mark.usefixtures("standard_promotion")
def test_an_evaluation_that_cannot_run_is_refused_before_training(tmp_path: Path) -> None:
    for name in ("num_speculative_tokens", "max_tokens", "max_num_seqs"):
        with pytest.raises(ConfigError, match="expected .* of at least 1"):
            dataclasses.replace(EvaluationConfig(), **{name: 0})
    head = HeadConfig("dspark", draft_vocab_size=96, aux_layers=(1, 2), block_drafts=4)
    evaluation = EvaluationConfig(("a b c",), num_speculative_tokens=5)
    run = RunConfig(head, TrainConfig(), evaluation, held_out=4)
    with pytest.raises(ConfigError, match="expected at most 4, the drafts of this head's block"):
        run_in(tmp_path, run, dry_target("float32"), random_chats(0))
    assert not any(tmp_path.iterdir())


def test_rows_are_not_packed_for_a_target_with_chunks() -> None:
    """A chunk begins at a multiple of its size, and a packed document anywhere."""
    require_packable(target_config("gpt_oss"))  # windows
    with pytest.raises(ConfigError, match="pack: expected a target .* chunks of 5 positions"):
        require_packable(target_config("llama4_text"))


@pytest.fixture(scope="module")
def text_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose next token is mostly a function of the last one."""
    folder = write_target(tmp_path_factory.mktemp("text") / "target")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "architectures": ["TextForCausalLM"]})
    )
    return folder


@pytest.fixture(scope="module")
def texts(text_target: Path) -> list[np.ndarray]:
    """Return what that target writes."""
    llm = LLM(str(text_target), dtype="float32", max_model_len=64, max_num_seqs=8)
    prompts = [[first, first + 1] for first in range(8)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=38))
    return [
        np.array([*prompt, *output.token_ids])
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


@pytest.mark.parametrize(("method", "vocabulary"), [("dspark", "259"), ("dflash", "250")])
@pytest.mark.usefixtures("standard_promotion")
def test_a_head_that_the_command_trained_drafts(
    text_target: Path, texts: list[np.ndarray], tmp_path: Path, method: str, vocabulary: str
) -> None:
    """A round has the 3 drafts of its block, and the target accepts most of them."""
    pack(texts, np.full(8, 2), np.zeros(8), np.uint16).save(tmp_path / "chats.npz")
    flags = {
        "--target": text_target,
        "--method": method,
        "--chats": tmp_path / "chats.npz",
        "--output": tmp_path,
        "--dtype": "float32",
        "--draft-vocab-size": vocabulary,
        "--aux-layers": "0,1,2",
        "--block-drafts": 3,
        "--num-layers": 1,
        "--markov-rank": 8,
        "--buckets": 64,
        "--tokens-per-batch": 384,
        "--tokens-per-block": 4,
        "--learning-rate": 0.01,
        "--warmup-steps": 5,
        "--max-steps": 100,
        "--held-out": 1,
    }
    with pytest.raises(SystemExit) as stopped:
        app(["train", "--pack", *(str(x) for flag in flags.items() for x in flag)])
    assert stopped.value.code == 0
    saved = json.loads((tmp_path / "head" / "config.json").read_text())["speculators_config"]
    assert saved["verifier"]["architectures"] == ["TextForCausalLM"]
    history = json.loads((tmp_path / "training.json").read_text())["history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert len(losses) == 2 and losses[1] < 0.8 * losses[0], losses  # means of 50 steps each
    llm = LLM(
        str(text_target),
        speculative_config={"model": str(tmp_path / "head")},
        dtype="float32",
        max_model_len=128,
        max_num_seqs=1,
    )
    assert llm.speculative is not None and llm.speculative.num_speculative_tokens == 3
    [output] = llm.generate([texts[0][:2].tolist()], SamplingParams(temperature=0, max_tokens=38))
    assert output.token_ids == texts[0][2:].tolist()  # what the target writes by itself
    assert llm.metrics.mean_acceptance_length > 2, llm.metrics


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"learning_rate": float("nan")}, "learning_rate: expected a finite number above 0, got"),
        ({"learning_rate": -1.0}, "learning_rate: expected a finite number above 0, got -1.0"),
        ({"clip": 0.0}, "clip: expected a finite number above 0, got 0.0"),
        ({"decay": float("inf")}, "decay: expected a finite number above 0, got inf"),
        ({"weight_decay": -1.0}, "weight_decay: expected a finite number from 0, got -1.0"),
        ({"confidence_weight": float("nan")}, "confidence_weight from 0, got 16 and nan"),
    ],
)
def test_settings_with_which_a_run_diverges_are_refused(
    values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        TrainConfig(**values)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--seed", "-1"], "seed: expected an integer from 0 to 2^32 - 1, got -1"),
        (["--seed", str(2**70)], f"seed: expected an integer from 0 to 2^32 - 1, got {2**70}"),
        (["--generate-minutes", "nan"], "--generate-minutes: expected a finite number above 0"),
        (["--generate-minutes", "0"], "--generate-minutes: expected a finite number above 0"),
        (["--max-minutes", "nan"], "--max-minutes: expected a number from 0, got nan"),
        (["--evaluate-minutes", "inf"], "--evaluate-minutes: expected a finite number from 0"),
        (["--max-chats", "0"], "--max-chats: expected at least 1, got 0"),
        (["--shard", "\u00b2/5"], "--shard: expected i/n with i from 0 to n - 1, got"),
        (["--shard", "\u0663/\u0664"], "--shard: expected i/n with i from 0 to n - 1, got"),
    ],
)
def test_options_that_cannot_be_are_refused_before_any_work(
    args: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        app(["generate", "--dry-run", "--output", str(tmp_path / "out"), *args])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {sentence}")
    assert not (tmp_path / "out").exists()
