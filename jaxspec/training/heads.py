"""A head before training: its shape, and its first weights, fresh or from another head."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import models
from jaxspec.config import AttentionConfig, ConfigError, SpeculativeConfig
from jaxspec.config.settings import setting
from jaxspec.drafts import Eagle3Config, EagleConfig
from jaxspec.drafts.dflash import DFlashConfig
from jaxspec.drafts.dspark import DSparkConfig, MarkovKind
from jaxspec.drafts.families import BLOCKS
from jaxspec.layers.params import Params, ParamSpec, Weight, init_random, is_spec
from jaxspec.loading.model import load_draft
from jaxspec.training.chat_target import ChatTarget
from jaxspec.training.config import TrainableDraft
from jaxspec.training.target import head_columns
from jaxspec.training.trained import trained_specs
from jaxspec.training.vocabulary import choose_vocabulary


@dataclass(frozen=True)
class HeadConfig:
    """Settings of a head; the rest of its shape is its target's.

    method: "eagle3", "dflash", "dspark", or "eagle", which has the target's whole vocabulary
    intermediate_size, aux_layers: see eagle3_config and block_config
    block_drafts, num_layers, num_kv_heads, markov_*, confidence, mask_token_id: see block_config
    window: positions that the draft sees; None for all
    init:   folder of a head to continue from
    seed:   of the first weights
    """

    method: str = "eagle3"
    draft_vocab_size: int = setting(12_000, "Tokens that the draft may propose.")
    intermediate_size: int | None = setting(
        None, "Width of the draft's MLP. [default: the target's]"
    )
    aux_layers: tuple[int, ...] | None = setting(
        None,
        "Boundary ids of the target's layers, with commas between them. "
        "[default: 2, n // 2, n - 3]",
    )
    norm_before_residual: bool = setting(True, "Start the residual from the normed hidden state.")
    fc_norm: bool = setting(True, "Norm each hidden state before fc.")
    norm_output: bool = setting(True, "Feed the normed output back.")
    block_drafts: int = setting(7, "DFlash, DSpark: tokens that a block drafts.")
    num_layers: int = setting(2, "DFlash, DSpark: layers of the draft.")
    num_kv_heads: int | None = setting(
        None, "DFlash, DSpark: KV heads of a layer. [default: the target's]"
    )
    window: int | None = setting(None, "Tokens of context that the draft sees. [default: all]")
    markov_rank: int = setting(64, "DSpark: width of the Markov head.")
    markov_kind: MarkovKind = setting("vanilla", "DSpark: vanilla, gated or rnn.")
    confidence: bool = setting(True, "DSpark: train a confidence head.")
    mask_token_id: int | None = setting(
        None, "DFlash, DSpark: the token of rows to draft. [default: an unused special token]"
    )
    init: Path | None = setting(
        None,
        "Continue from this head. The vocabulary may differ, the MLP be wider; a block head may "
        "have more layers and aux layers, a larger Markov rank (vanilla alone), and a gated Markov "
        "head of the same rank instead of a vanilla one.",
    )
    seed: int = 0


def new_head(
    cfg: HeadConfig, target: ChatTarget, counts: np.ndarray
) -> tuple[TrainableDraft, Params, np.ndarray]:
    """Return (config, first weights, target ids of its vocabulary) of a head to train.

    counts [vocab]: how often each token occurs in the answers.
    """
    if cfg.window is not None and cfg.window < 1:
        raise ConfigError(f"window: expected at least 1 token, got {cfg.window}")
    if cfg.method == "eagle":
        draft = eagle_config(
            target.cfg, intermediate_size=cfg.intermediate_size, sliding_window=cfg.window
        )
        ids = np.arange(target.cfg.vocab_size)
    else:
        always = {
            *target.chat.stop_token_ids,
            *target.chat.special_token_ids,
            *target.chat.before_answer,
        }
        ids = choose_vocabulary(counts, cfg.draft_vocab_size, always)
        if cfg.method in BLOCKS:
            draft = block_config(cfg, target, counts)
        else:
            draft = eagle3_config(
                target.cfg,
                draft_vocab_size=cfg.draft_vocab_size,
                intermediate_size=cfg.intermediate_size,
                aux_layers=cfg.aux_layers,
                norm_before_residual=cfg.norm_before_residual,
                fc_norm=cfg.fc_norm,
                norm_output=cfg.norm_output,
                sliding_window=cfg.window,
            )
    params = initial_params(draft, target.cfg, target.params, ids, cfg.seed)
    if cfg.init:
        old_cfg, old = load_head(cfg.init, cfg.method, target, jnp.float32)
        old_ids = np.asarray(old.get("draft_to_target", ids))
        params = continued_params(draft, params, ids, old_cfg, old, old_ids)
    return draft, params, ids


def load_head(
    folder: Path, method: str, target: ChatTarget, dtype: Any
) -> tuple[TrainableDraft, Params]:
    """A saved head of this target."""
    speculative = SpeculativeConfig(model=str(folder), method=method)
    cfg, params = load_draft(folder, target.cfg, target.params, speculative, dtype)
    if not isinstance(cfg, EagleConfig | Eagle3Config | DFlashConfig):
        raise ConfigError(
            f"{folder}: expected an EAGLE-1, EAGLE-3, DFlash or DSpark head, got {cfg.method!r}"
        )
    return cfg, params


def eagle3_config(
    target: models.TargetConfig,
    *,
    draft_vocab_size: int,
    intermediate_size: int | None = None,
    aux_layers: tuple[int, ...] | None = None,
    norm_before_residual: bool = True,
    fc_norm: bool = True,
    norm_output: bool = True,
    sliding_window: int | None = None,
) -> Eagle3Config:
    """One layer of the target's width; by default its MLP and the aux layers (2, n // 2, n - 3)."""
    n = target.num_layers
    return Eagle3Config(
        target_hidden_size=target.hidden_size,
        hidden_size=target.hidden_size,
        intermediate_size=intermediate_size or target.intermediate_size,
        num_layers=1,
        attention=_head_attention(target),
        rms_norm_eps=target.rms_norm_eps,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        aux_layers=aux_layers or (2, n // 2, n - 3),
        norm_before_residual=norm_before_residual,
        fc_norm=fc_norm,
        norm_output=norm_output,
        sliding_window=sliding_window,
    )


def block_config(cfg: HeadConfig, target: ChatTarget, counts: np.ndarray) -> DFlashConfig:
    """Return a DFlash or DSpark head of a few layers of the target's width.

    Its MLP and KV heads are the target's by default, the aux layers (2, n // 2, n - 3). Queries and
    keys are normed, as in every published head. With a vocabulary of its own it has a head of its
    own.
    """
    if cfg.block_drafts < 1 or cfg.num_layers < 1 or cfg.markov_rank < 0:
        raise ConfigError(
            "training: expected block_drafts and num_layers from 1 and markov_rank from 0, "
            f"got {cfg.block_drafts}, {cfg.num_layers} and {cfg.markov_rank}"
        )
    is_dspark, shape = cfg.method == "dspark", target.cfg
    attention = _head_attention(shape)
    kv_heads = attention.num_kv_heads if cfg.num_kv_heads is None else cfg.num_kv_heads
    if kv_heads < 1 or attention.num_heads % kv_heads:
        raise ConfigError(
            f"num_kv_heads: expected a divisor of the target's {attention.num_heads} heads, "
            f"got {kv_heads}"
        )
    n, vocab = shape.num_layers, shape.vocab_size
    shared = DFlashConfig(
        target_hidden_size=shape.hidden_size,
        hidden_size=shape.hidden_size,
        intermediate_size=cfg.intermediate_size or shape.intermediate_size,
        attention=dataclasses.replace(attention, num_kv_heads=kv_heads, qk_norm=True),
        rms_norm_eps=shape.rms_norm_eps,
        vocab_size=vocab,
        draft_vocab_size=cfg.draft_vocab_size,
        aux_layers=cfg.aux_layers or (2, n // 2, n - 3),
        draft_block_size=cfg.block_drafts + (0 if is_dspark else 1),
        mask_token_id=_mask_token(cfg, target, counts),
        sample_from_anchor=is_dspark,
        windows=(cfg.window,) * cfg.num_layers,
        causal=(False,) * cfg.num_layers,
        own_lm_head=cfg.draft_vocab_size != vocab,
        tied_lm_head=cfg.draft_vocab_size == vocab and shape.tie_word_embeddings,
    )
    if not is_dspark:
        return shared
    fields = {f.name: getattr(shared, f.name) for f in dataclasses.fields(shared)}
    return DSparkConfig(
        **fields
        | {
            "method": "dspark",
            "markov_rank": cfg.markov_rank,
            "markov_kind": cfg.markov_kind if cfg.markov_rank else "vanilla",
            "has_confidence": cfg.confidence,
            "confidence_reads_token": cfg.confidence and cfg.markov_rank > 0,
        }
    )


def _mask_token(cfg: HeadConfig, target: ChatTarget, counts: np.ndarray) -> int:
    """Return the token of a block's rows that are to be drafted.

    The first special token that the chat template does not use, or else the token that answers use
    least.
    """
    vocab = target.cfg.vocab_size
    if cfg.mask_token_id is not None:
        if not 0 <= cfg.mask_token_id < vocab:
            raise ConfigError(
                f"mask_token_id: expected an id below {vocab}, got {cfg.mask_token_id}"
            )
        return cfg.mask_token_id
    chat = target.chat
    between = chat.before_next_user or ()
    used = {*chat.before_user, *chat.before_answer, *between, *chat.stop_token_ids}
    unused = sorted(set(chat.special_token_ids) - used)
    return int(unused[0]) if unused else int(np.argmin(counts))


def _head_attention(target: models.TargetConfig) -> AttentionConfig:
    """Return attention of the target's shape, with no more tensors than a head's files have."""
    if not isinstance(target.attention, AttentionConfig):
        raise ConfigError(
            f"target: expected full attention, got model_type {target.model_type!r}, "
            "for which no head is trained here"
        )
    return dataclasses.replace(
        target.attention,
        qk_norm=False,
        qkv_bias=False,
        o_bias=False,
        rms_norm_eps=target.rms_norm_eps,
        sinks=False,
        rope_interleave=False,
    )


def eagle_config(
    target: models.TargetConfig,
    *,
    intermediate_size: int | None = None,
    sliding_window: int | None = None,
) -> EagleConfig:
    """One layer of the target's width, without fc's bias: what vLLM reads."""
    return EagleConfig(
        hidden_size=target.hidden_size,
        intermediate_size=intermediate_size or target.intermediate_size,
        num_layers=1,
        attention=_head_attention(target),
        rms_norm_eps=target.rms_norm_eps,
        vocab_size=target.vocab_size,
        fc_bias=False,
        own_embedding=False,
        tied_lm_head=target.tie_word_embeddings,
        sliding_window=sliding_window,
    )


def initial_params(
    cfg: TrainableDraft,
    target_cfg: models.TargetConfig,
    target: Params,
    draft_ids: np.ndarray,
    seed: int,
) -> Params:
    """Return random matrices and norms of one.

    A final norm and lm_head start as the target's own, for the draft's tokens. W2 and the
    confidence head start at zero: the first drafts are DFlash's.
    """
    specs = trained_specs(cfg)
    params = init_random(specs, jax.random.key(seed), jnp.float32)

    def with_norms(spec: ParamSpec, x: jax.Array) -> jax.Array:
        return jnp.ones_like(x) if x.ndim == 1 and not spec.name.endswith("bias") else x

    params = jax.tree.map(with_norms, specs, params, is_leaf=is_spec)
    if "norm" in specs:
        params["norm"] = target["norm"].astype(jnp.float32)
    if "lm_head" in specs:
        columns = head_columns(target, target_cfg, jnp.asarray(draft_ids))
        params["lm_head"] = Weight(columns.astype(jnp.float32))
    for name in ("markov_w2", "confidence"):
        if name in specs:
            params[name] = Weight(jnp.zeros_like(params[name].values))
    if cfg.method == "eagle":
        # Embeddings are often far smaller than normed hidden states (17 times in SmolLM2), so the
        # two halves of fc start with equal outputs.
        def rms(x: jax.Array) -> jax.Array:
            return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))

        halves = jnp.concatenate(
            [jnp.full(cfg.hidden_size, rms(target[name])) for name in ("embed_tokens", "norm")]
        )
        params["fc"] = Weight(params["fc"].values / halves[:, None])
    return params


