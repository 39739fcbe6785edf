"""DFlash (z-lab): a few layers that draft a block of tokens in one pass.

Row 0 of the block reads the embedding of the last known token, the anchor. The other rows read that
of a mask token. Row i is at the anchor's position plus i and predicts the token there, or one
further with sample_from_anchor. Attention reads the context's keys and values too. Each layer's own
k_proj and v_proj make these of the target's hidden states at a few layers, joined and normed once.

Layouts: z-lab's (a flat config with dflash_config), DeepSpec's (flat, with an embedding and a head
of its own) and speculators'. The first two count layers by their outputs, the last one by boundary
ids, which are one higher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax

from jaxspec.cache.arrays import KVCache
from jaxspec.cache.metadata import Visibility
from jaxspec.config import (
    AttentionConfig,
    CacheGroup,
    ConfigError,
    Ops,
    SpeculativeConfig,
    check_options,
    is_int,
    read_bool,
    read_int,
    read_object,
    refuse_unless,
)
from jaxspec.config.reading import shown
from jaxspec.drafts.family import (
    Shapes,
    draft_attention,
    draft_eps,
    head_logits,
    is_no_weight,
    keep_aux,
)
from jaxspec.drafts.head_layout import (
    is_speculators,
    layer_config,
    with_nested,
    without_prefix,
)
from jaxspec.layers.attention import attention_specs, write_keys
from jaxspec.layers.context import Pass
from jaxspec.layers.decoder_layer import dense_layer
from jaxspec.layers.embedding import embed_norm
from jaxspec.layers.mlp import mlp_specs
from jaxspec.layers.norms import Norm, rms_norm
from jaxspec.layers.params import (
    Params,
    ParamSpec,
    joined,
    matrix,
    projection,
    vector,
    weight,
)
from jaxspec.layers.products import ResidualStream, normed_values, project
from jaxspec.layers.sums import norm_of_sum
from jaxspec.models import TargetConfig
from jaxspec.models.deepseek_v4 import DeepseekV4Config
from jaxspec.parallel.axes import Axes


@dataclass(frozen=True)
class DFlashConfig:
    """Static shape of a DFlash head.

    aux_layers:          boundary ids: the residual stream that enters each of these layers
    draft_block_size:    rows of the longest block
    mask_token_id:       the token of all rows but the first
    sample_from_anchor:  row i predicts the token after its own position; else the one at it, and
                         row 0 predicts nothing
    windows:             for each layer, the tokens of context that it sees; None for all
    causal:              for each layer, whether a row sees no later row of the block
    windows_from_anchor: a window counts the tokens before the block (speculators); else those up to
                         each row, itself included (z-lab)
    has_confidence:       whether there is a confidence head (DSpark)
    confidence_threshold: the chance of acceptance below which a request's drafts end; 0 for no end
    """

    AXES: ClassVar[Axes] = {"intermediate_size": "mlp"}

    target_hidden_size: int
    hidden_size: int
    intermediate_size: int
    attention: AttentionConfig
    rms_norm_eps: float
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    draft_block_size: int
    mask_token_id: int
    sample_from_anchor: bool
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    windows_from_anchor: bool = True
    own_embedding: bool = False
    own_lm_head: bool = False
    tied_lm_head: bool = False  # only with the target's head: it is the target's embedding
    has_confidence: bool = False
    confidence_threshold: float = 0.0
    method: str = "dflash"

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def maps_vocabulary(self) -> bool:
        """Whether draft ids differ from target ids (d2t)."""
        return self.draft_vocab_size != self.vocab_size

    @property
    def corrects_logits(self) -> bool:
        """Whether a token's logits depend on the drafts before it."""
        return False

    @property
    def block_capacity(self) -> int:
        """Tokens that a whole block drafts."""
        return self.draft_block_size - (0 if self.sample_from_anchor else 1)

    @property
    def kinds(self) -> tuple[tuple[int | None, bool], ...]:
        """Window and causality of each KV-cache group."""
        return tuple(dict.fromkeys(zip(self.windows, self.causal, strict=True)))

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """Index into cache_groups."""
        layers = zip(self.windows, self.causal, strict=True)
        return tuple(self.kinds.index(layer) for layer in layers)

    @property
    def visibility(self) -> tuple[Visibility, ...]:
        """For each of cache_groups, which of the block's rows see each other."""
        return tuple(
            Visibility(causal=causal, one_window=window is not None and self.windows_from_anchor)
            for window, causal in self.kinds
        )

    def cache_groups(self, block_size: int, max_model_len: int) -> tuple[CacheGroup, ...]:
        """Return a group for each kind of layer."""
        own = 1 if self.windows_from_anchor else 0  # the anchor, which the window does not count
        return tuple(
            CacheGroup(block_size, max_model_len, None if window is None else window + own)
            for window, _ in self.kinds
        )


