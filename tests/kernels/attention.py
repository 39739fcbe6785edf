"""The ground truth of paged attention, how near an implementation in bfloat16 must come, and
shapes of inputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import Inputs
from pallas_kernels.attention.shapes import Shape

# Share of all output values -> largest error, in units of the root mean square of the value's row.
# The output and the softmax weights are rounded to bfloat16, by at most 2^-9 = 0.002 of each; a
# value of four times the rms is off by 0.008. Few values are as large, so a wrong key, which moves
# every value of a row, shows in the median.
TOLERANCE = {0.5: 2e-3, 0.99: 1e-2, 1.0: 3e-2}


def abstract(shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of make_inputs' arrays: a cache of real size does not fit here."""
    cache = (shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    cache_dtype = jnp.float8_e4m3fn if shape.fp8 else jnp.bfloat16
    struct = {
        "q": ((shape.batch, shape.rows, shape.num_heads, shape.head_dim), jnp.bfloat16),
        "k_cache": (cache, cache_dtype),
        "v_cache": (cache, cache_dtype),
        "block_table": ((shape.batch, shape.table_pages), jnp.int32),
        "positions": ((shape.batch, shape.rows), jnp.int32),
        "seq_lens": ((shape.batch,), jnp.int32),
        "window_start": ((shape.batch, shape.rows), jnp.int32),
    }
    if shape.sinks:
        struct["sinks"] = ((shape.num_heads,), jnp.float32)
    if shape.fp8:
        struct |= {name: ((shape.num_kv_heads,), jnp.float32) for name in ("k_scale", "v_scale")}
    return {name: jax.ShapeDtypeStruct(*x) for name, x in struct.items()}


def live(shape: Shape) -> np.ndarray:
    """bool [batch, rows]: the rows whose output means something."""
    return shape.positions() < np.array(shape.lengths)[:, None]


def ground_truth(shape: Shape, inputs: Inputs) -> np.ndarray:
    """float64 [batch, rows, num_heads, head_dim], one request and row at a time from the op's
    docstring; NaN for rows that are not live."""
    q, k, v = (np.asarray(a).astype(np.float64) for a in (inputs.q, inputs.k_cache, inputs.v_cache))
    k, v = (
        x if scale is None else x * np.asarray(scale, np.float64)[:, None]
        for x, scale in ((k, inputs.k_scale), (v, inputs.v_scale))
    )
    table, starts, positions = (
        np.asarray(inputs.block_table),
        shape.window_start(),
        shape.positions(),
    )
    group = shape.num_heads // shape.num_kv_heads
    out = np.full(q.shape, np.nan)
    for b, row in np.argwhere(live(shape)):
        seen = np.arange(int(starts[b, row]), int(positions[b, row]) + 1)
        slots = table[b, seen // shape.block_size], seen % shape.block_size
        keys, values = (
            np.repeat(x[slots], group, axis=1) for x in (k, v)
        )  # [seen, num_heads, head_dim]
        scores = np.einsum("hd,khd->hk", q[b, row], keys) * inputs.scale
        sinks = (
            np.full(shape.num_heads, -np.inf)
            if inputs.sinks is None
            else np.asarray(inputs.sinks, np.float64)
        )
        top = np.maximum(scores.max(axis=1), sinks)
        weights = np.exp(scores - top[:, None])
        out[b, row] = (
            np.einsum("hk,khd->hd", weights, values)
            / (weights.sum(axis=1) + np.exp(sinks - top))[:, None]
        )
    return out


def assert_close(got: np.ndarray, expected: np.ndarray, rows: np.ndarray) -> None:
    """Over the rows that mean something; everything is finite."""
    assert np.isfinite(got).all()
    scale = np.sqrt(np.square(expected[rows]).mean(axis=-1, keepdims=True))
    error = np.abs(got[rows].astype(np.float64) - expected[rows]) / scale
    found = {share: float(np.quantile(error, share)) for share in TOLERANCE}
    assert all(found[share] <= TOLERANCE[share] for share in TOLERANCE), (
        f"expected at most {TOLERANCE}, got {found}"
    )
