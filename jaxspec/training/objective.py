"""The objective of one batch: the target's side of it, the loss, and the sums behind the metrics.

Losses are sums over rows divided by counts that are known before the batch is cut, over devices or
micro-batches. Adding up the parts therefore gives the gradient of the whole.
"""

from __future__ import annotations

from types import ModuleType

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec import drafts, models
from jaxspec.config import REFERENCE_OPS
from jaxspec.layers.params import Params
from jaxspec.loading import model
from jaxspec.training import eagle, eagle3
from jaxspec.training.config import TrainableDraft, TrainConfig
from jaxspec.training.data import Batch
from jaxspec.training.losses import (
    accepted_prefix,
    decayed_sum,
    head_logits,
    smooth_l1,
    soft_cross_entropy,
)
from jaxspec.training.step_attention import shift_left
from jaxspec.training.target import greedy_tokens, head_columns, target_states

FORWARDS: dict[str, ModuleType] = {"eagle": eagle, "eagle3": eagle3}  # forward_steps of each method


@struct.dataclass
class TrainingPair:
    """A draft's shape, and the frozen target that it learns from.

    draft:      the draft's config
    target_cfg: the target's config
    target:     the target's weights
    draft_ids:  int32 [draft_vocab], the target id of each draft id
    """

    draft: TrainableDraft = struct.field(pytree_node=False)
    target_cfg: models.TargetConfig = struct.field(pytree_node=False)
    target: Params
    draft_ids: jax.Array


@struct.dataclass
class TargetSide:
    """The frozen target's side of one batch, as the loss reads it.

    tokens:       int32 [batch, rows]
    hidden:       [batch, rows, D], after the final norm
    drafted_from: [batch, rows, _], what the draft reads of the target
    probs:        float32 [batch, rows, draft_vocab], what the draft should say of the next token:
                  the target's distribution restricted to the draft's vocabulary, with argmax_weight
                  more on its first choice
    greedy:       int32 [batch, rows], the target's choice
    predicts:     bool [batch, rows], whether the next token is part of the answer
    teachable:    bool [batch, rows], predicts where the draft has a token for the target's choice
    """

    tokens: jax.Array
    hidden: jax.Array
    drafted_from: jax.Array
    probs: jax.Array
    greedy: jax.Array
    predicts: jax.Array
    teachable: jax.Array


@struct.dataclass
class StepSums:
    """Sums over a batch's rows, float32 [num_steps] each, but for followed [].

    cross_entropy, feature: the losses
    matches:  rows whose draft is the target's choice
    accepted: rows whose draft and all earlier ones are the target's choice
    followed: rows that accepted is counted among
    """

    cross_entropy: jax.Array
    feature: jax.Array
    matches: jax.Array
    accepted: jax.Array
    followed: jax.Array


def num_draft_steps(cfg: TrainConfig, rows: int) -> int:
    """Draft steps that a sequence of rows tokens has room for."""
    return min(cfg.num_steps, rows - 1)


def step_counts(
    cfg: TrainConfig, lengths: jax.Array, answer_start: jax.Array, rows: int
) -> jax.Array:
    """Count the rows of each draft step that predict a token of an answer: float32 [steps].

    lengths, answer_start: int32 [batch].
    """
    first = jnp.arange(num_draft_steps(cfg, rows)) + 2  # step i predicts tokens 2+i and later ones
    count = jnp.maximum(lengths - jnp.maximum(answer_start, first[:, None]), 0)
    return jnp.sum(count, axis=1).astype(jnp.float32)


def shared_weights(draft: TrainableDraft, target: Params) -> Params:
    """Return the frozen weights that a draft without its own takes from the target."""
    return model.shared_weights(draft, drafts.family(draft).param_specs(draft), target)


