"""The training loop, one for all heads: float32 masters, compute in the target's dtype, data-parallel over the devices.

A step is one compiled program a bucket. Weights and optimiser state are whole on every device, the batch is cut along its
rows; gradients are summed, so the number of devices changes the order of a sum and nothing else.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec import models
from jaxspec.drafts import DraftConfig
from jaxspec.layers.params import Params
from jaxspec.training.config import TrainConfig
from jaxspec.training.data import Batch, Chats, batch_of, batches
from jaxspec.training.objective import (
    StepSums,
    draft_loss,
    observe_target,
    shared_weights,
    step_counts,
)
from jaxspec.training.optimizer import learning_rate, optimizer

DATA = "data"  # the mesh's one axis


@struct.dataclass
class TrainState:
    """params: float32 masters, the draft's own weights. optimizer: optax's state. step: int32 []."""

    params: Params
    optimizer: Any
    step: jax.Array


@struct.dataclass
class StepMetrics:
    """loss []; per draft step [num_steps]: cross_entropy, feature (EAGLE-1's regression), agreement (the draft's argmax is the
    target's), accepted (accepted_prefix, a share); gradient_norm [] and
    learning_rate [] of a training step."""

    loss: jax.Array
    cross_entropy: jax.Array
    feature: jax.Array
    agreement: jax.Array
    accepted: jax.Array
    gradient_norm: jax.Array
    learning_rate: jax.Array


def data_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """All visible devices along one axis."""
    return Mesh(np.asarray(jax.devices() if devices is None else devices), (DATA,))


def replicate(mesh: Mesh, tree: Any) -> Any:
    """A whole copy on every device."""
    return jax.device_put(tree, NamedSharding(mesh, P()))


def init_train_state(cfg: TrainConfig, params: Params) -> TrainState:
    """The start of training. The masters are copies: the state is donated, and params may share arrays with the target."""
    params = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
    return TrainState(params, optimizer(cfg).init(params), jnp.zeros((), jnp.int32))


def metrics_of(
    loss: jax.Array,
    sums: StepSums,
    counts: jax.Array,
    gradient_norm: jax.Array | float = 0.0,
    rate: jax.Array | float = 0.0,
) -> StepMetrics:
    """Sums over a whole batch -> means over its rows."""
    per_row = 1.0 / jnp.maximum(counts, 1.0)
    return StepMetrics(
        loss=loss,
        cross_entropy=sums.cross_entropy * per_row,
        feature=sums.feature * per_row,
        agreement=sums.matches * per_row,
        accepted=sums.accepted / jnp.maximum(sums.followed, 1.0),
        gradient_norm=jnp.asarray(gradient_norm),
        learning_rate=jnp.asarray(rate),
    )


def batch_gradient(
    cfg: TrainConfig,
    draft: DraftConfig,
    target_cfg: models.TargetConfig,
    params: Params,
    target: Params,
    draft_ids: jax.Array,
    tokens: jax.Array,
    lengths: jax.Array,
    answer_start: jax.Array,
    *,
    with_gradient: bool = True,
) -> tuple[Params, jax.Array, StepSums, jax.Array]:
    """(gradient, loss, sums, counts) of the whole batch, from this device's share of it: runs inside shard_map.

    The share is cut into cfg.accumulation micro-batches, one after the other.
    """
    dtype = target["embed_tokens"].dtype
    counts = jax.lax.psum(step_counts(cfg, lengths, answer_start, tokens.shape[1]), DATA)

    def loss(params: Params, share: tuple[jax.Array, ...]) -> tuple[jax.Array, StepSums]:
        side = observe_target(cfg, target_cfg, target, draft, draft_ids, *share)
        weights = {
            **shared_weights(draft, target),
            **jax.tree.map(lambda x: x.astype(dtype), params),
        }
        return draft_loss(cfg, draft, weights, draft_ids, side, counts)

    def one(share: tuple[jax.Array, ...]) -> tuple[Params, jax.Array, StepSums]:
        if not with_gradient:
            return {}, *loss(params, share)
        (value, sums), gradient = jax.value_and_grad(loss, has_aux=True)(params, share)
        return gradient, value, sums

    share = (tokens, lengths, answer_start)
    if cfg.accumulation == 1 or not with_gradient:
        parts = one(share)
    else:
        cut = jax.tree.map(lambda x: x.reshape(cfg.accumulation, -1, *x.shape[1:]), share)
        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype),
            jax.eval_shape(one, jax.tree.map(lambda x: x[0], cut)),
        )
        parts, _ = jax.lax.scan(
            lambda total, share: (jax.tree.map(jnp.add, total, one(share)), None), zeros, cut
        )
    return *jax.lax.psum(parts, DATA), counts


def over_devices(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """function(params, target, draft_ids, tokens, lengths, answer_start): the last three cut along their rows."""
    # Its gradients are summed by hand: check_vma would sum them again.
    specs = (P(), P(), P(), P(DATA), P(DATA), P(DATA))
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)


@partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=4)
def train_step(
    cfg: TrainConfig,
    draft: DraftConfig,
    target_cfg: models.TargetConfig,
    mesh: Mesh,
    state: TrainState,
    target: Params,
    draft_ids: jax.Array,
    tokens: jax.Array,
    lengths: jax.Array,
    answer_start: jax.Array,
    progress: jax.Array,
) -> tuple[StepMetrics, TrainState]:
    """One step of the optimiser; progress float32 [] is the schedule's. The compute dtype is the target's."""
    gradient_of = over_devices(mesh, partial(batch_gradient, cfg, draft, target_cfg))
    gradient, loss, sums, counts = gradient_of(
        state.params, target, draft_ids, tokens, lengths, answer_start
    )
    rate = learning_rate(cfg, state.step, progress)
    updates, optimizer_state = optimizer(cfg).update(gradient, state.optimizer, state.params)
    params = jax.tree.map(lambda p, u: p + rate * u, state.params, updates)
    metrics = metrics_of(loss, sums, counts, optax.global_norm(gradient), rate)
    return metrics, TrainState(params, optimizer_state, state.step + 1)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def validation_step(
    cfg: TrainConfig,
    draft: DraftConfig,
    target_cfg: models.TargetConfig,
    mesh: Mesh,
    params: Params,
    target: Params,
    draft_ids: jax.Array,
    tokens: jax.Array,
    lengths: jax.Array,
    answer_start: jax.Array,
) -> StepMetrics:
    """The loss and acceptance of a held-out batch."""
    observe = over_devices(
        mesh, partial(batch_gradient, cfg, draft, target_cfg, with_gradient=False)
    )
    _, loss, sums, counts = observe(params, target, draft_ids, tokens, lengths, answer_start)
    return metrics_of(loss, sums, counts)


def place(mesh: Mesh, batch: Batch) -> tuple[jax.Array, ...]:
    """tokens, lengths and answer_start of a batch, cut over the devices."""
    sharding = NamedSharding(mesh, P(DATA))
    return tuple(
        jax.device_put(x, sharding) for x in (batch.tokens, batch.lengths, batch.answer_start)
    )


def describe(metrics: StepMetrics, K: int = 3) -> str:
    """One line: losses, agreement and the acceptance that they promise."""
    numbers = lambda x: "[" + " ".join(f"{float(v):.3f}" for v in x) + "]"  # noqa: E731
    length = 1.0 + float(np.sum(np.asarray(metrics.accepted)[:K]))
    feature = f"  feature {numbers(metrics.feature)}" if np.any(metrics.feature) else ""
    shown = f"loss {float(metrics.loss):.3f} {numbers(metrics.cross_entropy)}{feature}  agree {numbers(metrics.agreement)}"
    return f"{shown}  accept {numbers(metrics.accepted)} -> {length:.3f} at K={K}"


def to_lists(metrics: StepMetrics, prefix: str = "") -> dict[str, Any]:
    """For JSON, four digits."""
    names = ("loss", "cross_entropy", "feature", "agreement", "accepted")
    return {
        prefix + name: np.round(np.asarray(getattr(metrics, name), np.float64), 4).tolist()
        for name in names
    }


def mean_metrics(all_metrics: list[StepMetrics]) -> StepMetrics:
    """The mean over steps, on the host."""
    return jax.tree.map(lambda *x: np.mean(np.stack(x), axis=0), *jax.device_get(all_metrics))


def validation_batches(cfg: TrainConfig, held_out: Chats, num_devices: int) -> list[Batch]:
    """At most 8 batches of the longest bucket, each a multiple of the devices; none if there are too few chats."""
    rows = cfg.buckets[-1]
    size = min(max(cfg.tokens_per_batch // rows, 1), len(held_out)) // num_devices * num_devices
    if size == 0:
        return []
    pick = np.arange(len(held_out))
    return [
        batch_of(held_out, pick[i : i + size], rows)
        for i in range(0, min(len(pick), 8 * size) - size + 1, size)
    ]


def train(
    cfg: TrainConfig,
    draft: DraftConfig,
    target_cfg: models.TargetConfig,
    target: Params,
    state: TrainState,
    draft_ids: np.ndarray,
    chats: Chats,
    held_out: Chats,
    *,
    mesh: Mesh,
    max_steps: int,
    deadline: float,
    save: Callable[[TrainState, int], dict[str, Any]],
    save_every_seconds: float = 150.0,
    log: Callable[[str], None] = print,
    history: list[dict[str, Any]] | None = None,
) -> tuple[TrainState, list[dict[str, Any]]]:
    """Train until max_steps or deadline (time.monotonic), whichever the schedule's progress says is nearer.

    save(state, step) is called on the way, so that a run that is killed leaves a usable head, and at the end; what it returns (an
    evaluation, say) joins the record. state may come from an earlier run: the stream of batches then goes on where it was.
    Returns the last state and a record (step, seconds, metrics) per log line, appended to history as they come.
    """
    step = begin = int(state.step)
    ids, target, state = replicate(mesh, (jnp.asarray(draft_ids, jnp.int32), target, state))
    history = [] if history is None else history
    recent: list[StepMetrics] = []
    validation = validation_batches(cfg, held_out, mesh.size)
    start = last_log = last_save = time.monotonic()
    tokens = 0

    def validate() -> dict[str, Any]:
        if not validation:
            return {}
        mean = mean_metrics(
            [
                validation_step(
                    cfg, draft, target_cfg, mesh, state.params, target, ids, *place(mesh, b)
                )
                for b in validation
            ]
        )
        log(f"train: held out {describe(mean)}")
        return to_lists(mean, "held_out_")

    stream = batches(
        chats, cfg.buckets, cfg.tokens_per_batch, cfg.seed, mesh.size * cfg.accumulation
    )
    for number, batch in itertools.islice(stream, begin, None):
        now = time.monotonic()
        if step >= max_steps or now >= deadline:
            break
        progress = max(step / max_steps, (now - start) / max(deadline - start, 1e-9))
        metrics, state = train_step(
            cfg,
            draft,
            target_cfg,
            mesh,
            state,
            target,
            ids,
            *place(mesh, batch),
            np.float32(progress),
        )
        recent.append(metrics)
        tokens += int(batch.lengths.sum())
        step += 1
        if step % cfg.log_every == 0 or step == max_steps:
            mean = mean_metrics(recent)  # waits for the device, so the clock below is honest
            now, rate = time.monotonic(), float(jax.device_get(metrics.learning_rate))
            pace, recent, last_log = len(recent) / (now - last_log), [], now
            log(
                f"train: step {step}  epoch {number}  {now - start:5.0f} of {deadline - start:.0f} s  {pace:.2f} steps/s  "
                f"{tokens / (now - start):.0f} tokens/s  rate {rate:.2e}  norm {float(mean.gradient_norm):.2f}  {describe(mean)}"
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
