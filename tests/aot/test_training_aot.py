"""The target's pass of a training step compiled for H200s: the attention kernel, no scores."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec import models
from jaxspec.config import AttentionConfig, RopeConfig
from jaxspec.layers.params import Params, init_random
from jaxspec.parallel.mesh import DATA
from jaxspec.training.config import TrainConfig
from jaxspec.training.data import Batch
from jaxspec.training.heads import eagle3_config, initial_params
from jaxspec.training.loop import validation_step
from jaxspec.training.objective import TrainingPair
from tests.support import h200

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(h200.unavailable() is not None, reason=str(h200.unavailable())),
]

ROWS, LAYERS, VOCAB, HEADS = 576, 2, 1024, 9  # no other size of a step is 576
TARGET = models.llama.LlamaConfig(
    "llama",
    VOCAB,
    HEADS * 64,
    640,
    LAYERS,
    AttentionConfig(num_heads=HEADS, num_kv_heads=3, head_dim=64, rope=RopeConfig(1e4)),
    1e-5,
    1024,
    tie_word_embeddings=True,
)
DRAFT = eagle3_config(TARGET, draft_vocab_size=256, intermediate_size=128, aux_layers=(1, 1, 2))


def compiled(devices: int, dtype: jnp.dtype) -> str:
    """Return the HLO of a held-out batch's pass over so many H200s."""
    mesh = h200.linked_mesh(devices, DATA)

    def placed(x: jax.Array | np.ndarray, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    def target() -> Params:
        specs = models.family(TARGET).param_specs(TARGET)
        return init_random(specs, jax.random.key(0), jnp.dtype(dtype))

    params = target()
    ids = np.arange(DRAFT.draft_vocab_size, dtype=np.int32)
    head = initial_params(DRAFT, TARGET, params, ids, 0)
    pair = TrainingPair(DRAFT, TARGET, params, jnp.asarray(ids))
    tokens = np.zeros((2 * devices, ROWS), np.int32)
    batch = Batch(tokens, tokens, tokens > 0, np.zeros((2 * devices, 0), np.int32))
    whole, cut = partial(placed, spec=P()), partial(placed, spec=P(DATA))
    cfg = TrainConfig(num_steps=1, pack=True, buckets=(ROWS,))
    arguments = jax.tree.map(whole, (head, pair)), jax.tree.map(cut, batch)
    with h200.compiled_anew(), jax.set_mesh(mesh):
        lowered = validation_step.lower(cfg, mesh, *arguments[0], arguments[1])
        return str(lowered.compile().as_text())


@pytest.mark.parametrize("devices", [1, 4])
def test_the_targets_pass_stores_no_scores(devices: int) -> None:
    """The draft's own layer stores its scores once; the target's layers store none."""

    def scores(hlo: str) -> list[str]:
        return [
            line
            for line in hlo.splitlines()
            if re.search(rf" = \(?f32\[[\d,]*\b{ROWS},{ROWS}\b", line) and "fusion(" in line
        ]

    by_kernel, by_reference = (compiled(devices, dtype) for dtype in (jnp.bfloat16, jnp.float32))
    assert by_kernel.count('custom_call_target="mosaic_gpu') >= LAYERS
    assert "mosaic_gpu" not in by_reference
    assert len(scores(by_reference)) > len(scores(by_kernel))
