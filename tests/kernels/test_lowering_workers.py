"""Other processes lower kernels as this one does; what they cannot lower stays here."""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import lowered_once, lowering_workers
from pallas_kernels.lowered_once import Call, Exports
from pallas_kernels.lowering_workers import Workers, lowering_elsewhere
from tests.kernels.interpreter import needs_mosaic

ROOT = Path(__file__).parents[2]
LIMIT = "jax_traceback_in_locations_limit"  # of the text that names callers
# The first lowering of a process: later ones differ in a counter.
OWN = """
import hashlib
from tests.kernels.test_lowering_workers import norm
print(hashlib.sha256(norm(1024).export().serialize()).hexdigest())
"""


def norm(width: int) -> Call:
    """The call of a kernel."""
    from pallas_kernels.rms_norm import mosaic_gpu

    arguments = {
        "x": jax.ShapeDtypeStruct((4, width), jnp.bfloat16),
        "weight": jax.ShapeDtypeStruct((width,), jnp.bfloat16),
    }
    return call_of(mosaic_gpu._rms_norm, arguments, eps=1e-5, pdl=True)


def call_of(function: Any, arguments: Any, **settings: Any) -> Call:
    shapes, structure = jax.tree.flatten(arguments)
    traced = tuple((name, jax.config.values[name]) for name in lowered_once.TRACE_SETTINGS)
    return Call(inspect.unwrap(function), structure, tuple(shapes), (*settings.items(),), traced)


@pytest.fixture
def workers() -> Iterator[Workers]:
    found = Workers(1)
    yield found
    found.end()
    assert all(process.poll() is not None for process in found._processes)


@needs_mosaic
def test_a_worker_makes_the_same_bytes(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT.upper(), "0")
    made = workers.lower(norm(1024))
    assert made is not None
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    own = subprocess.run(
        [sys.executable, "-c", OWN], capture_output=True, text=True, check=True, env=environment
    )
    assert hashlib.sha256(made.serialize()).hexdigest() == own.stdout.strip()
    again = workers.lower(norm(2048))
    assert again is not None and again.in_avals[-1].shape == (4, 2048)


def doubled(x: jax.Array) -> jax.Array:
    return x * 2


def test_threads_embed_what_workers_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A function that no other process can find is lowered here."""
    monkeypatch.setattr(lowered_once, "PLATFORM", "cpu")
    monkeypatch.setattr(lowered_once, "_EXPORTS", exports := Exports())
    monkeypatch.setattr(lowering_workers, "LEAST_CORES", 1)
    monkeypatch.setattr(lowering_workers, "_num_cores", lambda: 3)
    here: list[str] = []
    own = Call.export
    monkeypatch.setattr(Call, "export", lambda c: here.append(c.function.__name__) or own(c))

    def local(x: jax.Array) -> jax.Array:
        return x + 1

    functions = [lowered_once.lowered_once()(f) for f in (doubled, local)]
    monkeypatch.setattr(sys.modules[__name__], "doubled", functions[0])
    x = np.arange(3.0, dtype=np.float32)
    with lowering_elsewhere(), ThreadPoolExecutor(2) as pool:
        assert exports.lower is not None
        found = list(pool.map(lambda f: np.asarray(jax.jit(f)(x)), functions))
    assert exports.lower is None
    np.testing.assert_array_equal(found, [x * 2, x + 1])
    assert here == ["local"]
    assert not caplog.records


def test_a_dead_worker_costs_a_warning(
    workers: Workers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = call_of(doubled, {"x": jax.ShapeDtypeStruct((2,), jnp.float32)})
    made = workers.lower(call)
    assert made is not None and made.platforms == (lowered_once.PLATFORM,)
    workers._processes[0].kill()
    workers._processes[0].wait()
    with caplog.at_level(logging.WARNING):
        assert workers.lower(call) is None
        assert workers.lower(call) is None
    assert len(caplog.records) == 1


def test_a_worker_of_other_sources_refuses(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowered_once, "VERSIONS", "of another tree")
    call = call_of(doubled, {"x": jax.ShapeDtypeStruct((2,), jnp.float32)})
    assert workers.lower(call) is None
    assert workers._processes[0].poll() is None


def test_few_cores_start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering_workers, "_num_cores", lambda: lowering_workers.LEAST_CORES - 1)
    with lowering_elsewhere():
        assert lowered_once._EXPORTS.lower is None
