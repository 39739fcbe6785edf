"""DSpark (DeepSpec): DFlash with heads that draft a block's tokens from left to right.

The Markov head adds W2 W1[previous token] to a draft's logits. Its gated kind scales W1's row by a
gate of the hidden state, its rnn kind carries a state from draft to draft. The confidence head
predicts the chance that a draft is accepted, from the hidden state and W1's row of the token before
it (jaxspec.drafts.block has the use).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jaxspec.config import (
    ConfigError,
    Ops,
    SpeculativeConfig,
    read_bool,
    read_int,
)
from jaxspec.config.reading import shown
from jaxspec.drafts import dflash
from jaxspec.drafts.dflash import DFlashConfig
from jaxspec.drafts.family import Shapes
from jaxspec.drafts.head_layout import architectures, is_speculators, warn_of_guess, with_nested
from jaxspec.layers import markov
from jaxspec.layers.params import Params, ParamSpec, projection, vector
from jaxspec.layers.products import linear, vocab_logits
from jaxspec.models import TargetConfig

MarkovKind = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True)
class DSparkConfig(DFlashConfig):
    """Static shape of a DSpark head.

    markov_rank:            width of W1; 0 without a Markov head
    markov_kind:            how W1's row becomes W2's input
    confidence_reads_token: whether it reads W1's row of the previous token
    """

    markov_rank: int = 0
    markov_kind: MarkovKind = "vanilla"
    confidence_reads_token: bool = False
    method: str = "dspark"

    @property
    def corrects_logits(self) -> bool:
        """Whether a token's logits depend on the drafts before it."""
        return self.markov_rank > 0


def param_specs(cfg: DSparkConfig) -> Params:
    """Return DFlash's weights and those of the heads.

    Each device has the whole of W1, which a step reads one row of, and its own piece of W2.
    """
    specs, rank, hidden = dict(dflash.param_specs(cfg)), cfg.markov_rank, cfg.hidden_size
    if rank:
        w1 = "markov_head.markov_w1.weight"
        specs["markov_w1"] = ParamSpec(w1, (cfg.vocab_size, rank), (None, None))
        specs["markov_w2"] = projection(
            "markov_head.markov_w2.weight", rank, cfg.draft_vocab_size, (None, "vocab")
        )
    if rank and cfg.markov_kind != "vanilla":
        name, inner, outer = {
            "gated": ("gate_proj", hidden + rank, rank),
            "rnn": ("joint_proj", 2 * rank + hidden, 3 * rank),
        }[cfg.markov_kind]
        specs["markov_proj"] = projection(f"markov_head.{name}.weight", inner, outer, (None, None))
        specs["markov_bias"] = vector(f"markov_head.{name}.bias", outer)
    if cfg.has_confidence:
        inner = hidden + (rank if cfg.confidence_reads_token else 0)
        specs["confidence"] = projection("confidence_head.proj.weight", inner, 1, (None, None))
        specs["confidence_bias"] = vector("confidence_head.proj.bias", 1)
    return specs


def first_head_state(cfg: DSparkConfig, hidden: jax.Array) -> jax.Array | None:
    """Return the rnn kind's state before the block's first row, zeros [batch, rank]."""
    if cfg.markov_rank == 0 or cfg.markov_kind != "rnn":
        return None
    return jnp.zeros((hidden.shape[0], cfg.markov_rank), hidden.dtype)


def step_logits(
    params: Params,
    cfg: DSparkConfig,
    base: jax.Array,
    hidden: jax.Array,
    token: jax.Array,
    head_state: jax.Array | None,
    ops: Ops,
) -> tuple[jax.Array, jax.Array | None]:
    """Return base [batch, draft_vocab] plus the Markov term of the previous token [batch]."""
    if cfg.markov_rank == 0:
        return base, None
    features, head_state = markov_input(params, cfg, hidden, token, head_state)
    return base + vocab_logits(features, params["markov_w2"], ops), head_state


def markov_step(
    params: Params,
    cfg: DSparkConfig,
    base: jax.Array,
    step: jax.Array | int,
    token: jax.Array,
    ops: Ops,
) -> markov.MarkovStep | None:
    """Return a vanilla Markov head's step by kernels; see BlockFamily."""
    if cfg.markov_rank == 0 or cfg.markov_kind != "vanilla":
        return None
    return markov.markov_step(base, step, token, params["markov_w1"], params["markov_w2"], ops)


