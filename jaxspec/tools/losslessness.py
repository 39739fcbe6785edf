"""Differences of two decodings of the same prompts, and the target's margin at each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxspec import models
from jaxspec.cache.arrays import init_cache
from jaxspec.cache.metadata import build_metadata
from jaxspec.config import REFERENCE_OPS
from jaxspec.layers.context import Pass
from jaxspec.layers.params import Params

BLOCK = 64
BUCKET = 256  # prefixes are padded to multiples of this many tokens, so that few lengths compile
BFLOAT16_BITS = 7  # of the mantissa, the leading one not counted


class Decoded(Protocol):
    """The part of a RequestOutput that is compared."""

    @property
    def prompt_token_ids(self) -> list[int]: ...

    @property
    def token_ids(self) -> list[int]: ...


@dataclass(frozen=True)
class Difference:
    """The first token in which two texts of a prompt differ.

    position: counts generated tokens from 0.
    speculative_token_id, plain_token_id: None where that text has ended.
    margin: distance of the float32 logits of the two tokens, after the tokens that the texts
        share; None: not computed.
    ulp: one unit in the last place of bfloat16 at the larger of these logits. A margin below it is
        a tie to bfloat16.
    """

    prompt: int
    position: int
    speculative_token_id: int | None
    plain_token_id: int | None
    margin: float | None = None
    ulp: float | None = None

    @property
    def is_tie(self) -> bool:
        return self.margin is not None and self.ulp is not None and self.margin < self.ulp

    def __str__(self) -> str:
        where = (
            f"prompt {self.prompt}, token {self.position}: "
            f"{self.speculative_token_id} against {self.plain_token_id}"
        )
        if self.margin is None or self.ulp is None:
            return where
        ulps = f"{self.margin / self.ulp:.2f} bfloat16 ulp"
        return f"{where}, {self.margin:.3g} apart in float32, {ulps}"

    to_dict = asdict


def find_differences(speculative: Sequence[Decoded], plain: Sequence[Decoded]) -> list[Difference]:
    """Return one difference for each prompt whose token ids differ, in the order of the prompts."""
    return list(_differences(speculative, plain))


def _differences(speculative: Sequence[Decoded], plain: Sequence[Decoded]) -> Iterator[Difference]:
    for prompt, (a, b) in enumerate(zip(speculative, plain, strict=True)):
        for position, (x, y) in enumerate(zip_longest(a.token_ids, b.token_ids)):
            if x != y:
                yield Difference(prompt, position, x, y)
                break


def with_margins(
    cfg: models.TargetConfig,
    params: Params,
    outputs: Sequence[Decoded],
    found: Sequence[Difference],
    *,
    cache_dtype: DTypeLike,
) -> list[Difference]:
    """Return the differences with their margins.

    The target runs in float32 over the text that both decodings share, with its own codes where
    weights, keys and values are quantised.

    cache_dtype: of the keys and values that both decodings had
    """
    is_coded = jnp.dtype(cache_dtype).itemsize == 1
    forward = partial(_last_logits, cfg, params, cache_dtype if is_coded else jnp.float32)
    done = []
    for d in found:
        # Where one text is the other's beginning, there are no two logits to compare.
        if d.speculative_token_id is None or d.plain_token_id is None:
            done.append(d)
            continue
        output = outputs[d.prompt]
        logits = forward([*output.prompt_token_ids, *output.token_ids[: d.position]])
        a, b = float(logits[d.speculative_token_id]), float(logits[d.plain_token_id])
        ulp = 2.0 ** (math.floor(math.log2(max(abs(a), abs(b), 2.0**-126))) - BFLOAT16_BITS)
        done.append(
            Difference(
                d.prompt, d.position, d.speculative_token_id, d.plain_token_id, abs(a - b), ulp
            )
        )
    return done


def _last_logits(
    cfg: models.TargetConfig, params: Params, cache_dtype: DTypeLike, tokens: Sequence[int]
) -> np.ndarray:
    """Return the float32 logits [vocab] after tokens."""
    rows = -(-len(tokens) // BUCKET) * BUCKET
    padded = np.zeros((1, rows), np.int32)
    padded[0, : len(tokens)] = tokens
    length = np.asarray([len(tokens)], np.int32)
    return np.asarray(_forward(cfg, jnp.dtype(cache_dtype), params, padded, length))


@partial(jax.jit, static_argnums=(0, 1))
def _forward(
    cfg: Any, cache_dtype: np.dtype, params: Params, tokens: jax.Array, length: jax.Array
) -> jax.Array:
    family, pages = models.family(cfg), tokens.shape[1] // BLOCK
    groups = cfg.cache_groups(BLOCK, tokens.shape[1])
    table = jnp.arange(pages, dtype=jnp.int32)[None]
    metadata = build_metadata(
        groups,
        (table,) * len(groups),
        jnp.zeros_like(length),
        length,
        tokens.shape[1],
        attention=cfg.attention,
        ops=REFERENCE_OPS,
    )
    caches = init_cache(cfg.attention, (pages,) * cfg.num_layers, BLOCK, cache_dtype)
    # Cast inside the program, so that the copies live no longer than their use.
    params = jax.tree.map(_in_float32, params)
    with jax.default_matmul_precision("highest"):
        pass_ = Pass(metadata, REFERENCE_OPS)
        hidden = family.forward(params, cfg, tokens, pass_, caches).hidden
        return family.logits(params, cfg, hidden[:, length[0] - 1], REFERENCE_OPS)[0]


def _in_float32(weight: jax.Array) -> jax.Array:
    """Return numbers in float32, and the codes of quantised weights as they are."""
    is_number = weight.dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
    return weight.astype(jnp.float32) if is_number else weight