def observe_target(cfg: TrainConfig, pair: TrainingPair, batch: Batch[jax.Array]) -> TargetSide:
    """Run the target over a batch, without gradients."""
    draft, target_cfg, target, draft_ids = pair.draft, pair.target_cfg, pair.target, pair.draft_ids
    tokens, lengths, answer_start = batch
    hidden, aux = target_states(target, target_cfg, tokens, lengths, draft.aux_layers)
    if draft.maps_vocabulary:
        logits = jnp.einsum(
            "bqd,dv->bqv",
            hidden,
            head_columns(target, target_cfg, draft_ids),
            preferred_element_type=jnp.float32,
        )
        greedy = greedy_tokens(target, target_cfg, hidden)
        known = jnp.zeros(draft.vocab_size, bool).at[draft_ids].set(True)[greedy]
    else:
        logits = models.family(target_cfg).logits(target, target_cfg, hidden, REFERENCE_OPS)
        greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        known = jnp.ones_like(greedy, bool)
    probs = jax.nn.softmax(logits, axis=-1)
    if cfg.argmax_weight:
        best = jnp.argmax(logits, axis=-1)[..., None] == jnp.arange(logits.shape[-1])
        probs = (1.0 - cfg.argmax_weight) * probs + jnp.where(best, cfg.argmax_weight, 0.0)
    next_position = jnp.arange(1, tokens.shape[1] + 1)
    predicts = (next_position >= answer_start[:, None]) & (next_position < lengths[:, None])
    return TargetSide(
        tokens=tokens,
        hidden=hidden,
        drafted_from=drafts.family(draft).target_hidden(draft, hidden, aux),
        probs=probs,
        greedy=greedy,
        predicts=predicts,
        teachable=predicts & known,
    )


def draft_loss(
    cfg: TrainConfig,
    pair: TrainingPair,
    weights: Params,
    side: TargetSide,
    counts: jax.Array,
) -> tuple[jax.Array, StepSums]:
    """Return the loss [] and its sums.

    The loss is sum_i decay^i (cross entropy_i + feature_weight * smooth L1_i). Each term is summed
    over teachable rows and divided by counts[i]. weights: the draft's own and shared_weights, in
    the compute dtype. The second term is EAGLE-1's only: its output stands for the target's hidden
    state of the next position.
    """
    draft, draft_ids = pair.draft, pair.draft_ids
    rows = side.tokens.shape[1]
    steps = num_draft_steps(cfg, rows)

    def step_loss(weights: Params, head_input: jax.Array, step: int) -> tuple[jax.Array, jax.Array]:
        # Row p of step i predicts token p+2+i, which the target predicts at p+1+i.
        ahead = step + 1
        logits = head_logits(head_input[:, : rows - ahead], weights["lm_head"])
        cross_entropy = jnp.sum(
            soft_cross_entropy(logits, side.probs[:, ahead:])
            * side.teachable[:, ahead:].astype(jnp.float32)
        )
        drafted = jnp.argmax(jnp.asarray(logits), axis=-1)
        drafted = draft_ids[drafted] if draft.maps_vocabulary else drafted
        return cross_entropy, jnp.pad(drafted == side.greedy[:, ahead:], ((0, 0), (0, ahead)))

    def regress(head_input: jax.Array, step: int) -> jax.Array:
        ahead = step + 1
        if draft.method != "eagle":
            return jnp.zeros((), jnp.float32)
        loss = smooth_l1(head_input[:, : rows - ahead], side.hidden[:, ahead:])
        return jnp.sum(loss * side.predicts[:, ahead:].astype(jnp.float32))

    if cfg.remat:
        step_loss = jax.checkpoint(step_loss, static_argnums=2)
    head_inputs = FORWARDS[draft.method].forward_steps(
        weights, draft, side.tokens, side.drafted_from, steps
    )
    cross_entropies, matches = zip(
        *(step_loss(weights, x, step) for step, x in enumerate(head_inputs)), strict=True
    )
    features = [regress(x, step) for step, x in enumerate(head_inputs)]

    counted = [shift_left(side.predicts, step + 1) for step in range(steps)]
    # A row shows what a greedy draft would do only where the text that it was forced to follow is
    # the target's greedy text.
    greedy_text = side.tokens == jnp.roll(side.greedy, 1, axis=1)
    followed = counted[-1]
    for step in range(1, steps):
        followed = followed & shift_left(greedy_text, 1 + step)

    def count(mask: jax.Array) -> jax.Array:
        return jnp.sum(mask.astype(jnp.float32))

    sums = StepSums(
        cross_entropy=jnp.stack(cross_entropies),
        feature=jnp.stack(features),
        matches=jnp.stack(
            [count(match & mask) for match, mask in zip(matches, counted, strict=True)]
        ),
        accepted=accepted_prefix(matches, followed),
        followed=count(followed),
    )
    scale = 1.0 / jnp.maximum(counts, 1.0)
    losses = [
        (a + cfg.feature_weight * b) * scale[i]
        for i, (a, b) in enumerate(zip(cross_entropies, features, strict=True))
    ]
    return decayed_sum(losses, cfg.decay), sums
