"""The loss over a batch, the optimiser, the schedule, and a head that learns."""

from __future__ import annotations

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from jaxspec import models
from jaxspec.config import REFERENCE_OPS
from jaxspec.drafts import eagle3
from jaxspec.training import losses
from jaxspec.training.config import TrainConfig
from jaxspec.training.data import Batch, pack, packed_batch
from jaxspec.training.eagle import forward_steps as eagle_forward_steps
from jaxspec.training.eagle3 import forward_steps
from jaxspec.training.heads import eagle_config, initial_params
from jaxspec.training.loop import Budget, TrainState, data_mesh, init_train_state, train
from jaxspec.training.objective import (
    StepSums,
    TargetSide,
    TrainingPair,
    draft_loss,
    observe_target,
    shared_weights,
    step_counts,
)
from jaxspec.training.optimizer import learning_rate
from jaxspec.training.target import greedy_tokens, target_states
from tests.training.conftest import VOCAB, Pair

CFG = TrainConfig(
    num_steps=3,
    learning_rate=3e-3,
    warmup_steps=5,
    buckets=(24,),
    tokens_per_batch=96,
    log_every=10,
)

ONE = data_mesh(1)


def batch(seed: int = 0) -> Batch[jax.Array]:
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (2, 12)).astype(np.int32)
    lengths, answer_start = np.asarray([[12], [9]]), np.asarray([[4], [6]])
    row = np.arange(12)
    return Batch(
        jnp.asarray(tokens),
        jnp.asarray(np.where(row < lengths, 0, -1), jnp.int32),
        jnp.asarray((row >= answer_start) & (row < lengths)),
        jnp.zeros((2, 0), jnp.int32),
    )


LENGTHS, ANSWER_START = jnp.asarray([12, 9], jnp.int32), (4, 6)  # of batch()


def training_pair(pair: Pair) -> TrainingPair:
    ids = jnp.asarray(pair.draft_ids)
    return TrainingPair(pair.draft_cfg, pair.target_cfg, pair.target, ids)


def observe(pair: TrainingPair, cfg: TrainConfig = CFG) -> TargetSide:
    return jax.jit(lambda: observe_target(cfg, pair, batch()))()


@pytest.mark.parametrize("argmax_weight", [0.0, 0.25])
def test_loss_equals_its_definition_row_by_row(pair: Pair, argmax_weight: float) -> None:
    tokens, lengths, answer_start = batch().tokens, LENGTHS, ANSWER_START
    cfg = dataclasses.replace(CFG, argmax_weight=argmax_weight)
    side = observe(training_pair(pair), cfg)
    counts = step_counts(cfg, batch())
    weights = {**pair.draft, **shared_weights(pair.draft_cfg, pair.target)}
    loss, sums = jax.jit(lambda: draft_loss(cfg, training_pair(pair), weights, side, counts))()

    @jax.jit  # one program, where each operation would be one
    def logits_of_both() -> tuple[jax.Array, list[jax.Array]]:
        hidden, aux = target_states(
            pair.target, pair.target_cfg, tokens, lengths, pair.draft_cfg.aux_layers
        )
        assert aux is not None
        family = models.family(pair.target_cfg)
        return family.logits(pair.target, pair.target_cfg, hidden, REFERENCE_OPS), [
            eagle3.logits(pair.bound, pair.draft_cfg, x, REFERENCE_OPS)
            for x in forward_steps(pair.bound, pair.draft_cfg, tokens, aux, 3)
        ]

    target_logits, outputs = jax.tree.map(np.asarray, logits_of_both())
    expected = 0.0
    for step, out in enumerate(outputs):
        rows, hits = [], []
        log_qs = log_softmax(out, axis=-1)
        for b in range(2):
            for p in range(12):
                predicted = p + 2 + step  # the token that row p of this step predicts
                if not answer_start[b] <= predicted < lengths[b]:
                    continue
                judge = target_logits[b, predicted - 1]
                drafted = pair.draft_ids[int(np.argmax(out[b, p]))]
                hits.append(drafted == judge.argmax())
                log_q = log_qs[b, p]
                soft = -np.sum(softmax(judge[pair.draft_ids]) * log_q)
                hard = -log_q[np.argmax(judge[pair.draft_ids])]
                known = (
                    judge.argmax() in pair.draft_ids
                )  # a choice that the draft cannot make teaches nothing, but counts as a row
                rows.append(known * float((1 - argmax_weight) * soft + argmax_weight * hard))
        assert counts[step] == len(rows)
        np.testing.assert_allclose(sums.cross_entropy[step], sum(rows), rtol=1e-4)
        np.testing.assert_allclose(sums.matches[step], sum(hits), atol=1e-6)
        expected += 0.8**step * np.mean(rows)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)


