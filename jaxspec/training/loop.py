"""The training loop of all heads: float32 masters, compute in the target's dtype, data-parallel.

A step is one compiled program a bucket. Weights and optimiser state are whole on every device; the
batch is cut along its rows. Gradients are summed, so the number of devices changes the order of a
sum and nothing else.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.config import ConfigError, is_int
from jaxspec.drafts.dflash import DFlashConfig
from jaxspec.layers.params import Params
from jaxspec.parallel.mesh import DATA, make_mesh
from jaxspec.training.anchors import with_anchors
from jaxspec.training.config import TrainableDraft, TrainConfig
from jaxspec.training.data import Batch, Chats, batches, packed_batch, rows_of
from jaxspec.training.feature_scale import compute_weights
from jaxspec.training.methods import METHODS
from jaxspec.training.objective import (
    StepSums,
    TrainingPair,
    shared_weights,
)
from jaxspec.training.optimizer import learning_rate, optimizer
from jaxspec.training.trained import trained_specs

Tree = TypeVar("Tree")
Entry = dict[str, Any]  # of a run's record: what JSON may hold


@struct.dataclass
class TrainState:
    """State of a training run.

    params:    float32 masters, the draft's own weights
    optimizer: optax's state
    step:      int32 []
    """

    params: Params
    optimizer: optax.OptState
    step: jax.Array


@struct.dataclass
class StepMetrics:
    """Metrics of a batch.

    loss:          []
    cross_entropy: [num_steps], of each draft step
    feature:       [num_steps], EAGLE-1's regression
    overlap:       [num_steps], a block's chance of acceptance at temperature 1, given the text
    confidence:    [num_steps], the cross entropy of a block's confidence
    agreement:     [num_steps], share of the rows whose draft is the target's choice
    accepted:      [num_steps], share of the rows that accept draft i and all before it
    gradient_norm: [], of a training step
    learning_rate: [], of a training step
    """

    loss: jax.Array
    cross_entropy: jax.Array
    feature: jax.Array
    overlap: jax.Array
    confidence: jax.Array
    agreement: jax.Array
    accepted: jax.Array
    gradient_norm: jax.Array
    learning_rate: jax.Array


@dataclass(frozen=True)
class Budget:
    """The end of a run: max_steps or deadline (time.monotonic), whichever comes first."""

    max_steps: int
    deadline: float

    def is_spent(self, step: int, now: float) -> bool:
        return step >= self.max_steps or now >= self.deadline

    def share(self, step: int, start: float, now: float) -> float:
        """Return the spent share of what ends first, for a run that began at `start`."""
        seconds = max(self.deadline - start, 1e-9)
        return max(step / self.max_steps, (now - start) / seconds)


def data_mesh(size: int | None = None) -> Mesh:
    """Return the mesh of the first devices, which share each batch; None: all of them.

    ConfigError if there are fewer.
    """
    devices = jax.devices()
    if size is not None and not (is_int(size) and 1 <= size <= len(devices)):
        raise ConfigError(
            f"data_parallel_size: expected 1 to {len(devices)}, the devices of this machine, "
            f"got {size!r}"
        )
    return make_mesh(devices[:size], DATA)


def replicate(mesh: Mesh, tree: Tree) -> Tree:
    """Put a whole copy on every device."""
    return jax.device_put(tree, NamedSharding(mesh, P()))


def init_train_state(cfg: TrainConfig, draft: TrainableDraft, params: Params) -> TrainState:
    """Return the state that training starts from.

    The masters are copies: the state is donated, and params may share arrays with the target.
    """
    params = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
    start = _optimizer_of(cfg, draft).init(params)
    return TrainState(params, start, jnp.zeros((), jnp.int32))


def _optimizer_of(cfg: TrainConfig, draft: TrainableDraft) -> optax.GradientTransformation:
    return optimizer(cfg, trained_specs(draft))


def metrics_of(
    loss: jax.Array,
    sums: StepSums,
    counts: jax.Array,
    gradient_norm: jax.Array | float = 0.0,
    rate: jax.Array | float = 0.0,
) -> StepMetrics:
    """Divide the sums over a whole batch by its rows."""
    per_row = 1.0 / jnp.maximum(counts, 1.0)
    return StepMetrics(
        loss=loss,
        cross_entropy=sums.cross_entropy * per_row,
        feature=sums.feature * per_row,
        overlap=sums.overlap * per_row,
        confidence=sums.confidence * per_row,
        agreement=sums.matches * per_row,
        accepted=sums.accepted / jnp.maximum(sums.followed, 1.0),
        gradient_norm=jnp.asarray(gradient_norm),
        learning_rate=jnp.asarray(rate),
    )


def batch_gradient(
    cfg: TrainConfig,
    params: Params,
    pair: TrainingPair,
    batch: Batch[jax.Array],
    *,
    with_gradient: bool = True,
) -> tuple[Params, jax.Array, StepSums, jax.Array]:
    """Return (gradient, loss, sums, counts) of the whole batch, from this device's share of it.

    Runs inside shard_map. The share is cut into cfg.accumulation micro-batches, run in turn.
    """
    dtype = pair.target["embed_tokens"].dtype
    objective = METHODS[pair.draft.method]
    counts = jax.lax.psum(objective.counts(cfg, pair, batch), DATA)

    def loss(params: Params, share: Batch[jax.Array]) -> tuple[jax.Array, StepSums]:
        weights = {
            **shared_weights(pair.draft, pair.target),
            **compute_weights(pair, params, dtype),
        }
        return objective.loss(cfg, pair, weights, share, counts)

    def one(share: Batch[jax.Array]) -> tuple[Params, jax.Array, StepSums]:
        if not with_gradient:
            return {}, *loss(params, share)
        (value, sums), gradient = jax.value_and_grad(loss, has_aux=True)(params, share)
        return gradient, value, sums

    if cfg.accumulation == 1 or not with_gradient:
        parts = one(batch)
    else:
        size = batch.tokens.shape[0] // cfg.accumulation
        cut = jax.tree.map(lambda x: x.reshape(cfg.accumulation, size, *x.shape[1:]), batch)
        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype),
            jax.eval_shape(one, jax.tree.map(lambda x: x[0], cut)),
        )
        parts, _ = jax.lax.scan(
            lambda total, share: (jax.tree.map(jnp.add, total, one(share)), None), zeros, cut
        )
    return *jax.lax.psum(parts, DATA), counts


def gradient_over_devices(
    cfg: TrainConfig, mesh: Mesh, *, with_gradient: bool = True
) -> Callable[
    [Params, TrainingPair, Batch[jax.Array]], tuple[Params, jax.Array, StepSums, jax.Array]
]:
    """Return batch_gradient of (params, pair, batch), the batch cut over the devices by rows."""
    function = partial(batch_gradient, cfg, with_gradient=with_gradient)
    # Its gradients are summed by hand: check_vma would sum them again.
    return jax.shard_map(
        function, mesh=mesh, in_specs=(P(), P(), P(DATA)), out_specs=P(), check_vma=False
    )


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_step(
    cfg: TrainConfig,
    mesh: Mesh,
    state: TrainState,
    pair: TrainingPair,
    batch: Batch[jax.Array],
    progress: jax.Array | np.float32,
) -> tuple[StepMetrics, TrainState]:
    """Run one step of the optimiser. progress: float32 [], the schedule's.

    The compute dtype is the target's.
    """
    gradient, loss, sums, counts = gradient_over_devices(cfg, mesh)(state.params, pair, batch)
    rate = learning_rate(cfg, state.step, jnp.asarray(progress))
    update = _optimizer_of(cfg, pair.draft).update
    updates, optimizer_state = update(gradient, state.optimizer, state.params)
    params = jax.tree.map(lambda p, u: p + rate * u, state.params, updates)
    metrics = metrics_of(loss, sums, counts, optax.global_norm(gradient), rate)
    return metrics, TrainState(params, optimizer_state, state.step + 1)


@partial(jax.jit, static_argnums=(0, 1))
def validation_step(
    cfg: TrainConfig, mesh: Mesh, params: Params, pair: TrainingPair, batch: Batch[jax.Array]
) -> StepMetrics:
    """Return the loss and acceptance of a held-out batch."""
    observe = gradient_over_devices(cfg, mesh, with_gradient=False)
    _, loss, sums, counts = observe(params, pair, batch)
    return metrics_of(loss, sums, counts)


def place(mesh: Mesh, batch: Batch[np.ndarray]) -> Batch[jax.Array]:
    """Cut a batch over the devices."""
    sharding = NamedSharding(mesh, P(DATA))
    return Batch(*(jax.device_put(array, sharding) for array in batch))


def describe(metrics: StepMetrics, K: int = 3) -> str:
    """Return one line: losses, agreement and the acceptance that they promise."""

    def numbers(values: Iterable[float]) -> str:
        return "[" + " ".join(f"{float(v):.3f}" for v in values) + "]"

    length = 1.0 + float(np.sum(np.asarray(metrics.accepted)[:K]))
    named = (("feature", metrics.feature), ("overlap", metrics.overlap))
    extra = "".join(f"  {name} {numbers(values)}" for name, values in named if np.any(values))
    return (
        f"loss {float(metrics.loss):.3f} {numbers(metrics.cross_entropy)}{extra}  "
        f"agree {numbers(metrics.agreement)}  accept {numbers(metrics.accepted)} -> "
        f"{length:.3f} at K={K}"
    )


def to_lists(metrics: StepMetrics, prefix: str = "") -> Entry:
    """Return the metrics for JSON, with four digits."""
    names = (
        "loss",
        "cross_entropy",
        "feature",
        "overlap",
        "confidence",
        "agreement",
        "accepted",
    )
    return {
        prefix + name: np.round(np.asarray(getattr(metrics, name), np.float64), 4).tolist()
        for name in names
    }


def mean_metrics(all_metrics: list[StepMetrics]) -> StepMetrics:
    """Return the mean over steps, on the host."""
    return jax.tree.map(lambda *x: np.mean(np.stack(x), axis=0), *jax.device_get(all_metrics))


def validation_batches(
    cfg: TrainConfig, draft: TrainableDraft, held_out: Chats, num_devices: int
) -> list[Batch[np.ndarray]]:
    """Return at most 8 batches of the longest bucket, of as many rows for every device.

    None if there are too few chats.
    """
    rows = cfg.buckets[-1]
    members = rows_of(held_out, np.arange(len(held_out)), rows, packed=cfg.pack)
    size = min(max(cfg.tokens_per_batch // rows, 1), len(members)) // num_devices * num_devices
    if size == 0:
        return []
    return [
        prepare(cfg, draft, packed_batch(held_out, members[i : i + size], rows), i)
        for i in range(0, min(len(members), 8 * size) - size + 1, size)
    ]


def prepare(
    cfg: TrainConfig, draft: TrainableDraft, batch: Batch[np.ndarray], step: int
) -> Batch[np.ndarray]:
    """Return the batch of a step with anchors, where the draft makes blocks.

    A step's anchors depend on the seed and its number alone, so a run that goes on has the same.
    """
    if not isinstance(draft, DFlashConfig):
        return batch
    return with_anchors(batch, cfg.tokens_per_block, np.random.default_rng((cfg.seed, 1, step)))


def train(
    cfg: TrainConfig,
    pair: TrainingPair,
    state: TrainState,
    chats: Chats,
    held_out: Chats,
    *,
    mesh: Mesh,
    budget: Budget,
    save: Callable[[TrainState, int], Entry],
    save_every_seconds: float = 150.0,
    log: Callable[[str], None] = print,
    history: list[Entry] | None = None,
) -> tuple[TrainState, list[Entry]]:
    """Train until the budget is spent; the schedule follows its spent share.

    save(state, step) is called on the way, so that a run that is killed leaves a usable head, and
    at the end. What it returns (an evaluation, say) joins the record. state may come from an
    earlier run: the stream of batches then goes on where it was. Returns the last state and a
    record (step, seconds, metrics) per log line, appended to history as they come.
    """
    step = begin = int(state.step)
    pair, state = replicate(mesh, (pair, state))
    history = [] if history is None else history
    recent: list[StepMetrics] = []
    validation = validation_batches(cfg, pair.draft, held_out, mesh.size)
    start = last_log = last_save = time.monotonic()
    tokens = 0

    def validate() -> Entry:
        if not validation:
            return {}
        mean = mean_metrics(
            [validation_step(cfg, mesh, state.params, pair, place(mesh, b)) for b in validation]
        )
        log(f"train: held out {describe(mean)}")
        return to_lists(mean, "held_out_")

    stream = batches(
        chats,
        cfg.buckets,
        cfg.tokens_per_batch,
        cfg.seed,
        mesh.size * cfg.accumulation,
        packed=cfg.pack,
    )
    for number, batch in itertools.islice(stream, begin, None):
        now = time.monotonic()
        if budget.is_spent(step, now):
            break
        progress = np.float32(budget.share(step, start, now))
        batch = prepare(cfg, pair.draft, batch, step)
        metrics, state = train_step(cfg, mesh, state, pair, place(mesh, batch), progress)
        recent.append(metrics)
        tokens += int((batch.documents >= 0).sum())
        step += 1
        if step % cfg.log_every == 0 or step == budget.max_steps:
            mean = mean_metrics(recent)  # waits for the device, so the clock below is honest
            now, rate = time.monotonic(), float(jax.device_get(metrics.learning_rate))
            pace, recent, last_log = len(recent) / (now - last_log), [], now
            log(
                f"train: step {step}  epoch {number}  {now - start:5.0f} of "
                f"{budget.deadline - start:.0f} s  {pace:.2f} steps/s  "
                f"{tokens / (now - start):.0f} tokens/s  rate {rate:.2e}  "
                f"norm {float(mean.gradient_norm):.2f}  {describe(mean)}"
            )
            record = {
                "step": step,
                "epoch": number,
                "seconds": round(now - start, 1),
                "tokens": tokens,
                "learning_rate": rate,
            }
            history.append(record | to_lists(mean))
            if now - last_save > save_every_seconds:
                last_save = now
                history[-1] |= validate() | save(state, step)
    history.append(
        {"step": step, "seconds": round(time.monotonic() - start, 1), "tokens": tokens}
        | validate()
        | save(state, step)
    )
    return state, history
