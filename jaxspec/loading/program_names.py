"""Names of compiled programs, by which they are found on disk without a trace.

JAX's compilation cache finds a program by its module, so each process traces, lowers and serialises
it first, with Python's lock held. Here a name says what a trace would read: the sources of this
package and of its kernels, the versions, the device, the settings of JAX, the config, and the kinds
of the arguments. Two programs with one name are the same program.

What cannot be described in full has no name: configs and arguments with objects of other packages,
a process in which a registry holds a family, a drafter or a logits processor of another package,
and programs of several processes.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import re
import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from jax._src import config as jax_config
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxspec.parallel.mesh import Device
from pallas_kernels import lowered_once

PACKAGES = ("jaxspec", "pallas_kernels")
# The rooms above decode, which a trace cannot read: imports go down.
UNTRACED = ("commands", "doctor", "training", "tools", "llm", "engine")
# Settings of JAX that say where programs are kept and what is logged. All others are in a name.
SETTINGS_ASIDE = frozenset(
    {
        "jax_compilation_cache_dir",
        "jax_compilation_cache_max_size",
        "jax_enable_compilation_cache",
        "jax_explain_cache_misses",
        "jax_log_compiles",
        "jax_logging_level",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
        "jax_platforms",  # the devices are part of a name
        "jax_raise_persistent_cache_errors",
        "jax_traceback_filtering",
    }
)
# Variables of the environment that XLA reads, once. Those of the client say how memory is shared.
VARIABLES = re.compile(r"(XLA(?!_PYTHON_CLIENT)|TF_XLA)_|NVIDIA_TF32_OVERRIDE|LIBTPU_INIT_ARGS")
# Those of kernels are for developers, but for the paths that JAX itself sets when it is imported.
FOR_KERNELS = re.compile(r"PALLAS_|MOSAIC_(?!GPU_(CUDA_ROOT|RUNTIME_LIB_PATH|NVSHMEM_\w+_PATH)$)")
DISTRIBUTIONS = re.compile(r"(jax|jaxlib|nvidia|flax|numpy|ml_dtypes)[-_]")

trace_context: Callable[[], tuple[Any, ...]] = jax_config.trace_context


class Undescribed(Exception):
    """Says why a program has no name."""


@dataclass(frozen=True)
class Call:
    """A program and the kind of its arguments.

    function:  (*fixed, *arguments) -> results
    donated:   index of the donated argument
    options:   compiler options
    fixed:     the static arguments
    structure: the pytree of the arguments and the named ones
    kinds:     of its leaves: shape, dtype, whether the dtype is weak, and the sharding of an array
               that is bound to its devices
    context:   jax's settings that change a trace
    """

    function: Callable[..., Any]
    donated: int | None
    options: tuple[tuple[str, Hashable], ...]
    fixed: tuple[Hashable, ...]
    structure: Any
    kinds: tuple[tuple[Any, ...], ...]
    context: tuple[Any, ...]

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        donated: int | None,
        options: tuple[tuple[str, Hashable], ...],
        fixed: tuple[Hashable, ...],
        args: tuple[Any, ...],
        named: Mapping[str, Any],
    ) -> Call:
        """Return the call of arguments, or of a ShapeDtypeStruct for each."""
        leaves, structure = jax.tree.flatten((args, dict(named)))
        kinds = tuple(map(_kind, leaves))
        return cls(function, donated, options, fixed, structure, kinds, trace_context())

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that the arguments are bound to, or the default one; in the mesh's order."""
        for *_, sharding in self.kinds:
            if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
                return tuple(sharding.mesh.devices.flat)
            if isinstance(sharding, SingleDeviceSharding):
                return tuple(sharding.device_set)
        default = jax.config.values["jax_default_device"]
        if isinstance(default, str):
            raise Undescribed(f"a default device {default!r}")
        return (jax.local_devices()[0] if default is None else default,)

    def file_name(self, registered: Mapping[str, Any]) -> str:
        """Return the name of the program's file; Undescribed if it has none.

        registered: the registries that a trace reads
        """
        devices = self.devices
        if any(d.process_index != jax.process_index() for d in devices) or jax.process_count() > 1:
            raise Undescribed("several processes")
        kinds = {kind: describe(kind) for kind in set(self.kinds)}  # few of hundreds differ
        text = "\n".join(
            (
                _versions(),
                _device_kinds(devices),
                _settings(self.context),
                *(f"{name}: {_entries(entries)}" for name, entries in registered.items()),
                describe(self.function),
                describe((self.donated, self.options, self.fixed)),
                describe(self.structure),
                *(kinds[kind] for kind in self.kinds),
            )
        )
        name = self.function.__name__
        return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:40]}"


