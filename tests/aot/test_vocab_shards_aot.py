"""The sampling kernels compiled for two H200 that have half of the vocabulary each."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.gumbel_sample import Inputs as GumbelInputs
from pallas_kernels.gumbel_sample import gumbel_sample
from pallas_kernels.rejection_sampling import Inputs, rejection_sample
from pallas_kernels.rejection_sampling.shapes import SHAPES
from pallas_kernels.vocab_shards import VocabShards
from tests.aot.test_rejection_aot import structs
from tests.parallel.vocab_shard_kernels import AXIS, cut
from tests.support import h200

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(h200.unavailable() is not None, reason=str(h200.unavailable())),
]
SHARDS = VocabShards(AXIS, 2)


def compile_op(op: Any, inputs: Any) -> tuple[str, str]:
    """The compiled op's HLO on two devices, and ptxas's report on its kernels."""
    mesh = h200.linked_mesh(2, AXIS)
    specs = cut(inputs)

    def on_device(inputs: Any) -> Any:
        return op(replace(inputs, shards=SHARDS), implementation="mosaic_gpu")

    program = jax.shard_map(
        on_device, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False
    )
    placed = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        inputs,
        specs,
    )
    with h200.ptxas_report() as ptxas, jax.set_mesh(mesh):
        return jax.jit(program).lower(placed).compile().as_text() or "", ptxas()


# Kernels, all-gathers, and fusions of XLA: the first ids of the pieces, the rejected drafts' rows
# and, of several requests, the order of their words after an all-gather.
EXPECTED = {
    "llama3-8b-b1-greedy": (["row_maxima", "fold_scores", "match"], 1, 1),
    "llama3-8b-b16-eagle1": (
        ["row_sums", "fold_scores", "judge", "draw", "fold_winners", "emit"],
        2,
        1,
    ),
    "llama3-8b-b1-drawn": (
        ["row_sums", "fold_scores", "judge", "draw", "fold_winners", "emit"],
        3,
        2,
    ),
    "llama3-8b-b64-block-drawn": (
        ["row_sums", "fold_scores", "prefixes", "mass", "judge", "draw", "fold_winners", "emit"],
        3,  # XLA joins that of the scores and that of the draft's rows
        4,
    ),
    "llama3-8b-b64-synthetic": (["draw", "fold_winners", "emit"], 1, 1),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_two_devices_exchange_a_few_words(name: str) -> None:
    shape, (kernels, exchanges, fusions) = SHAPES[name], EXPECTED[name]
    inputs = Inputs(**structs(shape), rule=shape.rule, sampled=shape.sampled)
    program, report = compile_op(rejection_sample, inputs)
    assert re.findall(r"Function properties for (\w+)_mosaic_gpu_kernel", report) == kernels
    assert h200.stack_and_spills(report) == [(0, 0, 0)] * len(kernels)
    assert len(re.findall(r" all-gather\(", program)) == exchanges
    entry = program[program.index("ENTRY") :]
    assert entry.count("custom-call(") == len(kernels)
    assert len(re.findall(r" fusion\(", entry)) <= fusions
    assert not re.findall(r"= \S+ (copy|convert|reduce|gather|while)\(", entry)


def test_a_draft_step_exchanges_two_words_of_a_row() -> None:
    struct, rows, vocab = jax.ShapeDtypeStruct, 4, 32_000
    inputs: Any = GumbelInputs(
        logits=struct((rows, vocab), jnp.float32),  # type: ignore[arg-type]
        temperature=struct((rows,), jnp.float32),  # type: ignore[arg-type]
        keys=struct((rows, 2), jnp.uint32),  # type: ignore[arg-type]
        position=struct((rows,), jnp.int32),  # type: ignore[arg-type]
        offset=struct((), jnp.int32),  # type: ignore[arg-type]
        token_ids=struct((vocab,), jnp.int32),  # type: ignore[arg-type]
        stream=1,
    )
    program, report = compile_op(gumbel_sample, inputs)
    assert h200.stack_and_spills(report) == [(0, 0, 0)] * 2
    gathered = re.findall(r"= (\w+\[[\d,]*\])\S* all-gather\(", program)
    assert gathered == [f"s32[2,{rows},2]"]
