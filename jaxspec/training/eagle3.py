"""EAGLE-3's training-time test (2503.01840, section 3.2), as a dense forward over whole sequences.

Step i of row p is what the draft computes in its i-th step after the target has seen position p.
It sits at position p + i and predicts token p+2+i. It reads token p+1+i (teacher-forced), and its
own output of step i-1 in place of the target's hidden states. It attends to the step-0 keys of rows
0 .. p, which came from the target, and to its own keys of steps 1 .. i. That is the draft's cache
during a proposal, so weights trained here run in propose unchanged.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.config import REFERENCE_OPS
from jaxspec.drafts import eagle3
from jaxspec.drafts.eagle3 import Eagle3Config
from jaxspec.layers.mlp import add_mlp
from jaxspec.layers.norms import rms_norm
from jaxspec.layers.params import Params
from jaxspec.layers.rope import rope_tables
from jaxspec.training.step_attention import (
    StepKeys,
    shift_left,
    step_attention,
)


def forward_steps(
    params: Params,
    cfg: Eagle3Config,
    tokens: jax.Array,
    aux: jax.Array,
    num_steps: int,
    starts: jax.Array | None = None,
) -> list[jax.Array]:
    """Return the head input of each step, num_steps arrays [batch, rows, D].

    `drafts.eagle3.logits` turns them into logits. tokens int32 [batch, rows], aux [batch, rows,
    len(aux_layers) * target_hidden]. Row p of step i predicts token p+2+i. Rows that have no such
    token read zeros behind the end, and their output means nothing.

    starts: int32 [batch, rows], the row that each row's document begins at; None if a row of the
    batch is one document
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden = eagle3.fuse(params, cfg, aux, REFERENCE_OPS)
    keys: list[list[StepKeys]] = [[] for _ in params["layers"]]
    head_inputs = []
    for step in range(num_steps):
        with jax.named_scope(f"draft_step_{step}"):
            rope = rope_tables(cfg.attention.rope, cfg.attention.head_dim, positions + step)
            x, attention_input = eagle3.first_layer_input(
                params, cfg, shift_left(tokens, 1 + step), hidden, REFERENCE_OPS
            )
            for i, layer in enumerate(params["layers"]):
                if i > 0:
                    attention_input = rms_norm(
                        x, layer["input_layernorm"], cfg.rms_norm_eps, REFERENCE_OPS
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
            out = eagle3.output(params, cfg, x, (), REFERENCE_OPS)
        head_inputs.append(out.head_input)
        hidden = out.feedback
    return head_inputs
