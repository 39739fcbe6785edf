"""The size of the target's features, which a block head's fc learns without.

The dimensions of a target's residual streams differ in size by orders of magnitude, and fc reads
several streams as they are. AdamW's steps do not depend on the size of a gradient. With one rate it
would move the weights of large inputs too fast, or all others too slowly. So training reads the
features divided by their size, a factor that the saved fc holds. EAGLE-3's fc_norm does this in the
head.
"""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import drafts
from jaxspec.layers.params import Params, Weight
from jaxspec.training.data import Chats, batch_of
from jaxspec.training.objective import TrainingPair, batch_states

CHATS, TOKENS = 32, 512  # that are looked at: their number and length, at most
NORMAL_MEDIAN = 0.6745  # of the magnitude of a standard normal variable
LEAST = 1e-2  # of the mean scale, for a dimension that is almost always zero


def feature_scale(pair: TrainingPair, chats: Chats) -> jax.Array:
    """Return the size of each of the draft's features, float32 [width], over some chats.

    It is the median magnitude, which a few huge values at the first token of a text do not move.
    """
    rows = int(min(TOKENS, chats.lengths.max()))
    host = batch_of(chats, np.arange(min(CHATS, len(chats))), rows)
    batch = jax.tree.map(jnp.asarray, host)
    run = jax.jit(lambda pair, batch: batch_states(pair, batch))
    hidden, aux = run(pair, batch)
    features = drafts.head_family(pair.draft).target_hidden(pair.draft, hidden, aux)
    real = np.asarray(jax.device_get(features), np.float32)[host.documents >= 0]
    scale = np.median(np.abs(real), axis=0) / NORMAL_MEDIAN
    return jnp.asarray(np.maximum(scale, LEAST * scale.mean()), jnp.float32)


def scaled_params(pair: TrainingPair, params: Params) -> Params:
    """Return a head's weights as training moves them: fc for features of size one."""
    return _with_fc(pair, params, multiply=True)


def unscaled_params(pair: TrainingPair, params: Params) -> Params:
    """Return trained weights as a head has them: fc for features as they are."""
    return _with_fc(pair, params, multiply=False)


def compute_weights(pair: TrainingPair, params: Params, dtype: jnp.dtype) -> Params:
    """Return trained weights for a forward pass in a dtype, with the features as they are."""
    if pair.feature_scale is not None:
        params = unscaled_params(pair, params)
    return jax.tree.map(lambda x: x.astype(dtype), params)


def _with_fc(pair: TrainingPair, params: Params, *, multiply: bool) -> Params:
    if pair.feature_scale is None:
        return params
    factor = pair.feature_scale if multiply else 1.0 / pair.feature_scale
    fc = cast(Weight, params["fc"])
    return {**params, "fc": Weight(fc.values * factor[:, None])}
