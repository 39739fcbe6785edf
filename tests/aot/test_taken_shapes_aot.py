"""Each op's kernel lowers for an H200 at every shape that the op takes: drawn ones, with numbers of
rows, widths and depths of real models."""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable
from typing import Any

import jax
import pytest

from pallas_kernels import (
    attention,
    fp8_matmul,
    int4_matmul,
    latent_attention,
    matmul,
    moe,
    rope_cache,
    router,
)
from pallas_kernels.attention.shapes import Shape, ragged
from tests.kernels.attention import abstract
from tests.support import h200

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(h200.unavailable() is not None, reason=str(h200.unavailable())),
]
COUNT = 16  # shapes of an op
ROWS = (1, 2, 3, 5, 7, 8, 9, 12, 17, 20, 33, 48, 64, 65, 100, 128, 200, 256, 300)
DEPTHS = (64, 192, 576, 896, 1024, 1536, 2560, 2880, 4096, 7168, 14336)
WIDTHS = (*DEPTHS, 320, 960, 18944, 49152)

Draw = random.Random
Case = tuple[Callable[..., Any], Any]  # an op, and its inputs without values


def _of(op: str, run: Callable[..., Any], **sizes: Any) -> Case:
    shapes = importlib.import_module(f"pallas_kernels.{op}.shapes")
    shape = shapes.Shape(**sizes)
    return run, jax.eval_shape(lambda: shapes.make_inputs(shape, 0))


def _fused(draw: Draw) -> dict[str, bool]:
    kind = draw.choice(("", "swiglu", "residual"))
    return {"swiglu": kind == "swiglu", "residual": kind == "residual"}


def _matmul(draw: Draw) -> Case:
    fused = _fused(draw)
    widths = (draw.choice(WIDTHS),) * (2 if fused["swiglu"] else 1)
    sizes = {"rows": draw.choice(ROWS), "depth": draw.choice(DEPTHS), "widths": widths}
    return _of("matmul", matmul.matmul, **sizes, **fused)


def _fp8(draw: Draw) -> Case:
    form, fused = draw.choice(("channel", "block", "static")), _fused(draw)
    widths = (draw.choice(WIDTHS),) * (2 if fused["swiglu"] else 1)
    if form == "block" and not any(fused.values()):  # blocks keep projections apart
        widths += draw.choice(((), (192, 192)))
    sizes = {"rows": draw.choice(ROWS), "depth": draw.choice(DEPTHS), "widths": widths}
    return _of("fp8_matmul", fp8_matmul.fp8_matmul, **sizes, form=form, **fused)


def _int4(draw: Draw) -> Case:
    group = draw.choice((64, 128))
    depth = max(draw.choice(DEPTHS) // group, 1) * group
    sizes = {"rows": draw.choice(ROWS), "depth": depth, "width": draw.choice(WIDTHS)}
    zeros = draw.choice((False, True))
    return _of("int4_matmul", int4_matmul.int4_matmul, **sizes, group=group, zeros=zeros)


def _moe(draw: Draw) -> Case:
    form = draw.choice((None, "mxfp4", "fp8", "fp8-block", "int4", "int4 zeros"))
    packed = form == "mxfp4"
    return _of(
        "moe",
        moe.experts,
        rows=draw.choice(ROWS),
        num_experts=draw.choice((8, 32, 128)),
        top_k=draw.choice((1, 3, 4, 8)),
        hidden=draw.choice((256, 1024, 2880)),
        size=draw.choice((128, 384, 1408)),
        mxfp4=packed,
        bias=packed,
        codes=None if packed else form,
    )


def _router(draw: Draw) -> Case:
    sizes = {"num_experts": draw.choice((32, 64, 128)), "top_k": draw.choice((1, 3, 4, 8))}
    hidden, kind = draw.choice((1024, 2880)), draw.choice(("softmax", "sigmoid"))
    sizes |= {"rows": draw.choice(ROWS), "hidden": hidden}
    return _of("router", router.route, **sizes, kind=kind)


def _attention(draw: Draw) -> Case:
    group, kv_heads = draw.choice((1, 2, 3, 4, 5, 7, 8, 16)), draw.choice((1, 2, 3, 8))
    shape = Shape(
        ragged(draw.choice((1, 3, 16, 64)), draw.choice((100, 400, 4096, 32768))),
        rows=draw.choice((1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 33, 48, 200)),
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=draw.choice((64, 128)),
        block_size=draw.choice((16, 64, 128)),
        window=draw.choice((None, 128)),
        sinks=draw.choice((False, True)),
        fp8=draw.choice((False, True)),
    )
    scale = shape.head_dim**-0.5
    return attention.paged_attention, attention.Inputs(
        **abstract(shape), scale=scale, window=shape.window
    )


def _latent_attention(draw: Draw) -> Case:
    lengths = draw.choice(((1,), (1000,), (100, 1, 1000)))
    sizes = {"rows": draw.choice((1, 3, 4, 5, 8, 48)), "num_heads": draw.choice((16, 20, 64, 128))}
    run = latent_attention.latent_attention
    return _of("latent_attention", run, lengths=lengths, **sizes)


def _rope_cache(draw: Draw) -> Case:
    group, kv_heads = draw.choice((1, 3, 4, 5, 8)), draw.choice((1, 3, 8))
    return _of(
        "rope_cache",
        rope_cache.rope_and_write,
        batch=draw.choice((1, 3, 16, 42)),
        rows=draw.choice((1, 3, 4, 5, 9, 48)),
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=draw.choice((64, 128)),
        qk_norm=draw.choice((False, True)),
        packed=draw.choice((False, True)),
        fp8=draw.choice((False, True)),
    )


DRAWS: dict[str, Callable[[Draw], Case]] = {
    "matmul": _matmul,
    "fp8_matmul": _fp8,
    "int4_matmul": _int4,
    "moe": _moe,
    "router": _router,
    "attention": _attention,
    "latent_attention": _latent_attention,
    "rope_cache": _rope_cache,
}


@pytest.mark.parametrize("op", DRAWS)
def test_what_an_op_takes_lowers(op: str) -> None:
    """The op says what it does not take, and nothing else fails."""
    draw, taken, wrong = random.Random(op), 0, []
    for _ in range(10 * COUNT):
        run, inputs = DRAWS[op](draw)
        try:
            h200.lower_for_h200(functools.partial(run, implementation="mosaic_gpu"), inputs)
        except ValueError as e:
            if "implementation 'mosaic_gpu': expected" in str(e):
                continue
            wrong.append((jax.tree.map(jax.typeof, inputs), str(e)))
        taken += 1
        if taken == COUNT:
            break
    assert taken == COUNT, f"expected {COUNT} shapes that the op takes, got {taken}"
    assert not wrong, wrong
