"""Devices, micro-batches and a restart change nothing but the order of sums; a restart not even
that."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import ConfigError
from jaxspec.training.config import TrainConfig
from jaxspec.training.data import batch_of, pack
from jaxspec.training.heads import initial_params
from jaxspec.training.loop import (
    Budget,
    Entry,
    TrainState,
    data_mesh,
    init_train_state,
    place,
    replicate,
    train,
    train_step,
)
from jaxspec.training.objective import TrainingPair
from tests.support.slow import slow
from tests.training.conftest import VOCAB, Pair

ROOT = Path(__file__).resolve().parents[2]
CFG = TrainConfig(
    num_steps=2, learning_rate=3e-3, warmup_steps=2, buckets=(24,), tokens_per_batch=96, log_every=1
)
pytestmark = pytest.mark.usefixtures("standard_promotion")


def some_chats():
    rng = np.random.default_rng(0)
    return pack(
        [rng.integers(0, VOCAB, n) for n in rng.integers(16, 25, 24)],
        np.full(24, 3),
        np.zeros(24),
        np.uint16,
    )


def training_pair(pair: Pair) -> TrainingPair:
    ids = jnp.asarray(pair.draft_ids, jnp.int32)
    return TrainingPair(pair.draft_cfg, pair.target_cfg, pair.target, ids)


def fresh(pair: Pair, cfg: TrainConfig) -> TrainState:
    params = initial_params(pair.draft_cfg, pair.target_cfg, pair.target, pair.draft_ids, 0)
    return init_train_state(cfg, pair.draft_cfg, params)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_micro_batches_equal_one_batch(pair: Pair, optimizer: str) -> None:
    mesh = data_mesh(1)
    batch = batch_of(some_chats(), np.arange(4), 24)
    results = []
    for parts in (1, 4):
        cfg = dataclasses.replace(CFG, accumulation=parts, optimizer=optimizer)
        state, learned = replicate(mesh, (fresh(pair, cfg), training_pair(pair)))
        results.append(train_step(cfg, mesh, state, learned, place(mesh, batch), np.float32(0.0)))
    (metrics, state), (metrics_of_parts, state_of_parts) = results
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        metrics,
        metrics_of_parts,
    )
    # Adam's first step is a sign: an element whose gradient is all rounding may go either way.
    far = [
        np.mean(np.abs(a - b) > 1e-4)
        for a, b in zip(*map(jax.tree.leaves, (state.params, state_of_parts.params)), strict=True)
    ]
    assert max(far) < 0.01, far


def losses(
    pair: Pair,
    state: TrainState,
    max_steps: int,
    *,
    save: Callable[[TrainState, int], Entry] = lambda state, step: {},
    save_every_seconds: float = 150.0,
) -> tuple[TrainState, list[tuple[int, float]]]:
    state, history = train(
        CFG,
        training_pair(pair),
        state,
        some_chats(),
        some_chats().select(np.arange(0)),
        mesh=data_mesh(1),
        budget=Budget(max_steps, time.monotonic() + 1e6),
        log=lambda line: None,
        save=save,
        save_every_seconds=save_every_seconds,
    )
    return state, [(r["step"], r["loss"]) for r in history if "loss" in r]


def test_a_run_that_was_killed_goes_on_to_the_same_bits(pair: Pair, tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    from jaxspec.training.resume import restore_state, save_state

    class Killed(Exception):
        pass

    def save_and_die(state: TrainState, step: int) -> dict[str, int]:
        save_state(tmp_path / "state", state, training_pair(pair))
        if step == 8:  # in the second epoch
            raise Killed
        return {}

    whole, curve = losses(pair, fresh(pair, CFG), 12)
    with pytest.raises(Killed):
        losses(pair, fresh(pair, CFG), 12, save=save_and_die, save_every_seconds=0.0)
    restored, _ = restore_state(tmp_path / "state", fresh(pair, CFG), training_pair(pair))
    resumed, rest = losses(pair, restored, 12)
    assert rest == curve[8:]
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)
    with pytest.raises(ConfigError, match="expected a training state saved by --keep-state"):
        restore_state(tmp_path / "nothing", fresh(pair, CFG), training_pair(pair))


@pytest.mark.parametrize(("count", "steps"), [(2, 4), slow(4, 12)])
def test_several_devices_follow_the_curve_of_one(count: int, steps: int) -> None:
    program = """
import json, sys, time
import jax, numpy as np
from jaxspec.training.loop import Budget, data_mesh, train
from tests.training.conftest import make_pair
from tests.training.test_parallel import CFG, fresh, some_chats, training_pair
pair, curves = make_pair(), []
several, steps = map(int, sys.argv[1:])
for count in (1, several):
    _, history = train(
        CFG, training_pair(pair), fresh(pair, CFG), some_chats(), some_chats(),
        mesh=data_mesh(count), budget=Budget(steps, time.monotonic() + 1e6),
        save=lambda state, step: {}, log=lambda line: None,
    )
    names = ("loss", "agreement", "accepted")
    curve = [[r[name] for name in names] for r in history if "loss" in r]
    curves.append([*curve, history[-1]["held_out_loss"]])
print(json.dumps(curves))
"""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(count), str(steps)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    one, several = json.loads(done.stdout)
    assert len(one) == steps + 1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), one, several)


def test_more_devices_than_there_are_is_an_error() -> None:
    count = len(jax.devices())
    assert data_mesh().size == count
    for size in (0, count + 1, 1.5):
        with pytest.raises(ConfigError, match=f"data_parallel_size: expected 1 to {count}, the"):
            data_mesh(size)  # type: ignore[arg-type]
