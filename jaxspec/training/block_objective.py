"""The objective of a draft that makes blocks: DFlash and DSpark.

Draft k of a block is taught what the target says after the text up to that draft. The head reads
the text's own tokens as the drafts before it (teacher forcing).

The loss of a row is (1 - w) cross entropy + w total variation, w = overlap_weight. One minus the
total variation is sum min(p, q), the chance that rejection sampling accepts the draft at
temperature 1. DSpark's confidence learns this chance by its binary cross entropy. p is the target's
whole distribution: where the draft's vocabulary lacks tokens, q cannot reach their share.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec import models
from jaxspec.config import REFERENCE_OPS
from jaxspec.drafts import dspark, families
from jaxspec.drafts.dflash import DFlashConfig
from jaxspec.drafts.dspark import DSparkConfig
from jaxspec.layers.params import Params
from jaxspec.training.blocks import Blocks, forward_blocks
from jaxspec.training.config import TrainConfig
from jaxspec.training.data import Batch
from jaxspec.training.documents import document_starts
from jaxspec.training.losses import (
    DraftScores,
    accepted_prefix,
    binary_cross_entropy,
    decayed_sum,
    draft_scores,
    head_logits,
    summed_logits,
)
from jaxspec.training.objective import StepSums, TrainingPair, batch_states
from jaxspec.training.target import choice_and_total, greedy_and_total, head_columns


@struct.dataclass
class BlockSide:
    """The frozen target's side of a batch of blocks, as the loss reads it.

    tokens:   int32 [batch, rows]
    aux:      [batch, rows, _], the features that the draft reads of the target
    blocks:   where the blocks are
    previous: int32 [batch, blocks, K], the token before each draft; the anchor's before the first
    probs:    float32 [batch, blocks, K, draft_vocab], the target's probability of each draft
    greedy:   int32 [batch, blocks, K], the target's choice
    text:     int32 [batch, blocks, K], the text's own token
    counted:  bool [batch, blocks, K], drafts of used blocks whose token is in the document
    """

    tokens: jax.Array
    aux: jax.Array
    blocks: Blocks
    previous: jax.Array
    probs: jax.Array
    greedy: jax.Array
    text: jax.Array
    counted: jax.Array


def drafted_rows(draft: DFlashConfig, batch: Batch[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return the row before each draft's token, int32 [batch, blocks, K], and whether it counts.

    A draft counts if its block is used and its token belongs to the anchor's document.
    """
    last = batch.tokens.shape[1] - 1
    anchors = batch.anchors[..., None]
    row = jnp.maximum(anchors, 0) + jnp.arange(draft.block_capacity, dtype=jnp.int32)

    def document(of: jax.Array) -> jax.Array:
        flat = jnp.minimum(of, last).reshape(of.shape[0], -1)
        return jnp.take_along_axis(batch.documents, flat, axis=1).reshape(of.shape)

    same = document(row + 1) == document(jnp.maximum(anchors, 0))
    return jnp.minimum(row, last), (anchors >= 0) & (row < last) & same


def block_counts(draft: DFlashConfig, batch: Batch[jax.Array]) -> jax.Array:
    """Count the drafts of each place in a block: float32 [K]."""
    _, counted = drafted_rows(draft, batch)
    return jnp.sum(counted.astype(jnp.float32), axis=(0, 1))


def observe_blocks(cfg: TrainConfig, pair: TrainingPair, batch: Batch[jax.Array]) -> BlockSide:
    """Run the target over a batch, without gradients."""
    draft = families.block(pair.draft)
    assert isinstance(draft, DFlashConfig)
    hidden, aux = batch_states(pair, batch)
    assert aux is not None
    row, counted = drafted_rows(draft, batch)
    shape, flat = row.shape, row.reshape(row.shape[0], -1)
    before = jnp.take_along_axis(hidden, flat[..., None], axis=1).reshape(*shape, -1)
    if draft.maps_vocabulary:
        # Logits of the whole vocabulary, of every row of text or of every draft's.
        if hidden.shape[1] < flat.shape[1]:
            of_rows = greedy_and_total(pair.target, pair.target_cfg, hidden)
            greedy, total = (jnp.take_along_axis(x, flat, axis=1).reshape(shape) for x in of_rows)
        else:
            greedy, total = greedy_and_total(pair.target, pair.target_cfg, before)
        columns = head_columns(pair.target, pair.target_cfg, pair.draft_ids)
        logits = jnp.einsum("...d,dv->...v", before, columns, preferred_element_type=jnp.float32)
        is_choice = pair.draft_ids == greedy[..., None]
    else:  # the logits that the loss reads are those of the whole vocabulary
        family = models.family(pair.target_cfg)
        logits = family.logits(pair.target, pair.target_cfg, before, REFERENCE_OPS)
        greedy, total = choice_and_total(logits)
        is_choice = jnp.arange(draft.vocab_size) == greedy[..., None]
    probs = jnp.exp(logits - total[..., None])
    if cfg.argmax_weight:
        choice = jnp.where(is_choice, jnp.float32(cfg.argmax_weight), jnp.float32(0.0))
        probs = (1.0 - cfg.argmax_weight) * probs + choice

    def text(of: jax.Array) -> jax.Array:
        return jnp.take_along_axis(batch.tokens, of.reshape(flat.shape), axis=1).reshape(shape)

    anchors = jnp.maximum(batch.anchors, 0)
    starts = jnp.take_along_axis(document_starts(batch.documents), anchors, axis=1)
    return BlockSide(
        tokens=batch.tokens,
        aux=families.block_family(draft).target_hidden(draft, hidden, aux),
        blocks=Blocks(anchors, starts),
        previous=text(row),
        probs=probs,
        greedy=greedy,
        text=text(jnp.minimum(row + 1, batch.tokens.shape[1] - 1)),
        counted=counted,
    )


