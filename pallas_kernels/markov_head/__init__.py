"""Steps of a Markov head: W1's row of the token before times W2, added to a draft's logits."""

from __future__ import annotations

import jax

from pallas_kernels import hopper
from pallas_kernels.implementations import IMPLEMENTATIONS, runs_kernel
from pallas_kernels.markov_head import reference
from pallas_kernels.markov_head.inputs import Inputs

__all__ = ["IMPLEMENTATIONS", "Inputs", "markov_argmax", "markov_logits", "unsupported"]


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

    return mosaic_gpu.markov_argmax(inputs)


def markov_logits(inputs: Inputs, *, implementation: str = "reference") -> jax.Array:
    """Return base with table[token] @ weight added to its column `step`.

    The kernel changes the column in place where base is not read again, and its product has the
    bits of the matmul op's kernel.

    Raises ValueError as markov_argmax does.
    """
    if not _runs_kernel("markov_logits", inputs, implementation):
        return reference.markov_logits(inputs)
    from pallas_kernels.markov_head import mosaic_gpu

    return mosaic_gpu.markov_logits(inputs)


def unsupported(inputs: Inputs) -> str | None:
    """Return why the Mosaic kernels cannot take these inputs, None if they can."""
    if old := hopper.too_old():
        return old
    from pallas_kernels.markov_head import mosaic_gpu

    return mosaic_gpu.unsupported(inputs)


def _runs_kernel(op: str, inputs: Inputs, implementation: str) -> bool:
    inputs.check()
    return runs_kernel(op, implementation, lambda: hopper.missing() or unsupported(inputs))
