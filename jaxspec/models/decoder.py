"""What the families share: the weights around the layers, the loop over the layers with its aux outputs, and the head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxspec.cache.arrays import KVCache
from jaxspec.config import REFERENCE_KERNELS, Kernels
from jaxspec.layers.params import Params, ParamSpec, matrix, vector
from jaxspec.layers.products import ResidualStream, embed_norm, rms_norm, values_of, vocab_logits


class DecoderConfig(Protocol):
    """What every family's config has."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def tie_word_embeddings(self) -> bool: ...


@dataclass(frozen=True)
class TargetOutput:
    """hidden [batch, rows, embed] after the final norm; aux [batch, rows, len(aux_layers) * embed] or None; the caches."""

    hidden: jax.Array
    aux: jax.Array | None
    caches: KVCache


def decoder_specs(cfg: DecoderConfig, layer_specs: Callable[[int, str], Params]) -> Params:
    """The weights: a ParamSpec per array, in the structure of the params. layer_specs(i, prefix) are those of layer i."""
    specs: dict[str, Any] = {
        "embed_tokens": ParamSpec(
            "model.embed_tokens.weight", (cfg.vocab_size, cfg.hidden_size), ("vocab", "embed")
        ),
        "layers": [layer_specs(i, f"model.layers.{i}") for i in range(cfg.num_layers)],
        "norm": vector("model.norm.weight", cfg.hidden_size),
    }
    if not cfg.tie_word_embeddings:
        specs["lm_head"] = matrix(
            "lm_head.weight", cfg.hidden_size, cfg.vocab_size, ("embed", "vocab")
        )
    return specs


def ignored_tensor(cfg: DecoderConfig, name: str) -> bool:
    """Tensors that a checkpoint may hold and the decoder does not need: derived tables, a tied head saved twice."""
    return name.endswith("rotary_emb.inv_freq") or (
        cfg.tie_word_embeddings and name == "lm_head.weight"
    )


def run_layers(
    params: Params,
    cfg: DecoderConfig,
    tokens: jax.Array,
    caches: KVCache,
    run_layer: Callable[[int, Params, Any, Any], tuple[jax.Array | ResidualStream, Any]],
    *,
    aux_layers: tuple[int, ...],
    kernels: Kernels,
    first_norm: jax.Array | None = None,
) -> TargetOutput:
    """Embed tokens [batch, rows], then run_layer(i, layer's weights, x, layer's cache) -> (x, cache) for each layer, unrolled.

    aux_layers are boundary ids: n is the residual stream that enters layer n (vLLM's and speculators' convention; n = num_layers is the
    stream before the final norm). first_norm: the gain of layer 0's first norm, for layers that take a ResidualStream prepared for it.
    """
    x: jax.Array | ResidualStream
    if first_norm is None:
        x = params["embed_tokens"][tokens]
    else:
        embedded, normed = embed_norm(
            tokens, params["embed_tokens"], first_norm, cfg.rms_norm_eps, kernels
        )
        x = ResidualStream(embedded, normed=normed)
    aux: dict[int, jax.Array] = {}
    new_caches = []
    for i, (layer, cache) in enumerate(zip(params["layers"], caches, strict=True)):
        if i in aux_layers:
            aux[i] = values_of(x)
        with jax.named_scope(f"layer_{i}"):
            x, cache = run_layer(i, layer, x, cache)
        new_caches.append(cache)
    aux[cfg.num_layers] = x = values_of(x)
    hidden = rms_norm(x, params["norm"], cfg.rms_norm_eps, kernels)
    picked = jnp.concatenate([aux[i] for i in aux_layers], axis=-1) if aux_layers else None
    return TargetOutput(hidden, picked, tuple(new_caches))


def logits(
    params: Params, cfg: DecoderConfig, hidden: jax.Array, kernels: Kernels = REFERENCE_KERNELS
) -> jax.Array:
    """Float32 logits [..., vocab] of hidden [..., embed]."""
    tied = cfg.tie_word_embeddings
    return vocab_logits(hidden, params["embed_tokens" if tied else "lm_head"], kernels, tied=tied)
