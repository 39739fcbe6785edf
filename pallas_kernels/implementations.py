"""How a public op picks the implementation that runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

IMPLEMENTATIONS = ("reference", "mosaic_gpu")


def check(implementation: str, implementations: Sequence[str] = IMPLEMENTATIONS) -> None:
    """Raise ValueError for a name that is not among the op's implementations."""
    if implementation not in implementations:
        expected = ", ".join(implementations)
        raise ValueError(f"implementation: expected one of {expected}, got {implementation!r}")


def runs_kernel(op: str, implementation: str, unsupported: Callable[[], str | None]) -> bool:
    """Return whether the op's Mosaic kernel runs, and not its reference.

    unsupported: why the kernel cannot run, None if it can; asked only if the kernel is chosen.

    Raises ValueError for an unknown implementation, and for a kernel that cannot run, with the
    reason: an implementation is never replaced silently.
    """
    check(implementation)
    if implementation == "reference":
        return False
    if reason := unsupported():
        raise ValueError(f"{op}, implementation {implementation!r}: {reason}")
    return True
