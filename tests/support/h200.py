"""Compile for an H200 on a machine that has none: the CUDA plugin of jax, no driver, no GPU.

What comes back is the real thing but for autotuning: optimised HLO, the kernels' machine code,
ptxas's report of registers and spills. Needs the `aot` extra (jax-cuda13-plugin and
jax-cuda13-pjrt, no nvidia-* packages).
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import lowered_once
from pallas_kernels.lowered_once import Exports

_MARKS = itertools.count()

# What the compiler asks about the device (a GpuTargetConfigProto in text form), from the vendor's
# data sheet and XLA's own list of devices.
TARGET_CONFIG = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0a"
  name: "NVIDIA H200"
  device_address_bits: 64
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


def unavailable() -> str | None:
    """Why nothing can be compiled for an H200 here; None if it can."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        return "needs jax-cuda13-plugin (make test-h200-aot installs it)"
    if jax.__version_info__ < (0, 11):
        return f"needs jax 0.11 or later, got {jax.__version__}"
    return None


def mesh() -> Mesh:
    """One H200 that exists for the compiler only."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET_CONFIG, topology="1x1x1"
    )
    return topologies.make_mesh(topology, (1,), ("x",))


def linked_mesh(size: int, axis: str) -> Mesh:
    """H200s of one host with NVLink, which exist for the compiler only."""
    links = "device_address_bits: 64\n  device_interconnect_info { active_links: 18 }"
    config = TARGET_CONFIG.replace("device_address_bits: 64", links)
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=config, topology=f"1x1x{size}"
    )
    return topologies.make_mesh(topology, (size,), (axis,))


@contextlib.contextmanager
def compiled_anew() -> Iterator[None]:
    """Lower kernels anew and give each a mark, since a process compiles equal kernels once."""
    from jax._src.lib.mlir import ir
    from jax.experimental.mosaic import gpu

    lower, mark = gpu.core._mosaic_gpu_lowering_rule, f"{next(_MARKS)}"

    def lower_marked(ctx: Any, *args: Any, module: Any, **options: Any) -> Any:
        module.operation.attributes["sym_name"] = ir.StringAttr.get(mark, module.context)
        return lower(ctx, *args, module=module, **options)

    exports = lowered_once._EXPORTS
    jax.clear_caches()
    gpu.core._mosaic_gpu_lowering_rule, lowered_once._EXPORTS = lower_marked, Exports()
    try:
        yield
    finally:
        gpu.core._mosaic_gpu_lowering_rule, lowered_once._EXPORTS = lower, exports
        jax.clear_caches()


@contextlib.contextmanager
def ptxas_report() -> Iterator[Callable[[], str]]:
    """What ptxas says (-v) about the Mosaic kernels that are compiled while this is open: the
    function that comes back reads it.

    The compiler prints it to the process's standard output, past sys.stdout. Nothing may come from
    the compilation cache meanwhile.
    """
    cached = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:

        def read() -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        os.dup2(file.fileno(), 1)
        os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
        jax.config.update("jax_enable_compilation_cache", False)
        try:
            with compiled_anew():
                yield read
        finally:
            jax.config.update("jax_enable_compilation_cache", cached)
            del os.environ["MOSAIC_GPU_DUMP_PTXAS"]
            os.dup2(kept, 1)
            os.close(kept)


def stack_and_spills(report: str) -> list[tuple[int, int, int]]:
    """Bytes of stack, of spill stores and of spill loads of each kernel in a report of ptxas."""
    found = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
    )
    return [(int(stack), int(stores), int(loads)) for stack, stores, loads in found]


def sums_are_complete(ptx: str) -> bool:
    """Whether a kernel waits for its last product before it rounds sums, and rounds none before."""
    last = ptx.rindex("wgmma.commit_group")
    rounded = ptx.index("cvt.rn.bf16x2.f32", last)
    waits = "wgmma.wait_group.sync.aligned 0" in ptx[last:rounded]
    return waits and "cvt.rn.bf16x2.f32" not in ptx[:last]


def loads_before_it_waits(ptx: str) -> bool:
    """Whether a kernel's first copy comes before its wait for the kernel before."""
    first_load = re.search(r"cp\.async\.bulk\.tensor\S*\.global", ptx)
    assert first_load is not None
    return "griddepcontrol.wait" not in ptx[: first_load.start()]


def arithmetic(ptx: str) -> set[str]:
    """The multiplications, quotients and truncated sums of a logarithm and a temperature, with
    their constants."""
    found = re.findall(r"\b((?:fma|mul)\.rn\.f32|div\.\w+\.f32|sub\.rz\.f32)\s([^;]*);", ptx)
    return {" ".join([name, *re.findall(r"0f\w+", operands)]) for name, operands in found}


def lower_for_h200(
    function: Any, *args: Any, static_argnums: Any = (), donate_argnums: Any = ()
) -> Any:
    """function(*args) with its kernels, not compiled; arrays in args may be ShapeDtypeStructs."""
    here = mesh()
    sharding = NamedSharding(here, PartitionSpec())
    static = {static_argnums} if isinstance(static_argnums, int) else set(static_argnums)
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
    args = tuple(a if i in static else jax.tree.map(place, a) for i, a in enumerate(args))
    with jax.set_mesh(here):
        jitted = jax.jit(function, static_argnums=static_argnums, donate_argnums=donate_argnums)
        return jitted.lower(*args)


def compile_for_h200(
    function: Any,
    *args: Any,
    static_argnums: Any = (),
    donate_argnums: Any = (),
    options: dict | None = None,
) -> Any:
    """The compiled executable (`.as_text()` is its HLO) of function(*args); arrays in args may be
    ShapeDtypeStructs."""
    lowered = lower_for_h200(
        function, *args, static_argnums=static_argnums, donate_argnums=donate_argnums
    )
    return lowered.compile(compiler_options=options)


def compile_without_spills(
    function: Any, *args: Any, but: tuple[int, int, int] = (0, 0, 0), **options: Any
) -> str:
    """The optimised HLO of function(*args), of whose kernels none spills.

    but: what one may spill instead, as stack_and_spills says it
    """
    with ptxas_report() as report:
        hlo = compile_for_h200(function, *args, **options).as_text()
        found = stack_and_spills(report())
    assert found, "expected ptxas's report on at least one kernel"
    assert set(found) in ({but}, {but, (0, 0, 0)}), found
    return hlo
