"""The objective of one batch: the target's side of it, the loss, and the sums behind the metrics.

The objective of a draft of a token a pass is here; block_objective has that of blocks.

Losses are sums over rows divided by counts that are known before the batch is cut, over devices or
micro-batches. Adding up the parts therefore gives the gradient of the whole.
"""

from __future__ import annotations

from types import ModuleType

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec import drafts, models
from jaxspec.config import REFERENCE_OPS, Ops
from jaxspec.layers import op_choice
from jaxspec.layers.params import Params
from jaxspec.loading import binding
from jaxspec.training import eagle, eagle3
from jaxspec.training.config import TrainableDraft, TrainConfig
from jaxspec.training.data import Batch
from jaxspec.training.documents import continues, document_starts
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
    feature_scale: float32 [width], the size of each feature that a block head's fc reads
                (jaxspec.training.feature_scale); None for a head that reads them as they are
    """

    draft: TrainableDraft = struct.field(pytree_node=False)
    target_cfg: models.TargetConfig = struct.field(pytree_node=False)
    target: Params
    draft_ids: jax.Array
    feature_scale: jax.Array | None = None


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
    predicts:     bool [batch, rows], whether the next token is part of the document's answer
    teachable:    bool [batch, rows], predicts where the draft has a token for the target's choice
    documents:    int32 [batch, rows], see data.Batch
    """

    tokens: jax.Array
    hidden: jax.Array
    drafted_from: jax.Array
    probs: jax.Array
    greedy: jax.Array
    predicts: jax.Array
    teachable: jax.Array
    documents: jax.Array


@struct.dataclass
class StepSums:
    """Sums over a batch's rows, float32 [num_steps] each, but for followed [].

    cross_entropy, feature: the losses
    overlap:  a block's sum of min(p, q): its chance of acceptance at temperature 1; else 0
    confidence: the cross entropy of a block's confidence; else 0
    matches:  rows whose draft is the target's choice
    accepted: rows whose draft and all earlier ones are the target's choice
    followed: rows that accepted is counted among
    """

    cross_entropy: jax.Array
    feature: jax.Array
    overlap: jax.Array
    confidence: jax.Array
    matches: jax.Array
    accepted: jax.Array
    followed: jax.Array


def num_draft_steps(cfg: TrainConfig, rows: int) -> int:
    """Draft steps that a sequence of rows tokens has room for."""
    return min(cfg.num_steps, rows - 1)


def step_counts(cfg: TrainConfig, batch: Batch[jax.Array]) -> jax.Array:
    """Count the rows of each draft step that predict a token of an answer: float32 [steps]."""
    rows = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)
    index = rows - document_starts(batch.documents)  # of each token in its document
    first = jnp.arange(num_draft_steps(cfg, len(rows))) + 2  # of the tokens that step i predicts
    counted = batch.answers & (index >= first[:, None, None])
    return jnp.sum(counted.astype(jnp.float32), axis=(1, 2))


def shared_weights(draft: TrainableDraft, target: Params) -> Params:
    """Return the frozen weights that a draft without its own takes from the target."""
    return binding.shared_weights(draft, drafts.family(draft).param_specs(draft), target)


def target_ops(pair: TrainingPair, rows: int) -> Ops:
    """Return the ops of the target's pass over sequences of so many rows."""
    dtype = pair.target["embed_tokens"].dtype
    return op_choice.for_whole_sequences(pair.target_cfg, rows, dtype)


def batch_states(pair: TrainingPair, batch: Batch[jax.Array]) -> tuple[jax.Array, jax.Array | None]:
    """Return the target's hidden states and aux of a batch; see target_states."""
    lengths = jnp.sum((batch.documents >= 0).astype(jnp.int32), axis=1)
    return target_states(
        pair.target,
        pair.target_cfg,
        batch.tokens,
        lengths,
        pair.draft.aux_layers,
        starts=document_starts(batch.documents),
        ops=target_ops(pair, batch.tokens.shape[1]),
    )


def observe_target(cfg: TrainConfig, pair: TrainingPair, batch: Batch[jax.Array]) -> TargetSide:
    """Run the target over a batch, without gradients."""
    draft, target_cfg, target, draft_ids = pair.draft, pair.target_cfg, pair.target, pair.draft_ids
    hidden, aux = batch_states(pair, batch)
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
    predicts = predicts_answer(batch)
    return TargetSide(
        tokens=batch.tokens,
        hidden=hidden,
        drafted_from=drafts.head_family(draft).target_hidden(draft, hidden, aux),
        probs=probs,
        greedy=greedy,
        predicts=predicts,
        teachable=predicts & known,
        documents=batch.documents,
    )


def predicts_answer(batch: Batch[jax.Array]) -> jax.Array:
    """Return whether each row's next token is part of its document's answer, bool [batch, rows]."""
    return shift_left(batch.answers, 1) & continues(batch.documents, 1)


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
    # Row p and the row p+1+i that its step i is compared with are of one document.
    same = [continues(side.documents, step + 1) for step in range(steps)]

    def ahead_of(mask: jax.Array, step: int) -> jax.Array:
        return shift_left(mask, step + 1) & same[step]

    def step_loss(weights: Params, head_input: jax.Array, step: int) -> tuple[jax.Array, jax.Array]:
        # Row p of step i predicts token p+2+i, which the target predicts at p+1+i.
        ahead = step + 1
        logits = head_logits(head_input[:, : rows - ahead], weights["lm_head"])
        cross_entropy = jnp.sum(
            soft_cross_entropy(logits, side.probs[:, ahead:])
            * ahead_of(side.teachable, step)[:, : rows - ahead].astype(jnp.float32)
        )
        drafted = jnp.argmax(jnp.asarray(logits), axis=-1)
        drafted = draft_ids[drafted] if draft.maps_vocabulary else drafted
        return cross_entropy, jnp.pad(drafted == side.greedy[:, ahead:], ((0, 0), (0, ahead)))

    def regress(head_input: jax.Array, step: int) -> jax.Array:
        ahead = step + 1
        if draft.method != "eagle":
            return jnp.zeros((), jnp.float32)
        loss = smooth_l1(head_input[:, : rows - ahead], side.hidden[:, ahead:])
        counted = ahead_of(side.predicts, step)[:, : rows - ahead]
        return jnp.sum(loss * counted.astype(jnp.float32))

    if cfg.remat:
        step_loss = jax.checkpoint(step_loss, static_argnums=2)
    head_inputs = FORWARDS[draft.method].forward_steps(
        weights,
        draft,
        side.tokens,
        side.drafted_from,
        steps,
        document_starts(side.documents),
    )
    cross_entropies, matches = zip(
        *(step_loss(weights, x, step) for step, x in enumerate(head_inputs)), strict=True
    )
    features = [regress(x, step) for step, x in enumerate(head_inputs)]

    counted = [ahead_of(side.predicts, step) for step in range(steps)]
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
        overlap=jnp.zeros(steps, jnp.float32),
        confidence=jnp.zeros(steps, jnp.float32),
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
