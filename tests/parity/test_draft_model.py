"""Independent drafts against transformers: the logits of every draft over several rounds are those
of the small model's own plain forward over the text so far."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import drafts
from jaxspec.config import REFERENCE_OPS, RoundConfig
from jaxspec.drafts import DraftModelConfig
from jaxspec.drafts.drafter import DraftContext, Observation, PromptChunk
from jaxspec.layers.params import Params
from jaxspec.sampling.state import SamplingState
from tests.parity.oracles import TARGETS, TOLERANCE, hf_outputs, hf_target
from tests.parity.ours import TARGET, load, shuffled_block_table
from tests.parity.test_families import FAMILIES
from tests.support.slow import slow

pytestmark = pytest.mark.oracle("transformers")

K, BLOCK_SIZE, CHUNK, LIMIT = 4, 4, 16, 128
LENGTHS = (3, 9, 75)  # of prompts
ACCEPTED = ((K, 0, 2), (K, 1, K), (0, K, 3), (1, 2, 0))  # by round and request; then a last round


class Rounds:
    """The drafter of an independent model over texts that grow as a test has them grow."""

    def __init__(self, cfg: DraftModelConfig, params: Params, texts: list[list[int]]) -> None:
        self.params, self.texts, batch = params, texts, len(texts)
        self.cfg = RoundConfig.for_models(
            replace(TARGET, vocab_size=cfg.vocab_size),
            cfg,
            ops=REFERENCE_OPS,
            block_size=BLOCK_SIZE,
            max_model_len=LIMIT,
            num_speculative_tokens=K,
            rule="probabilistic",  # which reads q
        )
        self.drafter = drafts.drafter(cfg)
        table = shuffled_block_table(batch, BLOCK_SIZE, max_model_len=LIMIT)
        self.tables = (jnp.asarray(table),) * len(self.cfg.draft_groups)
        blocks = (table.size,) * len(self.cfg.cache_groups)
        dtypes: Any = dict(dtype=jnp.float32, cache_dtype=jnp.float32)
        self.state = self.drafter.init(self.cfg, batch, blocks, **dtypes)
        self._propose = jax.jit(partial(self.drafter.propose, self.cfg))
        self._prefill = jax.jit(partial(self.drafter.prefill, self.cfg, target=None))
        self._observe = jax.jit(partial(self.drafter.observe, self.cfg))

    def prefill(self) -> None:
        """All but the last token of each text, which is the first sampled one, by chunks."""
        prompts = [text[:-1] for text in self.texts]
        for begin in range(0, max(map(len, prompts)), CHUNK):
            rows = [p[begin : begin + CHUNK] for p in prompts]
            tokens = [r + [1] * (CHUNK - len(r)) for r in rows]
            following = [p[begin + CHUNK] if begin + CHUNK < len(p) else -1 for p in prompts]
            starts = [begin] * len(rows)
            chunk = PromptChunk(*map(_ints, (tokens, starts, [len(r) for r in rows], following)))
            first = _ints([text[-1] for text in self.texts])
            self.state = self._prefill(self.params, self.state, self.tables, chunk, first)

    def propose(self) -> tuple[np.ndarray, np.ndarray]:
        """Drafts [batch, K] and their logits [batch, K, Vd], sampled at temperature 1."""
        batch = len(self.texts)
        keys = np.random.default_rng(len(self.texts[0])).integers(0, 2**32, (batch, 2))
        context = DraftContext(
            seq_lens=_ints([len(text) - 1 for text in self.texts]),
            next_token=_ints([text[-1] for text in self.texts]),
            active=jnp.ones(batch, bool),
            block_tables=self.tables,
            sampling=SamplingState(jnp.asarray(keys, jnp.uint32), jnp.ones(batch, jnp.float32)),
        )
        proposal, self.state = self._propose(self.params, self.state, context)
        return np.asarray(proposal.draft_tokens), np.asarray(proposal.draft_logits)

    def accept(self, drafted: np.ndarray, counts: tuple[int, ...], others: list[int]) -> None:
        """Accept the first drafts of each request, and sample another token after them."""
        new = [[*d[:n].tolist(), o] for d, n, o in zip(drafted, counts, others, strict=True)]
        seen = Observation(
            seq_lens=_ints([len(text) - 1 for text in self.texts]),
            active=jnp.ones(len(new), bool),
            output_tokens=_ints([n + [-1] * (K + 1 - len(n)) for n in new]),
            num_sampled=_ints([len(n) for n in new]),
            block_tables=self.tables,
            target=None,  # type: ignore[arg-type]
        )
        self.state = self._observe(self.params, self.state, seen)
        for text, tokens in zip(self.texts, new, strict=True):
            text += tokens


def _ints(values: Any) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


# The draft's tokens are 160. A wider target has ids without a row, a narrower one cuts them off.
@pytest.mark.parametrize(
    ("case", "width"),
    [
        ("gpt_oss", 200),
        ("llama_tied", 130),
        slow("qwen3", 160),
        slow("llama4", 160),
        slow("glm", 160),
        slow("qwen3_moe", 200),
    ],
)
def test_every_draft_equals_the_plain_forward(case: str, width: int, tmp_path: Path) -> None:
    model = hf_target(tmp_path, **{**TARGETS, **FAMILIES}[case])
    target = replace(TARGET, vocab_size=width)
    cfg, params = load(tmp_path, "draft_model", shared={}, target=target)
    assert isinstance(cfg, DraftModelConfig) and cfg.draft_vocab_size == min(width, 160)
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, width, n + 1).tolist() for n in LENGTHS]
    ours = Rounds(cfg, params, texts)
    ours.prefill()
    for counts in (*ACCEPTED, None):
        drafted, logits = ours.propose()
        for i, text in enumerate(texts):
            tokens = np.minimum([*text, *drafted[i, :-1]], 159)
            expected = hf_outputs(model, tokens).logits[len(text) - 1 :, :width]
            np.testing.assert_allclose(
                logits[i], expected, **TOLERANCE, err_msg=f"request {i}, text of {len(text)}"
            )
        assert drafted.max() < cfg.draft_vocab_size
        if counts is not None:
            ours.accept(drafted, counts, rng.integers(0, width, len(texts)).tolist())
    assert max(map(len, texts)) > 80
