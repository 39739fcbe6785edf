"""Attention over a paged cache of latents, each of which is key and value of all heads."""

from __future__ import annotations

from functools import cache

import jax

from pallas_kernels import hopper
from pallas_kernels.implementations import IMPLEMENTATIONS, runs_kernel
from pallas_kernels.latent_attention import reference
from pallas_kernels.latent_attention.inputs import Inputs, Latents
from pallas_kernels.lowered_once import lowered_once

__all__ = ["IMPLEMENTATIONS", "Inputs", "Latents", "latent_attention", "unsupported"]


def latent_attention(inputs: Inputs, *, implementation: str = "reference") -> jax.Array:
    """Run causal attention over cached latents (DeepSeek-V2, 2405.04434, section 2.1, absorbed).

    Returns [batch, rows, num_heads, kv_lora_rank] in q's dtype. Raises ValueError for shapes that
    do not fit together and for inputs that the implementation does not support.
    """
    inputs.check()

    def reason() -> str | None:
        return unsupported(inputs.latents)

    if not runs_kernel("latent_attention", implementation, reason):
        return reference.latent_attention(inputs)
    from pallas_kernels.latent_attention import mosaic_gpu

    return (mosaic_gpu.latent_attention if hopper.interpreting() else _compiled())(inputs)


def unsupported(latents: Latents) -> str | None:
    """Return why the Mosaic kernel cannot run on this process's device, None if it can."""
    if old := hopper.too_old():
        return old
    from pallas_kernels.latent_attention import mosaic_gpu

    return mosaic_gpu.unsupported(latents)


@cache
def _compiled() -> jax.stages.Wrapped:
    """Compile the kernel as a function of its own, so that layers and programs share one."""
    from pallas_kernels.latent_attention import mosaic_gpu

    return lowered_once()(mosaic_gpu.latent_attention)
