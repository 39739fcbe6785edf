"""Rejection sampling: judge K draft tokens per request against the target's logits, in one call.

The noise is an input, as numbers or as the stream that they are drawn from, so that two implementations can be compared exactly and
the caller owns the random streams. Draft, accept and recover noise must be independent of each other (Streams of the same keys and
positions: of different numbers): shared between draft and recovered token, the output is not the target's distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper
from pallas_kernels.noise import Stream
from pallas_kernels.rejection_sampling import reference

RULES = ("strict", "probabilistic", "block", "synthetic")


def unsupported(target_logits: Any, draft_logits: Any = None) -> str | None:
    """Why the Mosaic kernels cannot take these logits (ShapeDtypeStructs will do), None if they can."""
    if old := hopper.too_old():
        return old
    from pallas_kernels.rejection_sampling import mosaic_gpu

    return mosaic_gpu.unsupported(target_logits, draft_logits)


def _mosaic_gpu(
    target_logits: jax.Array,
    draft_tokens: jax.Array,
    draft_logits: jax.Array | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[jax.Array, jax.Array]:
    reason = unsupported(target_logits, draft_logits)
    if reason is not None:
        raise ValueError(f"rejection_sampling, implementation 'mosaic_gpu': {reason}")
    from pallas_kernels.rejection_sampling import mosaic_gpu

    return mosaic_gpu.rejection_sample(target_logits, draft_tokens, draft_logits, *args, **kwargs)


IMPLEMENTATIONS: dict[str, Callable[..., tuple[jax.Array, jax.Array]]] = {
    "reference": reference.rejection_sample,
    "mosaic_gpu": _mosaic_gpu,
}


def rejection_sample(
    target_logits: jax.Array,
    draft_tokens: jax.Array,
    draft_logits: jax.Array | None,
    target_to_draft: jax.Array | None,
    greedy: jax.Array,
    uniforms: jax.Array | Stream | None,
    recover_noise: jax.Array | Stream | None,
    sample_noise: jax.Array | None,
    acceptance_rates: jax.Array | None,
    active: jax.Array,
    temperature: jax.Array | None = None,
    *,
    rule: str,
    sampled: bool = True,
    implementation: str = "reference",
) -> tuple[jax.Array, jax.Array]:
    """Accepted drafts, then one recovered or bonus token, for every request.

    Rules, over p = softmax(target_logits) and q = softmax(draft_logits), both in float32:
      strict         the target samples its own token at each row; emit up to and including the first that differs from the draft.
      probabilistic  keep d while p(d) > u q(d), then draw from max(p - q, 0) (Leviathan 2211.17192, Chen 2302.01318).
      block          judge prefixes jointly; never shorter on average than probabilistic (Sun 2403.10444).
      synthetic      keep d with a given rate, whatever p and q are; for benchmarks only: the output is not the target's distribution.
    After K accepted drafts a bonus token follows from the plain target. A draft that q cannot have drawn (-1, an id out of range, q(d) = 0)
    ends verification: it is rejected and the plain target is sampled in its place. A greedy row keeps drafts that equal the target's
    argmax, then emits the argmax (under synthetic: keeps by rate, then emits the argmax). NaN logits count as -inf.

    Arguments (B requests, K drafts of each, V target and Vd draft vocabulary; K may be 0):
      target_logits     f32 [B, K+1, V]; truncated tokens are -inf. Row i judges draft i.
      draft_tokens      i32 [B, K] ids in the target's vocabulary; -1 is a placeholder.
      draft_logits      f32 [B, K, Vd] from which the drafts were sampled, or None: the drafts are one-hot (drafted greedily).
      target_to_draft   i32 [V] the draft's id of each target token, -1 where it has none; None when Vd == V and ids are equal.
      greedy            bool [B] temperature 0.
      uniforms          f32 [B, K] in [0, 1), one per draft, or the Stream whose uniforms(K) they are; not used by strict.
      recover_noise     f32 [B, V] standard Gumbel for the one token drawn after the accepted drafts, or the Stream whose gumbel(V) it is;
                        not used by strict. Of Streams the kernels make what they need in registers.
      sample_noise      f32 [B, K+1, V] standard Gumbel keyed by position; strict only (the engine uses gumbel_sample), else None.
      acceptance_rates  f32 [K] rate of each draft given that those before it were accepted; synthetic only, else None.
      active            bool [B]; a padding row gets 0 tokens.
      temperature       f32 [B] by which both logits are divided here, except for greedy rows; None: they have been divided already.
      rule              one of RULES.
      sampled           False when every row is greedy: the noise may be None (synthetic still needs uniforms), nothing is exponentiated.
      implementation    one of IMPLEMENTATIONS; never replaced silently.

    Returns output_tokens i32 [B, K+1], padded with -1, and num_sampled i32 [B] (accepted + 1; 0 where inactive). Rows are independent.
    Raises ValueError for shapes, dtypes or arguments that do not fit, with what was expected and what was given.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: expected one of {sorted(IMPLEMENTATIONS)}, got {implementation!r}: rejection sampling has no such kernel"
        )
    if rule not in RULES:
        raise ValueError(f"rule: expected one of {', '.join(RULES)}, got {rule!r}")
    if target_logits.ndim != 3 or target_logits.shape[1] < 1:
        raise ValueError(
            f"target_logits: expected 3 axes [B, K+1, V], got shape {tuple(target_logits.shape)}"
        )
    batch, rows, vocab = target_logits.shape
    drafts = rows - 1
    _check("target_logits", target_logits, jnp.float32, (batch, rows, vocab))
    _check("draft_tokens", draft_tokens, jnp.int32, (batch, drafts))
    _check("greedy", greedy, jnp.bool_, (batch,))
    _check("active", active, jnp.bool_, (batch,))
    _check("temperature", temperature, jnp.float32, (batch,), needed=False)
    if draft_logits is not None:
        width = (
            draft_logits.shape[-1] if target_to_draft is not None and draft_logits.ndim else vocab
        )
        _check("draft_logits", draft_logits, jnp.float32, (batch, drafts, width))
    if target_to_draft is not None:
        _check("target_to_draft", target_to_draft, jnp.int32, (vocab,))
    _check_noise(
        "uniforms",
        uniforms,
        (batch, drafts),
        needed=(sampled and rule != "strict") or rule == "synthetic",
    )
    _check_noise(
        "recover_noise", recover_noise, (batch, vocab), needed=sampled and rule != "strict"
    )
    for name, value, dtype, shape, owner in (
        ("sample_noise", sample_noise, jnp.float32, (batch, rows, vocab), "strict"),
        ("acceptance_rates", acceptance_rates, jnp.float32, (drafts,), "synthetic"),
    ):
        if rule != owner and value is not None:
            raise ValueError(
                f"{name}: expected None with rule {rule!r} (only {owner!r} uses it), got an array"
            )
        _check(
            name, value, dtype, shape, needed=rule == owner and (sampled or owner == "synthetic")
        )
    return IMPLEMENTATIONS[implementation](
        target_logits,
        draft_tokens,
        draft_logits,
        target_to_draft,
        greedy,
        uniforms,
        recover_noise,
        sample_noise,
        acceptance_rates,
        active,
        temperature,
        rule=rule,
        sampled=sampled,
    )


def _check_noise(
    name: str, value: jax.Array | Stream | None, shape: tuple[int, ...], needed: bool
) -> None:
    """Numbers, or the stream of them."""
    if isinstance(value, Stream):
        _check(f"{name}.keys", value.keys, jnp.uint32, (shape[0], 2))
        _check(f"{name}.position", value.position, jnp.int32, shape[:1])
    else:
        _check(name, value, jnp.float32, shape, needed)


def _check(
    name: str, value: jax.Array | None, dtype: type, shape: tuple[int, ...], needed: bool = True
) -> None:
    expected = f"{jnp.dtype(dtype).name} {list(shape)}"
    if value is None:
        if needed:
            raise ValueError(f"{name}: expected {expected}, got None")
    elif isinstance(value, Stream):
        raise ValueError(f"{name}: expected {expected}, got a Stream")
    elif value.dtype != dtype or tuple(value.shape) != shape:
        raise ValueError(f"{name}: expected {expected}, got {value.dtype} {list(value.shape)}")
