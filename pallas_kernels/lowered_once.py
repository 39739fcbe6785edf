"""Functions around kernels, which Mosaic lowers once for all programs of a process.

Lowering a kernel takes 0.1 to 0.6 s of Python, which threads cannot share. An engine compiles a
hundred programs of the same two dozen kernels. So such a function is exported once for each shape
of its arguments (jax.export), and programs embed the result. A folder keeps the exports for later
processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import logging
import re
import threading
import uuid
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax import export
from jax._src import config as jax_config

from pallas_kernels import hopper

PLATFORM = "cuda"
# The call of a Mosaic kernel. jax.export promises nothing for it across versions of JAX, which are
# part of a kept export's name.
CHECKS = (export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2"),)
ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in the text of an object, which differs by process
# Settings of JAX that change what a function is traced to.
TRACE_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)

COMPILERS = 4  # threads that compile new kernels while programs are traced

logger = logging.getLogger(__name__)


def lowered_once(static_argnames: str | Sequence[str] = ()) -> Callable[[Any], Any]:
    """Return a decorator for a function that runs kernels; layers and programs then share them.

    static_argnames: arguments that are hashable, and no pytrees of arrays

    The function returns an array, or a tuple of arrays and Nones. It can be neither batched
    (jax.vmap) nor differentiated. It must not ask which device there is, since another process may
    lower it. Devices that share a program embed the export of one of them. If an argument names a
    mesh axis, over which the kernels exchange, and in the interpreter, the decorator is jax.jit
    alone.
    """
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @wraps(function)
        def embed(*args: Any, **named: Any) -> Any:
            given = signature.bind(*args, **named).arguments
            if hopper.interpreting() or _has_an_axis(given):
                return function(*args, **named)
            settings = tuple((name, given.pop(name)) for name in names if name in given)
            leaves, structure = jax.tree.flatten(given)
            values = jax.config.values
            traced = tuple((name, values[name]) for name in TRACE_SETTINGS)
            call = Call(function, structure, tuple(map(_shape_of, leaves)), settings, traced)
            return _EXPORTS.get(call).call(*leaves)

        return jax.jit(embed, static_argnames=names)

    return decorate


def keep_in(folder: Path | None) -> None:
    """Keep the exports in a folder, and take those that an earlier process left there.

    None: in this process alone
    """
    _EXPORTS.folder = folder


def make_by(aside: Callable[[Call], bytes | None] | None) -> None:
    """Take new exports from this function; see Exports.aside."""
    _EXPORTS.aside = aside


def has_maker() -> bool:
    """Return whether make_by has given a function."""
    return _EXPORTS.aside is not None


def cancel_compilations() -> None:
    """Compile no more new kernels by themselves: their programs are compiled, or not wanted."""
    _EXPORTS.cancel_compilations()


@dataclass(frozen=True)
class Call:
    """A function and the kind of its arguments.

    structure: the pytree of the other arguments by name
    shapes:    of its leaves
    settings:  the static arguments
    traced:    values of TRACE_SETTINGS
    """

    function: Callable[..., Any]
    structure: Any
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    settings: tuple[tuple[str, Hashable], ...]
    traced: tuple[tuple[str, Hashable], ...]

    def export(self) -> export.Exported:
        """Lower the function for these arguments."""

        def flat(*leaves: jax.Array) -> Any:
            return self.function(
                **jax.tree.unflatten(self.structure, leaves), **dict(self.settings)
            )

        flat.__name__ = self.function.__name__
        # Whole tracebacks in locations would differ with the caller, and so by process.
        with jax.disable_jit(False), jax_config.include_full_tracebacks_in_locations(False):
            exporting = export.export(jax.jit(flat), platforms=[PLATFORM], disabled_checks=CHECKS)
            return exporting(*self.shapes)

    def file_name(self) -> str | None:
        """Return the name of the kept export; None if the call's text holds an address."""
        name = f"{self.function.__module__}.{self.function.__qualname__}"
        text = repr((name, self.structure, self.shapes, self.settings, self.traced))
        if ADDRESS.search(text):
            return None
        digest = hashlib.sha256(f"{VERSIONS} {PLATFORM} {text}".encode()).hexdigest()
        return f"{name}-{digest[:32]}"


