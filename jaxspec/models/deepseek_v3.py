"""DeepSeek-V3: latent attention, a few dense layers, then layers with experts.

A sigmoid router chooses experts, and a shared expert serves every row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from jaxspec.cache.arrays import KVCache, LatentCache
from jaxspec.config import (
    CacheGroup,
    ConfigError,
    MLAConfig,
    RopeConfig,
    read_bool,
    read_int,
    read_number,
    refuse_unless,
)
from jaxspec.config.quantization import Quantization, read_quantization
from jaxspec.layers.context import Pass
from jaxspec.layers.mla import add_latent_attention, mla_specs
from jaxspec.layers.mlp import add_mlp, mlp_specs
from jaxspec.layers.moe import MoEConfig, add_sigmoid_moe, sigmoid_moe_specs
from jaxspec.layers.norms import Norm
from jaxspec.layers.params import Params, vector
from jaxspec.layers.products import pick_row
from jaxspec.layers.quantized import stored
from jaxspec.models import decoder
from jaxspec.models.decoder import TargetOutput, decoder_specs, logits, run_layers
from jaxspec.parallel.axes import Axes
from pallas_kernels.traced_once import traced_once

__all__ = [
    "DeepseekV3Config",
    "config_from_hf",
    "decoder_layer",
    "forward",
    "ignored_tensor",
    "layer_specs",
    "logits",
    "param_specs",
]


@dataclass(frozen=True)
class DeepseekV3Config:
    """Static shape of the decoder.

    num_dense_layers: number of leading layers without experts, whose MLP is intermediate_size wide
    num_mtp_layers: modules of multi-token prediction that the checkpoint holds after the layers;
        drafts/mtp.py reads them
    quantization: which matrices are stored as codes; None for plain weights. Projections that
        attention absorbs are dequantised while they load
    """

    AXES: ClassVar[Axes] = {"intermediate_size": "mlp"}

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_dense_layers: int
    attention: MLAConfig
    moe: MoEConfig
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    num_mtp_layers: int = 0
    quantization: Quantization | None = None

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """Index into cache_groups for each layer."""
        return (0,) * self.num_layers

    def cache_groups(self, block_size: int, max_model_len: int) -> tuple[CacheGroup, ...]:
        """Return one group: all layers have full attention."""
        return (CacheGroup(block_size, max_model_len),)


def config_from_hf(config: Mapping[str, Any]) -> DeepseekV3Config:
    """Read a checkpoint's config.json."""
    return mla_moe_config(
        config, num_dense_layers=read_int(config, "first_k_dense_replace", 3, least=0)
    )


def mla_moe_config(config: Mapping[str, Any], *, num_dense_layers: int) -> DeepseekV3Config:
    """Read the keys that the families of this decoder share."""
    for key, expected in (("hidden_act", "silu"), ("pretraining_tp", 1)):
        refuse_unless(config, key, expected)
    for key, expected in (
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("moe_layer_freq", 1),
        ("ep_size", 1),
    ):
        # DeepSeek's own config.json has these keys; that of transformers has not.
        refuse_unless(config, key, expected)
    num_layers = read_int(config, "num_hidden_layers")
    if not 0 <= num_dense_layers <= num_layers:
        raise ConfigError(
            f"first_k_dense_replace: expected at most the model's {num_layers} layers, "
            f"got {num_dense_layers}"
        )
    eps = read_number(config, "rms_norm_eps", 1e-6)
    attention = MLAConfig(
        num_heads=read_int(config, "num_attention_heads"),
        kv_lora_rank=read_int(config, "kv_lora_rank"),
        q_lora_rank=read_int(config, "q_lora_rank")
        if config.get("q_lora_rank") is not None
        else None,
        nope_head_dim=read_int(config, "qk_nope_head_dim"),
        rope_head_dim=read_int(config, "qk_rope_head_dim"),
        v_head_dim=read_int(config, "v_head_dim"),
        rope=RopeConfig.from_hf(config),
        rope_interleave=read_bool(config, "rope_interleave", True),
        bias=read_bool(config, "attention_bias", False),
        rms_norm_eps=eps,
    )
    size = read_int(config, "moe_intermediate_size")
    moe = MoEConfig(
        num_experts=read_int(config, "n_routed_experts"),
        top_k=read_int(config, "num_experts_per_tok"),
        intermediate_size=size,
        num_groups=read_int(config, "n_group", 1),
        top_groups=read_int(config, "topk_group", 1),
        routed_scaling=read_number(config, "routed_scaling_factor", 1.0),
        norm_top_k=read_bool(config, "norm_topk_prob", True),
        shared_size=size * read_int(config, "n_shared_experts", 1),
    )
    if moe.num_experts % moe.num_groups:
        raise ConfigError(
            f"n_group: expected a divisor of n_routed_experts {moe.num_experts}, "
            f"got {moe.num_groups}"
        )
    return DeepseekV3Config(
        model_type=config["model_type"],
        vocab_size=read_int(config, "vocab_size"),
        hidden_size=read_int(config, "hidden_size"),
        intermediate_size=read_int(config, "intermediate_size"),
        num_layers=num_layers,
        num_dense_layers=num_dense_layers,
        attention=attention,
        moe=moe,
        rms_norm_eps=eps,
        max_position_embeddings=read_int(config, "max_position_embeddings"),
        tie_word_embeddings=read_bool(config, "tie_word_embeddings", False),
        num_mtp_layers=read_int(
            config,
            "num_nextn_predict_layers",
            read_int(config, "num_mtp_layers", 0, least=0),
            least=0,
        ),
        quantization=read_quantization(config),
    )