def param_specs(cfg: DFlashConfig) -> Params:
    """Return the weights by the names that all layouts share.

    context_kv holds all layers' k_proj and v_proj a second time: the context's keys and values take
    one product of the target's hidden states.
    """
    hidden, num_layers = cfg.hidden_size, cfg.num_layers
    fused = len(cfg.aux_layers) * cfg.target_hidden_size
    width = cfg.attention.num_kv_heads * cfg.attention.head_dim
    names = [f"layers.{i}.self_attn.{part}_proj" for i in range(num_layers) for part in "kv"]
    weights = [matrix(f"{name}.weight", hidden, width, ("embed", "kv_heads")) for name in names]
    every = f"layers.0..{num_layers - 1}.self_attn.{{k,v}}_proj"
    specs: dict[str, Any] = {
        "fc": projection("fc.weight", fused, hidden, (None, "embed")),
        "hidden_norm": vector("hidden_norm.weight", hidden),
        "context_kv": weight(joined(f"{every}.weight", weights)),
        "layers": [_layer_specs(f"layers.{i}", cfg) for i in range(num_layers)],
        "norm": vector("norm.weight", hidden),
    }
    if cfg.attention.qkv_bias:
        biases = [vector(f"{name}.bias", width, "kv_heads") for name in names]
        specs["context_kv_bias"] = joined(f"{every}.bias", biases)
    if cfg.own_embedding:
        specs["embed_tokens"] = ParamSpec(
            "embed_tokens.weight", (cfg.vocab_size, hidden), ("vocab", "embed")
        )
    if cfg.own_lm_head:
        specs["lm_head"] = projection(
            "lm_head.weight", hidden, cfg.draft_vocab_size, ("embed", "vocab")
        )
    return specs


def _layer_specs(prefix: str, cfg: DFlashConfig) -> Params:
    hidden = cfg.hidden_size
    return {
        "input_layernorm": vector(f"{prefix}.input_layernorm.weight", hidden),
        "self_attn": attention_specs(f"{prefix}.self_attn", cfg.attention, hidden, hidden),
        "post_attention_layernorm": vector(f"{prefix}.post_attention_layernorm.weight", hidden),
        **mlp_specs(f"{prefix}.mlp", hidden, cfg.intermediate_size),
    }


def fuse(params: Params, cfg: DFlashConfig, hidden: jax.Array, ops: Ops) -> jax.Array:
    """Return hidden_norm(fc(hidden)): [batch, rows, aux_layers * target_hidden] -> [..., D]."""
    fused = project(hidden, (params["fc"],), ops)
    return rms_norm(fused, params["hidden_norm"], cfg.rms_norm_eps, ops)


def write_context(
    params: Params, cfg: DFlashConfig, hidden: jax.Array, pass_: Pass, caches: KVCache
) -> KVCache:
    """Write every layer's keys and values of hidden [batch, rows, D] into the caches."""
    pass_ = pass_.with_rope(cfg.attention)
    bias = params["context_kv_bias"] if cfg.attention.qkv_bias else None
    kv = project(hidden, (params["context_kv"],), pass_.ops, bias=bias)
    width = 2 * cfg.attention.num_kv_heads * cfg.attention.head_dim
    return tuple(
        write_keys(
            layer["self_attn"],
            cfg.attention,
            kv[..., i * width : (i + 1) * width],
            cache,
            pass_,
            group=cfg.group_of_layer[i],
        )
        for i, (layer, cache) in enumerate(zip(params["layers"], caches, strict=True))
    )


def forward(
    params: Params, cfg: DFlashConfig, tokens: jax.Array, pass_: Pass, caches: KVCache
) -> tuple[jax.Array, KVCache]:
    """Run the layers over a block's tokens [batch, rows].

    Returns the hidden states after the final norm [batch, rows, D], and the caches.
    """
    pass_, ops, eps = pass_.with_rope(cfg.attention), pass_.ops, cfg.rms_norm_eps
    layers, rows = params["layers"], tokens.shape[1]
    norms = [
        Norm(layer["input_layernorm"], eps, (layer["self_attn"]["qkv_proj"],)) for layer in layers
    ]
    final = Norm(params["norm"], eps)
    x = ResidualStream(*_embedded(params, tokens, norms[0], ops))
    written = []
    for i, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        window = cfg.windows[i]
        x, cache = dense_layer(
            layer,
            cfg.attention,
            eps,
            x,
            cache,
            pass_,
            norm=norms[i],
            residual=x,
            group=cfg.group_of_layer[i],
            window=None if window is None else window + rows,  # most keys: the context's and own
            next_norm=norms[i + 1] if i + 1 < cfg.num_layers else norm_of_sum(final, ops),
        )
        written.append(cache)
    return normed_values(x, final, ops), tuple(written)


