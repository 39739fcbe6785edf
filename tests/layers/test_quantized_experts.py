"""Experts in codes: each way through them has the sum that the format defines, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxspec.layers import moe
from jaxspec.layers.moe import MoEConfig
from pallas_kernels.fp8_matmul import Fp8Weight
from pallas_kernels.int4_matmul import Int4Weight, pack
from tests.layers.test_moe import WAYS

FORMS = ("token", "block", "int4")
DEPTH, SIZE, COUNT = 256, 128, 6
CFG = MoEConfig(num_experts=COUNT, top_k=2, intermediate_size=SIZE)
# Float32 sums against float64. A value of the activation that lies between two codes could take the
# other one, which moves its row by 1e-2; the seeds here have none.
TOLERANCE: Any = dict(rtol=1e-4, atol=1e-4)


@dataclass(frozen=True)
class Experts:
    """Experts of one form.

    params:  as layers hold them
    weights: float64 [experts, in, out] by name, what the codes stand for
    """

    params: dict[str, Any]
    weights: dict[str, np.ndarray]


def blocks(scales: np.ndarray) -> np.ndarray:
    return np.repeat(np.repeat(scales, 128, axis=1), 128, axis=2)


def matrix(rng: Any, form: str, depth: int, width: int) -> tuple[Any, np.ndarray]:
    """Codes with ragged scales, and what they stand for: [experts, out, in]."""
    shape = (COUNT, width, depth)
    if form == "int4":
        codes = rng.integers(0, 16, shape).astype(np.uint8)
        groups = (COUNT, depth // 128, width)
        scales = rng.uniform(0.1, 2, groups).astype(np.float32) * np.float32(depth**-0.5 / 6)
        zeros = rng.integers(5, 11, groups).astype(np.uint8)
        by_group = [
            np.repeat(a.astype(np.float64), 128, axis=1).swapaxes(1, 2) for a in (zeros, scales)
        ]
        values = (codes - by_group[0]) * by_group[1]
        return Int4Weight(jnp.asarray(pack(codes)), jnp.asarray(scales), jnp.asarray(zeros)), values
    codes = np.clip(120 * rng.normal(size=shape), -448, 448).astype(ml_dtypes.float8_e4m3fn)
    of_scales = (COUNT, width) if form == "token" else (COUNT, width // 128, depth // 128)
    scales = rng.uniform(0.1, 2, of_scales).astype(np.float32) * np.float32(depth**-0.5 / 120)
    spread = scales[..., None] if form == "token" else blocks(scales)
    weight = Fp8Weight(jnp.asarray(codes), jnp.asarray(scales), activation=form)  # type: ignore[arg-type]
    return weight, codes.astype(np.float64) * spread


def experts_of(form: str, seed: int = 0) -> Experts:
    rng = np.random.default_rng(seed)
    gate_up, of_gate_up = matrix(rng, form, DEPTH, 2 * SIZE)
    down, of_down = matrix(rng, form, SIZE, DEPTH)
    weights = {"gate_up": of_gate_up.swapaxes(1, 2), "down": of_down.swapaxes(1, 2)}
    return Experts({"gate_up": gate_up, "down": down}, weights)


def quantised(x: np.ndarray, form: str) -> np.ndarray:
    """A row as fp8 products read it: codes of a token, or of 128 values, times their scale."""
    if form == "int4":
        return x
    parts = x.reshape(-1, x.size if form == "token" else 128)
    scales = (np.abs(parts).max(axis=1, keepdims=True) / 448).astype(np.float32)
    codes = (parts.astype(np.float32) / scales).astype(ml_dtypes.float8_e4m3fn)
    return (codes.astype(np.float64) * scales).reshape(-1)


def by_hand(experts: Experts, form: str, x: Any, ids: Any, share: Any) -> np.ndarray:
    out = np.zeros(x.shape)
    for row, values in enumerate(np.asarray(x, np.float64)):
        for expert, weight in zip(np.asarray(ids[row]), np.asarray(share[row]), strict=True):
            of_row = quantised(values, form) @ experts.weights["gate_up"][expert]
            gate, up = np.split(of_row, 2)
            inner = quantised(gate / (1 + np.exp(-gate)) * up, form)
            out[row] += weight * (inner @ experts.weights["down"][expert])
    return out


def routed(rows: int, seed: int = 2) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, DEPTH)) * rng.uniform(0.1, 8, (rows, 1))
    ids = np.stack([rng.permutation(COUNT)[:2] for _ in range(rows)])
    share = rng.random((rows, 2))
    return jnp.asarray(x, jnp.float32), jnp.asarray(ids, jnp.int32), jnp.asarray(share, jnp.float32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_the_sum_that_the_format_defines(way: str, form: str) -> None:
    experts, inputs = experts_of(form), routed(9)
    out = WAYS[way](experts.params, CFG, *inputs)
    expected = by_hand(experts, form, *inputs)
    np.testing.assert_allclose(out, expected, **TOLERANCE)
    if form != "int4":  # activations are quantised: plain rows give another sum
        plain = by_hand(experts, "int4", *inputs)
        assert np.abs(expected - plain).max() > 100 * TOLERANCE["atol"]


@pytest.mark.parametrize(
    ("form", "rows_alike"), [*((form, False) for form in FORMS), ("block", True)]
)
def test_devices_with_whole_experts_add_up_to_all(form: str, rows_alike: bool) -> None:
    """Each has three of six."""
    experts, (x, ids, share) = experts_of(form), routed(9)
    held, total = replace(CFG, num_experts=3), jnp.zeros_like(x)
    for first in (0, 3):
        part = jax.tree.map(lambda a, first=first: a[first : first + 3], experts.params)
        total += moe._grouped(
            part,
            held,
            x,
            ids,
            share,
            jnp.int32(first),
            implementation="reference",
            rows_alike=rows_alike,
        )
    np.testing.assert_allclose(total, by_hand(experts, form, x, ids, share), **TOLERANCE)


@pytest.mark.parametrize("form", FORMS)
def test_a_rows_sum_does_not_depend_on_its_neighbours(form: str) -> None:
    experts, (x, ids, share) = experts_of(form), routed(9)
    for way in WAYS.values():
        others = x.at[1:].multiply(50.0)
        one, other = (way(experts.params, CFG, rows, ids, share) for rows in (x, others))
        np.testing.assert_array_equal(one[0], other[0])
