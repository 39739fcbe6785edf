"""The rope kernel compiles for an H200 at real shapes without spills, and writes into the caches
where they are."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import attention
from pallas_kernels.rope_cache import Inputs, rope_and_write
from pallas_kernels.rope_cache.shapes import SHAPES, Shape
from tests.support import h200

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(h200.unavailable() is not None, reason=str(h200.unavailable())),
]

BLOCKS = 200


def abstract(shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
    half, heads = shape.head_dim // 2, shape.num_heads + 2 * shape.num_kv_heads
    cache_dtype = jnp.float8_e4m3fn if shape.fp8 else jnp.bfloat16
    cache = ((BLOCKS, shape.block_size, shape.num_kv_heads, shape.head_dim), cache_dtype)
    table = ((shape.total_rows, half), jnp.float32)
    struct = {
        "qkv": ((shape.total_rows, heads * shape.head_dim), jnp.bfloat16),
        "cos": table,
        "sin": table,
    }
    struct |= {"slot_mapping": ((shape.total_rows,), jnp.int32), "k_cache": cache, "v_cache": cache}
    if shape.qk_norm:
        struct |= {name: ((shape.head_dim,), jnp.bfloat16) for name in ("q_norm", "k_norm")}
    if shape.fp8:
        struct |= {name: ((shape.num_kv_heads,), jnp.float32) for name in ("k_scale", "v_scale")}
    return {name: jax.ShapeDtypeStruct(*x) for name, x in struct.items()}


@pytest.mark.parametrize("name", SHAPES)
def test_compiles_without_spills_or_copies_of_the_cache(name: str) -> None:
    """Followed by attention where the queries are packed: nothing stands between the two
    kernels."""
    shape = SHAPES[name]

    def rope(
        args: dict[str, jax.Array], caches: dict[str, jax.Array], rest: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        pack = shape.rows if shape.packed else None
        inputs = Inputs(**args, **caches, num_heads=shape.num_heads, eps=1e-6, pack=pack)
        q, k, v = rope_and_write(inputs, implementation="mosaic_gpu")
        if shape.packed:
            names = ("block_table", "positions", "seq_lens", "window_start")
            metadata = dict(zip(names, rest, strict=True))
            queries = attention.Inputs(
                q=q, k_cache=k, v_cache=v, **metadata, scale=0.1, packed_heads=shape.num_heads
            )
            q = attention.paged_attention(queries, implementation="mosaic_gpu")
        return (q, k, v) if shape.num_heads else (k, v)

    integers = (
        (shape.batch, 4),
        (shape.batch, shape.rows),
        (shape.batch,),
        (shape.batch, shape.rows),
    )
    rest = tuple(jax.ShapeDtypeStruct(x, jnp.int32) for x in integers)
    args = abstract(shape)
    caches = {name: args.pop(name) for name in ("k_cache", "v_cache")}
    with h200.ptxas_report() as report:
        compiled = h200.compile_for_h200(rope, args, caches, rest, donate_argnums=1)
        spills = h200.stack_and_spills(report())
    assert spills == [(0, 0, 0)] * (1 + shape.packed)
    moved = re.findall(
        r"= (?:bf16|f8e4m3fn)\S* (?:copy|fusion|transpose|pad|concatenate)\(.*",
        compiled.as_text(),
    )
    assert not moved
