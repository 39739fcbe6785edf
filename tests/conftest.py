"""What every test runs under: CPU unless asked otherwise, strict dtypes, full matmul precision, and
a compilation cache."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxspec.loading import cache_dir, compilation_cache, executables

MOST_MAPS = 20_000


def _wants_gpu(config: pytest.Config) -> bool:
    """JAXSPEC_TEST_GPU=1, or a mark expression that selects gpu tests."""
    selected = re.sub(r"\bnot\s+gpu\b", "", config.option.markexpr or "")
    return os.environ.get("JAXSPEC_TEST_GPU") == "1" or re.search(r"\bgpu\b", selected) is not None


def _share_cores() -> None:
    """Give each xdist worker its share of the cores: two workers with a thread pool as wide as the
    machine slow each other down."""
    cores, workers = (
        len(os.sched_getaffinity(0)),
        int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")),
    )
    threads = max(1, cores // workers)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # torch, numpy
        os.environ.setdefault(name, str(threads))
    # XLA's CPU client. Mosaic's interpreter (jax 0.11) holds a thread for each warpgroup that
    # waits: with too few they wait for ever, and the eight blocks of a cluster may all wait for
    # each other.
    os.environ.setdefault(
        "PJRT_NPROC", str(threads if jax.__version_info__ < (0, 11) else max(12, threads))
    )


def _compile_quickly() -> None:
    """Tests of tiny models spend their time in XLA's compiler. Without LLVM's optimisations (and,
    before jax 0.11, without the fusion emitters, a pass through MLIR for each fusion) a round is
    compiled in 1.3 s, with them in 4.7 s."""
    jax.config.update("jax_disable_most_optimizations", True)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # for the processes that tests start
    if jax.__version_info__ < (
        0,
        11,
    ):  # later versions do not know the flag, which ends the process
        os.environ["XLA_FLAGS"] = (
            f"--xla_cpu_use_fusion_emitters=false {os.environ.get('XLA_FLAGS', '')}".strip()
        )


def _compilation_cache() -> Path:
    """One folder per kind of processor: a program compiled for one may hold instructions that
    another does not have."""
    try:
        features = re.search(
            r"^(?:flags|Features)\s*:.*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
    except OSError:
        features = None
    return cache_dir() / f"compiled-tests-{zlib.crc32(features[0].encode()) if features else 0:08x}"


def pytest_configure(config: pytest.Config) -> None:
    # Traces allocate many small objects; with Python's own thresholds the collector takes a
    # twentieth of the time.
    gc.set_threshold(100_000, 20, 20)
    # Read when a backend is first used, which no test module may do while it is imported.
    _share_cores()
    if not _wants_gpu(config):
        jax.config.update("jax_platforms", "cpu")
        _compile_quickly()
    else:
        # Some tests start processes of their own on the same GPUs, and xdist has several workers.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    # Reading a program takes 5 ms, and the least that is compiled takes 20.
    compilation_cache.use(_compilation_cache())
    # Tests replace functions at run time, which no name of a program on disk would tell.
    executables.allow(False)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip(f"needs an NVIDIA GPU, and JAX runs on {jax.default_backend()} here")
    for marker in item.iter_markers("oracle"):
        missing = [
            name
            for name in ("torch", *marker.args)
            if importlib.util.find_spec(name.split(".")[0]) is None
        ]
        if missing:
            pytest.skip(
                f"oracle not installed: {', '.join(missing)} (make test installs it on Python 3.11)"
            )


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """For tests that run optax: its Adam raises a Python float to an int32 power, which strict
    promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are traced, in turn."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    run, seen = plgpu.kernel, []
    jax.clear_caches()

    def note(body: Any, **options: Any) -> Any:
        seen.append(options["kernel_name"])
        return run(body, **options)

    monkeypatch.setattr(plgpu, "kernel", note)
    return seen


@pytest.fixture
def toy_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the toy families findable, as a new family's file would."""
    from jaxspec import drafts, models
    from tests.support import toys

    for name, family in toys.TARGET_FAMILIES.items():
        monkeypatch.setitem(models.FAMILIES, name, family)
    for name, family in toys.DRAFT_FAMILIES.items():
        monkeypatch.setitem(drafts.FAMILIES, name, family)


@pytest.fixture(scope="module", autouse=True)
def _optimised(request: pytest.FixtureRequest) -> Iterator[None]:
    """Undo _compile_quickly's setting for a module that is marked so (compiling for an H200
    too)."""
    quick = jax.config.values["jax_disable_most_optimizations"]
    marked = any(request.node.get_closest_marker(name) for name in ("optimised", "aot"))
    jax.config.update("jax_disable_most_optimizations", quick and not marked)
    yield
    jax.config.update("jax_disable_most_optimizations", quick)


@pytest.fixture(scope="module", autouse=True)
def _few_memory_maps() -> Iterator[None]:
    """Every program that XLA compiles for a CPU holds some 30 memory maps, of 65,530 that Linux
    allows a process; past that, compiling or reading the cache ends in a segmentation fault. What a
    worker has compiled is dropped before (and read again from the cache)."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()
