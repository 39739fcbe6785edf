"""Which experts a row takes, and with what weights: the router's product, its best k, and their softmax or normed scores."""

from __future__ import annotations

import importlib
from types import ModuleType

import jax

from pallas_kernels import hopper
from pallas_kernels.router import reference

IMPLEMENTATIONS = ("reference", "mosaic_gpu")
KINDS = ("softmax", "sigmoid")
MAX_ROWS = 256  # that the kernel takes


def route(
    x: jax.Array,
    router: jax.Array,
    bias: jax.Array | None = None,
    *,
    top_k: int,
    kind: str,
    scaling: float = 1.0,
    normalise: bool = True,
    implementation: str = "reference",
) -> tuple[jax.Array, jax.Array]:
    """Experts int32 [rows, at least top_k] (columns past top_k mean nothing) and weights float32 [rows, top_k], the best first.

    x:      [rows, D]; router: [D, experts], their product accumulated and kept in float32
    bias:   [experts]
    kind:   "softmax" (gpt-oss: the highest logits with their bias, weighed by their softmax) or "sigmoid" (DeepSeek-V3, 2412.19437, section
            2.1.2: the highest of sigmoid(logit) + bias; sigmoid(logit) weighs, divided by the sum of the chosen ones if `normalise`, times
            `scaling`)

    Of equal experts the first is taken. Raises ValueError for shapes that do not fit together and for what the implementation does not
    support, with the reason.
    """
    if x.ndim != 2 or router.ndim != 2 or router.shape[0] != x.shape[1]:
        raise ValueError(
            f"router: expected [{x.shape[-1]}, experts] for x {x.shape}, got {router.shape}"
        )
    if bias is not None and bias.shape != router.shape[1:]:
        raise ValueError(f"bias: expected {router.shape[1:]}, got {bias.shape}")
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    if not 1 <= top_k <= router.shape[1]:
        raise ValueError(f"top_k: expected 1 to {router.shape[1]}, got {top_k}")
    if implementation == "reference":
        return reference.route(
            x, router, bias, top_k=top_k, kind=kind, scaling=scaling, normalise=normalise
        )
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: expected one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    reason = hopper.missing() or unsupported(x.shape[0], router.shape, top_k, x.dtype)
    if reason:
        raise ValueError(f"router, implementation {implementation!r}: {reason}")
    return _mosaic_gpu().route(
        x, router, bias, top_k=top_k, kind=kind, scaling=scaling, normalise=normalise
    )


def unsupported(rows: int, router: tuple[int, ...], top_k: int, dtype: object) -> str | None:
    """Why the Mosaic kernel cannot route `rows` rows of this dtype by a router of this shape, None if it can."""
    return hopper.too_old() or _mosaic_gpu().unsupported(rows, router, top_k, dtype)


def _mosaic_gpu() -> ModuleType:
    # Imported on use: jax 0.10, the floor on CPU, has another Mosaic.
    return importlib.import_module("pallas_kernels.router.mosaic_gpu")
