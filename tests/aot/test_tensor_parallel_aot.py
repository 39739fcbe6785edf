"""The round of several H200 is compiled without any: exchanges, graphs, and nothing copied."""

from __future__ import annotations

import functools
import math
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.config import RoundConfig
from jaxspec.decode import programs, several_rounds
from jaxspec.decode.prefill import prefill
from jaxspec.decode.spread import partition, spread
from jaxspec.parallel.layout import Placement
from tests.aot.test_round_aot import PAGES, STEP_METADATA, Round, configured
from tests.support import h200
from tests.support.h200_round import (
    Thunk,
    abstract_arguments,
    body_of,
    parse_thunks,
    prefill_arguments,
)
from tests.support.slow import slow

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(h200.unavailable() is not None, reason=str(h200.unavailable())),
]
LAYERS, DRAFT_VOCABULARY = 3, 32000
EXCHANGE = "(?:all-gather|collective-permute)"


@dataclass(frozen=True)
class Compiled:
    """hlo: optimised. thunks: what the host or a CUDA graph launches, in order."""

    hlo: str
    thunks: Thunk
    ptxas: str
    aliased: int
    cache_bytes: int  # of one device


@functools.cache
def compiled(
    size: int,
    *,
    sampled: bool,
    batch: int = 1,
    num_rounds: int = 1,
    model: str = "llama-3-8b",
    plain: bool = False,
) -> Compiled:
    case = Round(model, 3, sampled=sampled, layers=LAYERS, batch=batch)
    mesh = h200.linked_mesh(size, "model")
    cfg = replace(configured(case), placement=Placement(mesh))
    params, state, tables = abstract_arguments(cfg, batch, PAGES)
    if plain:
        cfg = replace(cfg, draft=None, draft_groups=(), num_speculative_tokens=0)
        params, state, tables = {"target": params["target"]}, replace(state, draft=None), tables[:1]
    several = num_rounds > 1
    parts = (state,) if several else programs.split_donated(state)
    program = several_rounds._rounds if several else programs.round_program
    static = (cfg, num_rounds) if several else (cfg,)

    addresses = jax.ShapeDtypeStruct((2 * size,), jnp.uint32)
    args = placed_as(cfg, (params, *parts, tables))
    with tempfile.TemporaryDirectory() as folder, h200.ptxas_report() as report:
        options = dict(cfg.compiler_options) | {"xla_dump_to": folder}
        jitted = jax.jit(
            program.function,
            static_argnums=tuple(range(len(static))),
            donate_argnums=len(static) + 1,
        )
        lowered = jitted.lower(*static, *args, addresses=addresses)
        executable = lowered.compile(compiler_options=options)
        [thunks] = Path(folder).glob("*jit_decode_round*.thunk_sequence_after_thunk_passes.txt")
        caches = sum(
            x.size * x.dtype.itemsize // size for x in jax.tree.leaves(state.target_caches)
        )
        return Compiled(
            executable.as_text(),
            parse_thunks(thunks.read_text()),
            report(),
            executable.memory_analysis().alias_size_in_bytes,
            caches,
        )


