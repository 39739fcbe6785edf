"""jax.jit, with compiled programs that jaxspec.loading.executables keeps on disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable
from types import ModuleType
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from jaxspec import drafts, models
from jaxspec.cache import arrays
from jaxspec.config.ops import XlaFlags
from jaxspec.drafts import families, mtp
from jaxspec.loading import executables, program_names
from jaxspec.loading.program_names import Call, Undescribed
from jaxspec.sampling import logits

# Modules with what a trace finds by a name in a config: read at each use, for they may change.
REGISTRIES: tuple[tuple[ModuleType, tuple[str, ...]], ...] = (
    (models, ("FAMILIES",)),
    (families, ("FAMILIES", "STEPS", "BLOCKS", "CONFIDENT")),
    (drafts, ("MODEL_FREE",)),
    (mtp, ("FAMILIES",)),
    (arrays, ("CACHE_KINDS",)),
    (logits, ("BEFORE_TEMPERATURE", "AFTER_TEMPERATURE", "PROCESSORS")),
)
MOST_RECENT = 1024  # entries


def registered() -> dict[str, Any]:
    """Return what the registries hold."""
    return {f"{m.__name__}.{name}": getattr(m, name) for m, names in REGISTRIES for name in names}


class Recent(NamedTuple):
    """The program that some arguments ran last.

    first:    the first static argument, held so that no other object gets its id
    context:  program_names.trace_context()
    compiled: None: the jitted function runs
    """

    first: Any
    context: tuple[Any, ...]
    compiled: Any


class KeptJit:
    """A jitted function whose programs come from disk where an earlier process has kept them.

    Without a folder for them, and for calls that have no description, it is jax.jit.

    function: (*static arguments, *arguments) -> results
    donate:   index of the donated argument
    static:   number of static arguments, which come first
    options:  compiler options
    told_by:  index of the first of the arguments that tell which program ran last time. The later
              they begin, the sooner a program is launched. A program that is found by them checks
              shapes and dtypes of all arguments before it runs; if it was compiled for others, the
              whole call is compared. Calls of one config whose earlier arguments differ in a weak
              dtype, or in the device that they are bound to, must differ in these arguments too.
    named_as: the function of a module that names the programs, where `function` is made from one
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        donate: int | None = None,
        static: int = 0,
        options: XlaFlags = (),
        told_by: int = 0,
        named_as: Callable[..., Any] | None = None,
    ) -> None:
        self.jitted: Any = jax.jit(
            function,
            static_argnums=tuple(range(static)),
            donate_argnums=() if donate is None else donate,
            compiler_options=dict(options) or None,
        )
        self._named_as = named_as or function
        self._donate, self._static, self._options = donate, static, options
        self._told_by = told_by
        self._compiled: dict[Call, Any] = {}
        self._recent: dict[Hashable, Recent] = {}

    def __call__(self, *args: Any, **named: Any) -> Any:
        if executables.STORE.is_used:
            return self._run(args, named)
        return self.jitted(*args, **named)

    def compile(self, *args: Any, **named: Any) -> None:
        """Compile for arguments of these shapes; see Program.compile."""
        call = self._call(args, named) if executables.STORE.is_used else None
        if call is None or self._found(call, args, named) is None:
            self.jitted.lower(*args, **named).compile()

    def cache_size(self) -> int:
        """Return the number of compiled programs."""
        return self.jitted._cache_size() + len(self._compiled)

    def _run(self, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        executables.STORE.last_call = time.monotonic()
        first, fixed = args[0] if self._static else None, args[1 : self._static]
        arguments = args[self._static :]
        leaves, structure = jax.tree.flatten(arguments[self._told_by :])
        kinds = map(_told, leaves)
        key = (id(first), fixed, structure, *kinds, _binding(leaves))
        recent, context = self._recent.get(key), program_names.trace_context()
        if recent is not None and recent.context == context:
            if recent.compiled is None:
                return self.jitted(*args, **named)
            try:
                return recent.compiled(*arguments, **named)
            except (TypeError, ValueError):  # compiled for other arguments, or an error
                call = self._call(args, named)
                if call is not None and self._compiled.get(call) is recent.compiled:
                    raise
        call = self._call(args, named)
        if call is None:
            return self.jitted(*args, **named)
        compiled = self._found(call, args, named)
        if len(self._recent) >= MOST_RECENT:
            self._recent.clear()
        self._recent[key] = Recent(first, context, compiled)
        if compiled is None:
            return self.jitted(*args, **named)
        return compiled(*arguments, **named)

    def _call(self, args: tuple[Any, ...], named: dict[str, Any]) -> Call | None:
        """Return the description of a call; None if it is traced, or runs without jit."""
        if jax.config.values["jax_disable_jit"]:
            return None
        fixed, arguments = args[: self._static], args[self._static :]
        try:
            return Call.of(self._named_as, self._donate, self._options, fixed, arguments, named)
        except Undescribed:
            return None

    def _found(self, call: Call, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Return the compiled program of a call, made if it is new; None if it is not kept."""
        found = self._compiled.get(call)
        if found is None:
            path = executables.STORE.path(call, registered())
            if path is None:
                return None
            found = executables.STORE.read(path, call.devices)
            if found is None:
                found, is_fresh = executables.compile_fresh(
                    lambda: self.jitted.lower(*args, **named).compile()
                )
                if is_fresh:
                    executables.STORE.add(path, found)
            found = self._compiled.setdefault(call, found)
        return found


def _told(leaf: Any) -> tuple[Any, ...]:
    """Return what tells an argument from another: shape, dtype, whether it is weak or bound."""
    if _is_on_device(leaf):
        return leaf.shape, leaf.dtype, leaf.weak_type, leaf.committed
    return getattr(leaf, "shape", None), getattr(leaf, "dtype", type(leaf))


def _binding(leaves: Iterable[Any]) -> Any:
    """Return the devices of the first array that is bound to some; None for none.

    Its sharding may have another form after a program from disk, and is the same.
    """
    return next((frozenset(x.devices()) for x in leaves if _is_on_device(x) and x.committed), None)


def _is_on_device(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
