"""Rows have the same bits beside few other rows as beside many, wherever they stand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxspec.config import Ops
from jaxspec.layers import mla, moe
from jaxspec.layers.moe import MoEConfig
from jaxspec.layers.row_tiles import in_tiles
from pallas_kernels import latent_attention
from pallas_kernels.fp8_matmul import Fp8Weight

ROWS, DEPTH, SIZE, COUNT, TOP_K = 12, 512, 128, 8, 2
HEADS, NOPE, RANK, ROPE = 4, 64, 256, 32
OPS = Ops(rows_alike=True)
CFG = MoEConfig(num_experts=COUNT, top_k=TOP_K, intermediate_size=SIZE)
RNG = np.random.default_rng(0)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def codes(depth: int, width: int, form: Any) -> Fp8Weight:
    values = np.clip(120 * RNG.normal(size=(COUNT, width, depth)), -448, 448)
    of_scales = (COUNT, width) if form == "token" else (COUNT, width // 128, depth // 128)
    scales = RNG.uniform(0.5, 1, of_scales) * depth**-0.5 / 120
    stored = jnp.asarray(values.astype(ml_dtypes.float8_e4m3fn))
    return Fp8Weight(stored, jnp.asarray(scales, jnp.float32), activation=form)


def routes(kind: Any, cfg: MoEConfig = CFG) -> tuple[Callable[..., Any], list[jax.Array]]:
    router, bias = normal(DEPTH, COUNT), normal(COUNT) if kind == "sigmoid" else None
    return lambda x: moe.route(x, router, bias, cfg, kind, OPS), [normal(ROWS, DEPTH)]


def logits() -> tuple[Callable[..., Any], list[jax.Array]]:
    router = normal(DEPTH, COUNT)
    return lambda x: moe.router_logits(x, router, OPS), [normal(ROWS, DEPTH)]


def experts(form: str) -> tuple[Callable[..., Any], list[jax.Array]]:
    params = {"gate_up": codes(DEPTH, 2 * SIZE, form), "down": codes(SIZE, DEPTH, form)}
    ids = np.stack([RNG.permutation(COUNT)[:TOP_K] for _ in range(ROWS)]).astype(np.int32)
    share = jnp.asarray(RNG.random((ROWS, TOP_K)), jnp.float32)

    def run(x: jax.Array, ids: jax.Array, share: jax.Array) -> jax.Array:
        return moe.experts(params, CFG, x, ids, share, OPS)

    return run, [normal(ROWS, DEPTH), jnp.asarray(ids), share]


def heads(depth: int, width: int) -> tuple[Callable[..., Any], list[jax.Array]]:
    """With rotated keys beside the heads' own part, as queries have them, if depth is NOPE."""
    weights, rotated = normal(HEADS, depth, width), depth == NOPE
    x = normal(ROWS, HEADS, depth + ROPE * rotated)
    if not rotated:
        return lambda x: mla._by_head(x, weights, OPS), [x]
    return (
        lambda x, cos, sin: mla._by_head(x, weights, OPS, cos=cos, sin=sin),
        [x, normal(ROWS, ROPE // 2), normal(ROWS, ROPE // 2)],
    )


def latents() -> tuple[Callable[..., Any], list[jax.Array]]:
    cache = normal(4, 16, 1, RANK + ROPE)

    def attend(q: jax.Array, positions: jax.Array) -> jax.Array:
        queries = latent_attention.Inputs(
            q=q[None],
            cache=cache,
            block_table=jnp.arange(4, dtype=jnp.int32)[None],
            positions=positions[None],
            seq_lens=jnp.full(1, 64, jnp.int32),
            kv_lora_rank=RANK,
            scale=0.05,
        )
        return mla._attend(queries, OPS)[0]

    return attend, [normal(ROWS, 16, RANK + ROPE), 40 + jnp.arange(ROWS, dtype=jnp.int32)]


CASES: dict[str, Callable[[], tuple[Callable[..., Any], list[jax.Array]]]] = {
    "softmax router": lambda: routes("softmax"),
    "sigmoid router": lambda: routes("sigmoid", replace(CFG, num_groups=4, top_groups=2)),
    "router's logits": logits,
    "experts": lambda: experts("token"),
    "experts in blocks": lambda: experts("block"),
    "queries by head": lambda: heads(NOPE, RANK),
    "values by head": lambda: heads(RANK, NOPE),
    "latent attention": latents,
}


@pytest.mark.parametrize("case", CASES)
def test_a_row_alone_has_the_bits_that_it_has_among_others(case: str) -> None:
    run, inputs = CASES[case]()
    flags: Any = dict(OPS.compiler_options(cuda_graphs=True))
    program = jax.jit(run, compiler_options=flags)
    together = jax.tree.leaves(program(*inputs))
    for row in range(ROWS):
        alone = jax.tree.leaves(program(*(x[row : row + 1] for x in inputs)))
        for one, all_rows in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one[0], all_rows[row])


@pytest.mark.parametrize("rows", [1, 8, 19])
@pytest.mark.parametrize("axis", [0, 1])
def test_tiles_are_what_all_rows_are(axis: int, rows: int) -> None:
    shape = (2, rows, 3) if axis else (rows, 2, 3)
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)

    def doubled(x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
        assert x.shape[axis] == y.shape[axis] == 8
        return {"sum": x + y, "x": x}

    made = in_tiles(doubled, jnp.asarray(x), jnp.asarray(10 * x), axis=axis)
    np.testing.assert_array_equal(made["sum"], 11 * x)
    np.testing.assert_array_equal(made["x"], x)
