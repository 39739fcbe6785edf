"""Frozen, hashable configuration and all of its validation.

reading      keys of a checkpoint's config.json; ConfigError
settings     setting: a field with a line of help
keys         unknown keys of settings, and vLLM's keys that have no setting here
quantization/  forms of quantised checkpoints, and their quantization_config
attention    attention's dimensions, groups of layers that share a block table
models       TargetConfig, DraftConfig: the members that every family's config has
rope         rotary embedding: its settings and frequencies
cache_dtype  KVCacheDtype: the names of the dtypes of cached keys and values
draft_methods  the methods of drafting: names, options and their checks
speculative  SpeculativeConfig: what drafts, and how drafts are verified
engine       EngineConfig: how the engine runs
ops          Ops: the implementation of each op, and what follows from it
round        RoundConfig, SamplingFeatures: the static description of a compiled round
"""

from jaxspec.config.attention import (
    AttentionConfig,
    AttentionKind,
    CacheGroup,
    CompressedAttentionConfig,
    MLAConfig,
    TokenHistoryConfig,
)
from jaxspec.config.cache_dtype import KVCacheDtype
from jaxspec.config.engine import Compilation, EngineConfig
from jaxspec.config.models import DraftConfig, TargetConfig
from jaxspec.config.ops import REFERENCE_OPS, Ops
from jaxspec.config.reading import (
    ConfigError,
    as_python,
    is_int,
    is_number,
    is_one_of,
    is_positive_int,
    items_of,
    printable,
    read_bool,
    read_int,
    read_number,
    read_object,
    refuse_unless,
    settle_integers,
    shown,
)
from jaxspec.config.rope import RopeConfig, rope_frequencies
from jaxspec.config.round import RoundConfig, SamplingFeatures
from jaxspec.config.speculative import (
    DraftSampling,
    RejectionRule,
    SpeculativeConfig,
    check_options,
    check_verify_tokens,
)

__all__ = [
    "REFERENCE_OPS",
    "AttentionConfig",
    "AttentionKind",
    "CacheGroup",
    "Compilation",
    "CompressedAttentionConfig",
    "ConfigError",
    "DraftConfig",
    "DraftSampling",
    "EngineConfig",
    "KVCacheDtype",
    "MLAConfig",
    "Ops",
    "RejectionRule",
    "RopeConfig",
    "RoundConfig",
    "SamplingFeatures",
    "SpeculativeConfig",
    "TargetConfig",
    "TokenHistoryConfig",
    "as_python",
    "check_options",
    "check_verify_tokens",
    "is_int",
    "is_number",
    "is_one_of",
    "is_positive_int",
    "items_of",
    "printable",
    "read_bool",
    "read_int",
    "read_number",
    "read_object",
    "refuse_unless",
    "rope_frequencies",
    "settle_integers",
    "shown",
]
