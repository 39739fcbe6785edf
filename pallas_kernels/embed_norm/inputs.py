"""Inputs of embed_norm."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

from pallas_kernels.types import STATIC


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Tokens and what they are looked up in; with `hidden`, the inputs of an EAGLE-3 head.

    tokens:        int32 [rows]; an id outside the vocabulary reads the nearest row
    table:         [vocab, width], the embedding
    weight:        [width], the gain of the embedding's norm
    eps:           of both norms
    hidden:        [rows, width], the target's hidden state, or None
    hidden_weight: [width], the gain of the hidden state's norm; None exactly if hidden is
    norm_residual: the residual is the normed hidden state, and not the hidden state
    """

    tokens: jax.Array
    table: jax.Array
    weight: jax.Array
    eps: float = field(metadata=STATIC)
    hidden: jax.Array | None = None
    hidden_weight: jax.Array | None = None
    norm_residual: bool = field(default=False, metadata=STATIC)

    def check(self) -> None:
        """Raise ValueError for shapes that do not fit together."""
        tokens, table, weight = self.tokens, self.table, self.weight
        if tokens.ndim != 1 or table.ndim != 2 or weight.shape != table.shape[1:]:
            expected = "[rows], [vocab, width] and [width]"
            shapes = f"{tokens.shape}, {table.shape} and {weight.shape}"
            raise ValueError(f"tokens, table and weight: expected {expected}, got {shapes}")
        if (self.hidden is None) != (self.hidden_weight is None) or (
            self.norm_residual and self.hidden is None
        ):
            raise ValueError(
                "hidden and hidden_weight: expected both or neither, and both for norm_residual"
            )
        if self.hidden is not None and self.hidden_weight is not None:
            expected = (*tokens.shape, *weight.shape), weight.shape
            got = self.hidden.shape, self.hidden_weight.shape
            if got != expected:
                raise ValueError(
                    f"hidden and hidden_weight: expected {expected[0]} and {expected[1]}, "
                    f"got {got[0]} and {got[1]}"
                )
