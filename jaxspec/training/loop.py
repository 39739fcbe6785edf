"""The training loop: float32 masters, bfloat16 compute, AdamW under a warm-up and cosine schedule, one compiled step a bucket."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from jaxspec import models
from jaxspec.drafts import eagle3
from jaxspec.drafts.eagle3 import Eagle3Config
from jaxspec.params import Params, ParamSpec, init_random
from jaxspec.training.data import Batch, Chats, batch_of, batches
from jaxspec.training.eagle3 import forward_steps, shift_left
from jaxspec.training.losses import accepted_prefix, decayed_sum, masked_mean, soft_cross_entropy
from jaxspec.training.target import greedy_tokens, head_columns, target_states


@dataclass(frozen=True)
class TrainConfig:
    """num_steps: draft steps of the training-time test. clip: global norm of the gradient. remat: recompute a step's logits
    in the backward pass (saves their memory, costs one product with lm_head)."""

    num_steps: int = 5
    decay: float = 0.8
    learning_rate: float = 1e-3
    final_learning_rate: float = 1e-5
    warmup_steps: int = 200
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    clip: float = 0.5
    buckets: tuple[int, ...] = (256, 384, 512)
    tokens_per_batch: int = 16384
    remat: bool = False
    seed: int = 0
    log_every: int = 50


@struct.dataclass
class TrainState:
    """params: float32 masters, the draft's own weights. optimizer: optax's state. step: int32 []."""

    params: Params
    optimizer: Any
    step: jax.Array


@struct.dataclass
class StepMetrics:
    """loss []; per draft step [num_steps]: losses, agreement (the draft's argmax is the target's), accepted (accepted_prefix)."""

    loss: jax.Array
    losses: jax.Array
    agreement: jax.Array
    accepted: jax.Array
    gradient_norm: jax.Array


@struct.dataclass
class TargetSide:
    """What the loss reads of the frozen target for one batch.

    tokens int32 [batch, rows]; aux [batch, rows, fused]; probs float32 [batch, rows, draft_vocab], the target's distribution
    of the next token restricted to the draft's vocabulary; greedy int32 [batch, rows], its argmax over the whole vocabulary;
    predicts bool [batch, rows], whether the next token is part of the answer.
    """

    tokens: jax.Array
    aux: jax.Array
    probs: jax.Array
    greedy: jax.Array
    predicts: jax.Array


def optimizer(cfg: TrainConfig) -> optax.GradientTransformation:
    """AdamW without its learning rate, which the step multiplies in; decay spares norms and biases."""
    return optax.chain(
        optax.clip_by_global_norm(cfg.clip),
        optax.scale_by_adam(b1=cfg.betas[0], b2=cfg.betas[1]),
        optax.add_decayed_weights(cfg.weight_decay, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
    )


def learning_rate(cfg: TrainConfig, step: int, progress: float) -> float:
    """Linear warm-up over steps, times a cosine from 1 to the final rate over progress 0 .. 1 (of steps or of time)."""
    warmup = min((step + 1) / max(cfg.warmup_steps, 1), 1.0)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
    return warmup * (cfg.final_learning_rate + (cfg.learning_rate - cfg.final_learning_rate) * cosine)


def initial_params(cfg: Eagle3Config, target_cfg: models.TargetConfig, target: Params, draft_ids: np.ndarray, seed: int) -> Params:
    """Random matrices, norms of one; the final norm and lm_head start as the target's own, for the draft's tokens."""
    specs = eagle3.param_specs(cfg)
    params = init_random(specs, jax.random.key(seed), jnp.float32)
    one = lambda spec, x: jnp.ones_like(x) if x.ndim == 1 and not spec.name.endswith("bias") else x  # noqa: E731
    params = jax.tree.map(one, specs, params, is_leaf=lambda x: isinstance(x, ParamSpec))
    params["norm"] = target["norm"].astype(jnp.float32)
    params["lm_head"] = head_columns(target, target_cfg, jnp.asarray(draft_ids)).astype(jnp.float32)
    return params


def init_train_state(cfg: TrainConfig, params: Params) -> TrainState:
    """The start of training. The masters are copies: the state is donated, and params may share arrays with the target."""
    params = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
    return TrainState(params, optimizer(cfg).init(params), jnp.zeros((), jnp.int32))


def observe_target(
    target_cfg: models.TargetConfig,
    target: Params,
    draft: Eagle3Config,
    draft_ids: jax.Array,
    tokens: jax.Array,
    lengths: jax.Array,
    answer_start: jax.Array,
) -> TargetSide:
    """The target's pass over a batch, without gradients."""
    hidden, aux = target_states(target, target_cfg, tokens, lengths, draft.aux_layers)
    assert aux is not None
    restricted = jnp.einsum("bqd,dv->bqv", hidden, head_columns(target, target_cfg, draft_ids), preferred_element_type=jnp.float32)
    next_position = jnp.arange(1, tokens.shape[1] + 1)
    return TargetSide(
        tokens=tokens,
        aux=aux,
        probs=jax.nn.softmax(restricted, axis=-1),
        greedy=greedy_tokens(target, target_cfg, hidden),
        predicts=(next_position >= answer_start[:, None]) & (next_position < lengths[:, None]),
    )


