"""EAGLE-3's training-time test (2503.01840, section 3.2), as a dense forward over whole sequences.

Step i of row p is what the draft computes in its i-th step after the target has seen position p: it sits at position
p + i, reads token p+1+i (teacher-forced) and its own output of step i-1 in place of the target's hidden states, and
predicts token p+2+i. It attends to the step-0 keys of rows 0 .. p, which came from the target, and to its own keys of
steps 1 .. i; that is the draft's cache during a proposal, so weights trained here run in propose unchanged.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.attention import RopeTables, project_qkv
from jaxspec.config import AttentionConfig, ConfigError
from jaxspec.drafts import eagle3
from jaxspec.drafts.eagle3 import Eagle3Config
from jaxspec.layers import linear, mlp_block, rms_norm, rope_tables
from jaxspec.params import Params

_MASKED = -1e30


class StepKeys(NamedTuple):
    """Keys and values of one layer and one step, [batch, rows, kv_heads, head_dim] each."""

    k: jax.Array
    v: jax.Array


def shift_left(x: jax.Array, n: int) -> jax.Array:
    """x [batch, rows] moved n to the left, zeros behind: row p holds what was at p + n."""
    return jnp.pad(x[:, n:], ((0, 0), (0, n)))


def step_attention(
    params: Params, cfg: AttentionConfig, x: jax.Array, rope: RopeTables, earlier: list[StepKeys]
) -> tuple[jax.Array, StepKeys]:
    """Attention of one step: causal over step 0, then one's own row of each later step. x [batch, rows, in] -> [batch, rows, out]."""
    batch, rows = x.shape[:2]
    q, k, v = project_qkv(params, cfg, x, rope)
    own = StepKeys(k, v)
    first, *later = [*earlier, own]
    grouped = q.reshape(batch, rows, cfg.num_kv_heads, cfg.num_heads // cfg.num_kv_heads, cfg.head_dim)
    causal = jnp.arange(rows)[None, :] <= jnp.arange(rows)[:, None]
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, first.k, preferred_element_type=jnp.float32) * cfg.head_dim**-0.5
    scores = jnp.where(causal, scores, _MASKED)
    top = jnp.max(scores, axis=-1)
    diagonal = [jnp.einsum("bqhgd,bqhd->bhgq", grouped, step.k, preferred_element_type=jnp.float32) * cfg.head_dim**-0.5 for step in later]
    for score in diagonal:
        top = jnp.maximum(top, score)
    top = jax.lax.stop_gradient(top)
    # Normalised after the sum over keys: the [rows, rows] weights are written and read once less.
    weights = jnp.exp(scores - top[..., None])
    total = jnp.sum(weights, axis=-1)
    out = jnp.einsum("bhgqk,bkhd->bhgqd", weights.astype(first.v.dtype), first.v, preferred_element_type=jnp.float32)
    for score, step in zip(diagonal, later, strict=True):
        weight = jnp.exp(score - top)
        total = total + weight
        out = out + weight[..., None] * jnp.swapaxes(step.v, 1, 2)[:, :, None].astype(jnp.float32)
    out = jnp.moveaxis(out / total[..., None], 3, 1).reshape(batch, rows, -1).astype(x.dtype)
    return linear(out, params["o_proj"], params.get("o_bias")), own


def forward_steps(params: Params, cfg: Eagle3Config, tokens: jax.Array, aux: jax.Array, num_steps: int) -> list[jax.Array]:
    """The head input of each step, num_steps arrays [batch, rows, D]; `drafts.eagle3.logits` turns them into logits.

    tokens int32 [batch, rows], aux [batch, rows, len(aux_layers) * target_hidden]. Row p of step i predicts token p+2+i;
    rows that have no such token read zeros behind the end, and their output means nothing.
    """
    if cfg.sliding_window is not None:
        raise ConfigError(f"sliding_window: expected full attention in a head that is trained here, got a window of {cfg.sliding_window}")
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden = eagle3.fuse(params, cfg, aux)
    keys: list[list[StepKeys]] = [[] for _ in params["layers"]]
    head_inputs = []
    for step in range(num_steps):
        with jax.named_scope(f"draft_step_{step}"):
            rope = rope_tables(cfg.attention.rope, cfg.attention.head_dim, positions + step)
            x, attention_input = eagle3.first_layer_input(params, cfg, shift_left(tokens, 1 + step), hidden)
            for i, layer in enumerate(params["layers"]):
                if i > 0:
                    attention_input = rms_norm(x, layer["input_layernorm"], cfg.rms_norm_eps)
                attended, own = step_attention(layer["self_attn"], cfg.attention, attention_input, rope, keys[i])
                x = mlp_block(layer, cfg.rms_norm_eps, x + attended)
                keys[i].append(own)
            out = eagle3.output(params, cfg, x, ())
        head_inputs.append(out.head_input)
        hidden = out.feedback
    return head_inputs
