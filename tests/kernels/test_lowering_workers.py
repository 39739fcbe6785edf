"""Other processes lower kernels as this one would, and this one does what they cannot."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import lowered_once as module
from pallas_kernels import lowering_workers as workers
from pallas_kernels.lowered_once import Call, Exports, lowered_once
from pallas_kernels.lowering_workers import lowering_workers
from tests.kernels.interpreter import needs_mosaic

X = jnp.arange(6.0).reshape(2, 3)


@lowered_once(static_argnames="factor")
def scale(x: jax.Array, factor: int = 2) -> jax.Array:
    if factor == 7:
        print("not a reply", flush=True)
    if factor == 17 and os.environ["CUDA_VISIBLE_DEVICES"] == "":
        raise ValueError("not in a worker")
    return x @ x.T * factor


@pytest.fixture(autouse=True)
def made_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """Calls that a new process lowers itself, for the CPU that runs them here."""
    found: list[Call] = []
    make = Call.export
    monkeypatch.setattr(Call, "export", lambda call: found.append(call) or make(call))
    monkeypatch.setattr(module, "PLATFORM", "cpu")
    monkeypatch.setattr(module, "_EXPORTS", Exports())
    jax.clear_caches()
    yield found


def test_threads_share_processes_and_results_are_kept(
    tmp_path: Path, made_here: list[Call]
) -> None:
    module.keep_in(tmp_path)
    with lowering_workers(2), ThreadPoolExecutor(4) as pool:
        found = list(pool.map(partial(scale, X), (2, 3, 5, 7)))
    for factor, result in zip((2, 3, 5, 7), found, strict=True):
        np.testing.assert_array_equal(result, np.asarray(X @ X.T) * factor)
    assert made_here == [] and len(list(tmp_path.iterdir())) == 4


def test_processes_follow_the_settings_of_jax() -> None:
    with lowering_workers(1):
        for precision in ("highest", "bfloat16"):
            with jax.default_matmul_precision(precision):
                scale(X)
    for call, made in module._EXPORTS._found.items():
        with jax.default_matmul_precision(str(dict(call.traced)["jax_default_matmul_precision"])):
            assert made.mlir_module() == call.export().mlir_module()
    assert len({made.mlir_module() for made in module._EXPORTS._found.values()}) == 2


def test_what_fails_in_a_process_is_lowered_here(
    made_here: list[Call], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with lowering_workers(1):
        np.testing.assert_array_equal(scale(X, 17), np.asarray(X @ X.T) * 17)
        np.testing.assert_array_equal(scale(X, 19), np.asarray(X @ X.T) * 19)
    assert len(made_here) == 1 and caplog.text == ""


def test_threads_that_wait_go_on_when_the_context_closes(made_here: list[Call]) -> None:
    """The process is still importing JAX then."""
    with ThreadPoolExecutor(3) as pool:
        with lowering_workers(1):
            found = [pool.submit(scale, X, factor) for factor in (23, 29, 31)]
            time.sleep(0.3)
        for factor, future in zip((23, 29, 31), found, strict=True):
            np.testing.assert_array_equal(future.result(60), np.asarray(X @ X.T) * factor)
    assert len(made_here) == 3


def test_no_process_starts_for_what_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module.keep_in(tmp_path)
    scale(X)
    jax.clear_caches()
    monkeypatch.setattr(module, "_EXPORTS", Exports())
    module.keep_in(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", None)
    with lowering_workers(2):
        scale(X)


def test_what_no_other_process_finds_is_lowered_here(
    made_here: list[Call], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @lowered_once(static_argnames="name")
    def inner(x: jax.Array, name: Any = None) -> jax.Array:
        return x + 1

    monkeypatch.setattr(subprocess, "Popen", None)
    with lowering_workers(2):
        inner(X)
    assert len(made_here) == 1 and caplog.text == ""
    assert workers.Function.of(scale.__wrapped__.__wrapped__) == workers.Function(
        scale.__module__, "scale", 2
    )
    monkeypatch.setattr(sys.modules[scale.__module__], "scale", inner)
    assert workers.Function.of(scale.__wrapped__.__wrapped__) is None


@pytest.mark.parametrize("failure", ["versions", "killed", "no program"])
def test_a_process_that_ends_costs_one_warning(
    failure: str,
    made_here: list[Call],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if failure == "versions":
        monkeypatch.setattr(module, "VERSIONS", "other sources")
    if failure == "no program":
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
    if failure == "killed":
        ask = workers._ask

        def kill_first(worker: subprocess.Popen[bytes], request: bytes) -> Any:
            worker.send_signal(signal.SIGKILL)
            worker.wait()
            return ask(worker, request)

        monkeypatch.setattr(workers, "_ask", kill_first)
    with lowering_workers(1):
        for factor in (2, 3):
            np.testing.assert_array_equal(scale(X, factor), np.asarray(X @ X.T) * factor)
    assert len(made_here) == 2 and caplog.text.count("process that lowers") == 1


def test_processes_end_with_the_context_and_with_their_parent(tmp_path: Path) -> None:
    program = (
        "import os, sys, signal, jax, jax.numpy as jnp\n"
        "from pallas_kernels import lowered_once, lowering_workers as w\n"
        "from tests.kernels import test_lowering_workers as t\n"
        "lowered_once.PLATFORM = 'cpu'\n"
        "with w.lowering_workers(1):\n"
        "    t.scale(t.X)\n"
        "    workers = lowered_once._EXPORTS.aside.__self__\n"
        "    print(workers._all[0].pid, flush=True)\n"
        "    if sys.argv[1] == 'die': os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    for how in ("die", "close"):
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.run(
            [sys.executable, "-c", program, how], env=environment, capture_output=True, timeout=120
        )
        assert run.returncode == (-signal.SIGKILL if how == "die" else 0), run.stderr
        # Its pipes are this process's too: `run` returns when the last of them is closed.
        stat = Path(f"/proc/{int(run.stdout)}/stat")
        for _ in range(100):
            if not stat.exists() or stat.read_text().split()[2] == "Z":
                break
            signal.sigtimedwait([], 0.1)
        assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_few_cores_have_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for cores in (1, 3, 4, 8, 64):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, n=cores: set(range(n)))
        found.append(workers._most_workers())
    assert found == [0, 0, 2, 6, 12]


def text_of(exported: bytes) -> str:
    """A serialised export's program. Before jax 0.12, the name of a dump holds the kernel's number
    in its process, and the kernel's hash covers it."""
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    with mlir.make_ir_context():
        program = ir.Module.parse(
            jax.export.deserialize(bytearray(exported)).mlir_module_serialized
        )
        text = str(program.operation.get_asm(enable_debug_info=True))
    text, named = re.subn(r"(dump_basename\\00\w+?_)\d+(?=\\00)", r"\1N", text)
    text, hashed = re.subn(r'(kernel_hash"> = #vhlo.string_v1<)".*?"(?=>)', r"\1HASH", text)
    assert hashed > 0 and named == (hashed if jax.__version_info__ < (0, 12) else 0)
    return text