def draft_loss(
    cfg: TrainConfig, draft: Eagle3Config, params: Params, embed_tokens: jax.Array, draft_ids: jax.Array, side: TargetSide
) -> tuple[jax.Array, StepMetrics]:
    """EAGLE-3's loss: sum_i decay^i CE(target restricted to the draft's vocabulary, draft), where the target's own choice is in it.

    params in the compute dtype; embed_tokens is the target's, frozen.
    """
    rows = side.tokens.shape[1]
    steps = min(cfg.num_steps, rows - 1)
    in_vocabulary = jnp.zeros(draft.vocab_size, bool).at[draft_ids].set(True)[side.greedy]

    def judge(weights: Params, head_input: jax.Array, step: int) -> tuple[jax.Array, jax.Array]:
        # Row p of step i predicts token p+2+i, which the target predicts at p+1+i: slice the small side.
        ahead = step + 1
        logits = eagle3.logits(weights, draft, head_input[:, : rows - ahead])
        loss = masked_mean(soft_cross_entropy(logits, side.probs[:, ahead:]), (side.predicts & in_vocabulary)[:, ahead:])
        drafted = draft_ids[jnp.argmax(logits, axis=-1)]
        return loss, jnp.pad(drafted == side.greedy[:, ahead:], ((0, 0), (0, ahead)))

    if cfg.remat:
        judge = jax.checkpoint(judge, static_argnums=2)
    weights = {**params, "embed_tokens": embed_tokens}
    head_inputs = forward_steps(weights, draft, side.tokens, side.aux, steps)
    losses, matches = zip(*(judge(weights, x, step) for step, x in enumerate(head_inputs)), strict=True)

    counted = [shift_left(side.predicts, step + 1) for step in range(steps)]
    # A row shows what a greedy draft would do only where the text it was forced to follow is the target's greedy text.
    greedy_text = side.tokens == jnp.roll(side.greedy, 1, axis=1)
    followed = counted[-1]
    for step in range(1, steps):
        followed = followed & shift_left(greedy_text, 1 + step)
    agreement = [masked_mean(match.astype(jnp.float32), mask) for match, mask in zip(matches, counted, strict=True)]
    loss = decayed_sum(losses, cfg.decay)
    return loss, StepMetrics(loss, jnp.stack(losses), jnp.stack(agreement), accepted_prefix(matches, followed), jnp.zeros(()))


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def train_step(
    cfg: TrainConfig,
    draft: Eagle3Config,
    target_cfg: models.TargetConfig,
    state: TrainState,
    target: Params,
    draft_ids: jax.Array,
    tokens: jax.Array,
    lengths: jax.Array,
    answer_start: jax.Array,
    rate: jax.Array,
) -> tuple[StepMetrics, TrainState]:
    """One step of AdamW at learning rate `rate` []; the compute dtype is the target's."""
    dtype = target["embed_tokens"].dtype
    side = observe_target(target_cfg, target, draft, draft_ids, tokens, lengths, answer_start)

    def loss(params: Params) -> tuple[jax.Array, StepMetrics]:
        return draft_loss(cfg, draft, jax.tree.map(lambda x: x.astype(dtype), params), target["embed_tokens"], draft_ids, side)

    gradients, metrics = jax.grad(loss, has_aux=True)(state.params)
    updates, optimizer_state = optimizer(cfg).update(gradients, state.optimizer, state.params)
    params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
    metrics = metrics.replace(gradient_norm=optax.global_norm(gradients))
    return metrics, TrainState(params, optimizer_state, state.step + 1)


@partial(jax.jit, static_argnums=(0, 1, 2))
def validation_step(
    cfg: TrainConfig,
    draft: Eagle3Config,
    target_cfg: models.TargetConfig,
    params: Params,
    target: Params,
    draft_ids: jax.Array,
    tokens: jax.Array,
    lengths: jax.Array,
    answer_start: jax.Array,
) -> StepMetrics:
    """The loss and acceptance of a held-out batch."""
    dtype = target["embed_tokens"].dtype
    side = observe_target(target_cfg, target, draft, draft_ids, tokens, lengths, answer_start)
    return draft_loss(cfg, draft, jax.tree.map(lambda x: x.astype(dtype), params), target["embed_tokens"], draft_ids, side)[1]


