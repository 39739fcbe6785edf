"""The all-reduce compiled for several H200 on a machine without one: no spills, one launch each, in
CUDA graphs and in the program's order."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.all_reduce import Peers, all_reduce, unsupported
from tests.support import h200

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(h200.unavailable() is not None, reason=str(h200.unavailable())),
]

AXIS = "model"
REGISTERS, THREADS = 65536, 2048  # of an SM
# Each command of a graph names the one that it waits for.
THUNK = re.compile(r"^ *(\d+): (\w+) +\[(?:source|prev=(\d+))", re.MULTILINE)


def compile_on(
    size: int, body: Callable[..., jax.Array], *shapes: jax.ShapeDtypeStruct, dump: Path
) -> list[tuple[int, str, int | None]]:
    """Compile body(peers, *arrays) under shard_map; return its thunks: (id, kind, predecessor).

    Arrays are the same on all devices.
    """
    mesh = h200.linked_mesh(size, AXIS)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def local(addresses: jax.Array, *arrays: jax.Array) -> jax.Array:
        return body(Peers(addresses=addresses, axis=AXIS, size=size), *arrays)

    call = jax.shard_map(
        local, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    shapes = (jax.ShapeDtypeStruct((2 * size,), jnp.uint32), *shapes)
    args = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=everywhere) for s in shapes]
    with jax.set_mesh(mesh):
        jax.jit(call).lower(*args).compile(compiler_options={"xla_dump_to": str(dump)})
    found = list(dump.glob("*jit_local*thunk_sequence_after_thunk_passes.txt"))
    text = found[0].read_text() if found else ""  # none for a program of one thunk
    return [
        (int(number), kind, int(before) if before else None)
        for number, kind, before in THUNK.findall(text)
    ]


def struct(*sizes: int, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def with_norm(peers: Peers, x: jax.Array, residual: jax.Array, gain: jax.Array) -> jax.Array:
    total, normed = all_reduce(
        x, peers, residual=residual, gain=gain, eps=1e-5, implementation="mosaic_gpu"
    )
    return total + normed


@pytest.mark.parametrize(
    ("size", "rows", "width", "dtype"),
    [
        (2, 256, 4096, jnp.bfloat16),
        (2, 64, 8192, jnp.float32),
        (4, 256, 4096, jnp.bfloat16),
        (4, 128, 4096, jnp.float32),
        (8, 64, 8192, jnp.float32),
        (5, 132, 4096, jnp.bfloat16),
        (8, 128, 4096, jnp.float32),
        (2, 204, 5120, jnp.bfloat16),
        (2, 256, 3584, jnp.bfloat16),
        (2, 256, 256, jnp.bfloat16),  # one word a thread
        (2, 64, 2880, jnp.float32),  # padded to 3,072 values
        (2, 256, 896, jnp.bfloat16),
    ],
)
def test_all_blocks_run_at_once_without_spills(
    size: int, rows: int, width: int, dtype: jax.typing.DTypeLike, tmp_path: Path
) -> None:
    from pallas_kernels.all_reduce.mosaic_gpu import padded_width, threads_of
    from pallas_kernels.hopper import NUM_SMS

    assert unsupported(rows, width, dtype, size) is None
    most = width % 256 or rows == 256 or unsupported(rows + 1, width, dtype, size)
    assert most  # rows
    shapes = struct(rows, width, dtype=dtype), struct(rows, width), struct(width)
    with h200.ptxas_report() as report:
        compile_on(size, with_norm, *shapes, dump=tmp_path)
        said = report()
    found = h200.stack_and_spills(said)
    assert found and not any(map(any, found))
    (registers,) = map(int, re.findall(r"Used (\d+) registers", said))
    threads = 128 * threads_of(padded_width(width))[0]
    in_use = threads * -(-registers // 8) * 8  # a warp takes them by 256
    assert NUM_SMS * min(REGISTERS // in_use, THREADS // threads) >= rows


@pytest.mark.parametrize("size", [2, 4])
def test_a_chain_is_one_graph_with_one_launch_each(size: int, tmp_path: Path) -> None:
    layers = 6

    def chain(peers: Peers, x: jax.Array, residual: jax.Array, gain: jax.Array) -> jax.Array:
        for _ in range(layers):
            residual, x = all_reduce(
                x, peers, residual=residual, gain=gain, eps=1e-5, implementation="mosaic_gpu"
            )
        return residual

    shapes = struct(4, 4096), struct(4, 4096), struct(4096)
    (_, graph, _), *commands = compile_on(size, chain, *shapes, dump=tmp_path)
    kinds = [kind for _, kind, _ in commands]
    assert graph == "kCommandBuffer"
    assert kinds.count("kCustomCall") == layers
    # The rank, its conversion to int32 by the mesh's arithmetic, and a copy of an output at most.
    assert len(kinds) <= layers + 3, kinds


def test_all_reduces_that_do_not_depend_on_each_other_run_in_turn(tmp_path: Path) -> None:
    """Else a graph might run two at the same time, or in another order on another device."""

    def two_chains(peers: Peers, x: jax.Array, y: jax.Array) -> jax.Array:
        for _ in range(4):
            x = all_reduce(x, peers, implementation="mosaic_gpu")
            y = all_reduce(y, peers, implementation="mosaic_gpu")
        return jnp.concatenate([x, y])

    (_, graph, _), *commands = compile_on(
        2, two_chains, struct(4, 4096), struct(16, 4096), dump=tmp_path
    )
    assert graph == "kCommandBuffer"
    assert sum(kind == "kCustomCall" for _, kind, _ in commands) == 8
    before = [predecessor for _, _, predecessor in commands]
    assert before == [None, *(number for number, _, _ in commands[:-1])]