def trace_kernels() -> None:
    """Trace several kernels, which exports each of them."""
    from pallas_kernels.attention import _compiled, mosaic_gpu
    from pallas_kernels.attention import shapes as attention_shapes
    from pallas_kernels.markov_head import mosaic_gpu as markov_kernel
    from pallas_kernels.markov_head import shapes as markov_shapes
    from pallas_kernels.matmul import mosaic_gpu as matmul_kernel
    from pallas_kernels.matmul import shapes as matmul_shapes
    from pallas_kernels.rejection_sampling import mosaic_gpu as rejection_kernel
    from pallas_kernels.rejection_sampling import shapes as rejection_shapes
    from pallas_kernels.rms_norm import mosaic_gpu as norm_kernel

    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    norm = partial(norm_kernel._rms_norm, eps=1e-5, pdl=True)
    jax.jit(norm).trace(shape((3, 1024)), shape((1024,)))
    product = next(iter(matmul_shapes.SHAPES.values()))
    inputs = jax.eval_shape(lambda: matmul_shapes.make_inputs(product, 0))
    jax.jit(matmul_kernel.matmul).trace(inputs)
    step = markov_shapes.SHAPES["smollm2 rows 1"]
    jax.jit(markov_kernel.markov_draw).trace(
        jax.eval_shape(lambda: markov_shapes.make_inputs(step, 0))
    )
    keys = attention_shapes.SHAPES["8b, batch 1, context 400, Q 4"]
    jax.jit(_compiled(mosaic_gpu.paged_attention)).trace(attention_shapes.make_inputs(keys, 0))
    rows = rejection_shapes.SHAPES["llama3-8b-b1"]
    jax.jit(rejection_kernel.rejection_sample).trace(rejection_shapes.make_inputs(rows, 0))


@needs_mosaic
def test_processes_lower_kernels_as_this_one(
    made_here: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PLATFORM", "cuda")
    with lowering_workers(1):
        trace_kernels()
    assert made_here == []
    found = module._EXPORTS._found
    assert len(found) == 5
    for call, made in found.items():
        own = call.export()
        assert text_of(bytes(made.serialize())) == text_of(bytes(own.serialize()))
        assert (made.in_tree, made.out_tree) == (own.in_tree, own.out_tree)
        assert (made.in_avals, made.out_avals) == (own.in_avals, own.out_avals)
