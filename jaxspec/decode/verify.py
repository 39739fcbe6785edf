"""Verify: one target pass over [next_token, draft_tokens], then rejection sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jaxspec import models
from jaxspec.cache.arrays import KVCache
from jaxspec.cache.metadata import BlockTables, build_metadata
from jaxspec.config import RoundConfig
from jaxspec.decode.row_budget import Share
from jaxspec.drafts import drafter
from jaxspec.drafts.drafter import Proposal
from jaxspec.layers.context import Pass
from jaxspec.layers.flat_rows import FlatRows
from jaxspec.layers.params import Params
from jaxspec.sampling.logits import adjust_logits, truncate_logits, truncates
from jaxspec.sampling.logprobs import Scores, score_tokens
from jaxspec.sampling.loop_rows import map_rows
from jaxspec.sampling.processors.processor import Window
from jaxspec.sampling.state import SamplingState, draw, noise_stream
from pallas_kernels.rejection_sampling import Inputs, rejection_sample
from pallas_kernels.rejection_sampling.reference import count_leading

MAX_LOGITS_BYTES = 1 << 30  # float32 logits of a batch that are in memory at a time


@struct.dataclass
class Verification:
    """The result of a round.

    output_tokens:   int32 [batch, K+1], -1 after the sampled tokens and only there
    num_sampled:     int32 [batch], accepted drafts plus the recovered or bonus token; 0 for an idle
                     request
    logprobs:        of output_tokens; None where no request reads them
    prompt_logprobs: of the token after each row of a prefill's chunk; None where no request reads
                     them
    num_proposed:    int32 [batch], drafts of the round, placeholders not counted; None unless
                     their number adapts (RoundConfig.adaptive) or the drafter may stop
    is_lookup:       bool [batch], whether the drafts were looked up; None without
                     RoundConfig.fallback
    overflowed:      bool [batch], whether the target's own logits hold NaN or infinity in the row
                     that a prefill samples from; None for a round
    """

    output_tokens: jax.Array
    num_sampled: jax.Array
    logprobs: Scores | None = None
    prompt_logprobs: Scores | None = None
    num_proposed: jax.Array | None = None
    is_lookup: jax.Array | None = None
    overflowed: jax.Array | None = None


def sample_rows(
    cfg: RoundConfig,
    target_logits: jax.Array,
    temperature: jax.Array,
    keys: jax.Array,
    seq_lens: jax.Array,
) -> jax.Array:
    """Sample the target's own token of every row: logits [batch, K+1, vocab] -> int32 [batch, K+1].

    Plain decoding and the strict rule need no more. The strict rule's noise is keyed by the token's
    position. Plain decoding under another rule draws the noise that this rule draws after its
    drafts.
    """
    batch, rows, vocab = target_logits.shape
    if cfg.rule == "strict":
        stream, position = "sample", seq_lens[:, None] + jnp.arange(1, rows + 1, dtype=jnp.int32)
    else:
        stream, position = "recover", seq_lens
    each = lambda x: jnp.repeat(x, rows, axis=0)  # noqa: E731
    tokens = draw(
        target_logits.reshape(-1, vocab),
        each(temperature),
        each(keys),
        stream,
        position.reshape(-1),
        0,
        shards=cfg.vocab_shards,
        implementation=cfg.ops.gumbel_sample,
    )
    return tokens.reshape(batch, rows)


def match_drafts(
    target_tokens: jax.Array, draft_tokens: jax.Array, active: jax.Array
) -> Verification:
    """Keep the drafts [batch, K] that equal the target's own tokens [batch, K+1].

    The target's next token follows them.
    """
    num_sampled = jnp.where(active, count_leading(target_tokens[:, :-1] == draft_tokens) + 1, 0)
    index = jnp.arange(target_tokens.shape[1], dtype=jnp.int32)
    return Verification(jnp.where(index < num_sampled[:, None], target_tokens, -1), num_sampled)


def process_window(
    cfg: RoundConfig,
    raw_logits: jax.Array,
    proposal: Proposal,
    sampling: SamplingState,
    seq_lens: jax.Array,
) -> jax.Array:
    """Apply all processors to the model's own float32 logits [batch, K+1, vocab]: the own piece.

    The op that reads the result divides it by temperature, in every program. So a request that
    does not truncate has the same bits beside one that does.
    """
    window = Window(seq_lens + 1, proposal.draft_tokens, cfg.vocab_shards)
    logits = adjust_logits(cfg, raw_logits, sampling, window)
    if not truncates(cfg):
        return logits
    kept = truncate_logits(cfg, logits, sampling, window) > -jnp.inf
    return jnp.where(kept, logits, -jnp.inf)


def judge_by_sampling(
    cfg: RoundConfig,
    logits: jax.Array,
    draft_tokens: jax.Array,
    sampling: SamplingState,
    seq_lens: jax.Array,
    active: jax.Array,
) -> Verification:
    """Sample the target's own tokens and keep the drafts that equal them.

    The strict rule and plain decoding are this.
    """
    target_tokens = sample_rows(cfg, logits, sampling.temperature, sampling.keys, seq_lens)
    return match_drafts(target_tokens, draft_tokens, active)


def judge_by_rule(
    cfg: RoundConfig,
    logits: jax.Array,
    proposal: Proposal,
    target_to_draft: jax.Array | None,
    sampling: SamplingState,
    seq_lens: jax.Array,
    active: jax.Array,
) -> Verification:
    """Accept drafts by the round's rejection rule; a batch of greedy requests compares argmaxes."""
    stream = partial(noise_stream, sampling.keys, position=seq_lens)
    synthetic = cfg.rule == "synthetic"
    inputs = Inputs(
        target_logits=logits,
        draft_tokens=proposal.draft_tokens,
        draft_logits=proposal.draft_logits,
        target_to_draft=target_to_draft if proposal.draft_logits is not None else None,
        greedy=sampling.greedy,
        uniforms=stream("accept") if cfg.sampled or synthetic else None,
        recover_noise=stream("recover") if cfg.sampled else None,
        acceptance_rates=jnp.asarray(cfg.acceptance_rates, jnp.float32) if synthetic else None,
        active=active,
        temperature=sampling.temperature,
        # Greedy requests follow one rule. The strict rule comes here with them alone, since
        # judge_by_sampling has it otherwise.
        rule="probabilistic" if cfg.rule == "strict" else cfg.rule,
        sampled=cfg.sampled,
        shards=cfg.vocab_shards,
    )
    output_tokens, num_sampled = rejection_sample(inputs, implementation=cfg.ops.rejection_sampling)
    return Verification(output_tokens, num_sampled)


