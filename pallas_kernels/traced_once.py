"""traced_once: functions that layers and programs share, so that JAX traces them once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

Function = TypeVar("Function", bound=Callable[..., Any])


def traced_once(*static_argnames: str) -> Callable[[Function], Function]:
    """Return a decorator for a function that layers or programs share, such as a layer's.

    static_argnames: arguments that are hashable, and no pytrees of arrays

    JAX traces the function once for each set of static arguments and shapes, for all programs of
    the process. Equal layers are calls of one function in the lowered program, and XLA inlines
    them. That saves Python's time, which a warm-up takes for each of a hundred programs.

    A number inside another argument becomes an array unless it is a static field. An argument that
    the function returns becomes a new array.
    """

    def decorate(function: Function) -> Function:
        return jax.jit(function, static_argnames=static_argnames)  # type: ignore[return-value]

    return decorate
