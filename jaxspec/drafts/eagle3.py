"""EAGLE-3 (2503.01840): a decoder layer over [next token's embedding, fused target features].

The features are hidden states of three target layers. Row p pairs the target's hidden states of
position p with token p+1 and predicts token p+2. The first pass of a round reads the target's
hidden states through `fuse`; later passes read the draft's own output.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
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
    check_options,
    is_int,
    read_int,
    read_object,
)
from jaxspec.config.quantization import Quantization, read_quantization
from jaxspec.config.reading import shown
from jaxspec.drafts.family import (
    DraftOutput,
    Shapes,
    draft_attention,
    draft_eps,
    draft_window,
    head_logits,
    is_no_weight,
    keep_aux,
    keep_hidden,
)
from jaxspec.drafts.head_layout import (
    is_speculators,
    layer_config,
    read_nested_bool,
    warn_of_guess,
    without_prefix,
)
from jaxspec.layers.attention import attention_specs
from jaxspec.layers.context import Pass
from jaxspec.layers.decoder_layer import dense_layer
from jaxspec.layers.embedding import embed_norm
from jaxspec.layers.mlp import mlp_specs
from jaxspec.layers.norms import Norm, rms_norm
from jaxspec.layers.params import Params, ParamSpec, projection, vector
from jaxspec.layers.products import Stream, normed_values, project, values_of
from jaxspec.layers.quantized import stored
from jaxspec.layers.sums import norm_of_sum
from jaxspec.models import TargetConfig
from jaxspec.models.deepseek_v4 import DeepseekV4Config
from jaxspec.parallel.axes import Axes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Eagle3Config:
    """Static shape of an EAGLE-3 head.

    aux_layers:           boundary ids: the residual stream that enters each of these layers; ()
                          for a head without fc, which reads the target's last hidden state
    norm_before_residual: the residual of layer 0 is hidden_norm(g) instead of g
    norm_before_fc:       an RMS norm over the concatenated hidden states before fc
    fc_norm:              an RMS norm over each hidden state before fc
    norm_output:          the recycled hidden state is the normed one
    quantization:         which matrices are stored as codes; None for plain weights
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
    quantization: Quantization | None = None

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
        "layers": [_layer_specs(f"layers.{i}", cfg, first=i == 0) for i in range(cfg.num_layers)],
        "norm": vector("norm.weight", hidden),
    }
    if cfg.aux_layers:
        specs["fc"] = projection("fc.weight", fused, hidden, (None, "embed"))
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
    return stored(specs, cfg.quantization, num_kv_heads=cfg.attention.num_kv_heads)


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
    """Return g = fc(hidden): [batch, rows, aux_layers * target_hidden] -> [batch, rows, hidden].

    A head without aux layers has no fc: its g is the target's last hidden state.
    """
    if not cfg.aux_layers:
        return hidden
    if cfg.norm_before_fc:
        hidden = rms_norm(hidden, params["input_norm"], cfg.rms_norm_eps, ops)
    if cfg.fc_norm:
        parts = jnp.split(hidden, len(cfg.aux_layers), axis=-1)
        normed = [
            rms_norm(part, gain, cfg.rms_norm_eps, ops)
            for part, gain in zip(parts, params["fc_norm"], strict=True)
        ]
        hidden = jnp.concatenate(normed, axis=-1)
    bias = params["fc_bias"] if cfg.fc_bias else None
    return project(hidden, (params["fc"],), ops, bias=bias)


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


def final_norm(params: Params, cfg: Eagle3Config) -> Norm:
    """Return the norm after the last layer, before the head."""
    return Norm(params["norm"], cfg.rms_norm_eps)


def output(params: Params, cfg: Eagle3Config, x: Stream, caches: KVCache, ops: Ops) -> DraftOutput:
    """Return the outputs for the last layer's x.

    Logits read the normed x. The next step reads it only with norm_output.
    """
    normed = normed_values(x, final_norm(params, cfg), ops)
    return DraftOutput(normed, normed if cfg.norm_output else values_of(x), caches)


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
    new_caches, stream = [], None
    for i, (layer, cache) in enumerate(zip(params["layers"], caches, strict=True)):
        norm, is_last = None, i == cfg.num_layers - 1
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
            next_norm=norm_of_sum(final_norm(params, cfg), pass_.ops) if is_last else None,
        )
        x = stream.x
        new_caches.append(cache)
    assert stream is not None  # there is a layer
    return output(params, cfg, stream, tuple(new_caches), pass_.ops)


