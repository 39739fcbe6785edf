"""Steps of training compiled for H200s: attention's kernel, no scores, one product a head."""

from __future__ import annotations

import dataclasses
import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec import models
from jaxspec.config import AttentionConfig, Ops, RopeConfig
from jaxspec.drafts.dspark import DSparkConfig
from jaxspec.layers import op_choice
from jaxspec.layers.params import init_random
from jaxspec.parallel.mesh import DATA
from jaxspec.training.config import TrainableDraft, TrainConfig
from jaxspec.training.data import Batch
from jaxspec.training.heads import eagle3_config, initial_params
from jaxspec.training.loop import init_train_state, train_step, validation_step
from jaxspec.training.objective import TrainingPair
from tests.support import h200

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(h200.unavailable() is not None, reason=str(h200.unavailable())),
]

ROWS, LAYERS, VOCAB, HEADS, BATCH = 448, 2, 1024, 9, 2
ATTENTION = AttentionConfig(num_heads=HEADS, num_kv_heads=3, head_dim=64, rope=RopeConfig(1e4))
TARGET = models.llama.LlamaConfig(
    "llama", VOCAB, HEADS * 64, 640, LAYERS, ATTENTION, 1e-5, 1024, tie_word_embeddings=True
)
EAGLE3 = eagle3_config(TARGET, draft_vocab_size=256, intermediate_size=128, aux_layers=(1, 1, 2))
K, BLOCKS = 7, 32
DSPARK = DSparkConfig(
    target_hidden_size=HEADS * 64,
    hidden_size=HEADS * 64,
    intermediate_size=128,
    attention=dataclasses.replace(ATTENTION, qk_norm=True),
    rms_norm_eps=1e-5,
    vocab_size=VOCAB,
    draft_vocab_size=VOCAB,
    aux_layers=(1, 2),
    draft_block_size=K,
    mask_token_id=0,
    sample_from_anchor=True,
    windows=(320,),
    causal=(False,),
    tied_lm_head=True,
    markov_rank=32,
)


def compiled(draft: TrainableDraft, devices: int, *, trains: bool) -> str:
    """Return the HLO of a step over so many H200s: of training, or over a held-out batch."""
    mesh = h200.linked_mesh(devices, DATA)

    def placed(spec: P, tree: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    specs = models.family(TARGET).param_specs(TARGET)
    params = init_random(specs, jax.random.key(0), jnp.dtype(jnp.bfloat16))
    ids = np.arange(draft.draft_vocab_size, dtype=np.int32)
    head = initial_params(draft, TARGET, params, ids, 0)
    pair = TrainingPair(draft, TARGET, params, jnp.asarray(ids))
    parts = 2 if trains else 1  # micro-batches
    shape = BATCH * parts * devices, ROWS
    tokens, anchors = np.zeros(shape, np.int32), np.zeros((shape[0], BLOCKS), np.int32)
    batch = placed(P(DATA), Batch(tokens, tokens, tokens > 0, anchors))
    cfg = TrainConfig(num_steps=1, pack=True, buckets=(ROWS,), accumulation=parts)
    whole = partial(placed, P())
    state, progress = init_train_state(cfg, draft, head), jnp.zeros((), jnp.float32)
    standard = jax.numpy_dtype_promotion("standard")  # optax mixes dtypes
    with h200.compiled_anew(), jax.set_mesh(mesh), standard:
        if trains:
            lowered = train_step.lower(cfg, mesh, *whole((state, pair)), batch, whole(progress))
        else:
            lowered = validation_step.lower(cfg, mesh, *whole((head, pair)), batch)
        return str(lowered.compile().as_text())


def results(hlo: str, least: int) -> list[str]:
    """Return the operations that write an array of at least so many elements."""
    found = []
    for line in hlo.splitlines():
        _, _, written = line.partition(" = ")
        shapes = re.findall(r"\w+\[([\d,]+)\]", written.partition("(%")[0])
        sizes = [math.prod(map(int, shape.split(","))) for shape in shapes]
        if " fusion(" in line and max(sizes, default=0) >= least:
            found.append(line)
    return found


def scores(hlo: str) -> int:
    """Count the arrays of scores: every head, every row with every other one."""
    of_all = BATCH * HEADS * ROWS * ROWS
    return sum("layer_" in line for line in results(hlo, of_all))


@pytest.mark.parametrize("devices", [1, 4])
def test_the_targets_pass_stores_no_scores(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    by_kernel = compiled(EAGLE3, devices, trains=False)
    monkeypatch.setattr(op_choice, "for_whole_sequences", lambda *_: Ops())
    by_reference = compiled(EAGLE3, devices, trains=False)
    assert by_kernel.count('custom_call_target="mosaic_gpu') == LAYERS
    assert "mosaic_gpu" not in by_reference
    assert scores(by_kernel) == 0
    assert scores(by_reference) >= LAYERS


def test_a_step_of_dspark_has_the_kernel_and_one_product_of_the_vocabulary() -> None:
    """Base and Markov logits are one array: neither is written by itself."""
    hlo = compiled(DSPARK, 1, trains=True)
    assert hlo.count('custom_call_target="mosaic_gpu') == LAYERS
    assert scores(hlo) == 0
    rows = BATCH * BLOCKS * K
    written = [line.partition("fusion(")[0] for line in results(hlo, rows * VOCAB)]
    wide = [line for line in written if re.search(rf"f32\[[\d,]*\b{VOCAB}\]", line)]
    assert len(wide) <= 3, wide  # the target's logits, its probabilities, the draft's logits
