"""What the EAGLE heads share: the outputs of a draft pass, and reading a layer's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxspec.cache.arrays import KVCache
from jaxspec.config import (
    AttentionConfig,
    ConfigError,
    RopeConfig,
    SpeculativeConfig,
    read_int,
    read_number,
    refuse_unless,
)

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class DraftOutput:
    """head_input [batch, rows, D] goes to `logits`; feedback [batch, rows, D] is the next step's hidden; the caches.

    Who reads one row alone names it as last_row, int32 [batch]. Then only that one need be made, [batch, 1, D]: the last layer's attention
    writes the keys and values of all rows, and what comes after it is done for that row.
    """

    head_input: jax.Array
    feedback: jax.Array
    caches: KVCache


def draft_attention(layer: Mapping[str, Any], shapes: Shapes) -> AttentionConfig:
    """The draft layer's attention. A head_dim that the config lacks comes from q_proj's rows, since hidden / heads
    does not hold everywhere; a key/value head count that the tensors contradict is an error."""
    refuse_unless(layer, "hidden_act", "silu")
    refuse_unless(layer, "mlp_bias", False)
    num_heads = read_int(layer, "num_attention_heads")
    num_kv_heads = read_int(layer, "num_key_value_heads", num_heads)
    q, k = (shapes.get(f"layers.0.self_attn.{x}_proj.weight") for x in "qk")
    head_dim = read_int(
        layer, "head_dim", q[0] // num_heads if q else read_int(layer, "hidden_size") // num_heads
    )
    for name, shape, heads in (("q", q, num_heads), ("k", k, num_kv_heads)):
        if shape is not None and shape[0] != heads * head_dim:
            raise ConfigError(
                f"layers.0.self_attn.{name}_proj.weight: expected {heads} heads of {head_dim} rows by the draft's config, "
                f"got {shape[0]} rows"
            )
    bias = bool(layer.get("attention_bias", False))
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=RopeConfig.from_hf(layer),
        qk_norm=layer.get("model_type") == "qwen3",
        qkv_bias=bias,
        o_bias=bias,
        rms_norm_eps=read_number(layer, "rms_norm_eps", 1e-6),
    )


def refuse_eagle3_switches(overrides: SpeculativeConfig, method: str) -> None:
    """ConfigError for a switch of the speculative config that this method does not have."""
    for name in (
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "eagle_aux_hidden_state_layer_ids",
    ):
        if getattr(overrides, name) is not None:
            raise ConfigError(
                f"{name}: expected it only with method 'eagle3', got it with {method!r}"
            )


def draft_window(layer: Mapping[str, Any]) -> int | None:
    """The sliding window of the draft's layers in tokens (speculators 0.9 gives new drafts one), None for full attention."""
    kinds = set(layer.get("layer_types") or ["full_attention"])
    if kinds == {"full_attention"}:
        refuse_unless(layer, "use_sliding_window", False)
        return None
    if kinds != {"sliding_attention"} or not layer.get("sliding_window"):
        raise ConfigError(
            "layer_types: expected all full_attention, or all sliding_attention with a sliding_window, in the draft's config, "
            f"got {sorted(kinds)}"
        )
    return read_int(layer, "sliding_window")


def ignored_tensor(cfg: Any, name: str) -> bool:
    """Tensors of a draft's checkpoint that are no weights of the draft's layers: the vocabulary maps, which loading reads by itself."""
    return name in ("d2t", "t2d")
