"""A token's embedding and its RMS norm: what a pass over tokens begins with, a target's or a draft's."""

from __future__ import annotations

import importlib
from types import ModuleType

import jax

from pallas_kernels import hopper
from pallas_kernels.embed_norm import reference
from pallas_kernels.rms_norm import unsupported

IMPLEMENTATIONS = ("reference", "mosaic_gpu")


def embed_norm(
    tokens: jax.Array,
    table: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    hidden: jax.Array | None = None,
    hidden_weight: jax.Array | None = None,
    norm_residual: bool = False,
    implementation: str = "reference",
) -> tuple[jax.Array, jax.Array]:
    """(residual [rows, width], normed): the rows table[tokens] under the rms_norm op with gain `weight`, to the bit, and what the layer
    that reads them adds to.

    tokens: int32 [rows], an id outside the vocabulary reads the nearest row; table: [vocab, width]; weight: [width].
    Without hidden, a target: normed is [rows, width] and the residual is table[tokens].
    With hidden [rows, width] and its gain hidden_weight [width], an EAGLE-3 head: normed is [rows, 2 width], the normed embedding and then
    the normed hidden state; the residual is hidden, or with norm_residual the normed hidden state.
    Results have hidden's dtype, or without it the table's. Raises ValueError for shapes that do not fit together and for what the
    implementation does not support, with the reason.
    """
    if tokens.ndim != 1 or table.ndim != 2 or weight.shape != table.shape[1:]:
        shapes = f"{tokens.shape}, {table.shape} and {weight.shape}"
        raise ValueError(
            f"tokens, table and weight: expected [rows], [vocab, width] and [width], got {shapes}"
        )
    if (hidden is None) != (hidden_weight is None) or (norm_residual and hidden is None):
        raise ValueError(
            "hidden and hidden_weight: expected both or neither, and both for norm_residual"
        )
    if hidden is not None and hidden_weight is not None:
        expected, got = (
            ((*tokens.shape, *weight.shape), weight.shape),
            (hidden.shape, hidden_weight.shape),
        )
        if got != expected:
            raise ValueError(
                f"hidden and hidden_weight: expected {expected[0]} and {expected[1]}, got {got[0]} and {got[1]}"
            )
    options = {
        "eps": eps,
        "hidden": hidden,
        "hidden_weight": hidden_weight,
        "norm_residual": norm_residual,
    }
    if implementation == "reference":
        return reference.embed_norm(tokens, table, weight, **options)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: expected one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    rows = [table] if hidden is None else [table, hidden]
    reason = hopper.missing() or next(
        filter(None, (unsupported(x.shape[1], x.dtype) for x in rows)), None
    )
    if reason:
        raise ValueError(f"embed_norm, implementation {implementation!r}: {reason}")
    return _mosaic_gpu().embed_norm(tokens, table, weight, **options)


def _mosaic_gpu() -> ModuleType:
    # Imported on use: jax 0.10, the floor on CPU, has another Mosaic.
    return importlib.import_module("pallas_kernels.embed_norm.mosaic_gpu")
