"""The kernels of latent attention compile for an H200 without spills; a layer is eight launches
that leave cache and weights in place."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec.cache.arrays import LatentCache
from jaxspec.cache.metadata import AttentionMetadata
from jaxspec.config import Ops
from jaxspec.layers import mla
from jaxspec.layers.context import Pass
from jaxspec.layers.norms import Norm
from jaxspec.tools.benchmark.dimensions import HYBRID
from pallas_kernels.head_matmul import head_matmul
from pallas_kernels.head_matmul import shapes as head_shapes
from pallas_kernels.latent_attention import Inputs, latent_attention
from pallas_kernels.latent_attention import shapes as attention_shapes
from pallas_kernels.latent_cache import norm_and_write
from pallas_kernels.latent_cache import shapes as cache_shapes
from tests.support import h200

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(h200.unavailable() is not None, reason=str(h200.unavailable())),
]

# norm, projections to latents, norms and write, q_b, keys absorbed and rotation, attention, values,
# o + residual
LAUNCHES = 8
# Clusters of 8, 4, 2 and 1, one row tile to three, a prefill chunk, and many heads.
ATTENTION = [
    "glm, batch 1, context 400, Q 4",
    "glm, batch 1, context 400, Q 6",
    "glm, batch 16, context 400, Q 1",
    "glm, batch 16, context 4k, Q 4",
    "glm, batch 16, context 4k, Q 6",
    "glm, batch 64, context 4k, Q 4",
    "glm, prefill of 512 rows after 512",
    "deepseek-v3, batch 4, context 4k, Q 4",
]


def struct(inputs: Any) -> Any:
    """The shapes and dtypes of an op's inputs."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)


# What jax 0.12's compiler spills, in bytes of a thread: stack, stores, loads.
SPILLED = (8, 4, 4) if jax.__version_info__ >= (0, 12) else (0, 0, 0)
SPILLING = "glm, prefill of 512 rows after 512"


def moved(hlo: str, *shape: int) -> list[str]:
    """Instructions that make another array of this shape."""
    name = re.escape(f"bf16[{','.join(map(str, shape))}]")
    return re.findall(
        rf"= {name}\S* (?:copy|fusion|transpose|pad|scatter|dynamic-update-slice|convert)\(.*", hlo
    )


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_compiles_without_spills_or_copies_of_the_cache(name: str) -> None:
    shape = attention_shapes.SHAPES[name]
    inputs = jax.eval_shape(lambda: attention_inputs(shape))
    attend = functools.partial(latent_attention, implementation="mosaic_gpu")
    hlo = h200.compile_without_spills(
        attend, inputs, but=SPILLED if name == SPILLING else (0, 0, 0)
    )
    assert not moved(hlo, *inputs.cache.shape)
    assert not moved(hlo, *inputs.q.shape)


def attention_inputs(shape: attention_shapes.Shape) -> Inputs:
    """What make_inputs makes, to be traced: a cache of real size does not fit here."""
    cache = (shape.batch * shape.table_pages + 1, shape.block_size, 1, shape.width)
    return Inputs(
        q=jnp.zeros((shape.batch, shape.rows, shape.heads, shape.width), jnp.bfloat16),
        cache=jnp.zeros(cache, jnp.bfloat16),
        block_table=jnp.zeros((shape.batch, shape.table_pages), jnp.int32),
        positions=jnp.zeros((shape.batch, shape.rows), jnp.int32),
        seq_lens=jnp.zeros(shape.batch, jnp.int32),
        kv_lora_rank=512,
        scale=shape.scale,
    )


@pytest.mark.parametrize("name", head_shapes.SHAPES)
def test_products_by_head_compile_without_spills(name: str) -> None:
    inputs = head_shapes.make_inputs(head_shapes.SHAPES[name], 0)
    hlo = h200.compile_without_spills(
        lambda inputs: head_matmul(inputs, implementation="mosaic_gpu"), struct(inputs)
    )
    assert not moved(hlo, *inputs.weights.shape)


@pytest.mark.parametrize("name", cache_shapes.SHAPES)
def test_norms_and_write_compile_without_spills_or_copies_of_the_cache(name: str) -> None:
    inputs = cache_shapes.make_inputs(cache_shapes.SHAPES[name], 0)
    cache, rest = inputs.cache, struct(replace(inputs, cache=jnp.zeros((), jnp.bfloat16)))

    def write(inputs: Any, cache: jax.Array) -> Any:
        return norm_and_write(replace(inputs, cache=cache), implementation="mosaic_gpu")

    hlo = h200.compile_without_spills(write, rest, struct(cache), donate_argnums=1)
    assert not moved(hlo, *cache.shape)
    assert not moved(hlo, *cache.shape[:2], cache.shape[3] // 64, 64)


@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (1, 4), (1, 6), (16, 4)])
def test_a_layer_is_eight_launches_and_what_layers_share(batch: int, rows: int) -> None:
    cfg, hidden = HYBRID["glm-4.7-flash"].target.attention, 2048
    array = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    integers = functools.partial(array, dtype=jnp.int32)
    params = jax.tree.map(lambda spec: array(*spec.shape), mla.mla_specs("layer", cfg, hidden))
    x, table = (
        array(batch, rows, hidden),
        array(batch, rows, 1, cfg.rope_head_dim // 2, dtype=jnp.float32),
    )
    fields: dict[str, Any] = {
        name: integers(batch, rows) for name in ("positions", "slot_mapping", "window_start")
    }
    fields |= {
        "seq_lens": integers(batch),
        "num_pages": integers(batch),
        "block_table": integers(batch, 8),
    }
    metadata = AttentionMetadata(**fields)
    ops = Ops(
        attention="mosaic_gpu", matmul="mosaic_gpu", rms_norm="mosaic_gpu", rope_cache="mosaic_gpu"
    )

    def layer(
        params: Any, x: jax.Array, rope: Any, metadata: Any, norm: jax.Array, cache: LatentCache
    ) -> Any:
        pass_ = Pass((metadata,), ops, rope=rope)
        stream, cache = mla.add_latent_attention(
            params, cfg, x, cache, pass_, norm=Norm(norm, cfg.rms_norm_eps)
        )
        return stream.x, cache

    cache = LatentCache(array(batch * 8, 64, 1, cfg.head_dim))  # type: ignore[arg-type]
    hlo = h200.compile_without_spills(
        layer, params, x, (table, table), metadata, array(hidden), cache, donate_argnums=5
    )
    entry = hlo[hlo.index("\nENTRY") :]
    assert len(re.findall(r'custom_call_target="mosaic_gpu_v2"', entry)) == LAUNCHES
    made = re.findall(
        r"= (\w+)\[[^ ]* (?:fusion|copy|transpose|convert|pad|concatenate|scatter)\(", entry
    )
    assert set(made) <= {"s32", "f32", "pred"}, (
        made
    )  # bounds of the keys and tables of the rotation: no activations
