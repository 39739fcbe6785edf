"""The methods that can be trained, each with its objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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


class Objective(Protocol):
    """The loss of a kind of draft, and the counts that it is divided by."""

    def counts(self, cfg: TrainConfig, pair: TrainingPair, batch: Batch[jax.Array]) -> jax.Array:
        """Return the rows of each draft step that the loss is divided by, float32 [steps]."""
        ...

    def loss(
        self,
        cfg: TrainConfig,
        pair: TrainingPair,
        weights: Params,
        batch: Batch[jax.Array],
        counts: jax.Array,
    ) -> tuple[jax.Array, StepSums]:
        """Return the loss [] and its sums over a share of the batch that counts are of."""
        ...


@dataclass(frozen=True)
class StepObjective:
    """The training-time test of a draft of a token a pass."""

    def counts(self, cfg: TrainConfig, pair: TrainingPair, batch: Batch[jax.Array]) -> jax.Array:
        """See Objective."""
        return step_counts(cfg, batch)

    def loss(
        self,
        cfg: TrainConfig,
        pair: TrainingPair,
        weights: Params,
        batch: Batch[jax.Array],
        counts: jax.Array,
    ) -> tuple[jax.Array, StepSums]:
        """See Objective."""
        return draft_loss(cfg, pair, weights, observe_target(cfg, pair, batch), counts)


@dataclass(frozen=True)
class BlockObjective:
    """The loss of a draft that makes blocks, at the batch's anchors."""

    def counts(self, cfg: TrainConfig, pair: TrainingPair, batch: Batch[jax.Array]) -> jax.Array:
        """See Objective."""
        assert isinstance(pair.draft, DFlashConfig)
        return block_counts(pair.draft, batch)

    def loss(
        self,
        cfg: TrainConfig,
        pair: TrainingPair,
        weights: Params,
        batch: Batch[jax.Array],
        counts: jax.Array,
    ) -> tuple[jax.Array, StepSums]:
        """See Objective."""
        return block_loss(cfg, pair, weights, observe_blocks(cfg, pair, batch), counts)


METHODS: dict[str, Objective] = {
    "eagle": StepObjective(),
    "eagle3": StepObjective(),
    "dflash": BlockObjective(),
    "dspark": BlockObjective(),
}
