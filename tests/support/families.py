"""Tiny models of every family with a draft that mostly agrees with them, made without any other
library."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec import drafts, models
from jaxspec.config import AttentionConfig
from jaxspec.drafts import DraftModelConfig, Eagle3Config, EagleConfig, MtpConfig
from jaxspec.drafts.draft_model import drafts_for
from jaxspec.drafts.eagle_llama4 import EagleLlama4Config
from jaxspec.drafts.mtp_deepseek_v4 import DeepseekV4MtpConfig
from jaxspec.layers.params import Params, Weight, init_random
from jaxspec.loading.binding import bind_draft, bind_draft_model
from tests.support.tiny import HIDDEN, VOCAB, Model

_COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=4096,
)
_MLA = dict(
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
)
TARGETS: dict[str, dict[str, Any]] = {
    "gpt_oss": dict(num_local_experts=8, num_experts_per_tok=2, sliding_window=5),
    "glm4_moe_lite": _MLA,
    "deepseek_v3": dict(**_MLA, n_group=4, topk_group=2, first_k_dense_replace=1),
    "llama4_text": dict(
        num_local_experts=8,
        intermediate_size_mlp=32,
        attention_chunk_size=5,
        no_rope_layers=[1, 0],
        floor_scale=4,
        interleave_moe_layer_step=2,
    ),
    "mimo": {},
    "qwen3_moe": dict(
        num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, mlp_only_layers=[0]
    ),
    "deepseek_v4": dict(
        num_hidden_layers=3,
        num_key_value_heads=1,
        qk_rope_head_dim=4,
        q_lora_rank=16,
        o_groups=2,
        o_lora_rank=8,
        sliding_window=5,
        layer_types=[
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        compress_rates={"compressed_sparse_attention": 3, "heavily_compressed_attention": 7},
        index_n_heads=8,
        index_head_dim=8,
        index_topk=2,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        num_hash_layers=1,
        hc_mult=2,
        hc_sinkhorn_iters=4,
    ),
}
# (family, method): every family, every method, each with the KV-cache groups that it brings.
PAIRS = (
    ("gpt_oss", "eagle3"),
    ("gpt_oss", "eagle"),
    ("qwen3_moe", "eagle"),
    ("glm4_moe_lite", "mtp"),
    ("deepseek_v3", "mtp"),
    ("mimo", "mtp"),
    ("deepseek_v4", "mtp"),
    ("llama4_text", "eagle_llama4"),
)


def family_config(model_type: str) -> dict[str, Any]:
    """Return the config.json of a tiny model of any family."""
    return {"model_type": model_type, **_COMMON, **TARGETS.get(model_type, {})}


def target_config(model_type: str, vocab: int = VOCAB, **changes: Any) -> Any:
    """Return a tiny config of any family; changes: of its config.json."""
    config = family_config(model_type) | {"vocab_size": vocab, **changes}
    return models.config_from_hf(config)


@cache
def family_model(
    model_type: str,
    method: str,
    *,
    seed: int = 0,
    window: int | None = None,
    disturbance: float = 0.15,
    vocab: int = VOCAB,
) -> Model:
    """Target and draft are nearly functions of the last token alone: their layers add little
    (`disturbance`) to the embedding.

    method: "draft_model" takes a draft of the target's family, "draft_model:llama" one of another
    window: of an EAGLE draft's own layers
    """
    target = target_config(model_type, vocab)
    keys = jax.random.split(jax.random.key(seed), 2)
    params = _agreeing(
        init_random(models.family(target).param_specs(target), keys[0], jnp.float32), disturbance
    )
    params["embed_tokens"] = 5 * params["embed_tokens"]
    params["norm"] = jnp.ones_like(params["norm"])
    draft = draft_config(method, target, window)
    own = _agreeing(
        init_random(drafts.family(draft).param_specs(draft), keys[1], jnp.float32), disturbance
    )
    eye = jnp.eye(HIDDEN, dtype=jnp.float32)
    joined = {"mtp": "projection", "eagle": "fc", "eagle_llama4": "fc"}.get(method)
    if joined in own:  # the embedding goes through, with a little of the hidden state
        halves = [eye, 0.05 * own[joined].values[HIDDEN:]]
        hidden_first = method == "mtp" and draft.layout.hidden_first
        own[joined] = Weight(jnp.concatenate(halves[::-1] if hidden_first else halves))
    if "embedding_projection" in own:
        hidden = Weight(0.05 * own["hidden_projection"].values)
        own |= {"embedding_projection": Weight(eye), "hidden_projection": hidden}
    own |= {name: jnp.ones_like(own[name]) for name in ("norm", "embedding_norm") if name in own}
    if isinstance(draft, DraftModelConfig):  # the target's map from a token to the next
        own |= {"embed_tokens": params["embed_tokens"], "lm_head": params["lm_head"]}
        return Model(target, draft, {"target": params, "draft": bind_draft_model(draft, own)})
    return Model(target, draft, {"target": params, "draft": bind_draft(draft, own, params, None)})


def draft_config(method: str, target: Any, window: int | None = None) -> Any:
    """Return a tiny config of any draft with layers."""
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
    if method.startswith("draft_model"):
        kind = method.partition(":")[2] or target.model_type
        return drafts_for(target_config(kind, target.vocab_size), target)
    if method == "mtp" and target.model_type == "deepseek_v4":
        return DeepseekV4MtpConfig(target)
    if method == "mtp":
        return MtpConfig(target, zero_first_embedding=True)
    if method == "eagle_llama4":
        one_layer = {
            **_COMMON,
            **TARGETS["llama4_text"],
            "num_hidden_layers": 1,
            "no_rope_layers": [1],
            "interleave_moe_layer_step": 1,
        }
        layer = models.config_from_hf(
            {"model_type": "llama4_text", **one_layer, "vocab_size": target.vocab_size}
        )
        return EagleLlama4Config(layer, own_embedding=False, tied_lm_head=False)
    if method == "eagle":
        return EagleConfig(
            HIDDEN,
            48,
            1,
            attention,
            1e-5,
            target.vocab_size,
            False,
            False,
            False,
            sliding_window=window,
        )
    return Eagle3Config(
        HIDDEN,
        HIDDEN,
        48,
        1,
        attention,
        1e-5,
        target.vocab_size,
        target.vocab_size,
        (0, 1, 2),
        own_lm_head=False,
        sliding_window=window,
    )


def _agreeing(params: Params, scale: float) -> dict[str, Any]:
    def scaled(weight: Params) -> Params:
        return jax.tree.map(lambda x: scale * x, weight)

    def quieten(layer: Params) -> Params:
        quiet = dict(layer)
        quiet["self_attn"] = {
            k: scaled(v) if k in ("o_proj", "o_bias", "o_b_proj") else v
            for k, v in layer["self_attn"].items()
        }
        if "down_proj" in layer:
            quiet["down_proj"] = scaled(layer["down_proj"])
        for group in ("experts", "shared"):
            if group in layer:
                quiet[group] = {
                    k: scaled(v) if k.startswith("down") else v for k, v in layer[group].items()
                }
        return quiet

    return {**params, "layers": [quieten(layer) for layer in params["layers"]]}
