"""The methods that can be trained, each with its objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from jaxspec.drafts.dflash import DFlashConfig
from jaxspec.layers.params import Params
from jaxspec.training.block_objective import block_counts, block_loss, observe_blocks
from jaxspec.training.config import TrainConfig
from jaxspec.training.data import Batch
from jaxspec.training.objective import (
    StepSums,
    TrainingPair,
    draft_loss,
    observe_target,
    step_counts,
)


@dataclass(frozen=True)
class Objective:
    """The loss of a kind of draft, and the counts that it is divided by.

    counts: return the rows of each draft step that the loss is divided by, float32 [steps]
    loss:   return the loss [] and its sums over a share of the batch that counts are of
    """

    counts: Callable[[TrainConfig, TrainingPair, Batch[jax.Array]], jax.Array]
    loss: Callable[
        [TrainConfig, TrainingPair, Params, Batch[jax.Array], jax.Array],
        tuple[jax.Array, StepSums],
    ]


def _block_counts(cfg: TrainConfig, pair: TrainingPair, batch: Batch[jax.Array]) -> jax.Array:
    assert isinstance(pair.draft, DFlashConfig)
    return block_counts(pair.draft, batch)


# The training-time test of a draft of a token a pass.
_STEPS = Objective(
    counts=lambda cfg, pair, batch: step_counts(cfg, batch),
    loss=lambda cfg, pair, weights, batch, counts: draft_loss(
        cfg, pair, weights, observe_target(cfg, pair, batch), counts
    ),
)
# The loss of a draft that makes blocks, at the batch's anchors.
_BLOCKS = Objective(
    counts=_block_counts,
    loss=lambda cfg, pair, weights, batch, counts: block_loss(
        cfg, pair, weights, observe_blocks(cfg, pair, batch), counts
    ),
)

METHODS: dict[str, Objective] = {
    "eagle": _STEPS,
    "eagle3": _STEPS,
    "dflash": _BLOCKS,
    "dspark": _BLOCKS,
}
