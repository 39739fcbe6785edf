"""The dimensions of the models that are benchmarked, and of the EAGLE heads on them; weights are random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxspec.config import AttentionConfig, RopeConfig
from jaxspec.drafts import DraftConfig, Eagle3Config, EagleConfig
from jaxspec.models import TargetConfig

POSITIONS = 131072  # every benchmarked context fits; how long a model was trained for changes no timing


@dataclass(frozen=True)
class Dimensions:
    """A target, and what its EAGLE-3 head does not take from it."""

    target: TargetConfig
    draft_vocab_size: int
    aux_layers: tuple[int, ...]


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
    **switches: Any,
) -> Dimensions:
    """heads: query heads, key/value heads, head_dim; switches: qk_norm, qkv_bias."""
    attention = AttentionConfig(*heads, rope=RopeConfig(theta), **switches)
    target = TargetConfig(model_type, vocab_size, hidden_size, intermediate_size, num_layers, attention, 1e-5, POSITIONS, tied)
    return Dimensions(target, draft_vocab_size, aux_layers or (2, num_layers // 2, num_layers - 3))


MODELS: dict[str, Dimensions] = {
    "llama-3-8b": _dimensions("llama", 32, 4096, 14336, (32, 8, 128), 128256, 32000, theta=5e5),
    "smollm2-135m": _dimensions("llama", 30, 576, 1536, (9, 3, 64), 49152, 16000, theta=1e5, tied=True),
    "qwen3-8b": _dimensions("qwen3", 36, 4096, 12288, (32, 8, 128), 151936, 32000, theta=1e6, qk_norm=True),
    "mimo-7b": _dimensions("qwen2", 36, 4096, 11008, (32, 8, 128), 151680, 32000, theta=6.4e5, qkv_bias=True),
    # For trying the scripts out: seconds on a CPU.
    "tiny": _dimensions("llama", 2, 32, 48, (4, 2, 8), 96, 64, theta=1e4, aux_layers=(0, 1, 2)),
}


def draft_config(dimensions: Dimensions, method: str) -> DraftConfig:
    """One Llama layer of the target's width and head counts; EAGLE-3's attention reads 2D and its head has its own vocabulary."""
    target = dimensions.target
    heads = target.attention
    attention = AttentionConfig(heads.num_heads, heads.num_kv_heads, heads.head_dim, rope=heads.rope)
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
        draft_vocab_size=dimensions.draft_vocab_size,
        aux_layers=dimensions.aux_layers,
    )
