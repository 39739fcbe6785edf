"""The three ways through the experts give the same sum, each expert's rows in plain numpy; routers
by their definition."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import REFERENCE_OPS, Ops
from jaxspec.layers import moe
from jaxspec.layers.log_once import log_once
from jaxspec.layers.moe import MoEConfig
from jaxspec.layers.params import Weight
from tests.kernels.interpreter import needs_mosaic

CFG = MoEConfig(num_experts=6, top_k=2, intermediate_size=10)
DIM = 8
WAYS = {
    "gathered": moe._gathered,
    "all": partial(moe._by_the_op, implementation="reference", first_expert=None),
    "grouped": partial(moe._grouped, implementation="reference"),
    "alike": partial(moe._grouped, implementation="reference", rows_alike=True),
}


def weights(rng: Any, bias: bool) -> dict[str, Any]:
    shapes = {"gate_up": (6, DIM, 20), "down": (6, 10, DIM)} | (
        {"gate_up_bias": (6, 20), "down_bias": (6, DIM)} if bias else {}
    )
    arrays = {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()
    }
    return arrays | {name: Weight(arrays[name]) for name in ("gate_up", "down")}


def by_hand(params: Any, x: np.ndarray, ids: np.ndarray, weight: np.ndarray) -> np.ndarray:
    out = np.zeros_like(x)
    for row in range(len(x)):
        for expert, w in zip(ids[row], weight[row], strict=True):
            gate, up = np.split(
                x[row] @ params["gate_up"].values[expert]
                + params.get("gate_up_bias", np.zeros((6, 1)))[expert],
                2,
            )
            inner = gate / (1 + np.exp(-gate)) * up
            out[row] += w * (
                inner @ params["down"].values[expert]
                + params.get("down_bias", np.zeros((6, 1)))[expert]
            )
    return out


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_the_sum_over_the_chosen_experts(way: str, bias: bool) -> None:
    rng = np.random.default_rng(0)
    params = weights(rng, bias)
    x = rng.normal(size=(9, DIM)).astype(np.float32)
    ids = np.stack([rng.permutation(6)[:2] for _ in x]).astype(
        np.int32
    )  # some experts for several rows, perhaps some for none
    ids[0], ids[1] = (5, 0), (5, 0)
    weight = rng.random((9, 2)).astype(np.float32)
    host = jax.tree.map(np.asarray, params)
    expected = by_hand(host, x, ids, weight)
    for rows in (9, 1):
        few = (jnp.asarray(a[:rows]) for a in (x, ids, weight))
        out = WAYS[way](params, CFG, *few)
        np.testing.assert_allclose(out, expected[:rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("favourite", [0, 3, 5])
def test_grouped_rows_fill_whole_blocks_and_parts_of_them(
    favourite: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row chooses the same expert first, three blocks of it and a part; of the others some
    are chosen by none."""
    monkeypatch.setattr(moe, "BLOCK_ROWS", 4)
    monkeypatch.setattr(moe, "BLOCKS_AT_ONCE", 3)
    rng = np.random.default_rng(favourite)
    params, x = weights(rng, bias=True), rng.normal(size=(14, DIM)).astype(np.float32)
    ids = np.stack([[favourite, (favourite + 1 + i % 2) % 6] for i in range(14)]).astype(np.int32)
    weight = rng.random((14, 2)).astype(np.float32)
    inputs = (jnp.asarray(a) for a in (x, ids, weight))
    out = moe._grouped(params, CFG, *inputs, implementation="reference")
    host = jax.tree.map(np.asarray, params)
    np.testing.assert_allclose(out, by_hand(host, x, ids, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "way"), [(1, "gathered"), (2, "gathered"), (3, "all"), (64, "all"), (65, "grouped")]
)
def test_the_way_follows_from_the_shapes(
    rows: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    for name, function in (
        ("gathered", "_gathered"),
        ("all", "_by_the_op"),
        ("grouped", "_grouped"),
    ):
        monkeypatch.setattr(moe, function, lambda *_, name=name, **__: taken.append(name))
    moe.experts(
        weights(np.random.default_rng(0), bias=False),
        CFG,
        jnp.zeros((rows, DIM)),
        jnp.zeros((rows, 2), jnp.int32),
        jnp.zeros((rows, 2)),
        REFERENCE_OPS,
    )
    assert taken == [way]


@pytest.mark.parametrize(("rows", "way"), [(2, "gathered"), (3, "all"), (70, "grouped")])
def test_two_halves_of_the_experts_add_up_to_all(rows: int, way: str) -> None:
    """Each device has three of six experts, and the first row of the second case has none of the
    first device's."""
    rng = np.random.default_rng(rows)
    params = weights(rng, bias=True)
    x = jnp.asarray(rng.normal(size=(rows, DIM)), jnp.float32)
    ids = jnp.asarray([rng.permutation(6)[:2] for _ in range(rows)], jnp.int32).at[0].set([4, 5])
    share = jnp.asarray(rng.uniform(size=(rows, 2)), jnp.float32)
    total = jnp.zeros_like(x)
    for first in (0, 3):
        part = jax.tree.map(lambda a, first=first: a[first : first + 3], params)
        held = replace(CFG, num_experts=3)
        if way == "grouped":
            total += moe._grouped(
                part, held, x, ids, share, jnp.int32(first), implementation="reference"
            )
        else:
            routes = moe.own_routes(ids, share, jnp.int32(first), 3)
            total += WAYS[way](part, held, x, *routes)
    whole = WAYS[way](params, CFG, x, ids, share)
    np.testing.assert_allclose(total, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("favourite", "blocks"), [(0, 4), (3, 0), (2, 4)])
def test_a_device_multiplies_no_block_of_other_devices_experts(
    favourite: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has experts 0, 1 and 2; all rows choose one expert. Garbage fills other blocks."""
    monkeypatch.setattr(moe, "BLOCK_ROWS", 4)
    monkeypatch.setattr(moe, "BLOCKS_AT_ONCE", 3)
    counts, first_blocks = [], moe._first_blocks

    def noted(run: Any, of_blocks: Any, count: jax.Array, *sizes: int) -> jax.Array:
        counts.append(int(count))
        out = first_blocks(run, of_blocks, count, *sizes)
        computed = -(-int(count) // 3) * 3
        assert not np.asarray(out[computed:]).any()
        return out

    monkeypatch.setattr(moe, "_first_blocks", noted)
    rng = np.random.default_rng(favourite)
    params, x = weights(rng, bias=True), rng.normal(size=(14, DIM)).astype(np.float32)
    ids, weight = np.full((14, 1), favourite, np.int32), rng.random((14, 1)).astype(np.float32)
    part = jax.tree.map(lambda a: a[:3], params)
    cfg = replace(CFG, num_experts=3)
    inputs = tuple(jnp.asarray(a) for a in (x, ids, weight))
    out = moe._grouped(part, cfg, *inputs, first=jnp.int32(0), implementation="reference")
    assert counts == [blocks]
    expected = by_hand(jax.tree.map(np.asarray, params), x, ids, weight)
    np.testing.assert_allclose(out, expected if blocks else 0 * expected, rtol=1e-4, atol=1e-4)


def test_few_rows_gather_no_more_than_the_experts_they_chose() -> None:
    """No array of the size of all experts but the weights themselves is made."""
    params = weights(np.random.default_rng(0), bias=False)
    args = (jnp.zeros((2, DIM)), jnp.zeros((2, 2), jnp.int32), jnp.zeros((2, 2)))
    jaxpr = jax.make_jaxpr(
        lambda p, x, ids, weight: moe.experts(p, CFG, x, ids, weight, REFERENCE_OPS)
    )(params, *args)
    made = max(v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars)
    assert made <= 4 * DIM * 20 < 6 * DIM * 20


def test_the_bias_of_a_sigmoid_router_chooses_and_does_not_weigh() -> None:
    logits = jnp.asarray([[0.0, 1.0, 2.0, 3.0, -1.0, -2.0]])
    bias = jnp.asarray([9.0, 0, 0, 0, 0, 0])
    cfg = replace(CFG, routed_scaling=2.0)
    ids, weight = moe.route_sigmoid(logits, bias, cfg)
    chosen = jax.nn.sigmoid(jnp.asarray([0.0, 3.0]))
    assert ids.tolist() == [[0, 3]]
    np.testing.assert_allclose(weight[0], 2 * chosen / chosen.sum(), rtol=1e-6)


def test_groups_compete_by_their_best_two() -> None:
    """Experts 0 and 1 hold the single best score, 2 and 3 the best pair."""
    logits = jnp.asarray([[4.0, -9.0, 1.0, 1.5, -9.0, -9.0]])
    cfg = replace(CFG, num_groups=3, top_groups=1)
    ids, _ = moe.route_sigmoid(logits, jnp.zeros(6), cfg)
    assert sorted(ids[0].tolist()) == [2, 3]
    ids, _ = moe.route_sigmoid(logits, jnp.zeros(6), replace(cfg, top_groups=2))
    assert sorted(ids[0].tolist()) == [0, 3]


def test_with_the_kernel_its_rows_are_its_own_and_more_are_grouped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = []
    monkeypatch.setattr(moe, "_grouped", lambda *_, **__: taken.append("grouped"))
    monkeypatch.setattr(
        moe.moe_op, "experts", lambda *_, implementation, **__: taken.append(implementation)
    )
    shapes = {"gate_up": (6, DIM, 20), "down": (6, 10, DIM)}
    params = {name: Weight(jnp.zeros(shape)) for name, shape in shapes.items()}
    for rows in (1, 2, 64, 65, 256, 257):
        ids = jnp.zeros(
            (rows, 8), jnp.int32
        )  # wider than the weights, as the router's kernel gives them
        moe.experts(
            params,
            CFG,
            jnp.zeros((rows, DIM)),
            ids,
            jnp.zeros((rows, 2)),
            Ops(moe="mosaic_gpu"),
        )
    assert taken == ["mosaic_gpu"] * 5 + ["grouped"]


@needs_mosaic
def test_what_the_routers_kernel_does_not_take_is_xlas_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    taken = []
    monkeypatch.setattr(
        moe.router_op, "route", lambda *_, implementation, **__: taken.append(implementation)
    )
    monkeypatch.setattr(moe, "route_sigmoid", lambda *_: taken.append("groups"))
    cfg = MoEConfig(num_experts=32, top_k=2, intermediate_size=10)
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, "jaxspec.layers"):
        for rows, kernels, change in (
            (4, Ops(moe="mosaic_gpu"), {}),
            (4, Ops(), {}),
            (300, Ops(moe="mosaic_gpu"), {}),
            (4, Ops(moe="mosaic_gpu"), {"num_groups": 4, "top_groups": 2}),
        ):
            x, router = jnp.zeros((rows, 64), jnp.bfloat16), jnp.zeros((64, 32), jnp.bfloat16)
            moe.route(x, router, jnp.zeros(32), replace(cfg, **change), "sigmoid", kernels)
    assert taken == ["mosaic_gpu", "reference", "reference", "groups"]
    assert [r.getMessage() for r in caplog.records] == [
        "XLA routes by (64, 32): the kernel expected 1 to 256 rows, got 300"
    ]


def test_a_sigmoid_router_without_groups_is_the_op() -> None:
    rng = np.random.default_rng(0)
    x, router, bias = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((5, DIM), (DIM, 6), (6,))
    )
    cfg = replace(CFG, routed_scaling=1.8)
    expected = moe.route_sigmoid(moe.router_logits(x, router, REFERENCE_OPS), bias, cfg)
    for got, wanted in zip(
        moe.route(x, router, bias, cfg, "sigmoid", REFERENCE_OPS), expected, strict=True
    ):
        np.testing.assert_array_equal(got, wanted)
