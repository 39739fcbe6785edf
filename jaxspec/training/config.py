"""The settings of a training run, apart from the head's shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from jaxspec.config import ConfigError
from jaxspec.config.settings import setting
from jaxspec.drafts.dflash import DFlashConfig
from jaxspec.drafts.eagle import EagleConfig
from jaxspec.drafts.eagle3 import Eagle3Config

# The drafts that can be trained. A DSparkConfig is a DFlashConfig.
TrainableDraft = EagleConfig | Eagle3Config | DFlashConfig


def check_seed(seed: int) -> None:
    """Raise ConfigError for a seed that NumPy, or the requests of generation, would not take."""
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed: expected an integer from 0 to 2^32 - 1, got {seed}")


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run.

    num_steps:        draft steps of the training-time test; a block has as many as it drafts
    decay:            weight of each further step, relative to the step before
    argmax_weight:    share of the loss on the target's most likely token; the rest is on its
                      distribution
    feature_weight:   weight of EAGLE-1's smooth L1 on the target's hidden state
    overlap_weight:   share of a block's loss on the total variation distance between draft and
                      target; the rest is on cross entropy
    confidence_weight: weight of the confidence head's cross entropy beside a block's loss
    tokens_per_block: tokens of a row for each block that it is trained on
    pack:             fill rows with several chats, which do not see each other
    clip:             global norm that gradients are clipped to
    buckets:          lengths that sequences are padded to
    tokens_per_batch: tokens of a step over all devices
    accumulation:     micro-batches that a device cuts its share into
    remat:            recompute logits in the backward pass (less memory, one product more)
    """

    num_steps: int = setting(5, "Draft steps of the training-time test.")
    decay: float = setting(0.8, "Weight of each further draft step.")
    argmax_weight: float = setting(0.0, "Share of the loss on the target's first choice alone.")
    feature_weight: float = setting(0.1, "EAGLE-1: weight of the hidden state's smooth L1.")
    overlap_weight: float = setting(
        0.9, "DFlash, DSpark: share of the loss on total variation; the rest is cross entropy."
    )
    confidence_weight: float = setting(1.0, "DSpark: weight of the confidence head's loss.")
    tokens_per_block: int = setting(
        16, "DFlash, DSpark: tokens of a row for each block that it is trained on."
    )
    pack: bool = setting(False, "Fill rows with several chats, which do not see each other.")
    optimizer: Literal["adamw", "muon"] = setting(
        "adamw", "adamw, or muon for the matrices but lm_head."
    )
    learning_rate: float = setting(1e-3, "The highest.")
    final_learning_rate: float = 1e-5
    warmup_steps: int = setting(200, "Steps up to the highest learning rate.")
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = setting(0.01, "Of the optimiser.")
    clip: float = setting(0.5, "Global norm that gradients are clipped to.")
    buckets: tuple[int, ...] = setting(
        (256, 384, 512), "Sequence lengths that are compiled, with commas between them."
    )
    tokens_per_batch: int = setting(16384, "Tokens of a step, over all GPUs.")
    accumulation: int = setting(1, "Micro-batches of a step, one after the other: less memory.")
    remat: bool = setting(False, "Recompute logits in the backward pass.")
    seed: int = 0
    log_every: int = 50

    def __post_init__(self) -> None:
        if self.num_steps < 1 or self.accumulation < 1:
            raise ConfigError(
                "training: expected at least 1 draft step and 1 micro-batch, "
                f"got {self.num_steps} and {self.accumulation}"
            )
        if self.optimizer not in ("adamw", "muon"):
            raise ConfigError(f"optimizer: expected adamw or muon, got {self.optimizer!r}")
        for name in ("learning_rate", "clip", "decay"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name}: expected a finite number above 0, got {getattr(self, name)}"
                )
        for name in ("final_learning_rate", "weight_decay", "feature_weight"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name}: expected a finite number from 0, got {getattr(self, name)}"
                )
        for name in ("argmax_weight", "overlap_weight"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(
                    f"{name}: expected a share from 0 to 1, got {getattr(self, name)}"
                )
        if self.tokens_per_block < 1 or not 0.0 <= self.confidence_weight < math.inf:
            raise ConfigError(
                "training: expected tokens_per_block from 1 and confidence_weight from 0, "
                f"got {self.tokens_per_block} and {self.confidence_weight}"
            )
