"""Load a checkpoint on one device and on two, and compare texts and the arrays' pieces."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import LLM, EngineConfig, SamplingParams
from jaxspec.loading.model import load_target
from jaxspec.loading.placement import choose_placement, place_models

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
assert len(cut) == 5 * cfg.num_layers + 2  # qkv, o, gate, up, down; embedding and head
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
print("equal")
