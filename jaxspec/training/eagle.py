"""EAGLE-1 under a training-time test: training/eagle3.py with EAGLE-1's layer.

The paper (2401.15077) reads the target's features plus uniform noise at every position. The noise
stands for the draft's own error at later steps. Here steps 1 and on read the draft's own output
instead, so the error is the real one (as in HASS, 2408.15766).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.config import REFERENCE_OPS
from jaxspec.drafts.eagle import EagleConfig
from jaxspec.layers.mlp import add_mlp
from jaxspec.layers.norms import rms_norm
from jaxspec.layers.params import Params
from jaxspec.layers.products import linear
from jaxspec.layers.rope import rope_tables
from jaxspec.training.step_attention import (
    StepKeys,
    shift_left,
    step_attention,
)


def forward_steps(
    params: Params,
    cfg: EagleConfig,
    tokens: jax.Array,
    hidden: jax.Array,
    num_steps: int,
    starts: jax.Array | None = None,
) -> list[jax.Array]:
    """Return the feature of each step, num_steps arrays [batch, rows, D], for the target's head.

    tokens int32 [batch, rows]; hidden [batch, rows, D], the target's after its final norm. Row p of
    step i estimates the target's hidden state of position p+1+i, and so predicts token p+2+i. Rows
    without such a token mean nothing.

    starts: int32 [batch, rows], the row that each row's document begins at; None if a row of the
    batch is one document
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    keys: list[list[StepKeys]] = [[] for _ in params["layers"]]
    features = []
    for step in range(num_steps):
        with jax.named_scope(f"draft_step_{step}"):
            rope = rope_tables(cfg.attention.rope, cfg.attention.head_dim, positions + step)
            embedded = params["embed_tokens"][shift_left(tokens, 1 + step)].astype(hidden.dtype)
            x = linear(
                jnp.concatenate([embedded, hidden], axis=-1), params["fc"], params.get("fc_bias")
            )
            for i, layer in enumerate(params["layers"]):
                attention_input = (
                    x
                    if i == 0
                    else rms_norm(x, layer["input_layernorm"], cfg.rms_norm_eps, REFERENCE_OPS)
                )
                attended, own = step_attention(
                    layer["self_attn"],
                    cfg.attention,
                    attention_input,
                    rope,
                    keys[i],
                    starts,
                    cfg.sliding_window,
                )
                x = add_mlp(layer, cfg.rms_norm_eps, x + attended, REFERENCE_OPS).x
                keys[i].append(own)
        features.append(x)
        hidden = x
    return features
