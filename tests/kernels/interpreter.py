"""Where the kernels of a test run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Mosaic's GPU interpreter on the CPU, where memory that nobody wrote holds NaN; its state is reset after an error."""
    if jax.default_backend() == "gpu":
        yield
        return
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import (
        reset_gpu_interpret_mode_state,
    )
    from jax.experimental.pallas import mosaic_gpu as plgpu

    try:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(uninitialized_memory="nan")):
            yield
    except BaseException:
        reset_gpu_interpret_mode_state()
        raise
