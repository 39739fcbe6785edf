"""One sampled token for each row by the Gumbel-max trick: temperature, noise and argmax."""

from __future__ import annotations

import jax

from pallas_kernels import hopper
from pallas_kernels.gumbel_sample import reference
from pallas_kernels.gumbel_sample.inputs import Inputs
from pallas_kernels.implementations import IMPLEMENTATIONS, runs_kernel

__all__ = ["IMPLEMENTATIONS", "Inputs", "gumbel_sample", "unsupported"]


def gumbel_sample(inputs: Inputs, *, implementation: str = "reference") -> jax.Array:
    """Return argmax(logits / temperature + noise), int32 [rows]; of equal scores the first.

    A greedy row (temperature 0) gives argmax(logits). The noise is noise.gumbel(key, token_ids),
    and a row's token depends on the row alone. The kernel makes the same bits as the reference
    and, on an NVIDIA GPU, XLA's own logarithms and quotient; the interpreter's logarithms on a CPU
    may differ by a rounding.

    Raises ValueError for shapes that do not fit together and for inputs that the implementation
    does not support.
    """
    inputs.check()

    def reason() -> str | None:
        return hopper.missing() or unsupported(inputs.vocab)

    if not runs_kernel("gumbel_sample", implementation, reason):
        return reference.gumbel_sample(inputs)
    from pallas_kernels.gumbel_sample import mosaic_gpu

    return mosaic_gpu.gumbel_sample(inputs)


def unsupported(vocab: int) -> str | None:
    """Return why the Mosaic kernel cannot take rows of `vocab` logits, None if it can.

    vocab: tokens of a row that a device has
    """
    if old := hopper.too_old():
        return old
    from pallas_kernels.gumbel_sample import mosaic_gpu

    return mosaic_gpu.unsupported(vocab)
