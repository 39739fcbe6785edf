"""Rejection sampling: accept a prefix of each request's K drafts against the target's logits.

The noise is an input, as numbers or as the stream that they are drawn from, so that two
implementations can be compared exactly and the caller owns the random streams. The noise of
drafting, accepting and recovering must be independent (Streams of the same keys and positions: of
different numbers). If draft and recovered token share it, the output is not the target's
distribution.
"""

from __future__ import annotations

import jax

from pallas_kernels import hopper
from pallas_kernels.implementations import IMPLEMENTATIONS, runs_kernel
from pallas_kernels.rejection_sampling import reference
from pallas_kernels.rejection_sampling.inputs import RULES, Inputs, Rule
from pallas_kernels.types import Shaped

__all__ = ["IMPLEMENTATIONS", "RULES", "Inputs", "Rule", "rejection_sample", "unsupported"]


def rejection_sample(
    inputs: Inputs, *, implementation: str = "reference"
) -> tuple[jax.Array, jax.Array]:
    """Return accepted drafts, then one recovered or bonus token, for every request.

    Rules, over p = softmax(target_logits) and q = softmax(draft_logits), both in float32:
      probabilistic  keep d while p(d) > u q(d), then draw from max(p - q, 0) (Leviathan 2211.17192,
                     Chen 2302.01318)
      block          verify prefixes jointly; never shorter on average than probabilistic
                     (Sun 2403.10444)
      synthetic      keep d with a given rate, whatever p and q are; for benchmarks only: the output
                     is not the target's distribution

    After K accepted drafts a bonus token follows from the plain target. A draft that q cannot have
    drawn (-1, an id out of range, q(d) = 0) ends verification: it is rejected and the plain target
    is sampled in its place. A greedy row keeps drafts that equal the target's argmax, then emits
    the argmax (synthetic: keeps by rate, then emits the argmax). NaN logits count as -inf. Rows
    are independent.

    Returns output_tokens int32 [B, K+1], padded with -1, and num_sampled int32 [B] (accepted + 1;
    0 where inactive). Raises ValueError for inputs that do not fit together, and for those that
    the implementation does not support.
    """
    inputs.check()

    def reason() -> str | None:
        return unsupported(inputs.target_logits, inputs.draft_logits)

    if not runs_kernel("rejection_sampling", implementation, reason):
        return reference.rejection_sample(inputs)
    from pallas_kernels.rejection_sampling import mosaic_gpu

    return mosaic_gpu.rejection_sample(inputs)


def unsupported(target_logits: Shaped, draft_logits: Shaped | None = None) -> str | None:
    """Return why the Mosaic kernels cannot take these logits, None if they can.

    Of rows that are cut over devices: the own piece of each.
    """
    if old := hopper.too_old():
        return old
    from pallas_kernels.rejection_sampling import mosaic_gpu

    return mosaic_gpu.unsupported(target_logits, draft_logits)
