"""The real models' config.json and the names and shapes of their files' tensors, written out from
the families' published layouts.

Nothing here comes from jaxspec's own parameter tables: they are checked against it. MiMo's
dimensions are from secondary sources.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Shape = tuple[int, ...]
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}


def _oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss",
        "num_hidden_layers": layers,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "head_dim": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "initial_context_length": 4096,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "rope_scaling": {**YARN, "factor": 32.0, "rope_type": "yarn", "truncate": False},
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        },
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "attention_bias": False,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    "Qwen3-8B": {
        "model_type": "qwen3",
        "num_hidden_layers": 36,
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "use_sliding_window": False,
        "sliding_window": None,
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "use_sliding_window": False,
        "sliding_window": None,
        "attention_bias": False,
        "hidden_act": "silu",
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": _oss(24, 32),
    "gpt-oss-120b": _oss(36, 128),
    "GLM-4.7-Flash": {
        "model_type": "glm4_moe_lite",
        "num_hidden_layers": 47,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 1,
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000,
        "partial_rotary_factor": 1.0,
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    "MiMo-7B": {
        "model_type": "mimo",
        "num_hidden_layers": 36,
        "num_nextn_predict_layers": 1,
        "vocab_size": 151680,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 640000,
        "use_sliding_window": False,
        "attention_bias": True,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "ep_size": 1,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            **YARN,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "attention_bias": False,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
}
# Published sizes in billions of parameters, without modules of multi-token prediction.
BILLIONS = {
    "Llama-3.1-8B": 8.03,
    "Qwen3-8B": 8.19,
    "Qwen3-30B-A3B": 30.5,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "GLM-4.7-Flash": 29.9,
    "MiMo-7B": 7.6,
    "DeepSeek-V3": 671.0,
}


def tensors(name: str, *, mtp: bool = True) -> dict[str, Shape]:
    """Name -> shape of every tensor of a model's files: bfloat16, but for the MXFP4 experts of
    gpt-oss and DeepSeek-V3's float8."""
    c = CONFIGS[name]
    D, V, n = c["hidden_size"], c["vocab_size"], c["num_hidden_layers"]
    found: dict[str, Shape] = {
        "model.embed_tokens.weight": (V, D),
        "model.norm.weight": (D,),
        "lm_head.weight": (V, D),
    }
    layer = {
        "llama": _llama,
        "qwen3": _llama,
        "qwen3_moe": _llama,
        "mimo": _llama,
        "gpt_oss": _gpt_oss,
    }.get(c["model_type"], _deepseek)
    for i in range(n):
        found |= {f"model.layers.{i}.{k}": s for k, s in layer(c, i)}
    if mtp and c["model_type"] == "mimo":
        prefix = "model.mtp_layers.0"
        own = {
            "token_layernorm": (D,),
            "hidden_layernorm": (D,),
            "final_layernorm": (D,),
            "input_proj": (D, 2 * D),
        }
        found |= {f"{prefix}.{k}.weight": s for k, s in own.items()} | {
            f"{prefix}.{k}": s for k, s in _llama(c, 0)
        }
    elif mtp and c.get("num_nextn_predict_layers"):
        prefix = f"model.layers.{n}"
        own = {
            "enorm": (D,),
            "hnorm": (D,),
            "shared_head.norm": (D,),
            "eh_proj": (D, 2 * D),
            "embed_tokens": (V, D),
            "shared_head.head": (V, D),
        }
        found |= {f"{prefix}.{k}.weight": s for k, s in own.items()} | {
            f"{prefix}.{k}": s for k, s in _deepseek(c, n)
        }
    if c.get("quantization_config", {}).get("quant_method") == "fp8":
        scaled = {
            k: s
            for k, s in found.items()
            if k.endswith("_proj.weight") or k.endswith("kv_a_proj_with_mqa.weight")
        }
        found |= {
            f"{k}_scale_inv": (-(-s[0] // 128), -(-s[1] // 128))
            for k, s in scaled.items()
            if ".eh_proj" not in k
        }
    return found


def _norms(D: int) -> Iterator[tuple[str, Shape]]:
    yield from (("input_layernorm.weight", (D,)), ("post_attention_layernorm.weight", (D,)))


def _mlp(prefix: str, D: int, size: int) -> Iterator[tuple[str, Shape]]:
    yield from (
        (f"{prefix}.gate_proj.weight", (size, D)),
        (f"{prefix}.up_proj.weight", (size, D)),
        (f"{prefix}.down_proj.weight", (D, size)),
    )


def _qkvo(c: dict[str, Any], bias: tuple[str, ...]) -> Iterator[tuple[str, Shape]]:
    D, hd = c["hidden_size"], c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    q, kv = c["num_attention_heads"] * hd, c["num_key_value_heads"] * hd
    for x, (rows, columns) in {"q": (q, D), "k": (kv, D), "v": (kv, D), "o": (D, q)}.items():
        yield f"self_attn.{x}_proj.weight", (rows, columns)
        if x in bias:
            yield f"self_attn.{x}_proj.bias", (rows,)


def _llama(c: dict[str, Any], _: int) -> Iterator[tuple[str, Shape]]:
    yield from _norms(c["hidden_size"])
    yield from _qkvo(c, ("q", "k", "v") if c["attention_bias"] else ())
    if c["model_type"] in ("qwen3", "qwen3_moe"):
        yield from (
            ("self_attn.q_norm.weight", (c["head_dim"],)),
            ("self_attn.k_norm.weight", (c["head_dim"],)),
        )
    if c["model_type"] != "qwen3_moe":
        yield from _mlp("mlp", c["hidden_size"], c["intermediate_size"])
        return
    yield "mlp.gate.weight", (c["num_experts"], c["hidden_size"])
    for e in range(c["num_experts"]):
        yield from _mlp(f"mlp.experts.{e}", c["hidden_size"], c["moe_intermediate_size"])


def _gpt_oss(c: dict[str, Any], _: int) -> Iterator[tuple[str, Shape]]:
    D, E, size = c["hidden_size"], c["num_local_experts"], c["intermediate_size"]
    yield from _norms(D)
    yield from _qkvo(c, ("q", "k", "v", "o"))
    yield "self_attn.sinks", (c["num_attention_heads"],)
    yield from (("mlp.router.weight", (E, D)), ("mlp.router.bias", (E,)))
    for name, rows, depth in (("gate_up_proj", 2 * size, D), ("down_proj", D, size)):
        yield f"mlp.experts.{name}_blocks", (E, rows, depth // 32, 16)
        yield f"mlp.experts.{name}_scales", (E, rows, depth // 32)
        yield f"mlp.experts.{name}_bias", (E, rows)


def _deepseek(c: dict[str, Any], i: int) -> Iterator[tuple[str, Shape]]:
    D, H, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    yield from _norms(D)
    attention = {
        "q_a_proj": (c["q_lora_rank"], D),
        "q_a_layernorm": (c["q_lora_rank"],),
        "q_b_proj": (H * (nope + rope), c["q_lora_rank"]),
        "kv_a_proj_with_mqa": (rank + rope, D),
        "kv_a_layernorm": (rank,),
        "kv_b_proj": (H * (nope + v), rank),
        "o_proj": (D, H * v),
    }
    yield from ((f"self_attn.{k}.weight", s) for k, s in attention.items())
    if i < c["first_k_dense_replace"]:
        yield from _mlp("mlp", D, c["intermediate_size"])
        return
    yield from (
        ("mlp.gate.weight", (c["n_routed_experts"], D)),
        ("mlp.gate.e_score_correction_bias", (c["n_routed_experts"],)),
    )
    yield from _mlp("mlp.shared_experts", D, c["moe_intermediate_size"] * c["n_shared_experts"])
    for e in range(c["n_routed_experts"]):
        yield from _mlp(f"mlp.experts.{e}", D, c["moe_intermediate_size"])
