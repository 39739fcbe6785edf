"""jaxspec: EAGLE-type speculative decoding for causal language models, in JAX."""

from jaxspec.config import ConfigError, EngineConfig, SpeculativeConfig
from jaxspec.engine.outputs import (
    CompletionOutput,
    EngineError,
    Increment,
    Interrupted,
    RequestOutput,
)
from jaxspec.llm import LLM
from jaxspec.sampling.params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "EngineError",
    "Increment",
    "Interrupted",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "__version__",
]
