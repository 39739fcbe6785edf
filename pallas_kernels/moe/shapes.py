"""Real shapes of the experts, shared by tests and benchmarks.

The passes of a decode round of three models, at batches of 1 and 16.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.fp8_matmul.weight import BLOCK, DTYPE, LARGEST, Fp8Weight
from pallas_kernels.int4_matmul.weight import COLUMNS, DEPTHS, UNIT, Int4Weight
from pallas_kernels.moe.inputs import Gate, Inputs
from pallas_kernels.moe.mxfp4 import random_weight
from pallas_kernels.moe.stored import Codes, Stored

ROWS = (1, 4, 6, 16, 64, 96)  # a draft step, K + 1 of K = 3 and 5; the same of 16 requests


@dataclasses.dataclass(frozen=True)
class Shape:
    """Rows x [rows, hidden] through top_k of num_experts experts.

    gate_up is [experts, hidden, 2 * size] and down [experts, size, hidden]. routing: "random"
    (each row its own experts), "same" (all rows the same ones) or "spread" (one after the other:
    every expert is hit if rows * top_k suffice). mxfp4: weights are packed. codes: the form of
    weights with scales; "fp8" has one for each column, int4 groups of 128 or, with "zeros", of 64.
    """

    rows: int
    num_experts: int
    top_k: int
    hidden: int
    size: int
    gate: Gate = "silu"
    bias: bool = False
    routing: str = "random"
    mxfp4: bool = False
    codes: Literal["fp8", "fp8-block", "int4", "int4 zeros"] | None = None


_MODELS = {
    "gpt-oss-20b": Shape(0, 32, 4, 2880, 2880, gate="clamped", bias=True),
    "gpt-oss-20b mxfp4": Shape(0, 32, 4, 2880, 2880, gate="clamped", bias=True, mxfp4=True),
    "glm-4.7-flash": Shape(0, 64, 4, 2048, 1536),
    "qwen3-30b-a3b": Shape(0, 128, 8, 2048, 768),
    "qwen3-30b-a3b fp8": Shape(0, 128, 8, 2048, 768, codes="fp8"),
    "qwen3-30b-a3b fp8-block": Shape(0, 128, 8, 2048, 768, codes="fp8-block"),
    "qwen3-30b-a3b int4": Shape(0, 128, 8, 2048, 768, codes="int4"),
}
SHAPES = {
    f"{name} rows {rows}": dataclasses.replace(shape, rows=rows)
    for name, shape in _MODELS.items()
    for rows in ROWS
}


def route(shape: Shape, seed: int) -> np.ndarray:
    """Return chosen experts, int32 [rows, top_k], no expert twice in a row."""
    rng, rows, top_k = np.random.default_rng(seed), shape.rows, shape.top_k
    if shape.routing == "same":
        ids = np.tile(rng.permutation(shape.num_experts)[:top_k], (rows, 1))
    elif shape.routing == "spread":
        ids = np.arange(rows * top_k).reshape(rows, top_k) % shape.num_experts
    else:
        ids = np.stack([rng.permutation(shape.num_experts)[:top_k] for _ in range(rows)])
    return ids.astype(np.int32)


def make_inputs(shape: Shape, seed: int) -> Inputs:
    """Return normal random numbers, scaled so that x and the result are of one size."""
    keys = jax.random.split(jax.random.key(seed), 6)

    def normal(key: jax.Array, *dims: int, scale: float = 1.0) -> jax.Array:
        return jax.random.normal(key, dims, jnp.bfloat16) * jnp.asarray(scale, jnp.bfloat16)

    count, hidden, size = shape.num_experts, shape.hidden, shape.size

    def matrices(key: jax.Array, depth: int, width: int) -> Stored:
        if shape.codes is not None:
            return random_codes(key, shape.codes, (count, depth, width))
        if shape.mxfp4:  # a code's root mean square is about 3
            exponent = round(-math.log2(3 * math.sqrt(depth)))
            return random_weight(key, (count, depth, width), exponent)
        return normal(key, count, depth, width, scale=1 / math.sqrt(depth))

    logits = jax.random.normal(keys[1], (shape.rows, shape.top_k), jnp.float32)
    return Inputs(
        x=normal(keys[0], shape.rows, hidden),
        ids=jnp.asarray(route(shape, seed)),
        weights=jax.nn.softmax(logits),
        gate_up=matrices(keys[2], hidden, 2 * size),
        down=matrices(keys[3], size, hidden),
        gate_up_bias=normal(keys[4], count, 2 * size) if shape.bias else None,
        down_bias=normal(keys[5], count, hidden) if shape.bias else None,
        gate=shape.gate,
    )


def random_codes(key: jax.Array, form: str, shape: tuple[int, int, int]) -> Codes:
    """Return random codes and ragged scales of matrices [experts, in, out] of about in ** -0.5."""
    (count, depth, width), keys = shape, jax.random.split(key, 3)

    def scales(*dims: int, largest: float) -> jax.Array:
        noise = jax.random.uniform(keys[1], (count, *dims), jnp.float32, 0.5, 1.5)
        return noise / (largest * math.sqrt(depth))

    if form.startswith("int4"):
        units = count, width // COLUMNS, depth // DEPTHS, UNIT
        words = jax.lax.bitcast_convert_type(jax.random.bits(keys[0], units, jnp.uint32), jnp.int32)
        has_zeros = form.endswith("zeros")
        groups = depth // (DEPTHS if has_zeros else BLOCK), width
        zeros = jax.random.randint(keys[2], (count, *groups), 6, 11).astype(jnp.uint8)
        by_group = scales(*groups, largest=4.6).astype(jnp.bfloat16)
        return Int4Weight(words, by_group, zeros if has_zeros else None)
    noise = 120 * jax.random.normal(keys[0], (count, width, depth), jnp.float32)
    codes = jnp.clip(noise, -LARGEST, LARGEST).astype(DTYPE)
    if form == "fp8":
        return Fp8Weight(codes, scales(width, largest=120), activation="token")
    blocks = scales(width // BLOCK, depth // BLOCK, largest=120)
    return Fp8Weight(codes, blocks, activation="block")


def bytes_moved(shape: Shape) -> int:
    """Return the fewest bytes of device memory.

    Each expert that make_inputs hits with seed 0 is read once; rows are read and written.
    """
    hit = len(np.unique(route(shape, 0)))
    weights = 3 * shape.hidden * shape.size
    biases = 2 * shape.size + shape.hidden if shape.bias else 0
    by_form = {"fp8": weights, "fp8-block": weights, "int4": weights // 2 + weights // 64}
    by_form["int4 zeros"] = weights // 2 + 3 * weights // 64
    stored = by_form[shape.codes] if shape.codes is not None else 2 * weights
    per_expert = (weights * 17 // 32 if shape.mxfp4 else stored) + 2 * biases
    rows = 4 * shape.rows * shape.hidden
    return hit * per_expert + rows + 8 * shape.rows * shape.top_k
