"""Each family's prefill and round take bfloat16 weights and caches under strict dtype promotion.

A float32 factor of a bfloat16 array would promote it without a word elsewhere. Nothing is computed.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import drafts, models
from jaxspec.config import REFERENCE_OPS, RoundConfig
from jaxspec.decode import state as decode_state
from jaxspec.decode.prefill import prefill
from jaxspec.decode.round import decode_round
from jaxspec.layers.params import Params, init_random
from jaxspec.loading.binding import bind_draft
from tests.support.families import PAIRS, draft_config, target_config
from tests.support.tiny import block_tables, pad_chunk, sampling_state

pytestmark = pytest.mark.once
OTHERS = (("llama", "eagle3"), ("qwen2", "eagle3"), ("qwen3", "eagle3"))


@pytest.mark.parametrize(("family", "method"), [*OTHERS, *PAIRS])
def test_bfloat16_is_promoted_nowhere(family: str, method: str) -> None:
    assert jax.config.values["jax_numpy_dtype_promotion"] == "strict"
    target = target_config(family)
    draft = draft_config(method, target)
    cfg = RoundConfig.for_models(
        target,
        draft,
        ops=REFERENCE_OPS,
        block_size=4,
        max_model_len=16,
        num_speculative_tokens=2,
    )

    def make() -> Params:
        key = jax.random.key(0)
        of_target = init_random(models.family(target).param_specs(target), key, jnp.bfloat16)
        own = init_random(drafts.family(draft).param_specs(draft), key, jnp.bfloat16)
        return {"target": of_target, "draft": bind_draft(draft, own, of_target, None)}

    tables, num_blocks = block_tables(2, cfg)
    limits, stops = np.full(2, 8, np.int32), np.full((2, 1), -1, np.int32)
    start = partial(
        decode_state.init_state,
        cfg,
        num_blocks=num_blocks,
        dtype=jnp.bfloat16,
        cache_dtype=jnp.bfloat16,
    )
    params = jax.eval_shape(make)
    state = jax.eval_shape(start, sampling_state([0, 1], 1.0), limits, stops)
    chunk = pad_chunk([[1, 2, 3], [4]], 0, 4)
    for program, more in ((prefill, (tables, chunk)), (decode_round, (tables,))):
        _, after = jax.eval_shape(partial(program, cfg), params, state, *more)
        assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)
