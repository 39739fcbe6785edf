"""EAGLE-3 (2503.01840): a decoder layer over [next token's embedding, fused target features].

The features are hidden states of three target layers. Row p pairs the target's hidden states of
position p with token p+1 and predicts token p+2. The first pass of a round reads the target's
hidden states through `fuse`; later passes read the draft's own output.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxspec.cache.arrays import KVCache
from jaxspec.config import (
    AttentionConfig,
    CacheGroup,
    ConfigError,
    Ops,
    SpeculativeConfig,
    read_bool,
    read_int,
    read_number,
    read_object,
    refuse_unless,
)
from jaxspec.drafts.family import (
    DraftOutput,
    Shapes,
    draft_attention,
    draft_window,
    head_logits,
    is_vocabulary_map,
    keep_aux,
)
from jaxspec.layers.attention import attention_specs
from jaxspec.layers.context import Pass
from jaxspec.layers.decoder_layer import dense_layer
from jaxspec.layers.embedding import embed_norm
from jaxspec.layers.mlp import mlp_specs
from jaxspec.layers.norms import Norm, rms_norm
from jaxspec.layers.params import Params, ParamSpec, projection, vector
from jaxspec.layers.products import linear, project
from jaxspec.models import TargetConfig
from jaxspec.models.deepseek_v4 import DeepseekV4Config
from jaxspec.parallel.axes import Axes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Eagle3Config:
    """Static shape of an EAGLE-3 head.

    aux_layers:           boundary ids: the residual stream that enters each of these layers
    norm_before_residual: the residual of layer 0 is hidden_norm(g) instead of g
    norm_before_fc:       an RMS norm over the concatenated hidden states before fc
    fc_norm:              an RMS norm over each hidden state before fc
    norm_output:          the recycled hidden state is the normed one
    """

    AXES: ClassVar[Axes] = {"intermediate_size": "mlp"}

    target_hidden_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    attention: AttentionConfig
    rms_norm_eps: float
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False
    own_embedding: bool = False
    own_lm_head: bool = True
    sliding_window: int | None = None  # of the draft's own KV-cache group
    tied_lm_head: bool = False  # only with the target's head: it is the target's embedding
    method: str = "eagle3"

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """Index into cache_groups."""
        return (0,) * self.num_layers

    def cache_groups(self, block_size: int, max_model_len: int) -> tuple[CacheGroup, ...]:
        """Return one group for all layers of the draft."""
        return (CacheGroup(block_size, max_model_len, self.sliding_window),)

    @property
    def maps_vocabulary(self) -> bool:
        """Whether draft ids differ from target ids (d2t)."""
        return self.draft_vocab_size != self.vocab_size


def param_specs(cfg: Eagle3Config) -> Params:
    """Return the weights by speculators' names (`layers.0`).

    SafeAI's `midlayer` is renamed on loading.
    """
    hidden, fused = cfg.hidden_size, len(cfg.aux_layers) * cfg.target_hidden_size
    specs: dict[str, Any] = {
        "fc": projection("fc.weight", fused, hidden, (None, "embed")),
        "layers": [_layer_specs(f"layers.{i}", cfg, first=i == 0) for i in range(cfg.num_layers)],
        "norm": vector("norm.weight", hidden),
    }
    if cfg.fc_bias:
        specs["fc_bias"] = vector("fc.bias", hidden)
    if cfg.norm_before_fc:
        specs["input_norm"] = vector("input_norm.weight", fused)
    if cfg.fc_norm:
        specs["fc_norm"] = [
            vector(f"fc_norm.{i}.weight", cfg.target_hidden_size)
            for i in range(len(cfg.aux_layers))
        ]
    if cfg.own_embedding:
        specs["embed_tokens"] = ParamSpec(
            "embed_tokens.weight", (cfg.vocab_size, hidden), ("vocab", "embed")
        )
    if cfg.own_lm_head:
        specs["lm_head"] = projection(
            "lm_head.weight", hidden, cfg.draft_vocab_size, ("embed", "vocab")
        )
    return specs


def _layer_specs(prefix: str, cfg: Eagle3Config, *, first: bool) -> Params:
    hidden = cfg.hidden_size
    specs: dict[str, Any] = {
        "input_layernorm": vector(f"{prefix}.input_layernorm.weight", hidden),
        "self_attn": attention_specs(
            f"{prefix}.self_attn", cfg.attention, 2 * hidden if first else hidden, hidden
        ),
        "post_attention_layernorm": vector(f"{prefix}.post_attention_layernorm.weight", hidden),
        **mlp_specs(f"{prefix}.mlp", hidden, cfg.intermediate_size),
    }
    if first:
        specs["hidden_norm"] = vector(f"{prefix}.hidden_norm.weight", hidden)
    return specs


def fuse(params: Params, cfg: Eagle3Config, hidden: jax.Array, ops: Ops) -> jax.Array:
    """Return g = fc(hidden): [batch, rows, aux_layers * target_hidden] -> [batch, rows, hidden]."""
    if cfg.norm_before_fc:
        hidden = rms_norm(hidden, params["input_norm"], cfg.rms_norm_eps, ops)
    if cfg.fc_norm:
        parts = jnp.split(hidden, len(cfg.aux_layers), axis=-1)
        normed = [
            rms_norm(part, gain, cfg.rms_norm_eps, ops)
            for part, gain in zip(parts, params["fc_norm"], strict=True)
        ]
        hidden = jnp.concatenate(normed, axis=-1)
    if cfg.fc_bias:
        return linear(hidden, params["fc"], params["fc_bias"])
    return project(hidden, (params["fc"],), ops)


def first_layer_input(
    params: Params, cfg: Eagle3Config, tokens: jax.Array, hidden: jax.Array, ops: Ops
) -> tuple[jax.Array, jax.Array]:
    """Return residual [batch, rows, D] and attention input [batch, rows, 2D].

    The embedding comes first in the concatenation.
    """
    layer = params["layers"][0]
    return embed_norm(
        tokens,
        params["embed_tokens"],
        Norm(layer["input_layernorm"], cfg.rms_norm_eps),
        ops,
        hidden=hidden,
        hidden_gain=layer["hidden_norm"],
        norm_residual=cfg.norm_before_residual,
    )


def output(
    params: Params, cfg: Eagle3Config, x: jax.Array, caches: KVCache, ops: Ops
) -> DraftOutput:
    """Return the outputs for the last layer's x.

    Logits read the normed x. The next step reads it only with norm_output.
    """
    normed = rms_norm(x, params["norm"], cfg.rms_norm_eps, ops)
    return DraftOutput(normed, normed if cfg.norm_output else x, caches)


def forward(
    params: Params,
    cfg: Eagle3Config,
    tokens: jax.Array,
    hidden: jax.Array,
    pass_: Pass,
    caches: KVCache,
) -> DraftOutput:
    """Run the draft once over tokens [batch, rows] and hidden [batch, rows, D].

    A row's token is the one after the row's position. hidden is the output of `fuse`, or the
    feedback of the previous pass.
    """
    pass_ = pass_.with_rope(cfg.attention)
    x, attention_input = first_layer_input(params, cfg, tokens, hidden, pass_.ops)
    new_caches = []
    for i, (layer, cache) in enumerate(zip(params["layers"], caches, strict=True)):
        norm = None
        if i > 0:
            attention_input = x
            norm = Norm(layer["input_layernorm"], cfg.attention.rms_norm_eps)
        stream, cache = dense_layer(
            layer,
            cfg.attention,
            cfg.rms_norm_eps,
            attention_input,
            cache,
            pass_.for_layer(i, cfg.num_layers),
            norm=norm,
            residual=x,
            window=cfg.sliding_window,
        )
        x = stream.x
        new_caches.append(cache)
    return output(params, cfg, x, tuple(new_caches), pass_.ops)


def canonical_name(name: str) -> str:
    """Return speculators' name of a tensor.

    SafeAI and SpecForge write `midlayer.*` for `layers.0.*`; SGLang's older aux norms are
    fc_norm.0/1/2.
    """
    for old, new in (
        ("midlayer.", "layers.0."),
        ("aux_norm_low.", "fc_norm.0."),
        ("aux_norm_mid.", "fc_norm.1."),
        ("aux_norm_high.", "fc_norm.2."),
    ):
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


# Defaults of DraftFamily.
ignored_tensor = is_vocabulary_map
logits = head_logits
target_hidden = keep_aux


def config_from_checkpoint(
    config: Mapping[str, Any], shapes: Shapes, target: TargetConfig, overrides: SpeculativeConfig
) -> Eagle3Config:
    """Read the config from config.json and the tensors' shapes (canonical names) of either layout.

    SafeAI / SpecForge: a flat config whose rope_theta defaults to 10000, never to the target's.
    speculators: the layer is under transformer_layer_config. The strict loading that follows
    refuses tensors that contradict the result.
    """
    if isinstance(target, DeepseekV4Config):
        raise ConfigError(
            "method 'eagle3': expected a target with one residual stream, got model_type "
            f"{target.model_type!r}, "
            f"which has {target.residual.streams}"
        )
    speculators = "transformer_layer_config" in config
    layer = read_object(config, "transformer_layer_config") if speculators else config
    hidden = read_int(layer, "hidden_size")
    n = target.num_layers
    aux_layers = _aux_layers(config, overrides, n)
    fc = shapes.get("fc.weight")
    if fc is not None and fc[1] != len(aux_layers) * target.hidden_size:
        raise ConfigError(
            f"draft fc.weight: expected [{hidden}, {len(aux_layers)} x {target.hidden_size}] for "
            f"aux layers {aux_layers} of this target "
            f"(hidden size {target.hidden_size}), got {list(fc)}"
        )
    for key, ours in (
        ("target_hidden_size", target.hidden_size),
        ("vocab_size", target.vocab_size),
    ):
        value = config.get(key, layer.get(key)) if key == "vocab_size" else config.get(key)
        if value is not None and value != ours:
            raise ConfigError(
                f"draft and target do not fit: expected {key} {ours} as the target has, got {value}"
            )
    draft_vocab = read_int(
        config, "draft_vocab_size", read_int(layer, "draft_vocab_size", target.vocab_size)
    )
    if draft_vocab != target.vocab_size and "d2t" not in shapes:
        raise ConfigError(
            f"d2t: expected it in the draft, whose vocabulary of {draft_vocab} is not the "
            f"target's {target.vocab_size}, got none"
        )
    own_embedding, own_lm_head = "embed_tokens.weight" in shapes, "lm_head.weight" in shapes
    if not own_embedding and hidden != target.hidden_size:
        raise ConfigError(
            f"embed_tokens.weight: expected it in a draft of hidden size {hidden} (the target's "
            f"is {target.hidden_size}), got none"
        )
    if not own_lm_head and (draft_vocab != target.vocab_size or hidden != target.hidden_size):
        raise ConfigError(
            "lm_head.weight: expected it in a draft whose vocabulary or hidden size is not the "
            "target's, got none"
        )
    switches: dict[str, Any] = {
        name: _switch(name, config, overrides, speculators)
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    }
    return Eagle3Config(
        target_hidden_size=target.hidden_size,
        hidden_size=hidden,
        intermediate_size=read_int(layer, "intermediate_size"),
        num_layers=read_int(layer, "num_hidden_layers", 1),
        attention=draft_attention(layer, shapes),
        sliding_window=draft_window(layer),
        rms_norm_eps=read_number(layer, "rms_norm_eps", 1e-6),
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab,
        aux_layers=aux_layers,
        fc_bias="fc.bias" in shapes,
        own_embedding=own_embedding,
        own_lm_head=own_lm_head,
        tied_lm_head=not own_lm_head and target.tie_word_embeddings,
        **switches,
    )


def _aux_layers(
    config: Mapping[str, Any], overrides: SpeculativeConfig, num_layers: int
) -> tuple[int, ...]:
    """Return boundary ids; the default is (2, n // 2, n - 3).

    The top-level field holds boundary ids (vLLM, speculators). SpecForge's nested eagle_config
    field holds the ids of the layers whose *output* is read, one lower.
    """
    eagle_config = read_object(config, "eagle_config")
    refuse_unless(eagle_config, "use_aux_hidden_state", True)
    nested = eagle_config.get("eagle_aux_hidden_state_layer_ids")
    ids = overrides.eagle_aux_hidden_state_layer_ids or config.get(
        "eagle_aux_hidden_state_layer_ids"
    )
    for given in (ids, nested):
        if given and not (
            isinstance(given, list | tuple) and all(isinstance(i, int) for i in given)
        ):
            raise ConfigError(
                f"eagle_aux_hidden_state_layer_ids: expected a list of integers, got {given!r:.200}"
            )
    if not ids:
        ids = [i + 1 for i in nested] if nested else [2, num_layers // 2, num_layers - 3]
    if any(not 0 <= i <= num_layers for i in ids) or sorted(set(ids)) != list(ids):
        raise ConfigError(
            f"aux layer ids: expected increasing boundary ids within 0..{num_layers} of the "
            f"target's layers, got {list(ids)}"
        )
    return tuple(ids)


def _switch(
    name: str, config: Mapping[str, Any], overrides: SpeculativeConfig, speculators: bool
) -> bool:
    value = getattr(overrides, name)
    if value is None and config.get(name) is not None:
        value = read_bool(config, name, False)
    if value is None and name == "norm_before_residual" and speculators:
        raise ConfigError(
            "norm_before_residual: expected it in a speculators config (vLLM and speculators "
            "disagree on its default), got none; "
            "set it in the speculative config"
        )
    if value and name == "norm_output" and not speculators and getattr(overrides, name) is None:
        logger.warning(
            "norm_output in a flat config: taken as vLLM takes it, the recycled hidden state is "
            "the normed one; if SpecForge wrote this "
            "draft, where it means the norm before lm_head only, set norm_output to false in the "
            "speculative config"
        )
    return bool(value)
