"""Tiny random models, and a plain loop over prefill and rounds that needs no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import drafts, models
from jaxspec.cache.metadata import BlockTables
from jaxspec.config import REFERENCE_OPS, AttentionConfig, RoundConfig
from jaxspec.decode import programs
from jaxspec.decode import state as decode_state
from jaxspec.decode.state import DecodeState
from jaxspec.drafts import DFlashConfig, DSparkConfig, Eagle3Config, EagleConfig
from jaxspec.drafts.drafter import PromptChunk
from jaxspec.layers.params import Weight, init_random
from jaxspec.loading.binding import bind_draft
from jaxspec.models import TargetConfig
from jaxspec.models.llama import LlamaConfig
from jaxspec.sampling.processors.truncation import TruncationState
from jaxspec.sampling.state import SamplingState

VOCAB, HIDDEN, LAYERS = 48, 32, 2
ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
METHODS = ("eagle", "eagle3")  # a token a pass
BLOCK_METHODS = ("dflash", "dspark")
MASK = VOCAB - 1  # of blocks; prompts hold it too


@dataclass(frozen=True)
class Model:
    """A target with a draft that fits it, and the weights of both as the round takes them."""

    target: TargetConfig
    draft: Any
    params: Any

    def round_config(
        self, K: int, *, block_size: int = 4, max_model_len: int = 64, **changes: Any
    ) -> RoundConfig:
        """Rounds with this draft; K = 0 is plain decoding."""
        cfg = RoundConfig.for_models(
            self.target,
            self.draft if K else None,
            ops=REFERENCE_OPS,
            block_size=block_size,
            max_model_len=max_model_len,
            num_speculative_tokens=K,
        )
        return replace(cfg, **changes)


@cache
def tiny_model(
    method: str,
    *,
    seed: int = 0,
    window: int | None = None,
    mapped: bool | None = None,
    dtype: Any = jnp.float32,
) -> Model:
    """Random weights that agree about nothing. EAGLE-3 has a draft vocabulary of its own unless
    mapped is False."""
    target = LlamaConfig("llama", VOCAB, HIDDEN, 48, LAYERS, ATTENTION, 1e-5, 4096, False)
    mapped = method == "eagle3" if mapped is None else mapped
    keys = jax.random.split(jax.random.key(seed), 2)
    target_params = init_random(models.family(target).param_specs(target), keys[0], dtype)
    draft = _draft_config(method, window, VOCAB * 3 // 4 if mapped else VOCAB)
    own = init_random(drafts.family(draft).param_specs(draft), keys[1], dtype)
    ids = (
        np.sort(np.random.default_rng(seed).permutation(VOCAB)[: draft.draft_vocab_size])
        if mapped
        else None
    )
    return Model(
        target,
        draft,
        {"target": target_params, "draft": bind_draft(draft, own, target_params, ids)},
    )


def block_config(
    method: str, *, window: int | None = None, draft_vocab: int = VOCAB, **changes: Any
) -> Any:
    """Two layers of a block draft, the second with a window if one is given; blocks of up to 16
    drafts."""
    windows, anchored = (None, window), method == "dspark"
    values: dict[str, Any] = dict(
        target_hidden_size=HIDDEN,
        hidden_size=HIDDEN,
        intermediate_size=48,
        attention=replace(ATTENTION, qk_norm=True, rms_norm_eps=1e-5),
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
        draft_vocab_size=draft_vocab,
        aux_layers=(0, 1, 2),
        draft_block_size=16 if anchored else 17,
        mask_token_id=MASK,
        sample_from_anchor=anchored,
        windows=windows,
        causal=tuple(w is not None for w in windows),
        own_lm_head=draft_vocab != VOCAB,
    )
    if method == "dflash":
        return DFlashConfig(**{**values, **changes})
    heads = dict(markov_rank=8, has_confidence=True, confidence_reads_token=True)
    return DSparkConfig(**{**values, **heads, **changes})


def _draft_config(method: str, window: int | None, draft_vocab: int) -> Any:
    if method in BLOCK_METHODS:
        return block_config(method, window=window, draft_vocab=draft_vocab)
    if method == "eagle":
        return EagleConfig(
            HIDDEN, 48, 1, ATTENTION, 1e-5, VOCAB, False, False, False, sliding_window=window
        )
    return Eagle3Config(
        HIDDEN, HIDDEN, 48, 1, ATTENTION, 1e-5, VOCAB, draft_vocab, (0, 1, 2), sliding_window=window
    )


@cache
def agreeing_model(method: str, *, seed: int = 0, disturbance: float = 0.2) -> Model:
    """A draft that mostly agrees with its target by construction: both are nearly a function of the
    last token alone.

    The target's layers add little to the embedding (`disturbance`), so its argmax is mostly that of
    lm_head(embedding). EAGLE-1's fc passes the embedding through, with a little of the hidden
    state; EAGLE-3's attention, with a window of one token, copies it into a residual stream that
    starts near 0.
    """
    model = tiny_model(method, seed=seed, mapped=False, window=1 if method == "eagle3" else None)
    target, draft = dict(model.params["target"]), dict(model.params["draft"])
    target["embed_tokens"] = 5 * target["embed_tokens"]
    target["norm"] = jnp.ones_like(target["norm"])
    target["layers"] = [_quieten(layer, disturbance) for layer in target["layers"]]
    eye = jnp.eye(HIDDEN, dtype=jnp.float32)
    layer = _quieten(draft["layers"][0], 0.1)
    if method == "eagle":
        draft["fc"] = Weight(jnp.concatenate([eye, 0.05 * draft["fc"].values[HIDDEN:]]))
        draft["layers"] = [layer]
        cfg = model.draft
    else:
        cfg = replace(
            model.draft, attention=AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=8)
        )
        keys = jax.random.normal(jax.random.key(seed + 1), (2 * HIDDEN, HIDDEN), jnp.float32)
        passed = jnp.concatenate([eye, jnp.zeros_like(eye)])
        qkv = jnp.concatenate([keys, keys, passed], axis=1)
        layer["self_attn"] = {"qkv_proj": Weight(qkv), "o_proj": Weight(eye)}
        layer["input_layernorm"] = jnp.ones_like(layer["input_layernorm"])
        draft |= {
            "layers": [layer],
            "fc": Weight(0.03 * draft["fc"].values),
            "norm": jnp.ones_like(draft["norm"]),
            "lm_head": target["lm_head"],
        }
    draft |= {"embed_tokens": target["embed_tokens"], "lm_head": target["lm_head"]}
    return replace(model, draft=cfg, params={"target": target, "draft": draft})


@cache
def agreeing_block_model(method: str, *, seed: int = 0, **changes: Any) -> Model:
    """agreeing_model's target, with a block draft that mostly agrees with it.

    DSpark's Markov head is the target's own map from a token to the next; the rest of its logits is
    small. DFlash's one layer attends evenly to the block and to one token of context, whose values
    are zero as the mask's embedding is: every row reads the anchor's embedding alone, so the first
    draft agrees.
    """
    target = agreeing_model("eagle", seed=seed)
    theirs = target.params["target"]
    if method == "dspark":
        draft = block_config(method, markov_rank=HIDDEN, **changes)
    else:
        attention = AttentionConfig(4, 4, 8, qk_norm=True, rms_norm_eps=1e-5)
        draft = block_config(
            method, attention=attention, windows=(1,), causal=(True,), own_embedding=True, **changes
        )
    own = init_random(drafts.family(draft).param_specs(draft), jax.random.key(seed), jnp.float32)
    embedding = theirs["embed_tokens"]
    if method == "dspark":
        scale = jnp.sqrt((embedding**2).mean(axis=1, keepdims=True) + 1e-5)
        own |= {"norm": 0.01 * own["norm"], "markov_w1": embedding / scale}
        own["markov_w2"] = theirs["lm_head"]
    else:
        eye, layer = jnp.eye(HIDDEN, dtype=jnp.float32), _quieten(own["layers"][0], 0.1)
        nothing = jnp.zeros((HIDDEN, HIDDEN), jnp.float32)
        layer["self_attn"] |= {
            "qkv_proj": Weight(jnp.concatenate([nothing, nothing, eye], axis=1)),
            "o_proj": Weight(9 * eye),
        }
        layer["input_layernorm"] = jnp.ones_like(layer["input_layernorm"])
        own |= {
            "layers": [layer],
            "context_kv": Weight(jnp.zeros_like(own["context_kv"].values)),
            "norm": jnp.ones_like(own["norm"]),
            "embed_tokens": embedding.at[MASK].set(0),
        }
    return replace(
        target,
        draft=draft,
        params={"target": theirs, "draft": bind_draft(draft, own, theirs, None)},
    )


def _quieten(layer: Any, scale: float) -> Any:
    """The layer with less to add to the residual stream."""
    o_proj, down_proj = (
        Weight(scale * weight.values)
        for weight in (layer["self_attn"]["o_proj"], layer["down_proj"])
    )
    attention = layer["self_attn"] | {"o_proj": o_proj}
    return layer | {"self_attn": attention, "down_proj": down_proj}


def sampling_state(
    seeds: Sequence[int],
    temperature: float | Sequence[float] = 0.0,
    top_k: Sequence[int] | None = None,
    top_p: Sequence[float] | None = None,
) -> SamplingState:
    """One row per seed, as NumPy arrays; with truncation where top_k and top_p are given."""
    batch = len(seeds)
    keys = np.stack([np.zeros(batch), np.asarray(seeds)], axis=1).astype(np.uint32)
    temperatures = np.broadcast_to(np.float32(temperature), batch).copy()
    processors = {}
    if top_k is not None and top_p is not None:
        processors["truncation"] = TruncationState(
            np.asarray(top_k, np.int32),  # type: ignore[arg-type]
            np.asarray(top_p, np.float32),  # type: ignore[arg-type]
        )
    return SamplingState(keys, temperatures, processors)  # type: ignore[arg-type]


def block_tables(
    batch: int, cfg: RoundConfig, *, shuffle_seed: int | None = None, guard: int = 0
) -> tuple[tuple[np.ndarray, ...], tuple[int, ...]]:
    """Return a block table int32 [batch, pages] and a number of blocks for each of
    cfg.cache_groups.

    All groups have the same table, each in a pool of its own. A seed shuffles the blocks. `guard`
    blocks of each pool belong to no request.
    """
    pages = -(-cfg.max_model_len // cfg.block_size)
    blocks = np.arange(batch * pages, dtype=np.int32)
    if shuffle_seed is not None:
        blocks = (
            np.random.default_rng(shuffle_seed)
            .permutation(batch * pages + guard)
            .astype(np.int32)[: batch * pages]
        )
    groups = len(cfg.cache_groups)
    return (blocks.reshape(batch, pages),) * groups, (batch * pages + guard,) * groups


def random_prompts(lengths: Sequence[int], seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]


def pad_chunk(prompts: Sequence[Sequence[int]], begin: int, chunk: int) -> PromptChunk:
    """The chunk of one prefill call, from position `begin` of each prompt."""
    tokens = np.zeros((len(prompts), chunk), np.int32)
    parts = [list(p[begin : begin + chunk]) for p in prompts]
    for row, part in enumerate(parts):
        tokens[row, : len(part)] = part
    following = [p[begin + chunk] if begin + chunk < len(p) else -1 for p in prompts]
    start = np.full(len(prompts), begin, np.int32)
    num_tokens = np.array([len(p) for p in parts], np.int32)
    arrays: Any = (tokens, start, num_tokens, np.array(following, np.int32))
    return PromptChunk(*arrays)


@dataclass
class Run:
    """token_ids: what each request generated, at most max_tokens; accepted: per round, the accepted
    drafts of each live request."""

    token_ids: list[list[int]]
    accepted: list[list[int]]
    state: DecodeState

    @property
    def mean_acceptance_length(self) -> float:
        counts = [n for rows in self.accepted for n in rows]
        return 1 + sum(counts) / len(counts)


def start(
    cfg: RoundConfig,
    params: Any,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingState,
    tables: BlockTables | tuple[np.ndarray, ...],
    num_blocks: tuple[int, ...],
    *,
    max_tokens: int | Sequence[int] = 64,
    stop_token_ids: np.ndarray | None = None,
    chunk: int | None = None,
    compilation: str = "round",
) -> tuple[np.ndarray, DecodeState]:
    """Prefill; returns the first token of each request (-1: an empty prompt, a padding row) and the
    state.

    stop_token_ids: int32 [batch, stops], padded with -1; None: no request stops before max_tokens.
    """
    batch = len(prompts)
    limits = jnp.asarray(np.broadcast_to(np.asarray(max_tokens, np.int32), batch))
    sampling = jax.tree.map(jnp.asarray, sampling)
    stops = np.full((batch, 1), -1, np.int32) if stop_token_ids is None else stop_token_ids
    state = decode_state.init_state(
        cfg,
        sampling,
        limits,
        jnp.asarray(stops),
        num_blocks,
        dtype=jnp.float32,
        cache_dtype=jnp.float32,
    )
    longest = max(len(p) for p in prompts)
    first = np.full(batch, -1, np.int32)
    for begin in range(0, longest, chunk or longest):
        part = pad_chunk(prompts, begin, chunk or longest)
        verification, state = programs.run_prefill(
            cfg, params, state, tables, part, compilation=compilation
        )
        ended = np.asarray(verification.num_sampled) > 0
        first = np.where(ended, np.asarray(verification.output_tokens)[:, 0], first)
    return first, state


def generate(
    cfg: RoundConfig,
    params: Any,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingState,
    *,
    max_tokens: int | Sequence[int] = 16,
    stop_token_ids: np.ndarray | None = None,
    chunk: int | None = None,
    compilation: str = "round",
    shuffle_seed: int | None = None,
) -> Run:
    """Prompts to token ids, by prefill and rounds. An empty prompt is a padding row. A text goes on
    to the end of its last round."""
    tables, num_blocks = block_tables(len(prompts), cfg, shuffle_seed=shuffle_seed)
    first, state = start(
        cfg,
        params,
        prompts,
        sampling,
        tables,
        num_blocks,
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        chunk=chunk,
        compilation=compilation,
    )
    texts = [[int(t)] if t >= 0 else [] for t in first]
    accepted = []
    while np.asarray(state.active).any():
        verification, state = programs.run_round(cfg, params, state, tables, compilation)
        tokens, num_sampled = (
            np.asarray(verification.output_tokens),
            np.asarray(verification.num_sampled),
        )
        for row, text in enumerate(texts):
            text += tokens[row, : num_sampled[row]].tolist()
        accepted.append([int(n) - 1 for n in num_sampled if n])
    limits = np.broadcast_to(np.asarray(max_tokens), len(prompts))
    return Run([text[:limit] for text, limit in zip(texts, limits, strict=True)], accepted, state)
