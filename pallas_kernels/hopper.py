"""Where a Mosaic kernel runs: on a Hopper GPU, for one that is compiled for, or in the interpreter."""

from __future__ import annotations

import jax
from jax._src import config as jax_config

CAPABILITY = "9.0"


def too_old() -> str | None:
    """Which jax there is instead of one whose Mosaic the kernels are written for, None if there is one. Ask before importing a kernel."""
    return (
        f"expected jax 0.11 or later, got {jax.__version__}"
        if jax.__version_info__ < (0, 11)
        else None
    )


def interpreting() -> bool:
    """Whether plgpu.force_gpu_interpret_mode is on; its interpreter does not know the PDL instructions."""
    return jax_config.pallas_tpu_interpret_mode_context_manager.value is not None


def missing() -> str | None:
    """Which device there is instead of a Hopper GPU, None if there is one, or the interpreter is on."""
    if interpreting():
        return None
    described = (
        jax.sharding.get_abstract_mesh().abstract_device
    )  # ahead-of-time compilation for a device that is not here
    if described is not None:
        hopper = any(name in described.device_kind for name in ("H100", "H200", "GH200"))
        return None if hopper else f"expected a Hopper GPU, got {described.device_kind}"
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"expected an NVIDIA GPU, got {device.platform}"
    capability = getattr(device, "compute_capability", "unknown")
    return (
        None
        if capability == CAPABILITY
        else f"expected compute capability {CAPABILITY} (Hopper), got {capability}"
    )