def verify_rows(
    cfg: RoundConfig,
    raw_logits: jax.Array,
    proposal: Proposal,
    target_to_draft: jax.Array | None,
    sampling: SamplingState,
    seq_lens: jax.Array,
    active: jax.Array,
) -> Verification:
    """Verify a proposal against the model's own float32 logits [batch, K+1, vocab].

    Only active [batch] requests take part. Where rows are cut over devices (cfg.vocab_shards), the
    logits are the own piece, and the result is the same on all devices. The reference ops make 1
    exchange in a greedy round, and 2 in a sampled one. A rule that reads q makes 1 more if the
    draft has a smaller vocabulary; block verification of several drafts makes another.
    """
    logits = process_window(cfg, raw_logits, proposal, sampling, seq_lens)
    if cfg.sampled and (cfg.rule == "strict" or cfg.num_speculative_tokens == 0):
        verification = judge_by_sampling(
            cfg, logits, proposal.draft_tokens, sampling, seq_lens, active
        )
    else:
        verification = judge_by_rule(
            cfg, logits, proposal, target_to_draft, sampling, seq_lens, active
        )
    if cfg.acceptance_rates is not None and cfg.rule != "synthetic":
        verification = force_acceptance(
            cfg, proposal.draft_tokens, verification, sampling, seq_lens
        )
    if cfg.logprobs:
        verification = replace(
            verification,
            logprobs=score_tokens(
                raw_logits,
                verification.output_tokens,
                cfg.vocab_shards,
                everything=cfg.all_logprobs,
            ),
        )
    return verification


def force_acceptance(
    cfg: RoundConfig,
    draft_tokens: jax.Array,
    verification: Verification,
    sampling: SamplingState,
    seq_lens: jax.Array,
) -> Verification:
    """Replace the count of accepted drafts by one at the conditional rates [K], for benchmarks.

    The rule has done all its work, and its last token (recovered, bonus or argmax) stays the last
    one here. That token depends on everything the rule reads and draws, so the compiler cannot drop
    any of it. The count comes from one hashed number per request. A random stream would add its
    kernels to the timing.
    """
    bits = (seq_lens.astype(jnp.uint32) * jnp.uint32(0x9E3779B9)) ^ sampling.keys[:, 1]
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # murmur3's finalizer
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    uniform = ((bits ^ (bits >> 16)) >> 8).astype(jnp.float32) * 2.0**-24
    rates = jnp.asarray(np.cumprod(cfg.acceptance_rates or ()), jnp.float32)
    num_accepted = (uniform[:, None] < rates).sum(axis=1, dtype=jnp.int32)
    may_stop = cfg.draft is not None and drafter(cfg.draft).may_stop(cfg)
    if cfg.limits_drafts or may_stop:  # they come last
        num_accepted = jnp.minimum(num_accepted, (draft_tokens >= 0).sum(axis=1, dtype=jnp.int32))
    active = verification.num_sampled > 0
    last = jnp.take_along_axis(
        verification.output_tokens, jnp.maximum(verification.num_sampled - 1, 0)[:, None], axis=1
    )
    index = jnp.arange(draft_tokens.shape[1] + 1, dtype=jnp.int32)
    drafts = jnp.pad(draft_tokens, ((0, 0), (0, 1)), constant_values=-1)
    tokens = jnp.where(
        index < num_accepted[:, None], drafts, jnp.where(index == num_accepted[:, None], last, -1)
    )
    return Verification(
        jnp.where(active[:, None], tokens, -1), jnp.where(active, num_accepted + 1, 0)
    )


