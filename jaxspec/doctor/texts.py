"""The target's own greedy texts, and its hidden states over them in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import EngineConfig, TargetConfig
from jaxspec.layers.params import Params
from jaxspec.llm import LLM
from jaxspec.sampling.params import SamplingParams
from jaxspec.training.target import target_states

ROWS = 64  # texts are padded to a multiple: one program serves most sets of prompts


@dataclass(frozen=True)
class Target:
    """A loaded target. stop_token_ids end a text."""

    cfg: TargetConfig
    params: Params
    stop_token_ids: tuple[int, ...]
    dtype: jnp.dtype | type | str


@dataclass(frozen=True)
class Texts:
    """Prompts with the target's greedy texts, side by side.

    tokens:  int32 [texts, rows], zeros behind the end
    prompts: int32 [texts], tokens of each prompt
    lengths: int32 [texts], tokens of each prompt and its text
    """

    tokens: np.ndarray
    prompts: np.ndarray
    lengths: np.ndarray

    def of(self, texts: slice) -> Texts:
        """Return some of the texts."""
        return Texts(self.tokens[texts], self.prompts[texts], self.lengths[texts])

    @property
    def ended(self) -> np.ndarray:
        """The texts that end with their first token, bool [texts]."""
        return self.lengths - self.prompts <= 1

    def drafted(self, num_steps: int) -> np.ndarray:
        """Return which rows draft num_steps tokens of the text, bool [texts, rows].

        Row p has seen position p and token p+1, and drafts the tokens p+2 and on. Rows where three
        tokens repeat an earlier place of the text are left out: a text that goes in circles is easy
        to draft whatever the head, and one format of prompts has more of it than another.
        """
        rows = np.arange(self.tokens.shape[1])
        drafted = (rows + 1 >= self.prompts[:, None]) & (
            rows + 1 + num_steps < self.lengths[:, None]
        )
        for text, (tokens, length) in enumerate(zip(self.tokens, self.lengths, strict=True)):
            seen: set[tuple[int, ...]] = set()
            for row in range(length - 3):
                three = tuple(tokens[row + 1 : row + 4].tolist())
                drafted[text, row] &= three not in seen
                seen.add(three)
        return drafted


def write_texts(target: Target, prompts: Sequence[Sequence[int]], max_tokens: int) -> Texts:
    """Decode all prompts (token ids) greedily in one batch."""
    block, batch = EngineConfig.block_size, len(prompts)
    pages = -(-(max(map(len, prompts)) + max_tokens + 1) // block)
    llm = LLM(
        (target.cfg, target.params),
        eos_token_ids=target.stop_token_ids,
        config=EngineConfig(
            max_model_len=min(pages * block, target.cfg.max_position_embeddings),
            max_num_seqs=batch,
            batch_buckets=(batch,),
            num_gpu_blocks_override=batch * (pages + 1),
            enable_prefix_caching=False,
        ),
        dtype=target.dtype,
    )
    outputs = llm.generate(
        [list(prompt) for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=max_tokens),
    )
    texts = [[*p, *o.token_ids] for p, o in zip(prompts, outputs, strict=True)]
    rows = -(-max(map(len, texts)) // ROWS) * ROWS
    tokens = np.zeros((batch, rows), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    return Texts(
        tokens, np.array([len(p) for p in prompts]), np.array([len(text) for text in texts])
    )


@dataclass(frozen=True)
class Features:
    """The target's hidden states over Texts.

    last:     [texts, rows, D], after the final norm
    boundary: boundary id -> [texts, rows, D], the residual stream that enters that layer
    """

    last: jax.Array
    boundary: dict[int, jax.Array]

    def of_layers(self, aux_layers: Sequence[int]) -> jax.Array:
        """Return what a head with these aux layers reads: [texts, rows, width]."""
        if not aux_layers:
            return self.last
        return jnp.concatenate([self.boundary[i] for i in aux_layers], axis=-1)

    def of(self, texts: slice) -> Features:
        """Return those of some of the texts."""
        return Features(self.last[texts], {i: x[texts] for i, x in self.boundary.items()})


def read_features(target: Target, texts: Texts, layers: Sequence[int]) -> Features:
    """Run the target once over all texts and keep the hidden states at these boundary ids."""
    ids = tuple(sorted(set(layers)))
    run = jax.jit(partial(target_states, cfg=target.cfg, aux_layers=ids))
    last, aux = run(
        target.params,
        tokens=jnp.asarray(texts.tokens),
        lengths=jnp.asarray(texts.lengths, dtype=jnp.int32),
    )
    parts = [] if aux is None else jnp.split(aux, len(ids), axis=-1)
    return Features(last, dict(zip(ids, parts, strict=True)))