def test_eagle_1_adds_the_regression_of_the_next_hidden_state(pair: Pair) -> None:
    tokens, lengths, answer_start = batch().tokens, LENGTHS, ANSWER_START
    draft = eagle_config(pair.target_cfg)
    learned = TrainingPair(draft, pair.target_cfg, pair.target, jnp.arange(VOCAB))
    params = initial_params(draft, pair.target_cfg, pair.target, np.arange(VOCAB), 0)
    weights = {**params, **shared_weights(draft, pair.target)}
    counts = step_counts(CFG, batch())
    side = observe(learned)
    _, sums = jax.jit(lambda: draft_loss(CFG, learned, weights, side, counts))()
    features = jax.jit(lambda: eagle_forward_steps(weights, draft, tokens, side.hidden, 3))()
    for step, feature in enumerate(features):
        rows = [
            np.abs(np.asarray(feature[b, p] - side.hidden[b, p + 1 + step]))
            for b in range(2)
            for p in range(11 - step)
            if answer_start[b] <= p + 2 + step < lengths[b]
        ]
        expected = sum(np.where(e < 1, e * e / 2, e - 0.5).mean() for e in rows)
        np.testing.assert_allclose(sums.feature[step], expected, rtol=1e-4)


def test_remat_changes_no_gradient(pair: Pair) -> None:
    learned = training_pair(pair)
    side = observe(learned)
    counts, shared = step_counts(CFG, batch()), shared_weights(pair.draft_cfg, pair.target)

    def gradient(cfg: TrainConfig):
        def loss(params):
            return draft_loss(cfg, learned, {**params, **shared}, side, counts)[0]

        return jax.jit(jax.grad(loss))(pair.draft)

    plain, again = gradient(CFG), gradient(dataclasses.replace(CFG, remat=True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), plain, again)
    assert min(float(jnp.abs(g).max()) for g in jax.tree.leaves(plain)) > 0  # every weight learns


def test_greedy_tokens_in_chunks_equal_those_of_all_logits(pair: Pair) -> None:
    hidden = jax.random.normal(jax.random.key(0), (3, 7, 32))
    expected = jnp.argmax(
        models.family(pair.target_cfg).logits(pair.target, pair.target_cfg, hidden, REFERENCE_OPS),
        axis=-1,
    )
    for chunk in (1, 4, 21, 100):
        assert (greedy_tokens(pair.target, pair.target_cfg, hidden, chunk) == expected).all()


def test_target_states_do_not_depend_on_padding(pair: Pair) -> None:
    tokens, lengths = batch().tokens, LENGTHS
    states = jax.jit(
        lambda tokens, lengths: target_states(pair.target, pair.target_cfg, tokens, lengths, (1, 4))
    )
    hidden, aux = states(tokens, lengths)
    short, short_aux = states(tokens[1:, :9], lengths[1:])
    assert aux is not None and short_aux is not None
    np.testing.assert_allclose(hidden[1, :9], short[0], atol=1e-5)
    np.testing.assert_allclose(aux[1, :9], short_aux[0], atol=1e-5)


@pytest.mark.parametrize("method", ["eagle3", "eagle"])
def test_chats_of_one_row_do_not_see_each_other(pair: Pair, method: str) -> None:
    """Loss and sums of packed rows are those of the chats by themselves."""
    rng = np.random.default_rng(5)
    lengths = (9, 12, 11)
    # The second answer begins where the first chat's last rows could be compared with it.
    chats = pack([rng.integers(0, VOCAB, n) for n in lengths], [2, 1, 5], np.zeros(3), np.int32)
    learned = training_pair(pair)
    params = pair.draft
    if method == "eagle":
        draft, ids = eagle_config(pair.target_cfg), np.arange(VOCAB)
        learned = TrainingPair(draft, pair.target_cfg, pair.target, jnp.arange(VOCAB))
        params = initial_params(draft, pair.target_cfg, pair.target, ids, 0)
    weights = {**params, **shared_weights(learned.draft, pair.target)}
    results = []
    for members, rows in (([[0, 1], [2]], 24), ([[0], [1], [2]], 12)):
        together = Batch(*map(jnp.asarray, packed_batch(chats, members, rows)))
        counts = step_counts(CFG, together)

        @jax.jit
        def loss(batch: Batch[jax.Array], counts: jax.Array) -> tuple[jax.Array, StepSums]:
            return draft_loss(CFG, learned, weights, observe_target(CFG, learned, batch), counts)

        results.append((counts, loss(together, counts)))
    packed, alone = results
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), packed, alone)
    assert packed[0].tolist() == [7 + 10 + 6, 6 + 9 + 6, 5 + 8 + 6]


