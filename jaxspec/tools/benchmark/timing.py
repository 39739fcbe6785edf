"""Device times: programs dispatched back to back, chained calls, and the device's best rates.

Nothing here runs under a profiler: an active one turns CUDA graphs off.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Carry = TypeVar("Carry")
REPEAT_SECONDS, MOST_DISPATCHES = 0.02, 200
DISCARDED = 5  # the first runs of a program warm it up, then record its CUDA graphs


@dataclass(frozen=True)
class Timing:
    """Seconds of a call.

    samples: one a repeat
    host:    what dispatching one took; device time that is no longer says nothing about the device
    """

    samples: tuple[float, ...]
    host: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def best(self) -> float:
        return min(self.samples)

    def to_dict(self, calls: int = 1) -> dict[str, Any]:
        """Return the times for JSON, of a call that held `calls` of what is timed."""
        return {
            "seconds": self.median / calls,
            "best_seconds": self.best / calls,
            "samples": [s / calls for s in self.samples],
            "host_seconds": self.host / calls,
        }


def back_to_back(
    step: Callable[[Carry], Carry],
    carry: Carry,
    *,
    count: int,
    repeats: int,
    rewind: Callable[[Carry], Carry] = lambda carry: carry,
    pause: float = 0.0,
) -> tuple[Timing, Carry]:
    """Time step(carry) -> carry: `count` calls dispatched without waiting, one wait at the end.

    That is repeated `repeats` times, with `rewind` between. `pause` seconds of idling come before
    each repeat: after them a device at its power limit runs at full clock for some tenths of a
    second.
    """
    carry = rewind(carry)
    for _ in range(min(DISCARDED, count)):
        carry = step(carry)
    samples, host = [], []
    for _ in range(repeats):
        carry = jax.block_until_ready(rewind(carry))
        time.sleep(pause)
        began = time.perf_counter()
        for _ in range(count):
            carry = step(carry)
        host.append((time.perf_counter() - began) / count)
        jax.block_until_ready(carry)
        samples.append((time.perf_counter() - began) / count)
    return Timing(tuple(samples), min(host)), carry


def time_chained(
    op: Callable[..., Any], copies: Sequence[Mapping[str, Any]], *, repeats: int
) -> Timing:
    """Time a program with one call of op(**arrays) for each of the copies (see `chain`).

    It runs for REPEAT_SECONDS at a time.
    """
    program, zero = jax.jit(chain(op)), jnp.zeros((), jnp.int32)
    step = lambda zero: program(copies, zero)  # noqa: E731
    first, zero = back_to_back(step, zero, count=2, repeats=1)
    count = min(max(2, round(REPEAT_SECONDS / first.best)), MOST_DISPATCHES)
    return back_to_back(step, zero, count=count, repeats=repeats)[0]


def chain(op: Callable[..., Any]) -> Callable[[Sequence[Mapping[str, Any]], jax.Array], jax.Array]:
    """Return a program (copies, zero) -> zero of one call of op after the other.

    Each call has its own copy of the arguments, so that no two are merged. Each call's smallest
    array has a zero added that is made of the results of the call before, so that none is dropped
    or overlapped. The addition is one small kernel a call: its time is that of a chain of
    `smallest`.
    """
    inner = jax.jit(op)  # traced and lowered once, however many calls

    def program(copies: Sequence[Mapping[str, Any]], zero: jax.Array) -> jax.Array:
        for copy in copies:
            arrays, zero = lax.optimization_barrier((dict(copy), zero))
            name = smallest_name(arrays)
            arrays[name] = _add_zero(arrays[name], zero)
            zero = _zero_of(lax.optimization_barrier(inner(**arrays)))
        return zero

    return program


def smallest_name(arrays: Mapping[str, Any]) -> str:
    """Return the argument that the chain goes through: an array, not a tuple of some."""
    return min(
        (name for name, x in arrays.items() if hasattr(x, "size")),
        key=lambda name: (arrays[name].size, name),
    )


def smallest(**arrays: Any) -> jax.Array:
    """Do nothing: an op for the time of the chain itself."""
    return arrays[smallest_name(arrays)]


def _add_zero(x: jax.Array, zero: jax.Array) -> jax.Array:
    return x ^ (zero != 0) if x.dtype == jnp.bool_ else x + zero.astype(x.dtype)


def _zero_of(results: Any) -> jax.Array:
    """Return 0, made of every array in results in a way that no compiler can know.

    An element of each array is not a NaN, or not the lowest integer.
    """
    zero = jnp.zeros((), jnp.int32)
    for leaf in jax.tree.leaves(results):
        first = leaf.reshape(-1)[0]
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        odd = jnp.isnan(first) if floating else first.astype(jnp.int32) == jnp.iinfo(jnp.int32).min
        zero = zero | odd.astype(jnp.int32)
    return zero


# --- what the device can do ------------------------------------------------------------------


def measure_bandwidth(num_bytes: int, *, repeats: int = 5) -> float:
    """Measure the bytes a second that a maximum over num_bytes reads.

    The result is the best of several runs of two forms of it.
    """
    x = jax.block_until_ready(_fill(num_bytes // 4096))
    forms = [jax.jit(lambda x: jnp.max(x)), jax.jit(lambda x: jnp.max(jnp.max(x, axis=1)))]
    best = min(
        back_to_back(lambda _, form=form: form(x), x[0, 0], count=4, repeats=repeats)[0].best
        for form in forms
    )
    return x.nbytes / best


def measure_matmul_rate(size: int, *, repeats: int = 5) -> float:
    """Measure the floating-point operations a second of a size x size bfloat16 product.

    The result is the best of several runs.
    """
    keys = jax.random.split(jax.random.key(0), 2)
    a, b = (jax.random.normal(key, (size, size), jnp.float32).astype(jnp.bfloat16) for key in keys)
    product = jax.jit(
        lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(jnp.bfloat16)
    )
    best = back_to_back(lambda _: product(a, b), a, count=10, repeats=repeats)[0].best
    return 2 * size**3 / best


@partial(jax.jit, static_argnums=0)
def _fill(rows: int) -> jax.Array:
    """uint32 [rows, 1024] of mixed values."""
    index = lax.broadcasted_iota(jnp.uint32, (rows, 1024), 0) * jnp.uint32(
        1024
    ) + lax.broadcasted_iota(jnp.uint32, (rows, 1024), 1)
    return index * jnp.uint32(0x9E3779B9)
