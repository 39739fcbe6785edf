"""The bytes of a target's weights that a pass reads on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxspec.config import TargetConfig
from jaxspec.layers.moe import MoEConfig, moe_of
from jaxspec.layers.params import Params
from jaxspec.parallel.layout import bytes_on_device


@dataclass(frozen=True)
class PassBytes:
    """The bytes by what decides whether a pass reads them.

    always:     read by every pass
    experts:    of all experts of all layers; a pass reads those that its rows choose
    moe:        how rows choose experts; None for a dense target
    num_layers: of the target
    """

    always: int
    experts: int
    moe: MoEConfig | None
    num_layers: int

    @classmethod
    def of(cls, target: TargetConfig, params: Params) -> PassBytes:
        """Count those of a target with these weights."""
        layers: Any = params.get("layers", ())
        experts = bytes_on_device([layer.get("experts", ()) for layer in layers])
        looked_up = {} if target.tie_word_embeddings else params.get("embed_tokens", {})
        always = bytes_on_device(params) - experts - bytes_on_device(looked_up)
        return cls(always, experts, moe_of(target), target.num_layers)

    @property
    def total(self) -> int:
        """The bytes that a pass of many rows reads."""
        return self.always + self.experts

    def a_layer(self, rows: int) -> float:
        """Return the bytes that a pass of so many rows reads, for each layer.

        Each row is taken to choose its experts by chance.
        """
        share = 1.0 if self.moe is None else self.moe.share_chosen(rows)
        return (self.always + share * self.experts) / max(self.num_layers, 1)
