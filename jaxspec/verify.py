"""Verify: one target pass over [next_token, draft_tokens], then rejection sampling."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec import models
from jaxspec.config import RoundConfig
from jaxspec.kv_cache import KVCache
from jaxspec.metadata import build_metadata
from jaxspec.params import Params
from jaxspec.propose import Proposal
from jaxspec.sampling import SamplingState, gumbel_noise, process_target_logits, scale_by_temperature, uniform_noise
from pallas_kernels.rejection_sampling import rejection_sample


@struct.dataclass
class Verification:
    """What a round produced. output_tokens: int32 [batch, K+1], padded with -1; num_sampled: int32 [batch], accepted
    drafts plus the recovered or bonus token, 0 for an idle request."""

    output_tokens: jax.Array
    num_sampled: jax.Array


@struct.dataclass
class VerifyNoise:
    """The random numbers of one verification; a rule leaves what it does not read as None (shapes: rejection_sample)."""

    uniforms: jax.Array | None = None
    recover: jax.Array | None = None
    sample: jax.Array | None = None


def verify_noise(cfg: RoundConfig, sampling: SamplingState, seq_lens: jax.Array) -> VerifyNoise:
    """Draw a round's noise: strict by the position of each token, the other rules by the round's first seq_len [batch]."""
    K, vocab = cfg.num_speculative_tokens, cfg.target.vocab_size
    if cfg.rule == "strict":
        if not cfg.sampled:
            return VerifyNoise()
        rows = [gumbel_noise(sampling.keys, "sample", seq_lens + 1 + i, 0, vocab) for i in range(K + 1)]
        return VerifyNoise(sample=jnp.stack(rows, axis=1))
    uniforms = uniform_noise(sampling.keys, "accept", seq_lens, K) if cfg.sampled or cfg.rule == "synthetic" else None
    return VerifyNoise(uniforms, gumbel_noise(sampling.keys, "recover", seq_lens, 0, vocab) if cfg.sampled else None)


def judge(
    cfg: RoundConfig,
    target_logits: jax.Array,
    proposal: Proposal,
    target_to_draft: jax.Array | None,
    sampling: SamplingState,
    seq_lens: jax.Array,
    active: jax.Array,
) -> Verification:
    """Rejection sampling of a proposal against raw float32 target_logits [batch, K+1, vocab] for the active [batch] requests."""
    noise = verify_noise(cfg, sampling, seq_lens)
    draft_logits = None if proposal.draft_logits is None else scale_by_temperature(proposal.draft_logits, sampling.temperature)
    output_tokens, num_sampled = rejection_sample(
        process_target_logits(target_logits, sampling, truncated=cfg.truncated),
        proposal.draft_tokens,
        draft_logits,
        target_to_draft if draft_logits is not None else None,
        sampling.greedy,
        noise.uniforms,
        noise.recover,
        noise.sample,
        None if cfg.acceptance_rates is None else jnp.asarray(cfg.acceptance_rates, jnp.float32),
        active,
        rule=cfg.rule,
        sampled=cfg.sampled,
        implementation=cfg.rejection_implementation,
    )
    return Verification(output_tokens, num_sampled)


def verify(
    cfg: RoundConfig,
    params: Params,
    next_token: jax.Array,
    proposal: Proposal,
    seq_lens: jax.Array,
    active: jax.Array,
    block_table: jax.Array,
    caches: KVCache,
    sampling: SamplingState,
    target_to_draft: jax.Array | None = None,
) -> tuple[Verification, models.TargetOutput]:
    """One target pass over [next_token, draft_tokens] at positions seq_lens .. seq_lens + K, and what comes of it.

    next_token, seq_lens: int32 [batch]; active: bool [batch]. With K = 0 this is a step of plain decoding.
    """
    rows = cfg.num_speculative_tokens + 1
    # -1 placeholders are rejected whatever the target says, so any id in range will do to embed them.
    tokens = jnp.concatenate([next_token[:, None], jnp.maximum(proposal.draft_tokens, 0)], axis=1)
    metadata = build_metadata(cfg.target_group, block_table, seq_lens, jnp.where(active, rows, 0), rows)
    family = models.family(cfg.target)
    out = family.forward(
        params,
        cfg.target,
        tokens,
        metadata,
        caches,
        aux_layers=cfg.draft.aux_layers if cfg.draft else (),
        attention_implementation=cfg.attention_implementation,
    )
    logits = family.logits(params, cfg.target, out.hidden)
    return judge(cfg, logits, proposal, target_to_draft, sampling, seq_lens, active), out
