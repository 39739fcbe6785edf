"""The real target and the trained head, end to end: greedy speculative text is the target's own, in
every mode and for every K."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec import LLM, EngineConfig, RequestOutput, SamplingParams, SpeculativeConfig
from jaxspec.config import AttentionConfig, RopeConfig
from jaxspec.drafts import eagle
from jaxspec.drafts.eagle import EagleConfig
from jaxspec.layers.params import init_random
from jaxspec.loading import load_tokenizer, resolve
from jaxspec.loading.binding import bind_draft
from jaxspec.loading.model import load_draft, load_target
from jaxspec.tools.prompts import DEMO
from tests.support.slow import slow

pytestmark = pytest.mark.once

HEAD, HEAD_1 = "smollm2-135m-instruct-eagle3", "smollm2-135m-instruct-eagle"
BLOCK_HEAD = "smollm2-135m-instruct-dspark"
CHATS = [
    [{"role": "user", "content": text}] for text in (DEMO[3], "Hi!", DEMO[1])
]  # three lengths, padded to a bucket of 4
PARAMS = SamplingParams(temperature=0.0, max_tokens=24)


class Models:
    """SmolLM2 in float32, read once; engines over it."""

    def __init__(self) -> None:
        folder = resolve(None, kind="target")
        self.tokenizer = load_tokenizer(folder)
        self.target = load_target(folder, jnp.float32)

    def engine(
        self,
        draft: tuple[Any, Any] | None = None,
        speculative: SpeculativeConfig | None = None,
        **config: Any,
    ) -> LLM:
        settings = EngineConfig(max_model_len=512, max_num_seqs=4, **config)
        return LLM(self.target, draft, speculative, tokenizer=self.tokenizer, config=settings)

    @cache  # noqa: B019 (as long as the module's fixture)
    def trained(self, head: str, K: int, **config: Any) -> LLM:
        """An engine with a trained head; one of each kind, as a program takes 10 s to make."""
        speculative = SpeculativeConfig(model=head, num_speculative_tokens=K)
        return self.engine(
            load_draft(resolve(head, kind="draft"), *self.target, speculative, jnp.float32),
            speculative,
            **config,
        )

    def random_eagle1(self, K: int) -> LLM:
        """A random head proposes what is rejected."""
        cfg = self.target[0]
        assert isinstance(cfg.attention, AttentionConfig)
        attention = AttentionConfig(
            cfg.attention.num_heads,
            cfg.attention.num_kv_heads,
            cfg.attention.head_dim,
            RopeConfig(),
        )
        draft = EagleConfig(
            cfg.hidden_size,
            512,
            1,
            attention,
            cfg.rms_norm_eps,
            cfg.vocab_size,
            True,
            False,
            cfg.tie_word_embeddings,
        )
        params = init_random(eagle.param_specs(draft), jax.random.key(0), jnp.float32)
        speculative = SpeculativeConfig(model="random", method="eagle", num_speculative_tokens=K)
        return self.engine((draft, bind_draft(draft, params, self.target[1], None)), speculative)


@pytest.fixture(scope="module")
def models() -> Models:
    return Models()


@pytest.fixture(scope="module")
def plain(models: Models) -> list[RequestOutput]:
    return models.engine().generate(CHATS, PARAMS)


def token_ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


# Every other K, block drafts' text, a hostile head, other modes and sampled requests: fast with
# tiny models in tests/decode, slow with this one.


@pytest.mark.parametrize(
    ("head", "K"),
    [(HEAD, 3), *(slow(HEAD, K) for K in (1, 2, 4, 5)), slow(BLOCK_HEAD, 7)],
)
def test_trained_head_accepts_and_text_is_the_plain_one(
    models: Models, plain: list[RequestOutput], head: str, K: int
) -> None:
    llm = models.trained(head, K)
    llm.reset_metrics()
    assert token_ids(llm.generate(CHATS, PARAMS)) == token_ids(plain)
    assert llm.metrics.mean_acceptance_length > 1.3, (
        "a run in which nothing is accepted shows little"
    )


@pytest.mark.slow
@pytest.mark.parametrize("K", [1, 3, 5])
def test_hostile_eagle1_head_leaves_the_plain_text(
    models: Models, plain: list[RequestOutput], K: int
) -> None:
    assert token_ids(models.random_eagle1(K).generate(CHATS, PARAMS)) == token_ids(plain)


@pytest.mark.parametrize(
    ("head", "K", "length"),
    [(HEAD, 3, 1 + 194 / 128), slow(HEAD_1, 3, 1 + 182 / 138), (BLOCK_HEAD, 7, 1 + 228 / 96)],
)
def test_trained_heads_reach_the_acceptance_that_was_recorded(
    models: Models, head: str, K: int, length: float
) -> None:
    """The demo's prompts; MT-bench's figures are in the cards.

    A wrong norm or aux layer leaves the text right: of EAGLE-3, norm_output off gives 2.31 here,
    aux layers one up 2.32, norm_before_residual off 1.44.
    """
    llm = models.trained(head, K)
    llm.reset_metrics()
    chats = [[{"role": "user", "content": text}] for text in DEMO]
    llm.generate(chats, SamplingParams(temperature=0.0, max_tokens=64))
    assert llm.metrics.mean_acceptance_length == pytest.approx(length, abs=0.015)


@pytest.mark.slow
@pytest.mark.parametrize("compilation", ["step", "eager"])
def test_compilation_modes_agree_with_one_program(models: Models, compilation: str) -> None:
    """K = 5 on part of the prompts; docs/notes/compilation-modes.md has all of MT-bench."""
    params = SamplingParams(temperature=0.0, max_tokens=12)
    one, other = models.trained(HEAD, 5), models.trained(HEAD, 5, compilation=compilation)
    one.reset_metrics()
    assert token_ids(one.generate(CHATS, params)) == token_ids(other.generate(CHATS, params))
    assert one.metrics == other.metrics
    assert one.metrics.num_accepted_tokens > 0


@pytest.mark.slow
def test_sampled_text_repeats_with_its_seed_among_other_neighbours(models: Models) -> None:
    """Greedy and sampled requests share a batch; slot and neighbours change nothing."""
    llm = models.trained(HEAD, 3)
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=16)
    alone = llm.generate([CHATS[0]], sampled)[0]
    among = llm.generate(
        [CHATS[1], CHATS[2], CHATS[0]],
        [PARAMS, SamplingParams(temperature=1.0, seed=1, max_tokens=16), sampled],
    )[2]
    assert alone.token_ids == among.token_ids
    assert (
        alone.token_ids
        != llm.generate(
            [CHATS[0]], SamplingParams(temperature=0.8, top_p=0.9, seed=9, max_tokens=16)
        )[0].token_ids
    )


@pytest.mark.gpu
def test_bfloat16_text_of_a_gpu_is_the_plain_one_at_batch_1() -> None:
    """Every kernel of the target sums a row in one order, whether there are K + 1 rows or one.

    docs/notes/losslessness-bf16.md has MT-bench's 80 prompts.
    """
    chats = [[{"role": "user", "content": text}] for text in DEMO]
    params = SamplingParams(temperature=0.0, max_tokens=96)
    llm = LLM.from_pretrained(
        speculative={"model": HEAD, "num_speculative_tokens": 3}, dtype="bfloat16", max_num_seqs=1
    )
    plain = LLM.from_pretrained(dtype="bfloat16", max_num_seqs=1)
    assert token_ids(llm.generate(chats, params)) == token_ids(plain.generate(chats, params))
    assert llm.metrics.mean_acceptance_length > 1.5


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "settings",
    [
        {"batch_invariant": True},
        {},  # prefill in order, and rounds of up to 32 rows
        {"kv_cache_dtype": "fp8"},
        {"quantize": "int4"},
        {"quantize": "fp8-block"},
        {"quantize": "fp8"},
    ],
)
def test_bfloat16_text_of_a_gpu_does_not_depend_on_neighbours(
    settings: dict[str, Any], temperature: float
) -> None:
    """Alone and among others; scripts/compare_batching.py does it for MT-bench's prompts."""
    chats = [[{"role": "user", "content": text}] for text in DEMO]
    speculative = {"model": HEAD, "num_speculative_tokens": 3}
    llm = LLM.from_pretrained(
        speculative=speculative,
        dtype="bfloat16",
        max_num_seqs=8,
        enable_prefix_caching=False,
        max_model_len=512,
        **settings,
    )
    params = [SamplingParams(temperature, seed=i, max_tokens=48) for i in range(len(chats))]
    together = token_ids(llm.generate(chats, params))
    assert [
        token_ids(llm.generate([chat], p))[0] for chat, p in zip(chats, params, strict=True)
    ] == together