def continued_params(
    cfg: TrainableDraft,
    fresh: Params,
    draft_ids: np.ndarray,
    old_cfg: TrainableDraft,
    old: Params,
    old_ids: np.ndarray,
) -> Params:
    """Return fresh weights (initial_params) overwritten by those of a trained head.

    The new head computes what the old one did, where it is larger too:

    another vocabulary:   tokens that the old one lacks keep their fresh column
    a wider MLP:          new columns of gate and up are fresh, their rows of down are zero
    more layers:          the last ones add zero to the residual stream
    more aux layers:      their rows of fc are zero
    a larger Markov rank: new columns of W1 are fresh, their rows of W2 and confidence zero
    a gated Markov head for a vanilla one: all gates are a half, and W2 is twice the old one's
    """
    if isinstance(cfg, DSparkConfig) and isinstance(old_cfg, DSparkConfig):
        _check_at_least("markov_rank", old_cfg.markov_rank, cfg.markov_rank)
        if cfg.markov_kind != "vanilla" and cfg.markov_rank != old_cfg.markov_rank:
            raise ConfigError(
                f"markov_rank: expected the {old_cfg.markov_rank} of the head to continue from in "
                f"a {cfg.markov_kind} Markov head, got {cfg.markov_rank}"
            )
    params = dict(fresh)
    gains_gate = (
        isinstance(cfg, DSparkConfig)
        and cfg.markov_kind == "gated"
        and "markov_w1" in old
        and "markov_proj" not in old
    )
    for name in fresh:
        if gains_gate and name in ("markov_proj", "markov_bias"):
            params[name] = jax.tree.map(jnp.zeros_like, fresh[name])
        elif name not in old:
            raise ConfigError(f"{name}: expected it in the head to continue from, got none")
        elif name == "layers":
            params[name] = _continued_layers(fresh[name], old[name])
        elif name in ("lm_head", "markov_w2"):
            had = old[name].values
            if name == "markov_w2":
                had = _with_zero_rows(had, fresh[name].values)
                had = 2.0 * had if gains_gate else had
            column = np.full(cfg.vocab_size, -1)
            column[old_ids] = np.arange(len(old_ids))
            kept = column[draft_ids]
            had = had[:, np.maximum(kept, 0)]
            params[name] = Weight(jnp.where(jnp.asarray(kept >= 0), had, fresh[name].values))
        elif name == "markov_w1":
            params[name] = fresh[name].at[:, : old[name].shape[1]].set(old[name])
        elif name == "confidence":
            params[name] = Weight(_with_zero_rows(old[name].values, fresh[name].values))
        elif name == "fc" and isinstance(old_cfg, DFlashConfig):
            params[name] = Weight(_continued_fc(cfg.aux_layers, old_cfg, old[name].values))
        else:
            _same_shapes(name, fresh[name], old[name])
            params[name] = old[name]
    return params


