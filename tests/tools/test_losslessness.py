"""Where texts part, and how near to a tie the target was there."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, SamplingParams, models
from jaxspec.cache.arrays import init_cache
from jaxspec.cache.metadata import build_metadata
from jaxspec.config import REFERENCE_OPS, CacheGroup
from jaxspec.layers.context import Pass
from jaxspec.tools.losslessness import Difference, find_differences, with_margins
from tests.support.quantized import plain_checkpoint
from tests.support.tiny import VOCAB, Model, tiny_model


def output(*token_ids: int, prompt: tuple[int, ...] = (3, 1, 4)) -> Any:
    return SimpleNamespace(prompt_token_ids=list(prompt), token_ids=list(token_ids))


def test_each_prompt_that_differs_is_named_with_its_first_token() -> None:
    found = find_differences(
        [output(1), output(1, 2), output(5, 6, 7)], [output(1), output(1, 2, 3), output(5, 9, 8)]
    )
    assert found == [Difference(1, 2, None, 3), Difference(2, 1, 6, 9)]
    assert find_differences([output(1, 2)], [output(1, 2)]) == []


def test_the_margin_is_that_of_the_targets_logits_after_the_shared_text() -> None:
    model = tiny_model("eagle")
    rng = np.random.default_rng(0)
    texts = [
        output(
            *map(int, rng.integers(0, VOCAB, 9)), prompt=tuple(map(int, rng.integers(0, VOCAB, n)))
        )
        for n in (4, 300)
    ]
    found = with_margins(
        model.target,
        model.params["target"],
        texts,
        [Difference(1, 6, 7, 2), Difference(0, 3, 5, 40), Difference(0, 9, 1, None)],
        cache_dtype=jnp.float32,
    )
    assert found[2] == Difference(0, 9, 1, None) and not found[2].is_tie
    for d in found[:2]:
        prefix = np.asarray(
            [[*texts[d.prompt].prompt_token_ids, *texts[d.prompt].token_ids[: d.position]]],
            np.int32,
        )
        logits = reference_logits(model, prefix)
        a, b = logits[d.speculative_token_id], logits[d.plain_token_id]
        assert d.margin is not None and d.margin == pytest.approx(abs(a - b), rel=1e-4, abs=1e-6)
        assert d.ulp == 2.0 ** (math.floor(math.log2(max(abs(a), abs(b)))) - 7)
        assert d.margin is not None and d.ulp is not None and d.is_tie == (d.margin < d.ulp)


@pytest.mark.parametrize(
    "form",
    [{"quantize": f} for f in ("fp8", "fp8-block", "int4")] + [{"kv_cache_dtype": "fp8"}],
    ids=str,
)
def test_the_margin_of_a_quantised_target_is_that_of_its_own_logits(
    form: dict[str, Any], tmp_path: Path
) -> None:
    """Codes are no numbers: those of int4 are packed into words."""
    llm = LLM(str(plain_checkpoint(tmp_path / "plain")), dtype="float32", **form)
    params = SamplingParams(0.0, max_tokens=4, ignore_eos=True, logprobs=2)
    (found,) = llm.generate([[5, 6, 7, 5, 6]], params)
    assert found.logprobs is not None
    first, second = found.logprobs[3].items()
    given = [found], [Difference(0, 3, first[0], second[0])]
    (difference,) = with_margins(
        llm.target_config, llm.params["target"], *given, cache_dtype=llm.cache_dtype
    )
    expected = first[1].logprob - second[1].logprob
    assert difference.margin == pytest.approx(expected, rel=1e-4, abs=1e-5)


def reference_logits(model: Model, tokens: Any) -> np.ndarray:
    cfg, rows = model.target, tokens.shape[1]
    family, zero = models.family(cfg), jnp.zeros(1, jnp.int32)
    metadata = build_metadata(
        (CacheGroup(rows, rows),),
        (zero[None],),
        zero,
        zero + rows,
        rows,
        attention=cfg.attention,
        ops=REFERENCE_OPS,
    )
    with jax.default_matmul_precision("highest"):
        out = family.forward(
            model.params["target"],
            cfg,
            tokens,
            Pass(metadata, REFERENCE_OPS),
            init_cache(cfg.attention, (1,) * cfg.num_layers, rows, jnp.dtype(jnp.float32)),
        )
        return np.asarray(
            family.logits(model.params["target"], cfg, out.hidden[:, -1], REFERENCE_OPS)
        )[0]
