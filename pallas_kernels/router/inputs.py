"""Inputs of route."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import jax

from pallas_kernels.types import STATIC

Kind = Literal["softmax", "sigmoid"]
KINDS = get_args(Kind)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Rows, the router's weights, and how experts are chosen and weighed.

    x:         [rows, D]
    router:    [D, experts]; its product with x is accumulated and kept in float32
    bias:      [experts], or None
    top_k:     experts for each row
    kind:      "softmax" (gpt-oss, Qwen3-MoE): take the highest logits, bias included; weigh by the
               softmax of all logits.
               "sigmoid" (DeepSeek-V3, 2412.19437, section 2.1.2): take the highest of
               sigmoid(logit) + bias; weigh by sigmoid(logit)
    scaling:   factor on the weights, of "sigmoid" alone
    normalise: divide the weights by the sum of the chosen ones
    """

    x: jax.Array
    router: jax.Array
    bias: jax.Array | None = None
    top_k: int = field(metadata=STATIC)
    kind: Kind = field(metadata=STATIC)
    scaling: float = field(default=1.0, metadata=STATIC)
    normalise: bool = field(default=True, metadata=STATIC)

    def check(self) -> None:
        """Raise ValueError for shapes that do not fit together."""
        x, router = self.x.shape, self.router.shape
        if len(x) != 2 or len(router) != 2 or router[0] != x[1]:
            raise ValueError(f"router: expected [{x[-1]}, experts] for x {x}, got {router}")
        if self.bias is not None and self.bias.shape != router[1:]:
            raise ValueError(f"bias: expected {router[1:]}, got {self.bias.shape}")
        if self.kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        if not 1 <= self.top_k <= router[1]:
            raise ValueError(f"top_k: expected 1 to {router[1]}, got {self.top_k}")
