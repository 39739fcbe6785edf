"""Dimensions of the benchmarked models and of the drafts on them; weights are random."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxspec import models
from jaxspec.config import AttentionConfig, ConfigError, MLAConfig, RopeConfig
from jaxspec.config.quantization import FROM_FLOATS, with_form
from jaxspec.drafts import (
    BLOCKS,
    DFlashConfig,
    DSparkConfig,
    Eagle3Config,
    EagleConfig,
    LayeredConfig,
    MtpConfig,
)
from jaxspec.drafts.draft_model import METHOD, drafts_for
from jaxspec.drafts.mtp import LAYOUTS
from jaxspec.models.llama import LlamaConfig

POSITIONS = (
    131072  # every benchmarked context fits; how long a model was trained for changes no timing
)
BLOCK_LAYERS, BLOCK_AUX_LAYERS = 5, 5  # of the published heads of DFlash and DSpark on Qwen3-8B
BLOCK_ROWS = 16  # of the longest block
MARKOV_RANK = 256
MASK_TOKEN = 7  # which token it is changes no timing


@dataclass(frozen=True)
class Dimensions:
    """A target, what its EAGLE-3 head does not take from it, and a small model that drafts for it.

    small: of the target's vocabulary; None where none is published
    """

    target: Any
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    small: LlamaConfig | None = None


@dataclass(frozen=True)
class HeadShape:
    """What differs between heads of one method; None: as published.

    num_layers:         of a block draft
    draft_vocab_size:   of EAGLE-3 or a block draft
    sample_from_anchor: whether a block's first row drafts too
    quantize:           form of the weights; None: bfloat16
    """

    num_layers: int | None = None
    draft_vocab_size: int | None = None
    sample_from_anchor: bool | None = None
    quantize: str | None = None

    def block_capacity(self, method: str) -> int:
        """Return the K that the longest block of a block draft holds."""
        return BLOCK_ROWS if self.drafts_from_anchor(method) else BLOCK_ROWS - 1

    def drafts_from_anchor(self, method: str) -> bool:
        """Return sample_from_anchor of a block draft."""
        return method == "dspark" if self.sample_from_anchor is None else self.sample_from_anchor


PUBLISHED = HeadShape()


def _dimensions(
    model_type: str,
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    heads: tuple[int, int, int],
    vocab_size: int,
    draft_vocab_size: int,
    *,
    theta: float,
    tied: bool = False,
    aux_layers: tuple[int, ...] | None = None,
    small: Dimensions | None = None,
    **switches: Any,
) -> Dimensions:
    """heads: query heads, key/value heads, head_dim; switches: qk_norm, qkv_bias."""
    attention = AttentionConfig(*heads, rope=RopeConfig(theta), **switches)
    target = LlamaConfig(
        model_type,
        vocab_size,
        hidden_size,
        intermediate_size,
        num_layers,
        attention,
        1e-5,
        POSITIONS,
        tied,
    )
    return Dimensions(
        target,
        draft_vocab_size,
        aux_layers or (2, num_layers // 2, num_layers - 3),
        small and small.target,
    )


# Published dimensions.
_LLAMA_3_2_1B = _dimensions(
    "llama", 16, 2048, 8192, (32, 8, 64), 128256, 32000, theta=5e5, tied=True
)
_QWEN3_0_6B = _dimensions(
    "qwen3", 28, 1024, 3072, (16, 8, 128), 151936, 32000, theta=1e6, tied=True, qk_norm=True
)
_TINY_SMALL = _dimensions("llama", 1, 16, 32, (2, 1, 8), 96, 64, theta=1e4, aux_layers=())
_GPT_OSS_20B = dict(
    model_type="gpt_oss",
    num_hidden_layers=24,
    num_local_experts=32,
    num_experts_per_tok=4,
    vocab_size=201088,
    hidden_size=2880,
    intermediate_size=2880,
    max_position_embeddings=POSITIONS,
)
_GPT_OSS_20B_MXFP4 = _GPT_OSS_20B | {"quantization_config": {"quant_method": "mxfp4"}}
_GLM_4_7_FLASH = dict(
    model_type="glm4_moe_lite",
    num_hidden_layers=47,
    vocab_size=154880,
    hidden_size=2048,
    intermediate_size=10240,
    moe_intermediate_size=1536,
    num_attention_heads=20,
    q_lora_rank=768,
    kv_lora_rank=512,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    n_routed_experts=64,
    num_experts_per_tok=4,
    max_position_embeddings=POSITIONS,
)
_QWEN3_30B_A3B = dict(
    model_type="qwen3_moe",
    num_hidden_layers=48,
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    rope_theta=1e6,
    max_position_embeddings=POSITIONS,
)
# Experts, and attention of several types or of latents.
HYBRID: dict[str, Dimensions] = {
    # Experts in bfloat16, and in MXFP4.
    "gpt-oss-20b": Dimensions(models.config_from_hf(_GPT_OSS_20B), 64000, (2, 12, 21)),
    "gpt-oss-20b-mxfp4": Dimensions(models.config_from_hf(_GPT_OSS_20B_MXFP4), 64000, (2, 12, 21)),
    "glm-4.7-flash": Dimensions(models.config_from_hf(_GLM_4_7_FLASH), 154880, ()),
    "qwen3-30b-a3b": Dimensions(
        models.config_from_hf(_QWEN3_30B_A3B), 32000, (2, 24, 45), _QWEN3_0_6B.target
    ),
}
# One GPU does not hold them.
LARGE: dict[str, Dimensions] = {
    "llama-3-70b": _dimensions(
        "llama", 80, 8192, 28672, (64, 8, 128), 128256, 32000, theta=5e5, small=_LLAMA_3_2_1B
    ),
}
PLAIN: dict[str, Dimensions] = {
    "llama-3-8b": _dimensions(
        "llama", 32, 4096, 14336, (32, 8, 128), 128256, 32000, theta=5e5, small=_LLAMA_3_2_1B
    ),
    "llama-3.2-1b": _LLAMA_3_2_1B,
    "smollm2-135m": _dimensions(
        "llama", 30, 576, 1536, (9, 3, 64), 49152, 16000, theta=1e5, tied=True
    ),
    "qwen3-8b": _dimensions(
        "qwen3",
        36,
        4096,
        12288,
        (32, 8, 128),
        151936,
        32000,
        theta=1e6,
        qk_norm=True,
        small=_QWEN3_0_6B,
    ),
    "mimo-7b": _dimensions(
        "qwen2", 36, 4096, 11008, (32, 8, 128), 151680, 32000, theta=6.4e5, qkv_bias=True
    ),
    **HYBRID,
    **LARGE,
    # For trying the scripts out: seconds on a CPU.
    "tiny": _dimensions(
        "llama", 2, 32, 48, (4, 2, 8), 96, 64, theta=1e4, aux_layers=(0, 1, 2), small=_TINY_SMALL
    ),
}
# Targets with quantised weights, and plain drafts: "llama-3-8b-fp8" and so on.
QUANTIZED: dict[str, Dimensions] = {
    f"{name}-{form}": replace(
        PLAIN[name], target=with_form(PLAIN[name].target, form, {"dtype": "bfloat16"})
    )
    for name in ("llama-3-8b", "qwen3-8b", "qwen3-30b-a3b", "llama-3-70b")
    for form in FROM_FLOATS
}
MODELS: dict[str, Dimensions] = {**PLAIN, **QUANTIZED}


def draft_config(
    dimensions: Dimensions, method: str, shape: HeadShape = PUBLISHED
) -> LayeredConfig:
    """Return the draft of a method; heads have the target's width and head counts.

    EAGLE's are of one Llama layer; EAGLE-3's attention reads 2D and its head has its own
    vocabulary. MTP is one of the target's own layers, for targets that have such a module. DFlash
    and DSpark have five layers of Qwen3, all with full attention, and the target's vocabulary. An
    independent draft is a small model of the target's vocabulary, with dimensions of its own.
    """
    cfg = _plain_draft(dimensions, method, shape)
    if shape.quantize is None:
        return cfg
    if method == "mtp":
        raise ConfigError(
            "--draft-quantize: expected None for mtp, whose module has the form of its target, "
            f"got {shape.quantize!r}"
        )
    form: Any = shape.quantize
    return with_form(cfg, form, {"dtype": "bfloat16"}, key="--draft-quantize")


def _plain_draft(dimensions: Dimensions, method: str, shape: HeadShape) -> LayeredConfig:
    """Return draft_config without a form of its weights."""
    target = dimensions.target
    if method == METHOD:
        if dimensions.small is None:
            named = [name for name, each in PLAIN.items() if each.small is not None]
            raise ConfigError(
                f"--method {METHOD}: expected a model with a smaller one, among "
                f"{', '.join(named)}, got {target.model_type} without"
            )
        return drafts_for(dimensions.small, target)
    if method == "mtp":
        if target.model_type not in LAYOUTS:
            raise ConfigError(
                f"--method mtp: expected a model of {', '.join(LAYOUTS)}, "
                f"got one of {target.model_type}"
            )
        return MtpConfig(target, zero_first_embedding=False)
    if isinstance(target.attention, MLAConfig):
        raise ConfigError(
            f"--method {method}: expected mtp with latent attention, "
            "whose heads are no Llama layer's"
        )
    heads = target.attention
    attention = AttentionConfig(
        heads.num_heads, heads.num_kv_heads, heads.head_dim, rope=heads.rope
    )
    if method in BLOCKS:
        return _block_config(target, attention, method, shape)
    if method == "eagle":
        return EagleConfig(
            hidden_size=target.hidden_size,
            intermediate_size=target.intermediate_size,
            num_layers=1,
            attention=attention,
            rms_norm_eps=target.rms_norm_eps,
            vocab_size=target.vocab_size,
            fc_bias=False,
            own_embedding=False,
            tied_lm_head=target.tie_word_embeddings,
        )
    return Eagle3Config(
        target_hidden_size=target.hidden_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=1,
        attention=attention,
        rms_norm_eps=target.rms_norm_eps,
        vocab_size=target.vocab_size,
        draft_vocab_size=shape.draft_vocab_size or dimensions.draft_vocab_size,
        aux_layers=dimensions.aux_layers,
    )


def _block_config(
    target: Any, attention: AttentionConfig, method: str, shape: HeadShape
) -> DFlashConfig:
    """Return a block draft whose aux_layers are spread over the target evenly."""
    num_layers = shape.num_layers or BLOCK_LAYERS
    vocab = shape.draft_vocab_size or target.vocab_size
    last = max(target.num_layers - 3, 1)
    spread = {1 + i * (last - 1) // (BLOCK_AUX_LAYERS - 1) for i in range(BLOCK_AUX_LAYERS)}
    common: dict[str, Any] = dict(
        target_hidden_size=target.hidden_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        attention=replace(attention, qk_norm=True),
        rms_norm_eps=target.rms_norm_eps,
        vocab_size=target.vocab_size,
        draft_vocab_size=vocab,
        aux_layers=tuple(sorted(spread)),
        draft_block_size=BLOCK_ROWS,
        mask_token_id=MASK_TOKEN,
        sample_from_anchor=shape.drafts_from_anchor(method),
        windows=(None,) * num_layers,
        causal=(False,) * num_layers,
        own_lm_head=vocab != target.vocab_size,
        tied_lm_head=vocab == target.vocab_size and target.tie_word_embeddings,
    )
    if method == "dflash":
        return DFlashConfig(**common)
    return DSparkConfig(
        **common, markov_rank=MARKOV_RANK, has_confidence=True, confidence_reads_token=True
    )
