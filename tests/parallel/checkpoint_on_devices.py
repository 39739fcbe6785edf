"""Load a checkpoint on one device and on two, and compare texts and the arrays' pieces.

Then load a model of many layers onto two devices, and look at the host's memory.
"""

from __future__ import annotations

import math
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import LLM, EngineConfig, SamplingParams, models
from jaxspec.layers.params import is_spec
from jaxspec.loading.model import load_target
from jaxspec.loading.placement import choose_placement, place_models
from jaxspec.loading.weights import load_params
from jaxspec.parallel import layout

jax.config.update("jax_default_matmul_precision", "highest")

folder = Path(sys.argv[1])
placement = choose_placement(EngineConfig(tensor_parallel_size=2))
cfg, whole = load_target(folder, jnp.float32)
_, read = load_target(folder, jnp.float32, placement)
placed, _ = place_models(placement, (cfg, whole), None)
for one, other in zip(jax.tree.leaves(read), jax.tree.leaves(placed), strict=True):
    assert one.sharding == other.sharding
    for piece, same in zip(one.addressable_shards, other.addressable_shards, strict=True):
        np.testing.assert_array_equal(piece.data, same.data)
cut = [a for a in jax.tree.leaves(read) if not a.sharding.is_fully_replicated]
of_a_layer = 5 if placement.target(cfg).is_cut("heads") else 4  # o, gate, up and down; qkv
assert len(cut) == of_a_layer * cfg.num_layers + 2  # embedding and head
again, _ = place_models(placement, (cfg, read), None)
assert again is read

texts = []
for size in (1, 2):
    llm = LLM.from_pretrained(
        str(folder), max_model_len=64, tensor_parallel_size=size, num_gpu_blocks_override=4
    )
    [output] = llm.generate([[3, 5, 7]], SamplingParams(temperature=0, max_tokens=12))
    texts.append(list(output.token_ids))
assert texts[0] == texts[1], texts


class Tensor:
    """A tensor of a checkpoint, made when it is read."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def read(self) -> np.ndarray:
        return np.ones(self.shape, np.float32)


def copied(array: Any, sharding: Any) -> jax.Array:
    """As put, but a CPU's array would be the host's own memory."""
    return jax.block_until_ready(jnp.copy(jax.device_put(array, sharding)))


# As Llama-3-70B: the embedding is larger than a layer, and no piece has zeros.
shape: Any = cfg
large = replace(shape, num_layers=12, hidden_size=128, intermediate_size=512, vocab_size=2048)
specs = models.llama.param_specs(large)
of_layer, *_ = [
    sum(4 * math.prod(s.shape) for s in jax.tree.leaves(layer, is_leaf=is_spec))
    for layer in specs["layers"]
]
tensors: Any = {
    name: Tensor(shape)
    for spec in jax.tree.leaves(specs, is_leaf=is_spec)
    for name, shape in spec.tensors.items()
}
layout.put = copied
load_params(specs, tensors, jnp.float32, placement.target(large))  # compiles the copies
tracemalloc.start()
loaded = load_params(specs, tensors, jnp.float32, placement.target(large))
_, peak = tracemalloc.get_traced_memory()
assert peak < 2 * of_layer, f"expected less than two layers, got {peak / of_layer:.2f}"
print("equal")
