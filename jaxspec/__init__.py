"""jaxspec: EAGLE-type speculative decoding for causal language models, in JAX."""

from jaxspec.config import ConfigError, EngineConfig, SpeculativeConfig
from jaxspec.engine import LLM, RequestOutput
from jaxspec.sampling_params import SamplingParams

__all__ = ["LLM", "ConfigError", "EngineConfig", "RequestOutput", "SamplingParams", "SpeculativeConfig"]
