"""How the tests call the public ops, and where their kernels run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax


def call(op: Callable[..., Any], inputs: Any, changes: dict[str, Any]) -> Any:
    """Run an op with some of its inputs changed; changes["implementation"] is the op's own."""
    options = {name: x for name, x in changes.items() if name == "implementation"}
    fields = {name: x for name, x in changes.items() if name not in options}
    return op(dataclasses.replace(inputs, **fields), **options)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Mosaic's GPU interpreter on the CPU, where memory that nobody wrote holds NaN; its state is
    reset after an error."""
    if jax.default_backend() == "gpu":
        yield
        return
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import (
        reset_gpu_interpret_mode_state,
    )
    from jax.experimental.pallas import mosaic_gpu as plgpu

    gpu: Any = plgpu  # jax 0.10 has no interpreter
    try:
        with gpu.force_gpu_interpret_mode(gpu.InterpretGPUParams(uninitialized_memory="nan")):
            yield
    except BaseException:
        reset_gpu_interpret_mode_state()
        raise