def arrays(batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    return jnp.asarray(batch.tokens), jnp.asarray(batch.lengths), jnp.asarray(batch.answer_start)


def describe(metrics: StepMetrics, K: int = 3) -> str:
    """One line: losses, agreement and the acceptance that they promise."""
    numbers = lambda x: "[" + " ".join(f"{float(v):.3f}" for v in x) + "]"  # noqa: E731
    length = 1.0 + float(np.sum(np.asarray(metrics.accepted)[:K]))
    shown = f"loss {float(metrics.loss):.3f} {numbers(metrics.losses)}  agree {numbers(metrics.agreement)}"
    return f"{shown}  accept {numbers(metrics.accepted)} -> {length:.3f} at K={K}"


def to_lists(metrics: StepMetrics, prefix: str = "") -> dict[str, Any]:
    """For JSON."""
    return {prefix + name: np.asarray(getattr(metrics, name)).tolist() for name in ("loss", "losses", "agreement", "accepted")}


def mean_metrics(all_metrics: list[StepMetrics]) -> StepMetrics:
    """The mean over steps, on the host."""
    return jax.tree.map(lambda *x: np.mean(np.stack(x), axis=0), *jax.device_get(all_metrics))


def train(
    cfg: TrainConfig,
    draft: Eagle3Config,
    target_cfg: models.TargetConfig,
    target: Params,
    params: Params,
    draft_ids: np.ndarray,
    chats: Chats,
    held_out: Chats,
    *,
    max_steps: int,
    deadline: float,
    save: Callable[[Params, int, dict[str, Any]], None],
    save_every_seconds: float = 150.0,
    log: Callable[[str], None] = print,
) -> tuple[Params, list[dict[str, Any]]]:
    """Train until max_steps or deadline (time.monotonic), whichever the schedule's progress says is nearer.

    save(params, step, record) is called on the way, so that a run that is killed leaves a usable head, and at the end.
    Returns the float32 masters and a record (step, seconds, metrics) per log line.
    """
    ids = jnp.asarray(draft_ids, jnp.int32)
    state = init_train_state(cfg, params)
    stream: Iterator[tuple[int, Batch]] = batches(chats, cfg.buckets, cfg.tokens_per_batch, cfg.seed)
    history: list[dict[str, Any]] = []
    recent: list[StepMetrics] = []
    start = last_log = last_save = time.monotonic()
    tokens = step = 0

    def validate() -> dict[str, Any]:
        found = [validation_step(cfg, draft, target_cfg, state.params, target, ids, *arrays(b)) for b in validation]
        mean = mean_metrics(found)
        log(f"train: held out {describe(mean)}")
        return to_lists(mean, "held_out_")

    rows = cfg.buckets[-1]
    size = max(min(cfg.tokens_per_batch // rows, len(held_out)), 1)
    pick = np.arange(len(held_out))
    validation = [batch_of(held_out, pick[i : i + size], rows) for i in range(0, min(len(pick), 8 * size) - size + 1, size)]
    while step < max_steps:
        now = time.monotonic()
        if now >= deadline:
            break
        number, batch = next(stream)
        progress = max(step / max_steps, (now - start) / max(deadline - start, 1e-9))
        rate = jnp.float32(learning_rate(cfg, step, progress))
        metrics, state = train_step(cfg, draft, target_cfg, state, target, ids, *arrays(batch), rate)
        recent.append(metrics)
        tokens += int(batch.lengths.sum())
        step += 1
        if step % cfg.log_every == 0 or step == max_steps:
            mean = mean_metrics(recent)  # waits for the device, so the clock below is honest
            recent, now = [], time.monotonic()
            pace = cfg.log_every / (now - last_log)
            last_log = now
            log(
                f"train: step {step}  epoch {number}  {now - start:5.0f} s  {pace:.2f} steps/s  "
                f"{tokens / (now - start):.0f} tokens/s  rate {float(rate):.2e}  norm {float(mean.gradient_norm):.2f}  {describe(mean)}"
            )
            record = {"step": step, "epoch": number, "seconds": now - start, "tokens": tokens, "learning_rate": float(rate)}
            history.append(record | to_lists(mean))
            if now - last_save > save_every_seconds:
                last_save = now
                history[-1] |= validate() if validation else {}
                save(state.params, step, history[-1])
    history.append({"step": step, "seconds": time.monotonic() - start, "tokens": tokens} | (validate() if validation else {}))
    save(state.params, step, history[-1])
    return state.params, history
