"""A target for a dry run: tiny, random, with hashes for words.

Every stage of training runs with it in seconds on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import models
from jaxspec.config import AttentionConfig, RopeConfig
from jaxspec.layers.params import init_random
from jaxspec.training.chat_target import ChatFormat, ChatTarget

CHAT = ChatFormat(
    before_user=(1, 4, 5),
    before_answer=(2, 6, 7),
    stop_token_ids=(2,),
    special_token_ids=(0, 1, 2),
    before_next_user=(1, 4, 5),
)
NUM_RESERVED = 8  # ids below are the template's
EVALUATION_PROMPTS = tuple(f"prompt number {i} of a dry run" for i in range(3))


@dataclass(frozen=True)
class HashedWords:
    """Each word is a token, by its hash; of a text only the first words count."""

    vocab_size: int

    def encode_chat(self, prompt: str) -> np.ndarray:
        return np.asarray(
            [*CHAT.before_user, *self._ids(prompt, most=12), *CHAT.before_answer], np.int32
        )

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._ids(text, most=3), np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        return " ".join(map(str, tokens))

    def _ids(self, text: str, most: int) -> list[int]:
        hashes = [sum(i * ord(c) for i, c in enumerate(word, 1)) for word in text.split()[:most]]
        return [NUM_RESERVED + h % (self.vocab_size - NUM_RESERVED) for h in hashes]


def dry_target(dtype: Any) -> ChatTarget:
    """Three layers of random weights, a vocabulary of 128."""
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, rope=RopeConfig())
    cfg = models.llama.LlamaConfig("llama", 128, 32, 48, 3, attention, 1e-5, 2048, True)
    params = init_random(models.family(cfg).param_specs(cfg), jax.random.key(0), jnp.dtype(dtype))
    return ChatTarget(
        "dry-run", cfg, params, CHAT, HashedWords(cfg.vocab_size), ("LlamaForCausalLM",)
    )
