"""Steps of a Markov head: W1's row of the token before times W2, added to a draft's logits.

A step takes the largest of the sums, or draws a token from them and keeps them.
"""

from __future__ import annotations

from dataclasses import replace

import jax

from pallas_kernels import hopper
from pallas_kernels.implementations import IMPLEMENTATIONS, runs_kernel
from pallas_kernels.markov_head import reference
from pallas_kernels.markov_head.inputs import Draw, Inputs, Step

__all__ = [
    "IMPLEMENTATIONS",
    "Draw",
    "Inputs",
    "Step",
    "markov_argmax",
    "markov_draw",
    "unsupported",
]


def markov_argmax(inputs: Inputs, *, implementation: str = "reference") -> jax.Array:
    """Return argmax(base[:, step] + table[token] @ weight), int32 [rows]; of equal ones the first.

    Logits are float32, and NaN counts as -inf. The kernel's product has the bits of the matmul op's
    kernel, and no logit is written.

    Raises ValueError for shapes that do not fit together and for inputs that the implementation
    does not support.
    """
    if not _runs_kernel("markov_argmax", inputs, implementation):
        return reference.markov_argmax(inputs)
    from pallas_kernels.markov_head import mosaic_gpu

    return mosaic_gpu.markov_argmax(replace(inputs, draw=None))


def markov_draw(inputs: Inputs, *, implementation: str = "reference") -> Step:
    """Return base with table[token] @ weight added to base[:, step], and a token drawn from there.

    The token is the one that gumbel_sample draws from the new base[:, step], at offset `step`. The
    kernel changes base in place where it is not
    read again. Its product has the bits of the matmul op's kernel, and its noise those of
    gumbel_sample's.

    Raises ValueError as markov_argmax does, and for inputs without a draw.
    """
    if inputs.draw is None:
        raise ValueError("draw: expected what the token is drawn with, got None")
    if not _runs_kernel("markov_draw", inputs, implementation):
        return reference.markov_draw(inputs)
    from pallas_kernels.markov_head import mosaic_gpu

    return Step(*mosaic_gpu.markov_draw(inputs))


def unsupported(inputs: Inputs) -> str | None:
    """Return why the Mosaic kernels cannot take these inputs, None if they can."""
    if old := hopper.too_old():
        return old
    from pallas_kernels.markov_head import mosaic_gpu

    return mosaic_gpu.unsupported(inputs)


def _runs_kernel(op: str, inputs: Inputs, implementation: str) -> bool:
    inputs.check()
    return runs_kernel(op, implementation, lambda: hopper.missing() or unsupported(inputs))