def _kind(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, Tracer):
        raise Undescribed("an argument that is being traced")
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, leaf.weak_type, leaf.sharding if leaf.committed else None
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.shape, leaf.dtype, leaf.weak_type, leaf.sharding
    kind = jax.typeof(leaf)
    return kind.shape, kind.dtype, kind.weak_type, None


# --- names ----------------------------------------------------------------------------------------


def describe(value: Any) -> str:
    """Return a text that equal values have in each process, and no other value has.

    Raises Undescribed for an object of another package, and for an array.
    """
    if value is None or type(value) in (bool, int, float, str, bytes):
        return repr(value)
    if isinstance(value, Enum):
        return f"{_place(type(value), anywhere=True)}.{value.name}"
    if type(value) in (tuple, list):
        return f"{type(value).__name__}({', '.join(map(describe, value))})"
    if type(value) in (set, frozenset):
        return f"{type(value).__name__}({', '.join(sorted(map(describe, value)))})"
    if type(value) is dict:
        items = sorted((describe(key), describe(item)) for key, item in value.items())
        return f"dict({items})"
    if isinstance(value, np.dtype):
        return f"dtype({value.str} {value.name})"
    if isinstance(value, jax.tree_util.PyTreeDef):
        return _describe_tree(value)
    if isinstance(value, (Mesh, AbstractMesh, NamedSharding, SingleDeviceSharding, PartitionSpec)):
        return _describe_sharding(value)
    if isinstance(value, type) or inspect.isfunction(value):
        return _place(value)
    if is_dataclass(value):
        held = (f"{f.name}={describe(getattr(value, f.name))}" for f in fields(value))
        return f"{_place(type(value))}({', '.join(held)})"
    raise Undescribed(f"{type(value).__module__}.{type(value).__qualname__}")


def _place(found: Any, *, anywhere: bool = False) -> str:
    """Return where a class or a function of these packages is; Undescribed if it is not there."""
    module, name = found.__module__, found.__qualname__
    at: Any = sys.modules.get(module)
    for part in name.split("."):
        at = getattr(at, part, None)
    if at is not found or not (anywhere or is_own(module)):
        raise Undescribed(f"{module}.{name}")
    return f"{module}.{name}"


def is_own(module: str) -> bool:
    """Return whether the sources of a module are part of each name."""
    return module.partition(".")[0] in PACKAGES


def _describe_tree(tree: Any) -> str:
    node = tree.node_data()
    if node is None:
        return "*" if tree.num_leaves else "None"
    kind, static = node
    is_builtin = kind in (tuple, list, dict, type(None))
    where = kind.__name__ if is_builtin else _place(kind)
    return f"{where}[{describe(static)}]({', '.join(map(_describe_tree, tree.children()))})"


def _describe_sharding(value: Any) -> str:
    if isinstance(value, Mesh):
        ids = [device.id for device in value.devices.flat]
        return f"Mesh{value.axis_names, value.devices.shape, ids, str(value.axis_types)}"
    if isinstance(value, NamedSharding):
        mesh, memory = _describe_sharding(value.mesh), value.memory_kind
        return f"NamedSharding({mesh}, {_describe_sharding(value.spec)}, {memory})"
    if isinstance(value, SingleDeviceSharding):
        (device,) = value.device_set
        return f"device {device.id} {value.memory_kind}"
    text = repr(value)
    if lowered_once.ADDRESS.search(text):
        raise Undescribed(text)
    return text