def block_logits(
    weights: Params, draft: DFlashConfig, hidden: jax.Array, previous: jax.Array
) -> jax.Array:
    """Return the logits float32 [batch, blocks, K, draft_vocab] that each draft is drawn from.

    hidden: [batch, blocks, K, D], the head's inputs. previous: int32 [batch, blocks, K]
    """
    if not draft.corrects_logits:
        return head_logits(hidden, weights["lm_head"])
    assert isinstance(draft, DSparkConfig)
    columns = hidden.reshape(-1, *hidden.shape[2:])
    state = dspark.first_head_state(draft, columns)
    if state is None:  # no draft waits for another
        markov, _ = dspark.markov_input(weights, draft, hidden, previous, None)
    else:

        def step(
            state: jax.Array, column: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            markov, state_after = dspark.markov_input(weights, draft, *column, state)
            assert state_after is not None
            return state_after, markov

        by_draft = jnp.moveaxis(columns, 1, 0), previous.reshape(columns.shape[:2]).T
        assert draft.sample_from_anchor  # else the state would first step over the anchor's row
        _, markov = jax.lax.scan(step, state, by_draft)
        markov = jnp.moveaxis(markov, 0, 1).reshape(*hidden.shape[:-1], -1)
    return summed_logits((hidden, markov), (weights["lm_head"], weights["markov_w2"]))


def block_loss(
    cfg: TrainConfig, pair: TrainingPair, weights: Params, side: BlockSide, counts: jax.Array
) -> tuple[jax.Array, StepSums]:
    """Return the loss [] and its sums.

    The loss is sum_k decay^k (loss of draft k). Each term is summed over counted drafts and divided
    by counts[k]. weights: the draft's own and shared_weights, in the compute dtype.
    """
    draft = families.block(pair.draft)
    assert isinstance(draft, DFlashConfig)
    hidden = forward_blocks(weights, draft, side.tokens, side.aux, side.blocks)
    counted = side.counted.astype(jnp.float32)

    def add_up(rows: jax.Array) -> jax.Array:
        return jnp.sum(rows * counted, axis=(0, 1))

    def of_rows(weights: Params, hidden: jax.Array) -> DraftScores:
        return draft_scores(block_logits(weights, draft, hidden, side.previous), side.probs)

    # Each array of the vocabulary's width is a gigabyte. The backward pass makes them again.
    if cfg.remat:
        of_rows = jax.checkpoint(of_rows)
    cross_entropy, overlap, drafted = of_rows(weights, hidden)
    drafted = pair.draft_ids[drafted] if draft.maps_vocabulary else drafted
    confidence = jnp.zeros_like(cross_entropy)
    if isinstance(draft, DSparkConfig) and draft.has_confidence:
        logit = dspark.confidence_logit(
            weights, draft, hidden.reshape(-1, hidden.shape[-1]), side.previous.reshape(-1)
        )
        chance = jax.lax.stop_gradient(overlap)
        confidence = binary_cross_entropy(logit.reshape(chance.shape), chance)
    matches = (drafted == side.greedy) & side.counted
    # A block shows what a greedy draft would do only where the text is the target's greedy text.
    greedy_text = jnp.all((side.text == side.greedy)[..., :-1], axis=-1)
    followed = side.counted[..., -1] & greedy_text
    K = side.counted.shape[-1]
    sums = StepSums(
        cross_entropy=add_up(cross_entropy),
        feature=jnp.zeros(K, jnp.float32),
        overlap=add_up(overlap),
        confidence=add_up(confidence),
        matches=add_up(matches.astype(jnp.float32)),
        accepted=accepted_prefix([matches[..., k] for k in range(K)], followed),
        followed=jnp.sum(followed.astype(jnp.float32)),
    )
    w = cfg.overlap_weight
    rows = (1.0 - w) * cross_entropy + w * (1.0 - overlap) + cfg.confidence_weight * confidence
    per_draft = add_up(rows) / jnp.maximum(counts, 1.0)
    return decayed_sum(list(per_draft), cfg.decay), sums
