"""A greedy draft of a Markov head: W1's row of the token before, W2, and the largest logit."""

from __future__ import annotations

import jax

from pallas_kernels import hopper
from pallas_kernels.implementations import IMPLEMENTATIONS, runs_kernel
from pallas_kernels.markov_argmax import reference
from pallas_kernels.markov_argmax.inputs import Inputs

__all__ = ["IMPLEMENTATIONS", "Inputs", "markov_argmax", "unsupported"]


def markov_argmax(inputs: Inputs, *, implementation: str = "reference") -> jax.Array:
    """Return argmax(base[:, step] + table[token] @ weight), int32 [rows]; of equal ones the first.

    Logits are float32, and NaN counts as -inf. The kernel's product has the bits of the matmul op's
    kernel.

    Raises ValueError for shapes that do not fit together and for inputs that the implementation
    does not support.
    """
    inputs.check()

    def reason() -> str | None:
        return hopper.missing() or unsupported(inputs)

    if not runs_kernel("markov_argmax", implementation, reason):
        return reference.markov_argmax(inputs)
    from pallas_kernels.markov_argmax import mosaic_gpu

    return mosaic_gpu.markov_argmax(inputs)


def unsupported(inputs: Inputs) -> str | None:
    """Return why the Mosaic kernel cannot take these inputs, None if it can."""
    if old := hopper.too_old():
        return old
    from pallas_kernels.markov_argmax import mosaic_gpu

    return mosaic_gpu.unsupported(inputs)