def markov_input(
    params: Params,
    cfg: DSparkConfig,
    hidden: jax.Array,
    token: jax.Array,
    head_state: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Return W2's input [..., rank] of a step (step_logits), and the next head_state.

    hidden: [..., D], token: int32 [...]; the rnn kind has one leading axis, [batch]
    """
    previous = params["markov_w1"][token].astype(hidden.dtype)
    if cfg.markov_kind == "gated":
        features = jnp.concatenate([hidden, previous], axis=-1)
        gate = jax.nn.sigmoid(linear(features, params["markov_proj"], params["markov_bias"]))
        previous = gate * previous
    elif cfg.markov_kind == "rnn":
        assert head_state is not None
        features = jnp.concatenate([head_state, previous, hidden], axis=-1)
        joint = linear(features, params["markov_proj"], params["markov_bias"])
        gate, candidate, output = jnp.split(joint, 3, axis=-1)
        gate = jax.nn.sigmoid(gate)
        head_state = gate * head_state + (1 - gate) * jnp.tanh(candidate)
        previous = jnp.tanh(output)
    return previous, head_state


def confidence(params: Params, cfg: DSparkConfig, hidden: jax.Array, token: jax.Array) -> jax.Array:
    """Return the chance float32 [batch] that a draft is accepted, from hidden [batch, D].

    token: int32 [batch], the one before the draft
    """
    return jax.nn.sigmoid(confidence_logit(params, cfg, hidden, token))


def confidence_logit(
    params: Params, cfg: DSparkConfig, hidden: jax.Array, token: jax.Array
) -> jax.Array:
    """Return the logit float32 [batch] of `confidence`."""
    features = hidden
    if cfg.confidence_reads_token:
        previous = params["markov_w1"][token].astype(hidden.dtype)
        features = jnp.concatenate([hidden, previous], axis=-1)
    logit = linear(features, params["confidence"], params["confidence_bias"])
    return logit[:, 0].astype(jnp.float32)


# The parts of DFlash.
canonical_name = dflash.canonical_name
forward = dflash.forward
fuse = dflash.fuse
ignored_tensor = dflash.ignored_tensor
logits = dflash.logits
target_hidden = dflash.target_hidden
write_context = dflash.write_context


def config_from_checkpoint(
    config: Mapping[str, Any], shapes: Shapes, target: TargetConfig, overrides: SpeculativeConfig
) -> DSparkConfig:
    """Read the config from config.json and the tensors' shapes (canonical names) of any layout."""
    fields = dflash.read_fields(config, shapes, target, overrides, "dspark")
    both = with_nested(config, "dflash_config")
    is_known = is_speculators(config) or "dspark" in architectures(config)
    if both.get("sample_from_anchor") is None and not is_known:
        warn_of_guess("sample_from_anchor", "true, as DeepSpec's heads have it", by_doctor=False)
    rank = read_int(both, "markov_rank", 0, least=0)
    if rank == 0 and "markov_head.markov_w1.weight" in shapes:
        raise ConfigError("markov_rank: expected W1's width in a head with markov_w1, got none")
    kind = both.get("markov_head_type", "vanilla") if rank else "vanilla"
    if kind not in get_args(MarkovKind):
        expected = ", ".join(get_args(MarkovKind))
        raise ConfigError(f"markov_head_type: expected one of {expected}, got {shown(kind)}")
    has_confidence = read_bool(both, "enable_confidence_head", is_speculators(config))
    reads_token = has_confidence and read_bool(both, "confidence_head_with_markov", True)
    if reads_token and rank == 0:
        raise ConfigError(
            "confidence_head_with_markov: expected false in a head without a Markov head, got true"
        )
    return DSparkConfig(
        **fields,
        has_confidence=has_confidence,
        sample_from_anchor=dflash.anchor_drafts(config, overrides, fields, default=True),
        markov_rank=rank,
        markov_kind=kind,
        confidence_reads_token=reads_token,
        confidence_threshold=overrides.draft_confidence_threshold or 0.0,
    )