def placed_as(cfg: RoundConfig, trees: Sequence[Any]) -> list[Any]:
    """The shapes of trees, on the devices of cfg as a program has them."""

    def placed(x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(cfg.placement.mesh, spec)  # type: ignore[arg-type]
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return [jax.tree.map(placed, tree, partition(cfg, tree)) for tree in trees]


CASES = pytest.mark.parametrize(
    ("size", "sampled"), [(2, True), slow(2, False), slow(4, True)], ids=str
)


@CASES
def test_each_block_ends_in_one_exchange_of_the_kernel(size: int, sampled: bool) -> None:
    """Embedding, attention and MLP, of the target's layers and of the draft's: two passes of the
    draft are in the program, and the embedding of each pass is exchanged too."""
    made = compiled(size, sampled=sampled)
    names = re.findall(r'mosaic_gpu_v2", .*op_name="[^"]*/(all_reduce\w*?)(?:/|")', made.hlo)
    assert len(names) == (1 + 2 * LAYERS) + 2 * (1 + 2)
    assert not re.findall(r" all-reduce(?:-start)?\(", made.hlo)


@CASES
def test_only_partial_results_of_rows_are_gathered(size: int, sampled: bool) -> None:
    """And the draft's row at the rejected position: its vocabulary is cut at other tokens. XLA
    gathers nothing."""
    made = compiled(size, sampled=sampled)
    names = re.findall(r'mosaic_gpu_v2", .*op_name="[^"]*/all_gather_(\d+)', made.hlo)
    sizes = sorted(map(int, names))
    assert len(sizes) == (5 if sampled else 3)
    assert max(sizes) == (DRAFT_VOCABULARY // size if sampled else 12)
    assert sizes[-2] <= 64
    assert not re.findall(r" all-gather(?:-start)?\(", made.hlo)


@CASES
def test_caches_are_updated_in_place_and_weights_are_not_copied(size: int, sampled: bool) -> None:
    made = compiled(size, sampled=sampled)
    copies = re.findall(r"= \w+\[(\d[\d,]*)\]\S* copy(?:-start)?\(", made.hlo)
    assert not copies
    assert made.aliased >= made.cache_bytes


@CASES
def test_no_kernel_spills(size: int, sampled: bool) -> None:
    report = h200.stack_and_spills(compiled(size, sampled=sampled).ptxas)
    assert report and set(report) <= {(0, 0, 0), STEP_METADATA}


@CASES
def test_a_round_is_three_cuda_graphs_as_on_one_device(size: int, sampled: bool) -> None:
    thunks = compiled(size, sampled=sampled).thunks
    assert [thunk.kind for thunk in thunks.inside] == ["kCommandBuffer", "kWhile", "kCommandBuffer"]
    assert [thunk.kind for thunk in body_of(thunks).inside] == ["kCommandBuffer"]


@pytest.mark.parametrize("size", [2, slow(4)], ids=str)
@pytest.mark.parametrize("plain", [False, True], ids=["drafts", "plain"])
def test_kernels_make_every_product_of_a_layer_whose_heads_do_not_divide(
    size: int, plain: bool
) -> None:
    """XLA would give one row other bits than four, so speculative text would not be plain text.
    SmolLM2's nine heads stay whole, and 576 outputs become pieces with zeros at the end."""
    hlo = compiled(size, sampled=False, model="smollm2-135m", plain=plain).hlo
    ends = r"(dot_general|matmul_\d+x\d+)"
    made = re.findall(rf'op_name="[^"]*/jit\(dense_layer\)/(?:[^"]*/)?{ends}\w*(?:/\w+)?"', hlo)
    piece = (576 + -576 % (64 * size)) // size
    down = 1536 // size
    assert Counter(made).keys() >= {f"matmul_{piece}x576", f"matmul_{down}x576"}
    assert "dot_general" not in made


def test_each_round_of_a_step_of_several_is_the_same_three_graphs() -> None:
    """The host launches them in a loop with a known count. No weights and no caches are copied."""
    made, single = compiled(2, sampled=True, num_rounds=4), compiled(2, sampled=True)
    body = body_of(made.thunks)
    kinds = [thunk.kind for thunk in body.inside]
    assert kinds[:3] == ["kCommandBuffer", "kWhile", "kCommandBuffer"]
    assert [thunk.kind for thunk in body_of(body).inside] == ["kCommandBuffer"]
    loops = [line for line in made.hlo.splitlines() if re.search(r" while\(", line)]
    assert loops and all('"known_trip_count"' in line for line in loops)
    assert made.aliased >= single.aliased >= made.cache_bytes
    copied = re.findall(r"= \w+\[(\d[\d,]*)\]\S* copy(?:-start)?\(", made.hlo)
    assert all(math.prod(map(int, dims.split(","))) < 1 << 20 for dims in copied), copied
    calls = [made.thunks.launches()["kCustomCall"], single.thunks.launches()["kCustomCall"]]
    assert calls[0] == calls[1]


@CASES
def test_an_exchange_before_a_product_reads_its_weights(size: int, sampled: bool) -> None:
    """Gate and up follow attention's, of the target's layers and of the draft's in two passes; the
    next layer's queries, keys and values an MLP's."""
    hlo = compiled(size, sampled=sampled).hlo
    calls = re.findall(r'custom-call\((.*?)\), custom_call_target="mosaic_gpu_v2".*all_reduce', hlo)
    assert calls
    weights = [len(operands.split("%")) - 1 - 5 for operands in calls if operands.count("%") > 5]
    assert Counter(weights) == {2: LAYERS + 2, 1: LAYERS - 1}


@functools.cache
def compiled_prefill(num_tiles: int, size: int = 2) -> str:
    """The scheduled HLO of a prefill call on several H200."""
    mesh = h200.linked_mesh(size, "model")
    case = Round("llama-3-8b", 3, sampled=True, layers=LAYERS, batch=1)
    cfg = replace(configured(case), placement=Placement(mesh))
    args = prefill_arguments(cfg, num_tiles, PAGES)
    program = jax.jit(
        spread(prefill, 1, programs.result_and_state), static_argnums=0, donate_argnums=2
    )
    addresses = jax.ShapeDtypeStruct((2 * size,), jnp.uint32)
    with mock.patch("jax.default_backend", lambda: "gpu"):  # products of many rows ask for it
        lowered = program.lower(cfg, *placed_as(cfg, args), addresses=addresses)
    hlo = lowered.compile(compiler_options=dict(cfg.prefill_options)).as_text()
    assert hlo is not None
    return hlo


def beside_exchanges(hlo: str) -> list[tuple[int, int]]:
    """Of each exchange, the rows that it adds and the products between its start and its end.

    Two devices copy to each other, four gather.
    """
    found: dict[str, list[int]] = {}
    running: set[str] = set()
    for line in hlo[hlo.index("\nENTRY ") :].splitlines():
        shape = r"[^\[]*\[(?:1,)?(\d+),4096\]"
        if begun := re.search(rf"%(\S+) = {shape}.* {EXCHANGE}(-start)?\(", line):
            found[begun[1]] = [int(begun[2]), 0]
            if begun[3]:  # else nothing runs beside it
                running.add(begun[1])
        elif ended := re.search(rf" {EXCHANGE}-done\(%?(\S+)\)", line):
            running.remove(ended[1])
        elif '"__cublas$lt$matmul"' in line:
            for name in running:
                found[name][1] += 1
    assert not running
    return [(rows, count) for rows, count in found.values()]


@pytest.mark.parametrize("size", [2, slow(4)], ids=str)
def test_the_halves_of_a_long_prompt_hide_each_others_exchanges(size: int) -> None:
    """Both halves exchange embedding, attention and MLP; the draft, which writes keys alone,
    exchanges its embedding, whole. Nothing runs beside the first exchange, and beside one more of
    two devices."""
    tiles = 86  # 4,128 rows
    exchanges = beside_exchanges(compiled_prefill(tiles, size))
    halves = [products for rows, products in exchanges if rows == tiles * 48 // 2]
    assert len(halves) == 2 * (1 + 2 * LAYERS)
    assert halves.count(0) == {2: 2, 4: 1}[size]


def test_copy_engines_exchange_the_halves() -> None:
    """A kernel of NCCL's would take multiprocessors from the products beside it."""
    starts = re.findall(r"collective-permute-start\(.*", compiled_prefill(86))
    assert starts and all('"COLLECTIVES_PEER_MEMORY"' in start for start in starts)


def test_a_sum_is_stored_once_and_in_bfloat16() -> None:
    """Of each exchange. XLA would store it in float32, or add it up again for each reader."""
    hlo = compiled_prefill(86)
    made = re.findall(r" = (.*?) fusion\((.*?)\), kind", hlo[hlo.index("\nENTRY ") :])
    shapes = [shape for results, _ in made for shape in re.findall(r"(\w+)\[2064,4096\]", results)]
    assert set(shapes) == {"bf16"}
    exchanged = r"%(collective-permute-done[.\d]*|ppermute[.\d]*)"
    read = Counter(name for _, operands in made for name in re.findall(exchanged, operands))
    assert len(read) >= 2 * (1 + 2 * LAYERS) and set(read.values()) == {1}


def test_a_short_prompt_is_not_halved() -> None:
    rows = re.findall(rf"\[(\d+),4096\].* {EXCHANGE}(?:-start)?\(", compiled_prefill(40))
    assert [*map(int, rows)] == [40 * 48] * (1 + 2 * LAYERS + 1)


@pytest.mark.parametrize("tiles", [40, 86])
def test_prefill_writes_caches_in_place(tiles: int) -> None:
    copies = re.findall(r"= \w+\[(\d+(?:,\d+)+)\]\S* copy(?:-start)?\(", compiled_prefill(tiles))
    assert not [shape for shape in copies if math.prod(map(int, shape.split(","))) > 1 << 20]