def _embedded(
    params: Params, tokens: jax.Array, norm: Norm, ops: Ops
) -> tuple[jax.Array, None, jax.Array]:
    """Return the fields of the stream that enters the first layer, which comes normed."""
    embedded, normed = embed_norm(tokens, params["embed_tokens"], norm, ops)
    return embedded, None, normed


def first_head_state(cfg: DFlashConfig, hidden: jax.Array) -> None:
    """Return None: drafts do not depend on each other."""
    return


def step_logits(
    params: Params,
    cfg: DFlashConfig,
    base: jax.Array,
    hidden: jax.Array,
    token: jax.Array,
    head_state: jax.Array | None,
    ops: Ops,
) -> tuple[jax.Array, None]:
    """Return the logits unchanged: drafts do not depend on each other."""
    return base, None


def markov_step(
    params: Params,
    cfg: DFlashConfig,
    base: jax.Array,
    step: jax.Array | int,
    token: jax.Array,
    ops: Ops,
) -> None:
    """Return None: there is no Markov head."""
    return


def canonical_name(name: str) -> str:
    """Return the name without the `model.` that some trainers write before it."""
    return without_prefix(name)


def ignored_tensor(cfg: DFlashConfig, name: str) -> bool:
    """Return whether a tensor is no weight of the draft.

    speculators keeps the target's norm and head beside the draft while it trains.
    """
    return is_no_weight(cfg, name) or name in ("verifier_norm.weight", "verifier_lm_head.weight")


# Defaults of DraftFamily.
logits = head_logits
target_hidden = keep_aux


def config_from_checkpoint(
    config: Mapping[str, Any], shapes: Shapes, target: TargetConfig, overrides: SpeculativeConfig
) -> DFlashConfig:
    """Read the config from config.json and the tensors' shapes (canonical names) of any layout."""
    fields = read_fields(config, shapes, target, overrides, "dflash")
    from_anchor = anchor_drafts(config, overrides, fields, default=False)
    return DFlashConfig(**fields, sample_from_anchor=from_anchor)


def read_fields(
    config: Mapping[str, Any],
    shapes: Shapes,
    target: TargetConfig,
    overrides: SpeculativeConfig,
    method: str,
) -> dict[str, Any]:
    """Return the fields of a DFlashConfig but for sample_from_anchor."""
    check_options(overrides, method)
    if isinstance(target, DeepseekV4Config):
        raise ConfigError(
            f"method {method!r}: expected a target with one residual stream, got deepseek_v4"
        )
    layer, both = layer_config(config), with_nested(config, "dflash_config")
    check_quantisation(config, method)
    for key, ours in (
        ("input_embedding_scale", 1.0),
        ("output_multiplier", 1.0),
        ("final_logit_softcapping", 0.0),
        ("selector_rank", 0),  # DFlash 2
    ):
        if both.get(key) is not None:
            refuse_unless(both, key, ours)
    layers_of_target = config.get("num_target_layers")
    for key, theirs, ours in (
        ("num_target_layers", layers_of_target, target.num_layers),
        ("vocab_size", layer.get("vocab_size"), target.vocab_size),
    ):
        if theirs is not None and theirs != ours:
            raise ConfigError(
                f"draft and target do not fit: expected {key} {ours} as the target has, "
                f"got {shown(theirs)}"
            )
    draft_vocab = read_int(config, "draft_vocab_size", target.vocab_size)
    if draft_vocab != target.vocab_size and not {"d2t", "lm_head.weight"} <= set(shapes):
        raise ConfigError(
            f"d2t and lm_head.weight: expected both in a draft whose vocabulary of {draft_vocab} "
            f"is not the target's {target.vocab_size}, got one or none"
        )
    hidden = read_int(layer, "hidden_size")
    own_embedding, own_lm_head = "embed_tokens.weight" in shapes, "lm_head.weight" in shapes
    if hidden != target.hidden_size and not (own_embedding and own_lm_head):
        raise ConfigError(
            f"embed_tokens.weight and lm_head.weight: expected both in a draft of hidden size "
            f"{hidden} (the target's is {target.hidden_size}), got one or none"
        )
    mask = read_int(both, "mask_token_id", least=0)
    if mask >= target.vocab_size:
        raise ConfigError(
            f"mask_token_id: expected an id below the target's {target.vocab_size}, got {mask}"
        )
    windows = layer_windows(layer)
    return {
        "target_hidden_size": target.hidden_size,
        "hidden_size": hidden,
        "intermediate_size": read_int(layer, "intermediate_size"),
        # Every layout's layers are Qwen3's, whatever model_type the config has of its target.
        "attention": replace(draft_attention(layer, shapes, by_doctor=False), qk_norm=True),
        "rms_norm_eps": draft_eps(layer, by_doctor=False),
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab,
        "aux_layers": aux_layers(config, both, target.num_layers),
        "draft_block_size": read_int(both, "block_size"),
        "mask_token_id": mask,
        "windows": windows,
        "causal": layer_causality(config, both, windows),
        "windows_from_anchor": is_speculators(config),
        "own_embedding": own_embedding,
        "own_lm_head": own_lm_head,
        "tied_lm_head": not own_lm_head and target.tie_word_embeddings,
    }


