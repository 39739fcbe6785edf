"""The attention kernels compile for an H200 at real shapes, without spills, and leave the caches
where they are."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import core as mosaic_core

from pallas_kernels.attention import Inputs, paged_attention
from pallas_kernels.attention.shapes import SHAPES, Shape, ragged
from pallas_kernels.packing import packed_size
from tests.kernels.attention import abstract
from tests.support import h200

SMEM_OF_AN_SM, RESERVED_SMEM = 228 * 1024, 1024  # the second in each CTA
pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(h200.unavailable() is not None, reason=str(h200.unavailable())),
]


# What jax 0.12's compiler spills, in bytes of a thread: stack, stores, loads.
SPILLED = (32, 28, 28) if jax.__version_info__ >= (0, 12) else (0, 0, 0)
SPILLING = "gpt-oss, prefill of 42 tiles of 48 rows after 2048, window 128, fp8"
# Of 32 columns over fp8 in clusters of two. Clusters of four spill nothing, and take twice as long.
SPILLED_OF_WIDE = (16, 32, 32)


ATTEND = functools.partial(paged_attention, implementation="mosaic_gpu")


@pytest.mark.parametrize("name", SHAPES)
def test_compiles_without_spills_or_copies_of_the_cache(name: str) -> None:
    shape = SHAPES[name]
    arrays: dict[str, Any] = abstract(shape)
    inputs = Inputs(**arrays, scale=shape.head_dim**-0.5, window=shape.window)
    but = SPILLED if name == SPILLING else (0, 0, 0)
    hlo = h200.compile_without_spills(ATTEND, inputs, but=but)
    element = "f8e4m3fn" if shape.fp8 else "bf16"
    cache = re.escape(f"{element}[{','.join(map(str, inputs.k_cache.shape))}]")
    assert not re.findall(rf"= {cache}\S* (?:copy|fusion|transpose)\(.*", hlo)
    if (
        shape.rows == 48
    ):  # an engine's tiles: queries are read, and results written, where the layer has them
        assert not re.findall(r"= bf16\S* (?:copy|fusion|transpose)\(.*", hlo)


SIZES = [(1, 4096), (4, 4096), (16, 4096), (64, 4096), (16, 400), (64, 400)]


@pytest.mark.parametrize(
    ("rows", "batch", "context", "fp8"),
    [
        *((rows, *size, False) for rows in (1, 3, 4, 8) for size in SIZES),
        *((rows, *size, True) for rows, size in zip((4, 8, 6, 1, 3, 8), SIZES, strict=True)),
        (6, 1, 4096, True),
        (8, 64, 4096, True),
        (8, 64, 8192, True),
        (8, 8, 16384, False),
        (8, 8, 16384, True),
        (6, 64, 4096, True),
        (8, 1, 4096, True),
    ],
)
def test_a_decode_step_with_packed_queries_is_one_kernel_and_the_bounds(
    rows: int, batch: int, context: int, fp8: bool
) -> None:
    """Every size of a cluster, one to four parts, 8 to 32 columns, one to three tiles in flight,
    one to four KV heads a CTA."""
    shape = dataclasses.replace(
        SHAPES["8b, batch 1, context 4k, Q 4"], lengths=ragged(batch, context), rows=rows, fp8=fp8
    )
    packed = (batch, 8, packed_size(4 * rows), 128)
    arrays: dict[str, Any] = abstract(shape)
    arrays |= {"q": jax.ShapeDtypeStruct(packed, jnp.bfloat16)}
    inputs = Inputs(**arrays, scale=shape.head_dim**-0.5, packed_heads=32)
    is_wide = fp8 and rows == 8 and batch == 64 and context == 8192
    but = SPILLED_OF_WIDE if is_wide else (0, 0, 0)
    hlo = h200.compile_without_spills(ATTEND, inputs, but=but)
    queries = rf"bf16\[{batch},(?:1,)?8,"
    assert not re.findall(rf"= {queries}\S* (?:copy|fusion|transpose|pad)\(.*", hlo)


@pytest.mark.parametrize("fp8", [False, True])
def test_sinks_of_one_head_a_kv_head_lower(fp8: bool) -> None:
    """They are one number for all columns of a row tile."""
    shape = Shape(ragged(3, 400), 4, 8, 8, 64, sinks=True, fp8=fp8)
    arrays: dict[str, Any] = abstract(shape)
    h200.lower_for_h200(ATTEND, Inputs(**arrays, scale=shape.head_dim**-0.5))


@pytest.mark.parametrize("batch", [16, 64])
def test_two_ctas_of_32_columns_fit_an_sm(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters are chosen as if two ran at once on each SM."""
    sizes: list[int] = []
    count = mosaic_core._smem_tree_size

    def counted(buffers: Any) -> int:
        sizes.append(count(buffers))
        return sizes[-1]

    monkeypatch.setattr(mosaic_core, "_smem_tree_size", counted)
    shape = SHAPES[f"8b, batch {batch}, context 400, Q 8"]
    shape = dataclasses.replace(shape, lengths=ragged(batch, 8192))  # shorter ones have parts
    arrays: dict[str, Any] = abstract(shape)
    h200.compile_without_spills(ATTEND, Inputs(**arrays, scale=shape.head_dim**-0.5))
    assert len(sizes) == 1, "expected one kernel, traced here"
    assert 2 * (sizes[0] + RESERVED_SMEM) <= SMEM_OF_AN_SM