def canonical_name(name: str) -> str:
    """Return speculators' name of a tensor.

    SafeAI, SpecForge and NVIDIA write `midlayer.*` for `layers.0.*`; NeMo writes `model.` before
    its names; SGLang's older aux norms are fc_norm.0/1/2.
    """
    name = without_prefix(name)
    for old, new in (
        ("midlayer.", "layers.0."),
        ("aux_norm_low.", "fc_norm.0."),
        ("aux_norm_mid.", "fc_norm.1."),
        ("aux_norm_high.", "fc_norm.2."),
    ):
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def target_hidden(cfg: Eagle3Config, hidden: jax.Array, aux: jax.Array | None) -> jax.Array:
    """Return the target's hidden states at aux_layers, or its last one for a head without any."""
    return keep_aux(cfg, hidden, aux) if cfg.aux_layers else keep_hidden(cfg, hidden, aux)


# Defaults of DraftFamily.
ignored_tensor = is_no_weight
logits = head_logits


def config_from_checkpoint(
    config: Mapping[str, Any], shapes: Shapes, target: TargetConfig, overrides: SpeculativeConfig
) -> Eagle3Config:
    """Read the config from config.json and the tensors' shapes (canonical names) of any layout.

    SafeAI, SpecForge, NVIDIA: a flat config whose rope_theta defaults to 10000, never to the
    target's. speculators: the layer is under transformer_layer_config. A WARNING says what was
    guessed. The strict loading that follows refuses tensors that contradict the result.
    """
    # First: the shapes of codes with another number of bits than 4 are wrong.
    quantization = read_quantization(config)
    check_options(overrides, "eagle3")
    if isinstance(target, DeepseekV4Config):
        raise ConfigError(
            "method 'eagle3': expected a target with one residual stream, got model_type "
            f"{target.model_type!r}, "
            f"which has {target.residual.streams}"
        )
    layer, nested = layer_config(config), read_object(config, "eagle_config")
    refuse_other_layers(nested)
    hidden = read_int(layer, "hidden_size")
    aux_layers = _aux_layers(config, nested, overrides, target.num_layers)
    fc = shapes.get("fc.weight")
    if aux_layers and fc is not None and fc[1] != len(aux_layers) * target.hidden_size:
        raise ConfigError(
            f"draft fc.weight: expected [{hidden}, {len(aux_layers)} x {target.hidden_size}] for "
            f"aux layers {aux_layers} of this target "
            f"(hidden size {target.hidden_size}), got {list(fc)}"
        )
    if not aux_layers and hidden != target.hidden_size:
        raise ConfigError(
            f"use_aux_hidden_state: expected true in a draft of hidden size {hidden}, which cannot "
            f"read the target's last hidden state of {target.hidden_size}, got false"
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
        name: _switch(name, config, nested, shapes, overrides)
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    }
    for name in ("norm_before_fc", "fc_norm"):
        if switches[name] and not aux_layers:
            raise ConfigError(
                f"{name}: expected false in a head that reads the target's last hidden state "
                "(use_aux_hidden_state false), got true"
            )
    return Eagle3Config(
        target_hidden_size=target.hidden_size,
        hidden_size=hidden,
        intermediate_size=read_int(layer, "intermediate_size"),
        num_layers=read_int(layer, "num_hidden_layers", 1),
        attention=draft_attention(layer, shapes),
        sliding_window=draft_window(layer, overrides.draft_sliding_window),
        rms_norm_eps=draft_eps(layer),
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab,
        aux_layers=aux_layers,
        fc_bias="fc.bias" in shapes,
        own_embedding=own_embedding,
        own_lm_head=own_lm_head,
        tied_lm_head=not own_lm_head and target.tie_word_embeddings,
        quantization=quantization,
        **switches,
    )


def refuse_other_layers(nested: Mapping[str, Any]) -> None:
    """Raise ConfigError for a switch of NVIDIA's trainer that asks for another layer."""
    for key, ours in (
        ("use_input_layernorm_in_first_layer", True),
        ("use_last_layernorm", True),
        ("use_mtp_layernorm", False),
        ("next_layer_regular", True),
        ("eh_proj_before_attn", False),
        ("parallel_draft_step", 1),
        ("parallel_draft_heads_num_layers", 1),
    ):
        if nested.get(key) is not None and nested[key] != ours:
            raise ConfigError(f"eagle_config.{key}: expected {ours!r}, got {shown(nested[key])}")


