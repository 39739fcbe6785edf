"""Toy families whose logits are known in closed form; registered for a test by the `toy_families`
fixture (tests/conftest.py).

`toy` (target): the logits that follow token t are row t of a table, so text is a Markov chain and
every probability is exact. `toy` (draft): the same with the draft's own table. `replay` (draft):
one-hot on a given text, by position. Neither has a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.config import REFERENCE_OPS, AttentionConfig, CacheGroup, Ops, RoundConfig
from jaxspec.drafts import DraftOutput
from jaxspec.layers.context import Pass
from jaxspec.models import TargetOutput

ATTENTION = AttentionConfig(1, 1, 2)  # of no layer
PEAK = 40.0  # the logit of a one-hot row: the rest has no mass in float32


@dataclass(frozen=True)
class ToyTarget:
    vocab_size: int
    model_type: str = "toy"
    hidden_size: int = 1
    num_layers: int = 0
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 1 << 20
    attention: AttentionConfig = ATTENTION
    group_of_layer: tuple[int, ...] = ()

    def cache_groups(self, block_size: int, max_model_len: int) -> tuple[CacheGroup, ...]:
        return (CacheGroup(block_size, max_model_len),)


@dataclass(frozen=True)
class ToyDraft:
    vocab_size: int
    method: str = "toy"
    num_layers: int = 0
    attention: AttentionConfig = ATTENTION
    group_of_layer: tuple[int, ...] = ()
    aux_layers: tuple[int, ...] = ()
    sliding_window: int | None = None
    own_vocab_size: int | None = None  # a vocabulary of the draft's own, smaller than the target's

    def cache_groups(self, block_size: int, max_model_len: int) -> tuple[CacheGroup, ...]:
        return (CacheGroup(block_size, max_model_len),)

    @property
    def maps_vocabulary(self) -> bool:
        return self.own_vocab_size is not None

    @property
    def draft_vocab_size(self) -> int:
        return self.own_vocab_size or self.vocab_size


def _tokens_as_hidden(tokens: jax.Array) -> jax.Array:
    return tokens[..., None].astype(jnp.float32)  # exact below 2 ** 24


def _row_of_table(params: Any, _cfg: Any, hidden: jax.Array, _ops: Ops) -> jax.Array:
    return params["table"][hidden[..., 0].astype(jnp.int32)]


def _target_forward(
    _params: Any, _cfg: ToyTarget, tokens: jax.Array, _pass: Pass, caches: Any, **_: Any
) -> TargetOutput:
    return TargetOutput(_tokens_as_hidden(tokens), None, caches)


def _draft_forward(
    _params: Any,
    _cfg: ToyDraft,
    tokens: jax.Array,
    hidden: jax.Array,
    _pass: Pass,
    caches: Any,
) -> DraftOutput:
    return DraftOutput(_tokens_as_hidden(tokens), hidden, caches)


def _replay_forward(
    params: Any,
    _cfg: ToyDraft,
    tokens: jax.Array,
    hidden: jax.Array,
    pass_: Pass,
    caches: Any,
) -> DraftOutput:
    # The row at position p reads token p+1 and predicts the token at p+2.
    text = params["text"]
    position = jnp.minimum(pass_.positions + 2, text.shape[1] - 1)
    return DraftOutput(
        _tokens_as_hidden(jnp.take_along_axis(text, position, axis=1)), hidden, caches
    )


def _one_hot(_params: Any, cfg: ToyDraft, head_input: jax.Array, _ops: Ops) -> jax.Array:
    return PEAK * jax.nn.one_hot(
        head_input[..., 0].astype(jnp.int32), cfg.vocab_size, dtype=jnp.float32
    )


def _keep_hidden(_cfg: Any, hidden: jax.Array, _aux: Any) -> jax.Array:
    return hidden


def _fuse(_params: Any, _cfg: Any, hidden: jax.Array, _ops: Ops) -> jax.Array:
    return hidden[..., :1]


TARGET_FAMILIES = {"toy": SimpleNamespace(forward=_target_forward, logits=_row_of_table)}
DRAFT_FAMILIES = {
    "toy": SimpleNamespace(
        forward=_draft_forward, logits=_row_of_table, fuse=_fuse, target_hidden=_keep_hidden
    ),
    "replay": SimpleNamespace(
        forward=_replay_forward, logits=_one_hot, fuse=_fuse, target_hidden=_keep_hidden
    ),
}


def toy_config(
    vocab_size: int,
    K: int,
    rule: str = "probabilistic",
    draft_sampling: str = "probabilistic",
    **changes: Any,
) -> RoundConfig:
    """Rounds of the toy target and the toy draft; caches do not exist, so one huge block is all of
    a block table."""
    group = CacheGroup(block_size=1 << 20, max_model_len=1 << 20)
    values: dict[str, Any] = {
        "target": ToyTarget(vocab_size),
        "target_groups": (group,),
        "ops": REFERENCE_OPS,
        "draft": ToyDraft(vocab_size),
        "draft_groups": (group,),
        "num_speculative_tokens": K,
        "rule": rule,
        "draft_sampling": draft_sampling,
    }
    return RoundConfig(**(values | changes))
