"""Kernels are lowered once for each shape: for all programs, threads, and later processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractMesh

from pallas_kernels import lowered_once as module
from pallas_kernels.lowered_once import Call, Exports, lowered_once
from tests.kernels.interpreter import needs_mosaic
from tests.support.compilations import COMPILED
from tests.support.devices import run_on_devices

X = jnp.arange(6.0).reshape(2, 3)


@pytest.fixture(autouse=True)
def exports(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exports]:
    """Exports of a new process, for the CPU that runs them here."""
    monkeypatch.setattr(module, "PLATFORM", "cpu")
    found = Exports()
    monkeypatch.setattr(module, "_EXPORTS", found)
    yield found


def scaled(lowerings: list[str]) -> Callable[..., Any]:
    """A function that notes each time it is lowered."""

    @lowered_once(static_argnames=("factor", "name"))
    def scale(x: jax.Array, factor: int = 2, *, shift: Any = None, name: Any = "") -> Any:
        lowerings.append(f"{x.shape} {x.dtype} {factor}")
        return x * factor if shift is None else (x * factor + shift["by"], None)

    return scale


def test_programs_layers_and_threads_share_one_lowering() -> None:
    lowerings: list[str] = []
    scale = scaled(lowerings)
    programs = [
        jax.jit(lambda x, n=n: sum((scale(x + i) for i in range(3)), jnp.float32(n)))
        for n in range(8)
    ]
    barrier = threading.Barrier(8)

    def run(program: Any) -> np.ndarray:
        barrier.wait(timeout=60)
        return np.asarray(program(X))

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(run, programs))
    for n, result in enumerate(results):
        np.testing.assert_array_equal(result, 6 * np.asarray(X) + 6 + n)
    assert lowerings == ["(2, 3) float32 2"]


def test_threads_that_want_one_export_wait_for_the_first(exports: Exports) -> None:
    lowerings: list[int] = []

    def double(x: jax.Array) -> jax.Array:
        lowerings.append(threading.get_ident())
        time.sleep(0.1)
        return x * 2

    call = Call(
        double, jax.tree.structure({"x": 0}), (jax.ShapeDtypeStruct(X.shape, X.dtype),), (), ()
    )
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: exports.get(call), range(8)))
    assert len(lowerings) == 1 and all(each is found[0] for each in found)


def test_each_kind_of_arguments_has_its_own() -> None:
    lowerings: list[str] = []
    scale = scaled(lowerings)
    np.testing.assert_array_equal(scale(X, 3), 3 * X)  # positional, named and defaults
    np.testing.assert_array_equal(scale(X, factor=3), 3 * X)
    np.testing.assert_array_equal(scale(X), 2 * X)
    assert scale(X.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert scale(X[:1]).shape == (1, 3)
    shifted, nothing = scale(X, shift={"by": X})
    np.testing.assert_array_equal(shifted, 3 * X)
    assert nothing is None
    # A Python number takes the dtype of what it is combined with.
    assert scale(X.astype(jnp.bfloat16), shift={"by": 1.0})[0].dtype == jnp.bfloat16
    assert len(lowerings) == 6


def test_a_later_process_takes_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowerings: list[str] = []

    def process() -> None:
        """Run as a new process does."""
        jax.clear_caches()
        monkeypatch.setattr(module, "_EXPORTS", Exports())
        module.keep_in(tmp_path / "kernels")
        scale = scaled(lowerings)
        np.testing.assert_array_equal(scale(X), 2 * X)
        np.testing.assert_array_equal(scale(X[:1]), 2 * X[:1])
        np.testing.assert_array_equal(scale(X, 5, shift={"by": X})[0], 6 * X)

    process()
    assert len(lowerings) == 3
    kept = sorted((tmp_path / "kernels").iterdir())
    assert len(kept) == 3 and all("scale" in path.name for path in kept)
    process()
    assert len(lowerings) == 3

    monkeypatch.setattr(module, "VERSIONS", "another JAX")
    process()
    assert len(lowerings) == 6


@pytest.mark.parametrize("content", [b"", b"no export", None], ids=["empty", "foreign", "cut"])
def test_a_broken_file_is_made_again(
    tmp_path: Path, exports: Exports, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    lowerings: list[str] = []
    module.keep_in(tmp_path)
    scaled(lowerings)(X)
    [path] = tmp_path.iterdir()
    good = path.read_bytes()
    path.write_bytes(good[: len(good) // 2] if content is None else content)
    exports._found.clear()
    np.testing.assert_array_equal(scaled(lowerings)(X), 2 * X)
    assert len(lowerings) == 2 and "it is lowered anew" in caplog.text
    assert path.read_bytes() == good


def test_a_folder_that_cannot_be_written_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    module.keep_in(tmp_path / "file" / "kernels")
    scale = scaled([])
    np.testing.assert_array_equal(scale(X), 2 * X)
    np.testing.assert_array_equal(scale(X[:1]), 2 * X[:1])
    assert caplog.text.count("are not kept") == 1


def test_an_export_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    module.keep_in(tmp_path)
    np.testing.assert_array_equal(scaled([])(X), 2 * X)
    assert list(tmp_path.iterdir()) == [] and "No space left" in caplog.text


def test_settings_of_jax_have_their_own(tmp_path: Path) -> None:
    lowerings: list[str] = []
    module.keep_in(tmp_path)
    scale = scaled(lowerings)
    for precision in ("highest", "bfloat16", "highest"):
        with jax.default_matmul_precision(precision):
            scale(X)
    assert len(lowerings) == len(list(tmp_path.iterdir())) == 2


def test_a_setting_whose_text_differs_by_process_is_not_kept(tmp_path: Path) -> None:
    module.keep_in(tmp_path)
    np.testing.assert_array_equal(scaled([])(X, name=object()), 2 * X)
    assert list(tmp_path.iterdir()) == []


def test_several_devices_embed_the_export_of_one() -> None:
    """A function that exchanges over a mesh axis is traced itself."""
    assert run_on_devices(2, "tests.kernels.lowered_on_devices").split() == ["1", "1", "True"]


@needs_mosaic
def test_a_kernel_is_lowered_for_a_gpu_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from pallas_kernels.rms_norm import mosaic_gpu

    monkeypatch.setattr(module, "PLATFORM", "cuda")
    lowered, make = [], Call.export
    monkeypatch.setattr(Call, "export", lambda call: lowered.append(call) or make(call))
    shapes = (
        jax.ShapeDtypeStruct((4, 1024), jnp.bfloat16),
        jax.ShapeDtypeStruct((1024,), jnp.bfloat16),
    )

    def text(function: Callable[..., Any]) -> str:
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()

    norm = partial(mosaic_gpu._rms_norm, eps=1e-5, pdl=True)
    found = [text(norm), text(lambda x, w: norm(norm(x, w), w))]
    assert len(lowered) == 1
    assert [each.count("stablehlo.custom_call @mosaic_gpu_v2") for each in found] == [1, 1]


@lowered_once()
def tripled(x: jax.Array) -> jax.Array:
    return x * 3


def test_a_new_kernel_compiles_beside_the_trace(
    exports: Exports, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And one from the folder does not: its programs are kept too."""
    monkeypatch.setattr(module, "_may_compile_early", lambda: True)
    found: list[str] = []

    def listen(event: str, _seconds: float, **_: object) -> None:
        if event == COMPILED:
            found.append(threading.current_thread().name.split("_")[0])

    exports.folder = tmp_path
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for _ in range(2):
            jax.jit(tripled).lower(X)
            exports._compilers.shutdown()
            monkeypatch.setattr(module, "_EXPORTS", exports := Exports())
            exports.folder = tmp_path
            jax.clear_caches()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert found == ["jaxspec-kernels"]