def param_specs(cfg: DeepseekV3Config) -> Params:
    """Return the weights: a ParamSpec per array, in the structure of the params."""
    specs = decoder_specs(
        cfg, lambda i, prefix: layer_specs(cfg, prefix, dense=i < cfg.num_dense_layers)
    )
    return stored(specs, cfg.quantization, num_kv_heads=cfg.attention.num_kv_heads)


def layer_specs(cfg: DeepseekV3Config, prefix: str, *, dense: bool = False) -> Params:
    """Return one decoder layer's weights."""
    hidden = cfg.hidden_size
    return {
        "input_layernorm": vector(f"{prefix}.input_layernorm.weight", hidden),
        "self_attn": mla_specs(f"{prefix}.self_attn", cfg.attention, hidden),
        "post_attention_layernorm": vector(f"{prefix}.post_attention_layernorm.weight", hidden),
        **(
            mlp_specs(f"{prefix}.mlp", hidden, cfg.intermediate_size)
            if dense
            else sigmoid_moe_specs(f"{prefix}.mlp", cfg.moe, hidden)
        ),
    }


def ignored_tensor(cfg: DeepseekV3Config, name: str) -> bool:
    """Return whether the decoder does not need this checkpoint tensor.

    Beside those of any decoder, it needs no modules of multi-token prediction.
    """
    mtp = tuple(f"model.layers.{cfg.num_layers + i}." for i in range(cfg.num_mtp_layers))
    return decoder.ignored_tensor(cfg, name) or name.startswith(mtp)


@traced_once("cfg")
def decoder_layer(
    layer: Params, cfg: DeepseekV3Config, x: jax.Array, cache: LatentCache, pass_: Pass
) -> tuple[jax.Array, LatentCache]:
    """Run one layer on x [batch, rows, D]; it may also be an MTP module's.

    The layer is dense or has experts, as its weights say.
    """
    norm = Norm(layer["input_layernorm"], cfg.attention.rms_norm_eps)
    stream, cache = add_latent_attention(
        layer["self_attn"], cfg.attention, x, cache, pass_, norm=norm
    )
    x = pick_row(stream.x, pass_.last_row)
    if "experts" in layer:
        return add_sigmoid_moe(layer, cfg.moe, cfg.rms_norm_eps, x, pass_.ops).x, cache
    return add_mlp(layer, cfg.rms_norm_eps, x, pass_.ops).x, cache


def forward(
    params: Params,
    cfg: DeepseekV3Config,
    tokens: jax.Array,
    pass_: Pass,
    caches: KVCache,
    *,
    aux_layers: tuple[int, ...] = (),
) -> TargetOutput:
    """Run the model over tokens [batch, rows]; aux_layers: see run_layers."""
    pass_ = pass_.with_rope(cfg.attention)

    def run_layer(
        i: int, layer: Params, x: jax.Array, cache: LatentCache
    ) -> tuple[jax.Array, LatentCache]:
        return decoder_layer(layer, cfg, x, cache, pass_)

    return run_layers(params, cfg, tokens, caches, run_layer, aux_layers=aux_layers, ops=pass_.ops)