class Exports:
    """The exports of this process.

    folder: keeps them for later processes; None: nothing is kept
    aside:  returns a serialised export that another process has made, None if it could not;
            None: this process makes all
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.aside: Callable[[Call], bytes | None] | None = None
        self._found: dict[Call, export.Exported] = {}
        self._locks: dict[Call, threading.Lock] = {}
        self._compilations: list[Future[None]] = []
        self._compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="jaxspec-kernels")

    def get(self, call: Call) -> export.Exported:
        """Return a call's export, which one thread reads or makes."""
        found = self._found.get(call)
        if found is None:
            with self._locks.setdefault(call, threading.Lock()):
                found = self._found.get(call)
                if found is None:
                    found = self._found[call] = self._read_or_make(call)
        return found

    def _read_or_make(self, call: Call) -> export.Exported:
        folder = self.folder  # a failed write in another thread may set it to None
        name = call.file_name() if folder is not None else None
        path = folder / name if folder is not None and name is not None else None
        if path is not None:
            try:
                return export.deserialize(bytearray(path.read_bytes()))
            except (FileNotFoundError, NotADirectoryError):
                pass
            except Exception as e:  # of an incomplete or a foreign file
                logger.warning("%s: expected a lowered kernel, got %r; it is lowered anew", path, e)
        aside = self.aside
        data = aside(call) if aside is not None else None
        made = call.export() if data is None else export.deserialize(bytearray(data))
        if path is not None:
            self._keep(made, path, data)
        if _may_compile_early():
            with contextlib.suppress(RuntimeError):  # the process ends
                self._compilations.append(self._compilers.submit(_compile, made, call.shapes))
        return made

    def cancel_compilations(self) -> None:
        """Drop the kernels that wait to be compiled."""
        while self._compilations:
            self._compilations.pop().cancel()

    def _keep(self, made: export.Exported, path: Path, data: bytes | None) -> None:
        # Several processes, also of several hosts, may write the same file.
        part = path.with_name(f".{uuid.uuid4().hex}")
        try:
            content = made.serialize() if data is None else data
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                part.write_bytes(content)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
        except Exception as e:  # of the folder, or of jax.export's format
            self.folder = None
            logger.warning("%s: lowered kernels are not kept (%s)", path.parent, e)


_EXPORTS = Exports()


def _may_compile_early() -> bool:
    """Return whether this process has GPUs for its programs."""
    return jax.default_backend() == "gpu"


def _compile(made: export.Exported, shapes: Sequence[jax.ShapeDtypeStruct]) -> None:
    """Compile a new kernel by itself.

    A process compiles a kernel once. So the first program, which compiles its kernels one after the
    other, finds them compiled.
    """
    try:
        jax.jit(made.call).lower(*shapes).compile()
    except Exception as e:  # the program tells what is wrong
        logger.debug("%s does not compile alone: %r", made.fun_name, e)


def _has_an_axis(arguments: Any) -> bool:
    """Return whether some node of a pytree names a mesh axis (VocabShards, Peers)."""

    def names_one(node: Any) -> bool:
        return getattr(node, "axis", None) is not None

    return any(map(names_one, jax.tree.leaves(arguments, is_leaf=names_one)))


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    kind = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type)


def digest_of_sources(root: Path, without: Sequence[str] = ()) -> str:
    """Return the sha256 of all Python files below a folder, and of their names.

    without: names of files (without .py) and folders in it that are left out
    """
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if name.with_suffix("").parts[0] not in without:
            digest.update(str(name).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _versions() -> str:
    """Return what lowers the kernels: JAX's versions, and a digest of this package's sources."""
    sources = digest_of_sources(Path(__file__).parent)
    return f"{jax.__version__} {version('jaxlib')} {sources}"


VERSIONS = _versions()  # before any kernel is imported
