"""The settings of a training run, apart from the head's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxspec.config import ConfigError
from jaxspec.drafts.eagle import EagleConfig
from jaxspec.drafts.eagle3 import Eagle3Config

TrainableDraft = EagleConfig | Eagle3Config  # the drafts that can be trained


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run.

    num_steps:        draft steps of the training-time test
    decay:            weight of each further step, relative to the step before
    argmax_weight:    share of the loss on the target's most likely token; the rest is on its
                      distribution
    feature_weight:   weight of EAGLE-1's smooth L1 on the target's hidden state
    clip:             global norm that gradients are clipped to
    buckets:          lengths that sequences are padded to
    tokens_per_batch: tokens of a step over all devices
    accumulation:     micro-batches that a device cuts its share into
    remat:            recompute logits in the backward pass (less memory, one product more)
    """

    num_steps: int = 5
    decay: float = 0.8
    argmax_weight: float = 0.0
    feature_weight: float = 0.1
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 1e-3
    final_learning_rate: float = 1e-5
    warmup_steps: int = 200
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    clip: float = 0.5
    buckets: tuple[int, ...] = (256, 384, 512)
    tokens_per_batch: int = 16384
    accumulation: int = 1
    remat: bool = False
    seed: int = 0
    log_every: int = 50

    def __post_init__(self) -> None:
        if self.num_steps < 1 or self.accumulation < 1:
            raise ConfigError(
                "training: expected at least 1 draft step and 1 micro-batch, "
                f"got {self.num_steps} and {self.accumulation}"
            )
        if not 0.0 <= self.argmax_weight <= 1.0:
            raise ConfigError(
                f"argmax_weight: expected a share from 0 to 1, got {self.argmax_weight}"
            )
