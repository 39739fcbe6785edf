"""Inputs of rejection_sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.noise import Stream
from pallas_kernels.types import STATIC
from pallas_kernels.vocab_shards import WHOLE, VocabShards

Rule = Literal["probabilistic", "block", "synthetic"]
RULES = get_args(Rule)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Logits, drafts and noise of a batch (B requests, K drafts each; K may be 0).

    V and Vd are the target's and the draft's vocabulary. Where rows are cut over devices
    (`shards`), the logits and the noise of a row are the own piece of it, V / n and Vd / n. All
    else is whole and the same on every device. So are the results.

    target_logits:    float32 [B, K+1, V]; truncated tokens are -inf. Row i verifies draft i
    draft_tokens:     int32 [B, K], ids in the target's vocabulary; -1 is a placeholder
    draft_logits:     float32 [B, K, Vd] from which the drafts were sampled; None: the drafts are
                      one-hot (drafted greedily)
    target_to_draft:  int32 [V], the draft's id of each target token, -1 where it has none; None
                      when Vd == V and ids are equal. Never cut
    greedy:           bool [B], temperature 0
    active:           bool [B]; a padding row gets 0 tokens
    uniforms:         float32 [B, K] in [0, 1), one for each draft, or the Stream whose uniforms(K)
                      they are; None if not `sampled`, except by the synthetic rule
    recover_noise:    float32 [B, V], standard Gumbel for the one token drawn after the accepted
                      drafts, or the Stream whose gumbel(V) it is; None if not `sampled`. Of
                      Streams, the kernels make what they need in registers
    acceptance_rates: float32 [K], rate of each draft given that those before it were accepted; of
                      the synthetic rule, else None
    temperature:      float32 [B], divides both logits here, except for greedy rows; None: they
                      are divided already
    rule:             see rejection_sample
    sampled:          False when every row is greedy: nothing is exponentiated
    shards:           how the rows are cut over devices
    """

    target_logits: jax.Array
    draft_tokens: jax.Array
    draft_logits: jax.Array | None = None
    target_to_draft: jax.Array | None = None
    greedy: jax.Array
    active: jax.Array
    uniforms: jax.Array | Stream | None = None
    recover_noise: jax.Array | Stream | None = None
    acceptance_rates: jax.Array | None = None
    temperature: jax.Array | None = None
    rule: Rule = field(metadata=STATIC)
    sampled: bool = field(default=True, metadata=STATIC)
    shards: VocabShards = WHOLE

    def check(self) -> None:
        """Raise ValueError for shapes, dtypes or arguments that do not fit together."""
        rule, synthetic = self.rule, self.rule == "synthetic"
        if rule not in RULES:
            raise ValueError(f"rule: expected one of {', '.join(RULES)}, got {rule!r}")
        shape = tuple(self.target_logits.shape)
        if len(shape) != 3 or shape[1] < 1:
            raise ValueError(f"target_logits: expected 3 axes [B, K+1, V], got shape {shape}")
        batch, rows, vocab = shape
        drafts, width = rows - 1, vocab
        if self.draft_logits is not None and self.target_to_draft is not None:
            width = self.draft_logits.shape[-1]
        _check("target_logits", self.target_logits, jnp.float32, shape)
        _check("draft_tokens", self.draft_tokens, jnp.int32, (batch, drafts))
        _check("greedy", self.greedy, jnp.bool_, (batch,))
        _check("active", self.active, jnp.bool_, (batch,))
        _check("temperature", self.temperature, jnp.float32, (batch,), needed=False)
        _check("draft_logits", self.draft_logits, jnp.float32, (batch, drafts, width), needed=False)
        total = self.shards.total(vocab)
        _check("target_to_draft", self.target_to_draft, jnp.int32, (total,), needed=False)
        _check_noise("uniforms", self.uniforms, (batch, drafts), needed=self.sampled or synthetic)
        _check_noise("recover_noise", self.recover_noise, (batch, vocab), needed=self.sampled)
        if self.acceptance_rates is not None and not synthetic:
            raise ValueError(
                f"acceptance_rates: expected None with rule {rule!r} (only 'synthetic' uses it), "
                "got an array"
            )
        _check("acceptance_rates", self.acceptance_rates, jnp.float32, (drafts,), needed=synthetic)


def _check_noise(
    name: str, value: jax.Array | Stream | None, shape: tuple[int, ...], needed: bool
) -> None:
    """Check numbers of this shape, or the stream of them."""
    if isinstance(value, Stream):
        _check(f"{name}.keys", value.keys, jnp.uint32, (shape[0], 2))
        _check(f"{name}.position", value.position, jnp.int32, shape[:1])
    else:
        _check(name, value, jnp.float32, shape, needed)


def _check(
    name: str,
    value: jax.Array | None,
    dtype: DTypeLike,
    shape: tuple[int, ...],
    needed: bool = True,
) -> None:
    expected = f"{jnp.dtype(dtype).name} {list(shape)}"
    if value is None:
        if needed:
            raise ValueError(f"{name}: expected {expected}, got None")
    elif value.dtype != dtype or tuple(value.shape) != shape:
        raise ValueError(f"{name}: expected {expected}, got {value.dtype} {list(value.shape)}")
