"""The all-gather's checks. scripts/experiment_all_reduce.py compares it with what GPUs send."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.all_gather import Peers, all_gather, unsupported
from pallas_kernels.all_gather.shapes import SHAPES, make_inputs
from pallas_kernels.vocab_shards import VocabShards
from tests.kernels.interpreter import needs_mosaic


def peers(size: int = 2) -> Peers:
    return Peers(addresses=jnp.zeros(2 * size, jnp.uint32), axis="model", size=size)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"words": jnp.ones((2, 3), jnp.int32)},
            r"words: expected int32 \[n\], got int32 \[2, 3\]",
        ),
        ({"words": jnp.ones(3)}, r"words: expected int32 \[n\], got float32 \[3\]"),
        (
            {"peers": Peers(addresses=jnp.zeros(3, jnp.uint32), axis="model", size=2)},
            r"addresses: expected \[4\], two words a device, got \(3,\)",
        ),
        ({"implementation": "mosaic_gpu"}, "all_gather, implementation 'mosaic_gpu': expected"),
    ],
)
def test_what_does_not_fit_is_one_sentence(arguments: dict[str, Any], sentence: str) -> None:
    inputs = {
        "words": jnp.ones(3, jnp.int32),
        "peers": peers(),
        "implementation": "reference",
    } | arguments
    with pytest.raises(ValueError, match=sentence):
        all_gather(**inputs)


@needs_mosaic
def test_the_kernel_says_what_it_does_not_take() -> None:
    assert all(unsupported(count, 2) is None for count in SHAPES.values())
    assert unsupported(0, 2) == "expected 1 to 262144 words, got 0"
    assert unsupported(262145, 2) == "expected 1 to 262144 words, got 262145"
    assert unsupported(2, 9) == "expected 2 to 8 devices, got 9"


def test_shards_without_mailboxes_gather_by_xla_and_hash_without_addresses() -> None:
    sent = make_inputs(6, 1, seed=0)
    shards = VocabShards("model", 1 + 1, jnp.zeros(4, jnp.uint32))
    assert shards == VocabShards("model", 2) and hash(shards) == hash(VocabShards("model", 2))
    mesh = Mesh(np.array(jax.devices()[:1]), ("model",))
    gather = jax.shard_map(
        lambda words: VocabShards("model", 2).gather_words(words[0]),
        mesh=mesh,
        in_specs=PartitionSpec("model"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    np.testing.assert_array_equal(jax.jit(gather)(sent), sent)
