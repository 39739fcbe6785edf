"""jaxspec: EAGLE-type speculative decoding for causal language models, in JAX."""

from jaxspec.config import ConfigError, EngineConfig, SamplingParams, SpeculativeConfig
from jaxspec.engine import LLM, RequestOutput

__all__ = ["LLM", "ConfigError", "EngineConfig", "RequestOutput", "SamplingParams", "SpeculativeConfig"]