def test_kernels_of_several_devices_compile_beside_the_trace_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with jax.sharding.use_abstract_mesh(AbstractMesh((2,), ("x",))):
        assert not module._may_compile_early()  # on a CPU
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        assert module._may_compile_early()


def test_kernels_that_wait_to_be_compiled_are_dropped(
    exports: Exports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_may_compile_early", lambda: True)
    go, ran = threading.Event(), []
    monkeypatch.setattr(module, "_compile", lambda *_: ran.append(go.wait(60)))
    structure = jax.tree.structure({"x": 0})
    for n in range(module.COMPILERS + 3):
        exports.get(Call(lambda x: x, structure, (jax.ShapeDtypeStruct((n,), X.dtype),), (), ()))
    module.cancel_compilations()
    go.set()
    exports._compilers.shutdown()
    assert ran == [True] * module.COMPILERS
    # A process that ends takes no more; the export is kept all the same.
    exports.get(Call(lambda x: x, structure, (jax.typeof(X),), (), ()))


def test_what_does_not_compile_alone_is_left_to_the_program(
    exports: Exports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_may_compile_early", lambda: True)
    monkeypatch.setattr(export.Exported, "call", property(lambda _: 1 / 0))
    exports.get(Call(lambda x: x, jax.tree.structure({"x": 0}), (jax.typeof(X),), (), ()))
    exports._compilers.shutdown()
