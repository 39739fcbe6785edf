"""NVIDIA GPUs of this machine as the driver names them, whether JAX computes on them or not."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import ModuleType


@contextlib.contextmanager
def _management_library() -> Iterator[ModuleType | None]:
    """Yield nvidia-ml-py's module; None without a driver."""
    try:
        import pynvml
    except ImportError:  # a source tree on PYTHONPATH, without the package's requirements
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def gpu_names() -> list[str]:
    """Return the names of this machine's GPUs; none without a driver.

    An empty CUDA_VISIBLE_DEVICES hides them all.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return []
    with _management_library() as nvml:
        if nvml is None:
            return []
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        return [nvml.nvmlDeviceGetName(handle) for handle in handles]


def first_gpu() -> str | None:
    """Return a GPU's name, driver, highest clocks and power limit; None without a driver."""
    with _management_library() as nvml:
        if nvml is None or nvml.nvmlDeviceGetCount() == 0:
            return None
        gpu = nvml.nvmlDeviceGetHandleByIndex(0)
        facts = [nvml.nvmlDeviceGetName(gpu), nvml.nvmlSystemGetDriverVersion()]
        with contextlib.suppress(nvml.NVMLError):  # some GPUs keep these to themselves
            for kind in (nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM):
                facts.append(f"{nvml.nvmlDeviceGetMaxClockInfo(gpu, kind)} MHz")
            facts.append(f"{nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000:.2f} W")
        return ", ".join(facts)