def check_quantisation(config: Mapping[str, Any], method: str) -> None:
    """Raise ConfigError for a head whose weights loading does not make plain.

    Loading makes float8 in blocks plain (jaxspec.loading.fp8), if the head's own config names it.
    """
    key = "quantization_config"
    of_head, of_layer = read_object(config, key), read_object(layer_config(config), key)
    is_read = of_head.get("quant_method") == "fp8" and of_head.get("weight_block_size")
    allowed = of_head if is_read else {}
    for found in (of_head, of_layer):
        if found and found != allowed:
            raise ConfigError(
                f"quantization_config: expected none, or quant_method 'fp8' with "
                f"weight_block_size, in a {method} head, got quant_method "
                f"{shown(found.get('quant_method'))}"
            )


def anchor_drafts(
    config: Mapping[str, Any],
    overrides: SpeculativeConfig,
    fields: Mapping[str, Any],
    *,
    default: bool,
) -> bool:
    """Return sample_from_anchor; ConfigError if a block holds no draft or not the caller's K."""
    found = read_bool(with_nested(config, "dflash_config"), "sample_from_anchor", default)
    size, K = fields["draft_block_size"], overrides.num_speculative_tokens
    most = size if found else size - 1
    if most == 0:
        raise ConfigError(
            f"block_size: expected at least 2 in a head whose first row drafts nothing, got {size}"
        )
    if K is not None and most < K:
        raise ConfigError(
            f"num_speculative_tokens: expected at most {most}, the drafts of this head's block of "
            f"{size}, got {K}"
        )
    return found


def layer_windows(layer: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, None for full attention.

    ConfigError where layer_types and use_sliding_window differ on whether there is one.
    """
    num_layers = read_int(layer, "num_hidden_layers")
    kinds, known = layer.get("layer_types"), ("full_attention", "sliding_attention")
    declared = layer.get("sliding_window") is not None
    if kinds is None and declared and read_bool(layer, "use_sliding_window", False):
        raise ConfigError(
            f"layer_types: expected the kind of each of {num_layers} layers beside "
            "use_sliding_window, in the draft's config, got none"
        )
    kinds = ["full_attention"] * num_layers if kinds is None else kinds
    is_list = isinstance(kinds, list | tuple)
    if not is_list or len(kinds) != num_layers or not all(kind in known for kind in kinds):
        raise ConfigError(
            f"layer_types: expected full_attention or sliding_attention for each of {num_layers} "
            f"layers of the draft, got {shown(kinds)}"
        )
    if "sliding_attention" not in kinds:
        return (None,) * num_layers
    if not read_bool(layer, "use_sliding_window", True):
        raise ConfigError(
            "use_sliding_window: expected true beside layer_types with sliding_attention, in the "
            "draft's config, got false"
        )
    window = read_int(layer, "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def layer_causality(
    config: Mapping[str, Any], both: Mapping[str, Any], windows: tuple[int | None, ...]
) -> tuple[bool, ...]:
    """Return for each layer whether a row sees no later row of its block.

    Layers with a window are causal unless the config says otherwise: speculators' key speaks of
    them alone, z-lab's of all layers.
    """
    if is_speculators(config):
        causal = not read_bool(config, "sliding_window_non_causal", False)
        return tuple(window is not None and causal for window in windows)
    if both.get("is_causal") is not None:
        return (read_bool(both, "is_causal", False),) * len(windows)
    return tuple(window is not None for window in windows)


def aux_layers(
    config: Mapping[str, Any], both: Mapping[str, Any], num_layers: int
) -> tuple[int, ...]:
    """Return boundary ids of the target's layers.

    speculators' are boundary ids. The others name layers whose output is read, -1 for the
    embedding. They read the last layer's after the target's final norm, which is not offered here.
    """
    if is_speculators(config):
        key, first, offset, last = "aux_hidden_state_layer_ids", 0, 0, num_layers
    else:
        key, first, offset, last = "target_layer_ids", -1, 1, num_layers - 2
    ids = both.get(key)
    if not isinstance(ids, list | tuple) or not ids or not all(map(is_int, ids)):
        raise ConfigError(f"{key}: expected a list of the target's layers, got {shown(ids)}")
    if not all(first <= i <= last for i in ids) or sorted(set(ids)) != list(ids):
        raise ConfigError(
            f"{key}: expected increasing ids within {first}..{last} for a target of {num_layers} "
            f"layers, got {shown(ids)}"
        )
    return tuple(i + offset for i in ids)
