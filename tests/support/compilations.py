"""Counting what XLA compiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

# recorded for a program from the persistent cache too
COMPILED = "/jax/core/compile/backend_compile_duration"


@contextmanager
def counting_compilations() -> Iterator[list[str]]:
    """Collects the names of the programs that are compiled, or taken from the persistent cache,
    meanwhile."""
    found: list[str] = []

    def listen(event: str, _seconds: float, **details: object) -> None:
        if event == COMPILED:
            found.append(str(details.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