def _entries(entries: Any) -> str:
    """Describe a registry by the places of what it holds, and by the attributes of objects."""
    if isinstance(entries, Mapping):
        return str(sorted((describe(name), _entries(entry)) for name, entry in entries.items()))
    if isinstance(entries, (tuple, list)):
        return str([_entries(entry) for entry in entries])
    if inspect.ismodule(entries):
        if not is_own(entries.__name__):
            raise Undescribed(f"a registered module {entries.__name__}")
        return entries.__name__
    if isinstance(entries, type) or inspect.isfunction(entries) or is_dataclass(entries):
        return describe(entries)
    return f"{_place(type(entries))}{describe(vars(entries))}"


def _settings(context: tuple[Any, ...]) -> str:
    """Describe the settings of JAX in this thread, and the environment's for XLA."""
    values = {k: repr(v) for k, v in jax.config.values.items() if k not in SETTINGS_ASIDE}
    mapped = [each.axis_sizes for each in context if _is_axis_env(each)]
    if any(mapped):
        raise Undescribed(f"mapped axes {mapped}")
    around = [repr(each) for each in context if not _is_axis_env(each)]
    text = str((sorted(values.items()), around, _variables()))
    if lowered_once.ADDRESS.search(text):
        raise Undescribed("a setting of JAX without a text")
    return text


def _variables() -> list[tuple[str, str]]:
    """Return the environment's variables for XLA; Undescribed if they do not say what XLA does.

    XLA reads them when the first device is asked for. The name of a kernel's export has none.
    """
    found = _chosen()
    if found != VARIABLES_AT_IMPORT:
        raise Undescribed("a variable for XLA that has changed since the import")
    for name in os.environ:
        if FOR_KERNELS.match(name):
            raise Undescribed(f"the variable {name}")
    for name, value in found:
        if any(Path(part).exists() for flag in value.split() for part in flag.split("=") if part):
            raise Undescribed(f"a file that {name} names")
    return found


def _chosen() -> list[tuple[str, str]]:
    return [(k, v) for k, v in sorted(os.environ.items()) if VARIABLES.match(k)]


VARIABLES_AT_IMPORT = _chosen()


def _is_axis_env(value: Any) -> bool:
    """Whether a value is the axes of jax.vmap and jax.shard_map; it has no text."""
    return hasattr(value, "axis_sizes") and not isinstance(value, AbstractMesh)


@cache
def _device_kinds(devices: tuple[Device, ...]) -> str:
    """Describe the devices, their driver, and those beside them."""
    client = devices[0].client
    of = [(d.id, d.platform, d.device_kind, getattr(d, "compute_capability", "")) for d in devices]
    beside = [d.device_kind for d in client.devices()]
    # Some functions ask for JAX's own choice while they are traced.
    default = jax.default_backend(), jax.devices()[0].device_kind
    driver = _driver(client.platform)
    return str((of, beside, default, client.platform, client.platform_version, driver))


def _driver(kind: str) -> str:
    """Describe what runs a platform's programs: the GPU's driver, or the processor."""
    path = Path("/proc/cpuinfo" if kind == "cpu" else "/proc/driver/nvidia/version")
    try:
        text = path.read_text()
    except OSError:
        return platform.processor() or platform.machine()
    if kind != "cpu":
        return text
    lines = re.findall(r"^(?:model name|flags|Features|CPU part)\s*:.*$", text, re.MULTILINE)
    return str(sorted(set(lines)))


@cache
def _versions() -> str:
    """Describe Python and what is installed beside it, and all sources of these packages."""
    site = Path(jaxlib.__file__).parent.parent
    found = sorted(p.name for p in site.glob("*.dist-info") if DISTRIBUTIONS.match(p.name))
    if not FILES:
        raise Undescribed("sources that cannot be read")
    return str((sys.version, platform.machine(), found, lowered_once.VERSIONS, SOURCES))


def _written(path: str) -> tuple[int, int] | None:
    """Return the size of a file and when it was written; None if it is gone."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def have_sources_changed() -> bool:
    """Return whether a source is not as it was: a module that is imported now is another one."""
    return any(_written(path) != written for path, written in FILES.items())


# Read when the package is imported.
FILES = {
    str(path): _written(str(path))
    for package in (Path(__file__).parent.parent, Path(lowered_once.__file__).parent)
    for path in package.rglob("*.py")
}
SOURCES = lowered_once.digest_of_sources(Path(__file__).parent.parent, without=UNTRACED)