def verify(
    cfg: RoundConfig,
    params: Params,
    next_token: jax.Array,
    proposal: Proposal,
    seq_lens: jax.Array,
    active: jax.Array,
    block_tables: BlockTables,
    caches: KVCache,
    sampling: SamplingState,
    target_to_draft: jax.Array | None = None,
    share: Share | None = None,
) -> tuple[Verification, models.TargetOutput]:
    """Run the target once over [next_token, draft_tokens] and judge the drafts.

    The rows are at positions seq_lens .. seq_lens + K. With K = 0 this is a step of plain decoding.

    next_token: int32 [batch]
    seq_lens:   int32 [batch]
    active:     bool [batch], the requests that take part
    share:      the rows of a flat pass, of requests whose drafts are their first ones; None where
                each request has K+1 rows
    """
    rows = cfg.num_speculative_tokens + 1
    # -1 placeholders are always rejected, so any id in range will do to embed them.
    tokens = jnp.concatenate([next_token[:, None], jnp.maximum(proposal.draft_tokens, 0)], axis=1)
    metadata = build_metadata(
        cfg.target_groups,
        block_tables,
        seq_lens,
        jnp.where(active, rows, 0) if share is None else share.num_rows,
        rows,
        attention=cfg.target.attention,
        ops=cfg.ops,
    )
    family, pass_ = models.family(cfg.target), Pass(metadata, cfg.ops)
    if share is not None:
        tokens, pass_ = share.flat.flatten(tokens), pass_.flattened(share.flat)
    out = family.forward(
        params,
        cfg.target,
        tokens,
        pass_,
        caches,
        aux_layers=cfg.draft.aux_layers if cfg.draft else (),
    )

    def logits_of(hidden: jax.Array) -> jax.Array:
        return family.logits(params, cfg.target, hidden, cfg.ops)

    def judged(
        logits: jax.Array,
        proposal: Proposal,
        sampling: SamplingState,
        seq_lens: jax.Array,
        active: jax.Array,
    ) -> Verification:
        return verify_rows(cfg, logits, proposal, target_to_draft, sampling, seq_lens, active)

    size, requests = piece_size(cfg, active.shape[0]), (proposal, sampling, seq_lens, active)
    if share is not None:
        flat_hidden, out = out.hidden, by_request(share.flat, out)
        if size == active.shape[0]:  # the head has the flat rows alone
            return judged(share.flat.by_request(logits_of(flat_hidden)), *requests), out
    return in_pieces(lambda x, *rest: judged(logits_of(x), *rest), size, out.hidden, *requests), out


def by_request(flat: FlatRows, out: models.TargetOutput) -> models.TargetOutput:
    """Return the output of a flat pass with the rows [batch, K+1] of each request."""
    aux = None if out.aux is None else flat.by_request(out.aux)
    return models.TargetOutput(flat.by_request(out.hidden), aux, out.caches)


def piece_size(cfg: RoundConfig, batch: int) -> int:
    """Return the number of requests that are judged at a time.

    It gives the fewest pieces of one size with at most MAX_LOGITS_BYTES of logits each.
    """
    vocab = cfg.vocab_shards.piece(cfg.target.vocab_size)  # the tokens of a device
    most = max(1, MAX_LOGITS_BYTES // (4 * (cfg.num_speculative_tokens + 1) * vocab))
    return -(-batch // -(-batch // most))


def in_pieces(judged: Callable[..., Verification], size: int, *rows: Any) -> Verification:
    """Run judged(*rows) for `size` requests at a time.

    rows are pytrees of arrays [batch, ...]; the results of a request depend on its own rows alone.
    If size does not divide the batch, the last piece starts earlier. It judges some requests a
    second time, with the same result.
    """
    batch = jax.tree.leaves(rows)[0].shape[0]
    if size == batch:
        return judged(*rows)
    starts = np.minimum(np.arange(0, batch, size), batch - size).astype(np.int32)
    pieces = map_rows(
        lambda start: judged(
            *jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), rows)
        ),
        jnp.asarray(starts),
    )
    again = len(starts) * size - batch
    return jax.tree.map(
        lambda x: jnp.concatenate([x[:-1].reshape(-1, *x.shape[2:]), x[-1, again:]]), pieces
    )
