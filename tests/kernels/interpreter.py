"""How the tests call the public ops, which implementations they try, and where kernels run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import pytest

needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason=f"the kernel needs jax 0.11 or later, got {jax.__version__}",
)


def by_implementation(names: Iterable[str]) -> pytest.MarkDecorator:
    """Return the decorator that runs a test with each of an op's implementations."""
    return pytest.mark.parametrize(
        "implementation",
        [pytest.param(name, marks=needs_mosaic if name == "mosaic_gpu" else ()) for name in names],
    )


def call(op: Callable[..., Any], inputs: Any, changes: dict[str, Any]) -> Any:
    """Run an op with some of its inputs changed; changes["implementation"] is the op's own."""
    options = {name: x for name, x in changes.items() if name == "implementation"}
    fields = {name: x for name, x in changes.items() if name not in options}
    return op(dataclasses.replace(inputs, **fields), **options)


@contextlib.contextmanager
def interpreted(memory: str = "nan", *, races: bool = False) -> Iterator[None]:
    """Run kernels in Mosaic's GPU interpreter on a CPU, whose state is reset after an error.

    memory: what memory holds that no kernel has written
    races:  fail if threads or copies of the last kernel race for memory
    """
    if jax.default_backend() == "gpu":
        yield
        return
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import (
        reset_gpu_interpret_mode_state,
    )
    from jax.experimental.pallas import mosaic_gpu as plgpu

    gpu: Any = plgpu  # jax 0.10 has no interpreter
    try:
        params = gpu.InterpretGPUParams(uninitialized_memory=memory, detect_races=races)
        with gpu.force_gpu_interpret_mode(params):
            yield
        assert not (races and gpu_callbacks.get_races().races_found)
    except BaseException:
        reset_gpu_interpret_mode_state()
        raise
