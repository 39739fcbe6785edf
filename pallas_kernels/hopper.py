"""Hopper GPUs, and whether a Mosaic kernel can run: on one, compiled for one, or interpreted."""

from __future__ import annotations

import jax
from jax._src import config as jax_config

CAPABILITY = "9.0"
NUM_SMS = 132  # of an H100 and an H200
WARPS = 4  # of a warpgroup
REGISTERS = 65536  # of an SM; a block has no more
_for_another_process = False


def too_old() -> str | None:
    """Return why this jax is too old for the kernels' Mosaic, None if it is not.

    Check before importing a kernel.
    """
    if jax.__version_info__ >= (0, 11):
        return None
    return f"expected jax 0.11 or later, got {jax.__version__}"


def interpreting() -> bool:
    """Return whether plgpu.force_gpu_interpret_mode is on.

    Its interpreter does not know the instructions of programmatic dependent launch (PDL).
    """
    return jax_config.pallas_tpu_interpret_mode_context_manager.value is not None


def lower_for_another_process() -> None:
    """Let this process lower kernels that it does not run."""
    global _for_another_process
    _for_another_process = True


def missing() -> str | None:
    """Return which device is here instead of a Hopper GPU, None with one or in the interpreter."""
    if interpreting() or _for_another_process:
        return None
    # Ahead-of-time compilation for a device that is not here.
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:
        hopper = any(name in described.device_kind for name in ("H100", "H200", "GH200"))
        return None if hopper else f"expected a Hopper GPU, got {described.device_kind}"
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"expected an NVIDIA GPU, got {device.platform}"
    capability = getattr(device, "compute_capability", "unknown")
    if capability == CAPABILITY:
        return None
    return f"expected compute capability {CAPABILITY} (Hopper), got {capability}"