def _check_at_least(key: str, had: int, new: int) -> None:
    if had > new:
        raise ConfigError(
            f"{key}: expected at least the {had} of the head to continue from, got {new}"
        )


def _with_zero_rows(had: jax.Array, new: jax.Array) -> jax.Array:
    return jnp.zeros_like(new[:, : had.shape[1]]).at[: len(had)].set(had)


def _continued_fc(aux_layers: Sequence[int], old_cfg: DFlashConfig, had: jax.Array) -> jax.Array:
    """Return fc with the old rows of each aux layer that the old head reads, zeros for others."""
    if missing := sorted(set(old_cfg.aux_layers) - set(aux_layers)):
        raise ConfigError(
            f"aux_layers: expected {', '.join(map(str, old_cfg.aux_layers))} of the head to "
            f"continue from among them, got none of {', '.join(map(str, missing))}"
        )
    rows = jnp.split(had, len(old_cfg.aux_layers))
    of_layer = dict(zip(old_cfg.aux_layers, rows, strict=True))
    return jnp.concatenate([of_layer.get(i, jnp.zeros_like(rows[0])) for i in aux_layers])


def _continued_layers(new: Sequence[Params], had: Sequence[Params]) -> list[Params]:
    _check_at_least("num_layers", len(had), len(new))

    def silent(layer: Params) -> Params:
        attention = layer["self_attn"]
        zero = partial(jax.tree.map, jnp.zeros_like)
        attention = {**attention, "o_proj": zero(attention["o_proj"])}
        return {**layer, "self_attn": attention, "down_proj": zero(layer["down_proj"])}

    kept = [_continued_layer(*layers) for layers in zip(new, had, strict=False)]
    return kept + [silent(layer) for layer in new[len(had) :]]


def _continued_layer(new: Params, had: Params) -> Params:
    names = ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (had[name].values for name in names)
    new_gate, new_up, new_down = (new[name].values for name in names)
    width, new_width = down.shape[0], new_down.shape[0]
    _check_at_least("intermediate_size", width, new_width)
    mlp = {
        "gate_proj": Weight(new_gate.at[:, :width].set(gate)),
        "up_proj": Weight(new_up.at[:, :width].set(up)),
        "down_proj": Weight(jnp.zeros_like(new_down).at[:width].set(down)),
    }
    rest = {name: had[name] for name in new if name not in mlp}
    _same_shapes("layers", {name: new[name] for name in rest}, rest)
    return {**rest, **mlp}


def _same_shapes(name: str, new: Params, old: Params) -> None:
    shapes = [jax.tree.map(jnp.shape, tree) for tree in (new, old)]
    if shapes[0] != shapes[1]:
        raise ConfigError(
            f"{name}: expected the head to continue from to have the shapes {shapes[0]}, "
            f"got {shapes[1]}"
        )
