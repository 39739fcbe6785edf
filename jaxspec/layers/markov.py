"""A step of a Markov head by kernels: the previous token's row of W1 times W2, added to logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxspec.config import Ops
from jaxspec.layers.log_once import log_once
from jaxspec.layers.params import AnyWeight, Weight
from pallas_kernels import markov_head
from pallas_kernels.markov_head import Draw

__all__ = ["Draw", "MarkovStep", "markov_step"]


@dataclass(frozen=True)
class MarkovStep:
    """A step that kernels run: its inputs, and which implementation.

    Its logits have the bits of vocab_logits and a sum.
    """

    inputs: markov_head.Inputs
    implementation: str

    def largest(self) -> jax.Array:
        """Return the column int32 [batch] of the step's largest logit."""
        return markov_head.markov_argmax(self.inputs, implementation=self.implementation)

    def drawn(self, draw: Draw) -> markov_head.Step:
        """Return the base logits of all steps with this step's, and the column drawn from these."""
        inputs = replace(self.inputs, draw=draw)
        return markov_head.markov_draw(inputs, implementation=self.implementation)


def markov_step(
    base: jax.Array,
    step: jax.Array | int,
    token: jax.Array,
    table: jax.Array,
    weight: AnyWeight,
    ops: Ops,
) -> MarkovStep | None:
    """Return the step that adds table[token] @ weight to base[:, step].

    None where no kernel does it: with the reference, for weights that are quantised or transposed,
    and for shapes that the kernels refuse, which the log names once.

    base: float32 [batch, steps, vocab], token: int32 [batch], table: W1 [tokens, rank],
    weight: W2 [rank, vocab]
    """
    if ops.matmul == "reference" or not isinstance(weight, Weight) or weight.transposed:
        return None
    inputs = markov_head.Inputs(
        base=base,
        step=jnp.asarray(step, jnp.int32),
        token=token,
        table=table,
        weight=weight.values,
    )
    if reason := markov_head.unsupported(inputs):
        log_once(f"a Markov head's step runs by separate ops: the kernel {reason}")
        return None
    return MarkovStep(inputs, ops.matmul)
