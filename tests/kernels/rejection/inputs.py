"""Inputs of all rejection rules as NumPy arrays, and the rules that tests call.

The strict rule is the engine's own: the target's tokens, then `match_drafts`. The others are the
op's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decode.verify import match_drafts
from jaxspec.sampling.state import scale_by_temperature
from pallas_kernels import rejection_sampling

ALL_RULES = ("strict", *rejection_sampling.RULES)
compiled = jax.jit(rejection_sampling.rejection_sample, static_argnames="implementation")


@jax.jit
def strict(
    target_logits: jax.Array,
    draft_tokens: jax.Array,
    greedy: jax.Array,
    sample_noise: jax.Array,
    active: jax.Array,
    temperature: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The strict rule with given noise [B, K+1, V]: what the engine does with tokens that it draws
    itself."""
    if temperature is not None:
        target_logits = scale_by_temperature(target_logits, jnp.where(greedy, 0.0, temperature))
    scores = jnp.where(greedy[:, None, None], target_logits, target_logits + sample_noise)
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    tokens = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    verification = match_drafts(tokens, draft_tokens, active)
    return verification.output_tokens, verification.num_sampled


@dataclass(frozen=True)
class Inputs:
    """The op's arrays and the strict rule's noise; every noise is present and `judge` passes on
    what a rule takes."""

    target_logits: np.ndarray
    draft_tokens: np.ndarray
    draft_logits: np.ndarray | None
    target_to_draft: np.ndarray | None
    greedy: np.ndarray
    uniforms: np.ndarray
    recover_noise: np.ndarray
    sample_noise: np.ndarray
    acceptance_rates: np.ndarray
    active: np.ndarray

    def rows(self, index: slice | list[int]) -> Inputs:
        """The requests at `index` alone."""
        shared = ("target_to_draft", "acceptance_rates")
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(
            self, **{k: v[index] for k, v in values.items() if v is not None and k not in shared}
        )


def make(
    target_logits: np.ndarray, draft_tokens: np.ndarray, seed: int = 0, **changes: Any
) -> Inputs:
    """One-hot drafts, sampled rows, all active, fresh noise, rates of 0.5, unless changed."""
    batch, rows, vocab = target_logits.shape
    rng = np.random.default_rng(seed)
    inputs = Inputs(
        target_logits=np.asarray(target_logits, np.float32),
        draft_tokens=np.asarray(draft_tokens, np.int32),
        draft_logits=None,
        target_to_draft=None,
        greedy=np.zeros(batch, bool),
        uniforms=rng.random((batch, rows - 1), np.float32),
        recover_noise=rng.gumbel(size=(batch, vocab)).astype(np.float32),
        sample_noise=rng.gumbel(size=(batch, rows, vocab)).astype(np.float32),
        acceptance_rates=np.full(rows - 1, 0.5, np.float32),
        active=np.ones(batch, bool),
    )
    return replace(inputs, **changes)


def judge(
    inputs: Inputs,
    rule: str,
    implementation: str = "reference",
    sampled: bool = True,
    temperature: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    arguments: dict[str, Any] = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    noise = arguments.pop("sample_noise")
    if rule == "strict":
        taken = inputs.target_logits, inputs.draft_tokens, inputs.greedy, noise, inputs.active
        tokens, num_sampled = strict(*taken, temperature)
        return np.asarray(tokens), np.asarray(num_sampled)
    if rule != "synthetic":
        arguments["acceptance_rates"] = None
    op_inputs = rejection_sampling.Inputs(
        **arguments, temperature=temperature, rule=rule, sampled=sampled
    )
    tokens, num_sampled = compiled(op_inputs, implementation=implementation)
    return np.asarray(tokens), np.asarray(num_sampled)


def emitted(tokens: np.ndarray, num_sampled: np.ndarray) -> list[list[int]]:
    """The tokens of each request as a list; the padding after them is checked."""
    for row, count in zip(tokens, num_sampled, strict=True):
        assert (row[count:] == -1).all() and (row[:count] >= 0).all(), (row, count)
    return [row[:count].tolist() for row, count in zip(tokens, num_sampled, strict=True)]