def _aux_layers(
    config: Mapping[str, Any],
    nested: Mapping[str, Any],
    overrides: SpeculativeConfig,
    num_layers: int,
) -> tuple[int, ...]:
    """Return boundary ids; () if the head reads the target's last hidden state instead.

    The top-level field holds boundary ids (vLLM, speculators). The nested field of SpecForge's
    eagle_config holds the ids of the layers whose *output* is read, one lower. NVIDIA writes
    boundary ids there too; those that name the last boundary have no other reading. Without ids the
    default is (2, n // 2, n - 3).
    """
    key = "eagle_aux_hidden_state_layer_ids"
    given = overrides.eagle_aux_hidden_state_layer_ids
    if given is None and read_nested_bool(config, nested, "use_aux_hidden_state") is False:
        return ()
    default = [2, num_layers // 2, num_layers - 3]
    ids, inner = given or config.get(key), nested.get(key)
    for field in (ids, inner):
        if field and not (isinstance(field, list | tuple) and all(map(is_int, field))):
            raise ConfigError(f"{key}: expected a list of integers, got {shown(field)}")
    if not ids and not inner and nested.get("layer_ids"):
        ids = _nested_layer_ids(nested["layer_ids"])
    elif not ids and inner:
        ids = _nested_aux_layers(inner, default, num_layers)
    elif ids and inner and given is None and list(inner) not in (list(ids), [i - 1 for i in ids]):
        logger.warning(
            "%s: %s beside eagle_config and %s in it, taken as the boundary ids %s",
            key,
            list(ids),
            list(inner),
            list(ids),
        )
    if not ids:
        warn_of_guess(key, f"the default {default}, boundary ids of {num_layers} layers")
        ids = default
    if any(not 0 <= i <= num_layers for i in ids) or sorted(set(ids)) != list(ids):
        raise ConfigError(
            f"aux layer ids: expected increasing boundary ids within 0..{num_layers} of the "
            f"target's layers, got {list(ids)}"
        )
    return tuple(ids)


def _nested_layer_ids(ids: Any) -> Sequence[int]:
    """Return the boundary ids of eagle_config.layer_ids, which vLLM alone reads, as they are."""
    if not (isinstance(ids, list | tuple) and all(map(is_int, ids))):
        raise ConfigError(f"eagle_config.layer_ids: expected a list of integers, got {shown(ids)}")
    logger.warning(
        "eagle_config.layer_ids: %s taken as boundary ids, as vLLM takes them; if they are the "
        "layers whose output is read, set eagle_aux_hidden_state_layer_ids to %s in the "
        "speculative config",
        list(ids),
        [i + 1 for i in ids],
    )
    return ids


def _nested_aux_layers(
    inner: Sequence[int], default: Sequence[int], num_layers: int
) -> Sequence[int]:
    """Return the boundary ids of eagle_config's field, with a WARNING where both readings fit."""
    if max(inner) == num_layers:
        return inner
    outputs = [i + 1 for i in inner]
    if outputs != list(default) and max(inner) < num_layers:
        logger.warning(
            "eagle_config.eagle_aux_hidden_state_layer_ids: %s taken as the layers whose output is "
            "read (SpecForge, SGLang), boundary ids %s; if they are boundary ids themselves, set "
            "eagle_aux_hidden_state_layer_ids to %s in the speculative config",
            list(inner),
            outputs,
            list(inner),
        )
    return outputs


# Other names of a switch, in eagle_config: TensorRT-LLM's.
_ALIASES = {"norm_output": "return_hidden_post_norm"}
# Norms with weights of their own, by the tensor that shows one.
_NORM_TENSORS = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}


def _switch(
    name: str,
    config: Mapping[str, Any],
    nested: Mapping[str, Any],
    shapes: Shapes,
    overrides: SpeculativeConfig,
) -> bool:
    """Return a norm switch: the caller's, the config's, what a tensor shows, or the default."""
    value = getattr(overrides, name)
    if value is not None:
        return value
    value = read_nested_bool(config, nested, name)
    if value is None and name in _ALIASES:
        value = read_nested_bool({}, nested, _ALIASES[name])
    if value is None and _NORM_TENSORS.get(name) in shapes:
        warn_of_guess(name, f"true, as the head has {_NORM_TENSORS[name]}")
        return True
    if value is None and name == "norm_before_residual" and is_speculators(config):
        warn_of_guess(name, "true, vLLM's default (that of speculators is false)")
        return True
    if value and name == "norm_output" and not is_speculators(config):
        logger.warning(
            "norm_output in a flat config: taken as vLLM takes it, the recycled hidden state is "
            "the normed one; if SpecForge wrote this "
            "draft, where it means the norm before lm_head only, set norm_output to false in the "
            "speculative config"
        )
    return bool(value)
