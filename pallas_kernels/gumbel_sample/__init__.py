"""Sampling a token a row by the Gumbel-max trick: temperature, noise and argmax in one op."""

from __future__ import annotations

import importlib
from types import ModuleType

import jax
import jax.numpy as jnp

from pallas_kernels import hopper
from pallas_kernels.gumbel_sample import reference

IMPLEMENTATIONS = ("reference", "mosaic_gpu")


def gumbel_sample(
    logits: jax.Array,
    temperature: jax.Array,
    keys: jax.Array,
    position: jax.Array,
    offset: jax.Array,
    token_ids: jax.Array | None = None,
    *,
    stream: int,
    implementation: str = "reference",
) -> jax.Array:
    """argmax(logits / temperature + noise) int32 [rows], of equal scores the first; argmax(logits) where the temperature is 0.

    logits:      float32 [rows, vocab]; NaN counts as -inf, so that a token is always in range
    temperature: float32 [rows]
    keys:        uint32 [rows, 2]; a row's noise has the key jax.random.fold_in'ed with stream, position and offset, one after another
    position:    int32 [rows]; offset: int32 scalar
    token_ids:   int32 [vocab], by which id each column's noise is drawn; None: its own index

    The noise is pallas_kernels.noise.gumbel(key, token_ids), and a row's token depends on nothing but the row. The kernel makes the same
    bits and, on an NVIDIA GPU, XLA's very logarithms and quotient; the interpreter's logarithms on a CPU may differ by a rounding. Raises
    ValueError for shapes that do not fit together and for what the implementation does not support, with the reason.
    """
    if logits.ndim != 2:
        raise ValueError(f"logits: expected [rows, vocab], got {list(logits.shape)}")
    rows, vocab = logits.shape
    wanted = {
        "logits": (logits, jnp.float32, (rows, vocab)),
        "temperature": (temperature, jnp.float32, (rows,)),
        "keys": (keys, jnp.uint32, (rows, 2)),
        "position": (position, jnp.int32, (rows,)),
        "offset": (offset, jnp.int32, ()),
    }
    if token_ids is not None:
        wanted["token_ids"] = (token_ids, jnp.int32, (vocab,))
    for name, (array, dtype, shape) in wanted.items():
        if array.dtype != dtype or array.shape != shape:
            expected = f"{jnp.dtype(dtype).name} {list(shape)}"
            raise ValueError(f"{name}: expected {expected}, got {array.dtype} {list(array.shape)}")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: expected one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    arguments = (logits, temperature, keys, position, offset, token_ids)
    if implementation == "reference":
        return reference.gumbel_sample(*arguments, stream=stream)
    reason = hopper.missing() or unsupported(vocab)
    if reason:
        raise ValueError(f"gumbel_sample, implementation {implementation!r}: {reason}")
    return _mosaic_gpu().gumbel_sample(*arguments, stream=stream)


def unsupported(vocab: int) -> str | None:
    """Why the Mosaic kernel cannot take rows of so many logits, None if it can."""
    return hopper.too_old() or _mosaic_gpu().unsupported(vocab)


def _mosaic_gpu() -> ModuleType:
    # Imported on use: jax 0.10, the floor on CPU, has another Mosaic.
    return importlib.import_module("pallas_kernels.gumbel_sample.mosaic_gpu")
