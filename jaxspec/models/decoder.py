"""Parts that families share.

They are the weights around the layers, the loop over the layers with its aux outputs, and the head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache.arrays import KVCache
from jaxspec.config import Ops, TargetConfig
from jaxspec.layers.embedding import embed, embed_norm
from jaxspec.layers.norms import Norm
from jaxspec.layers.params import Params, ParamSpec, Weight, projection, vector
from jaxspec.layers.products import (
    ResidualStream,
    Stream,
    normed_values,
    values_of,
    vocab_logits,
)


@dataclass(frozen=True)
class TargetOutput:
    """The result of a family's forward.

    hidden: [batch, rows, embed] after the final norm
    aux:    [batch, rows, len(aux_layers) * embed], or None without aux layers
    caches: the caches with these rows written
    """

    hidden: jax.Array
    aux: jax.Array | None
    caches: KVCache


def decoder_specs(cfg: TargetConfig, layer_specs: Callable[[int, str], Params]) -> Params:
    """Return the weights: a ParamSpec per array, in the structure of the params.

    layer_specs(i, prefix) returns the weights of layer i.
    """
    specs: dict[str, Any] = {
        "embed_tokens": ParamSpec(
            "model.embed_tokens.weight", (cfg.vocab_size, cfg.hidden_size), ("vocab", "embed")
        ),
        "layers": [layer_specs(i, f"model.layers.{i}") for i in range(cfg.num_layers)],
        "norm": vector("model.norm.weight", cfg.hidden_size),
    }
    if not cfg.tie_word_embeddings:
        specs["lm_head"] = projection(
            "lm_head.weight", cfg.hidden_size, cfg.vocab_size, ("embed", "vocab")
        )
    return specs


def ignored_tensor(cfg: TargetConfig, name: str) -> bool:
    """Return whether the decoder does not need this checkpoint tensor.

    Such tensors are derived tables, and a tied head that is saved twice.
    """
    return name.endswith("rotary_emb.inv_freq") or (
        cfg.tie_word_embeddings and name == "lm_head.weight"
    )


def run_layers(
    params: Params,
    cfg: TargetConfig,
    tokens: jax.Array,
    caches: KVCache,
    run_layer: Callable[[int, Params, Any, Any], tuple[Stream, Any]],
    *,
    aux_layers: tuple[int, ...],
    ops: Ops,
    first_norm: Norm | None = None,
) -> TargetOutput:
    """Embed tokens [batch, rows], then run the layers, unrolled.

    run_layer(i, layer's weights, x, layer's cache) returns x and the cache. The last layer may
        have prepared x for the final norm.
    aux_layers: boundary ids; n is the residual stream that enters layer n, and n = num_layers the
        stream before the final norm (vLLM's and speculators' convention)
    first_norm: layer 0's first norm, for layers that take a ResidualStream prepared for it
    """
    x: Stream
    if first_norm is None:
        x = embed(tokens, params["embed_tokens"], ops)
    else:
        embedded, normed = embed_norm(tokens, params["embed_tokens"], first_norm, ops)
        x = ResidualStream(embedded, normed=normed)
    aux: dict[int, jax.Array] = {}
    new_caches = []
    for i, (layer, cache) in enumerate(zip(params["layers"], caches, strict=True)):
        if i in aux_layers:
            aux[i] = values_of(x)
        with jax.named_scope(f"layer_{i}"):
            x, cache = run_layer(i, layer, x, cache)
        new_caches.append(cache)
    aux[cfg.num_layers] = values_of(x)
    hidden = normed_values(x, final_norm(params, cfg), ops)
    picked = jnp.concatenate([aux[i] for i in aux_layers], axis=-1) if aux_layers else None
    return TargetOutput(hidden, picked, tuple(new_caches))


def final_norm(params: Params, cfg: TargetConfig) -> Norm:
    """Return the norm after the last layer, before the head."""
    return Norm(params["norm"], cfg.rms_norm_eps)


def logits(params: Params, cfg: TargetConfig, hidden: jax.Array, ops: Ops) -> jax.Array:
    """Return float32 logits [..., vocab] of hidden [..., embed]."""
    return vocab_logits(hidden, lm_head(params, tied=cfg.tie_word_embeddings), ops)


def lm_head(params: Params, *, tied: bool) -> Weight:
    """Return the head of a decoder; tied: it is the embedding."""
    return Weight(params["embed_tokens"], transposed=True) if tied else params["lm_head"]