def test_schedule_warms_up_then_falls_along_a_cosine() -> None:
    cfg = TrainConfig(learning_rate=1.0, final_learning_rate=0.1, warmup_steps=4)

    def rate(step: int, progress: float) -> float:
        return float(learning_rate(cfg, jnp.int32(step), jnp.float32(progress)))

    np.testing.assert_allclose([rate(step, 0.0) for step in range(5)], [0.25, 0.5, 0.75, 1.0, 1.0])
    np.testing.assert_allclose([rate(10, p) for p in (0.5, 1.0, 2.0)], [0.55, 0.1, 0.1], rtol=1e-6)


@pytest.mark.usefixtures("standard_promotion")
def test_a_head_learns_and_is_saved_on_the_way(pair: Pair) -> None:
    """The loss falls towards the target's entropy (about 7.5 here), the agreement rises, and the
    target stays as it was."""
    rng = np.random.default_rng(0)
    chats = pack(
        [rng.integers(0, VOCAB, n) for n in rng.integers(16, 25, 24)],
        np.full(24, 3),
        np.zeros(24),
        np.uint16,
    )
    before = jax.tree.map(np.asarray, pair.target)
    params = initial_params(pair.draft_cfg, pair.target_cfg, pair.target, pair.draft_ids, 0)
    np.testing.assert_array_equal(
        params["lm_head"].values, np.asarray(pair.target["embed_tokens"])[pair.draft_ids].T
    )
    np.testing.assert_array_equal(params["norm"], pair.target["norm"])
    saved: list[int] = []

    def save(state: TrainState, step: int) -> dict[str, int]:
        saved.append(step)
        return {"seen": step}

    trained, history = train(
        CFG,
        training_pair(pair),
        init_train_state(CFG, pair.draft_cfg, params),
        chats,
        chats,
        mesh=ONE,
        budget=Budget(60, time.monotonic() + 1e6),
        save=save,
        save_every_seconds=0.0,
        log=lambda line: None,
    )
    assert saved == [10, 20, 30, 40, 50, 60, 60]
    steps = [record for record in history if "loss" in record]
    assert [record.get("seen") for record in steps] == saved[:6]
    assert steps[-1]["loss"] < 0.93 * steps[0]["loss"], [record["loss"] for record in steps]
    assert steps[-1]["agreement"][0] > steps[0]["agreement"][0] + 0.1, [
        record["agreement"] for record in steps
    ]
    np.testing.assert_allclose(
        history[-1]["held_out_cross_entropy"], steps[-1]["cross_entropy"], atol=0.2
    )  # the same chats
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, pair.target))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(trained.params))


@pytest.mark.usefixtures("standard_promotion")
def test_training_ends_at_the_deadline_and_still_saves(pair: Pair) -> None:
    chats = pack([np.arange(20)] * 8, np.full(8, 3), np.zeros(8), np.uint16)
    saved: list[int] = []
    params = initial_params(pair.draft_cfg, pair.target_cfg, pair.target, pair.draft_ids, 0)
    train(
        CFG,
        training_pair(pair),
        init_train_state(CFG, pair.draft_cfg, params),
        chats,
        chats,
        mesh=ONE,
        budget=Budget(60, time.monotonic() - 1),
        save=lambda state, step: saved.append(step) or {},
        log=lambda line: None,
    )
    assert saved == [0]


def test_decayed_sum_is_what_the_config_says() -> None:
    assert float(losses.decayed_sum([jnp.float32(1), jnp.float32(2)], 0.5)) == 2.0
