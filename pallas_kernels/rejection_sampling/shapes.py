"""Named shapes of rejection sampling, shared by tests and benchmarks.

Real vocabularies, and small ones that the interpreter can run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.noise import Stream
from pallas_kernels.rejection_sampling.inputs import Inputs, Rule


@dataclass(frozen=True)
class Shape:
    """Requests with K drafts each.

    draft_vocab: None: one-hot drafts; equal to vocab: no map between the two
    sampled:     False: every request is greedy
    drawn:       uniforms and recover_noise are streams, as a round's, and not numbers
    mixed:       some requests are greedy, some rows idle and some drafts placeholders, which a
                 kernel may skip: for tests, not to be timed
    """

    batch: int
    K: int
    vocab: int
    draft_vocab: int | None
    rule: Rule = "probabilistic"
    sampled: bool = True
    drawn: bool = False
    mixed: bool = False


SHAPES = {
    "llama3-8b-b1": Shape(1, 3, 128_256, 32_000),
    "llama3-8b-b1-drawn": Shape(1, 3, 128_256, 32_000, drawn=True),
    "llama3-8b-b64": Shape(64, 3, 128_256, 32_000),
    "llama3-8b-b64-drawn": Shape(64, 3, 128_256, 32_000, drawn=True),
    "llama3-8b-b64-k5": Shape(64, 5, 128_256, 32_000),
    "llama3-8b-b64-block": Shape(64, 3, 128_256, 32_000, "block"),
    "llama3-8b-b64-block-drawn": Shape(64, 3, 128_256, 32_000, "block", drawn=True),
    "llama3-8b-b64-synthetic": Shape(64, 3, 128_256, 32_000, "synthetic"),
    "llama3-8b-b1-greedy": Shape(1, 3, 128_256, None, sampled=False),
    "llama3-8b-b64-greedy": Shape(64, 3, 128_256, None, sampled=False),
    "llama3-8b-b16-mixed": Shape(16, 3, 128_256, 32_000, "block", mixed=True),
    "llama3-8b-b16-eagle1": Shape(16, 3, 128_256, 128_256),
    "llama3-8b-b16-one-hot": Shape(16, 3, 128_256, None),
    "qwen3-8b-b16": Shape(16, 3, 151_936, 32_000),
    "qwen3-8b-b4-block": Shape(4, 5, 151_936, 32_000, "block"),
    "gpt-oss-b4": Shape(4, 3, 201_088, 32_000),
    "smollm2-b1": Shape(1, 3, 49_152, 12_000),
    "smollm2-b16": Shape(16, 3, 49_152, 12_000),
    "smollm2-b1-drawn": Shape(1, 3, 49_152, 12_000, drawn=True),
    "smollm2-b1-greedy": Shape(1, 3, 49_152, None, sampled=False),
    # Two or more pieces of 512 with an overlap; of 128 and 256, as odd and even widths are cut; one
    # piece; nothing drafted.
    "tiny": Shape(12, 3, 700, 520, mixed=True),
    "tiny-block": Shape(12, 4, 700, 520, "block", mixed=True),
    "tiny-block-eagle1": Shape(12, 3, 1024, 1024, "block", mixed=True),
    "tiny-block-one-hot": Shape(12, 3, 700, None, "block", mixed=True),
    "tiny-odd": Shape(8, 2, 257, 131, mixed=True),
    "tiny-even": Shape(8, 2, 514, 130, "block", mixed=True),
    "tiny-one-hot": Shape(12, 3, 700, None, mixed=True),
    "tiny-one-draft": Shape(12, 1, 512, 128, "block", mixed=True),
    "tiny-synthetic": Shape(12, 3, 700, 300, "synthetic", mixed=True),
    "tiny-greedy": Shape(12, 3, 1300, None, sampled=False, mixed=True),
    "tiny-greedy-synthetic": Shape(12, 3, 700, None, "synthetic", sampled=False, mixed=True),
    "tiny-plain": Shape(12, 0, 700, None, mixed=True),
    "tiny-drawn": Shape(12, 3, 700, 520, drawn=True, mixed=True),
    "tiny-drawn-odd": Shape(8, 2, 257, 131, drawn=True, mixed=True),
    "tiny-drawn-block": Shape(12, 4, 700, 520, "block", drawn=True, mixed=True),
    "tiny-drawn-synthetic": Shape(12, 3, 700, 300, "synthetic", drawn=True, mixed=True),
    "tiny-drawn-greedy-synthetic": Shape(
        12, 3, 700, None, "synthetic", sampled=False, drawn=True, mixed=True
    ),
    "tiny-drawn-plain": Shape(12, 0, 700, None, drawn=True, mixed=True),
}


def make_inputs(shape: Shape, seed: int = 0) -> Inputs:
    """Return inputs whose drafts are drawn from q, which resembles p; arrays are NumPy's."""
    rng = np.random.default_rng(seed)
    B, K, V = shape.batch, shape.K, shape.vocab
    width = V if shape.draft_vocab is None else shape.draft_vocab
    target = 2.5 * rng.standard_normal((B, K + 1, V), np.float32)
    kept = np.sort(rng.permutation(V)[:width])
    to_draft = np.full(V, -1, np.int32)
    to_draft[kept] = np.arange(width)
    draft = target[:, :K][..., kept] + 0.7 * rng.standard_normal((B, K, width), np.float32)
    temperature = rng.uniform(0.5, 1.5, B).astype(np.float32)
    greedy = (np.arange(B) % 5 == 3) & shape.mixed if shape.sampled else np.ones(B, bool)
    temperature[greedy] = 0.0
    divisor = np.where(greedy, np.float32(1.0), temperature)[:, None, None]
    noise = (
        0.0
        if shape.draft_vocab is None
        else -np.log(rng.exponential(size=draft.shape)) * ~greedy[:, None, None]
    )
    tokens = kept[(draft / divisor + noise).argmax(-1)].astype(np.int32)
    missing = (rng.random((B, K)) < 0.05) & shape.mixed
    least = np.finfo(np.float32).tiny  # among millions of float32 draws one is 0

    def gumbel(*dims: int) -> np.ndarray:
        return -np.log(np.maximum(rng.standard_exponential(dims, np.float32), least))

    needs_uniforms = shape.sampled or shape.rule == "synthetic"
    numbers: dict[str, Any] = {
        "uniforms": rng.random((B, K), np.float32) if needs_uniforms else None,
        "recover_noise": gumbel(B, V) if shape.sampled else None,
    }
    if shape.drawn:
        keys, position = (
            jnp.asarray(rng.integers(0, 2**32, (B, 2), np.uint32)),
            jnp.asarray(rng.integers(0, 4096, B, np.int32)),
        )
        streams = {"uniforms": 2, "recover_noise": 3}
        numbers = {
            name: None if numbers[name] is None else Stream(keys, position, stream)
            for name, stream in streams.items()
        }
    rates = np.linspace(0.9, 0.5, K, dtype=np.float32)
    arrays: dict[str, Any] = numbers | {
        "target_logits": target,
        "draft_tokens": np.where(missing, -1, tokens).astype(np.int32),
        "draft_logits": None if shape.draft_vocab is None else draft,
        "target_to_draft": None if shape.draft_vocab in (None, V) else to_draft,
        "greedy": greedy,
        "acceptance_rates": rates if shape.rule == "synthetic" else None,
        "active": (np.arange(B) % 7 != 5) | (not shape.mixed),
        "temperature": temperature if shape.sampled else None,
    }
    return Inputs(**arrays, rule=shape.rule, sampled=shape.sampled)


def bytes_moved(shape: Shape) -> int:
    """Return the fewest bytes of device memory that the op reads; it writes a few hundred bytes."""
    B, K, V = shape.batch, shape.K, shape.vocab
    width = shape.draft_vocab or 0
    noise = shape.sampled and not shape.drawn
    if shape.rule == "synthetic" or K == 0:
        return 4 * B * V * (2 if noise else 1)
    if not shape.sampled:
        return 4 * B * (K + 1) * V
    entries = B * ((K + 1) * V + K * width)  # every log-sum-exp
    entries += B * (V + width + noise * V)  # one row of target, draft and noise for each request
    if shape.rule == "block" and width:
        entries += B * (K - 1) * (V + width)  # the inner rows' residual mass
    if width not in (0, V):
        entries += V  # the map
    return 4 * entries
