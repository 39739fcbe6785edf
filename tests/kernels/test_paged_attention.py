"""The paged attention op equals a dense attention in float64 NumPy, written from the op's
docstring."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import Inputs, paged_attention

compiled = jax.jit(paged_attention, static_argnames="implementation")

IMPLEMENTATIONS = (
    "reference",
)  # the kernel, which is bfloat16 only, has tests/kernels/test_attention.py
TOLERANCE = 2e-6  # float32 sums of at most 64 terms of order 1


class Case:
    """Ragged requests with keys and values in shuffled blocks; every slot that nobody wrote holds
    NaN."""

    def __init__(
        self,
        lengths: list[int],
        rows: int,
        heads: int,
        kv_heads: int,
        block_size: int,
        window: int | None,
        dim: int = 8,
    ) -> None:
        rng = np.random.default_rng(sum(lengths) + heads + block_size)
        pages = -(-max(max(lengths), 1) // block_size) + 1
        blocks = rng.permutation(len(lengths) * pages + 2)[: len(lengths) * pages].reshape(
            len(lengths), pages
        )
        self.lengths, self.window = lengths, window
        self.keys = [rng.normal(size=(n, kv_heads, dim)).astype(np.float32) for n in lengths]
        self.values = [rng.normal(size=(n, kv_heads, dim)).astype(np.float32) for n in lengths]
        self.q = rng.normal(size=(len(lengths), rows, heads, dim)).astype(np.float32)
        self.k_cache = np.full(
            (len(lengths) * pages + 2, block_size, kv_heads, dim), np.nan, np.float32
        )
        self.v_cache = self.k_cache.copy()
        for table, keys, values in zip(blocks, self.keys, self.values, strict=True):
            for p, (k, v) in enumerate(zip(keys, values, strict=True)):
                self.k_cache[table[p // block_size], p % block_size] = k
                self.v_cache[table[p // block_size], p % block_size] = v
        self.table = blocks.astype(np.int32)
        # The last `rows` positions of each request; those of a shorter one start at 0 and end past
        # its last token.
        self.positions = np.array(
            [[max(n - rows, 0) + i for i in range(rows)] for n in lengths], np.int32
        )
        start = 0 * self.positions if window is None else np.maximum(self.positions - window + 1, 0)
        self.window_start = start.astype(np.int32)

    def dense(self) -> np.ndarray:
        """float64, one query head and row at a time; NaN for a request without tokens."""
        out = np.full(self.q.shape, np.nan)
        group = self.q.shape[2] // self.k_cache.shape[2]
        for b, n in enumerate(self.lengths):
            for i, p in enumerate(self.positions[b].tolist()):
                seen = range(
                    0 if self.window is None else max(p - self.window + 1, 0), min(p + 1, n)
                )
                for h in range(self.q.shape[2]):
                    if len(seen):
                        keys = self.keys[b][seen, h // group].astype(np.float64)
                        scores = (
                            keys @ self.q[b, i, h].astype(np.float64) / math.sqrt(self.q.shape[3])
                        )
                        weights = np.exp(scores - scores.max())
                        out[b, i, h] = weights / weights.sum() @ self.values[b][seen, h // group]
        return out

    def paged(self, implementation: str) -> np.ndarray:
        inputs = Inputs(
            q=jnp.asarray(self.q),
            k_cache=jnp.asarray(self.k_cache),
            v_cache=jnp.asarray(self.v_cache),
            block_table=jnp.asarray(self.table),
            positions=jnp.asarray(self.positions),
            seq_lens=jnp.asarray(self.lengths, jnp.int32),
            window_start=jnp.asarray(self.window_start),
            scale=self.q.shape[3] ** -0.5,
        )
        return np.asarray(compiled(inputs, implementation=implementation))


@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(("heads", "kv_heads", "rows"), [(4, 4, 1), (6, 2, 4), (3, 1, 2)])
def test_equals_dense_attention(
    implementation: str, window: int | None, block_size: int, heads: int, kv_heads: int, rows: int
) -> None:
    """Ragged lengths around block boundaries, grouped heads, a sliding window; NaN in unwritten
    slots must not leak."""
    case = Case([1, 4, 5, 17, 33], rows, heads, kv_heads, block_size, window)
    expected, got = case.dense(), case.paged(implementation)
    meant = ~np.isnan(expected)
    assert meant.reshape(len(case.lengths), -1).any(axis=1).all()
    np.testing.assert_allclose(got[meant], expected[meant], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
def test_an_idle_request_is_finite_and_disturbs_nobody(implementation: str) -> None:
    case = Case([0, 7, 0, 3], rows=2, heads=2, kv_heads=1, block_size=4, window=None)
    case.k_cache, case.v_cache = (np.nan_to_num(x, nan=3.0) for x in (case.k_cache, case.v_cache))
    expected, got = case.dense(), case.paged(implementation)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[[1, 3]], expected[[1, 3]], atol=TOLERANCE, rtol=TOLERANCE)


BAD = {
    "num_heads: expected a multiple": {"q": np.zeros((4, 2, 3, 8), np.float32)},
    "k_cache and v_cache: expected": {"v_cache": np.zeros((2, 4, 2, 8), np.float32)},
    "q: expected \\(4, 3, 4, 8\\)": {"positions": np.zeros((4, 3), np.int32)},
    "positions: expected int32": {"positions": np.zeros((4, 2), np.float32)},
    "window_start: expected int32": {"window_start": np.zeros((4, 2), np.float32)},
    "implementation: expected one of": {"implementation": "nothing"},
}


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_fit_is_an_error(message: str) -> None:
    case = Case([1, 2, 3, 4], rows=2, heads=4, kv_heads=2, block_size=4, window=None)
    changes = dict(BAD[message])
    implementation = str(changes.pop("implementation", "reference"))
    for name, value in changes.items():
        setattr(case, name, value)
    with pytest.raises(ValueError, match=f"^{message}"):
        case.paged(implementation)
