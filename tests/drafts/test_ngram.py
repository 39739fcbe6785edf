"""Prompt lookup: the look-up equals plain Python, and rounds draft from the whole text.

`expected_metrics` counts in plain Python what each round of a request proposes and accepts. The
engine's counts have to equal it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, ConfigError, EngineConfig, RequestOutput, SamplingParams, SpeculativeConfig
from jaxspec.config import CacheGroup
from jaxspec.decode import state as decode_state
from jaxspec.drafts import METHODS, MODEL_FREE
from jaxspec.drafts.drafter import DraftContext, Observation
from jaxspec.drafts.ngram import NgramConfig, look_up
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.loading.pretrained import check_speculative
from jaxspec.sampling.state import SamplingState
from tests.decode.test_distribution import (
    CHAINS,
    START,
    Trials,
    biased_steps,
    joint_statistic,
    one_round,
)
from tests.decode.test_distribution import V as CHAIN_VOCAB
from tests.support.slow import slow
from tests.support.statistics import within_limit
from tests.support.tiny import VOCAB, agreeing_model, random_prompts, sampling_state
from tests.support.toys import PEAK, ToyTarget, toy_config

pytestmark = pytest.mark.once

K, LIMIT = 3, 96
MODEL = agreeing_model("eagle")  # its target alone
NGRAM = MODEL_FREE["ngram"]


def reference(text: list[int], K: int, longest: int, shortest: int) -> list[int]:
    """The drafts that follow a text, -1 for none."""
    for size in range(longest, shortest - 1, -1):
        for begin in reversed(range(len(text) - size)):
            if text[begin : begin + size] == text[-size:]:
                found = text[begin + size :][:K]
                return found + [-1] * (K - len(found))
    return [-1] * K


# ---- the look-up


@pytest.mark.parametrize("alphabet", [2, 4])
@pytest.mark.parametrize(("longest", "shortest"), [(5, 2), (1, 1), (4, 1), (3, 3), (24, 20)])
def test_look_up_equals_plain_python(longest: int, shortest: int, alphabet: int) -> None:
    """Texts may be shorter than the run. Tokens past a text's end do not count."""
    rng = np.random.default_rng(longest)
    texts = rng.integers(0, alphabet, (200, 24)).astype(np.int32)
    texts[:4] = 1
    lengths = rng.integers(0, 25, 200).astype(np.int32)
    lengths[:4] = (0, 1, 2, 24)
    sizes = range(longest, shortest - 1, -1)
    found = look_up(jnp.asarray(texts), jnp.asarray(lengths), 4, sizes).tolist()
    expected = [
        reference(text[:n], 4, longest, shortest)
        for text, n in zip(texts.tolist(), lengths.tolist(), strict=True)
    ]
    assert found == expected
    counts = {sum(t >= 0 for t in row) for row in expected}
    assert {0, 1} <= counts, "expected texts without an occurrence, and drafts cut off by an end"


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([7, 1, 2, 8, 9, 4, 2, 5, 6, 1, 2], [8, 9, 4]),  # two tokens before one token
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2]),  # the later of two
        ([1, 2, 3, 3, 3], [3, -1, -1]),  # an occurrence that overlaps the end of the text
        ([5, 6, 5], [6, 5, -1]),  # the text ends
        ([5, 6, 7], [-1, -1, -1]),
        ([5], [-1, -1, -1]),
    ],
)
def test_look_up_of_texts_worked_out_by_hand(text: list[int], drafts: list[int]) -> None:
    padded = jnp.asarray([text + [0] * (12 - len(text))], jnp.int32)
    length = jnp.asarray([len(text)], jnp.int32)
    assert look_up(padded, length, 3, range(2, 0, -1)).tolist() == [drafts]


# ---- rounds of the engine


def ngram_llm(
    target: Any = None, *, spec: dict[str, Any] | None = None, plain: bool = False, **config: Any
) -> LLM:
    values: dict[str, Any] = {"num_speculative_tokens": K, "rejection_sample_method": "strict"}
    speculative = SpeculativeConfig(method="ngram", **(values | (spec or {})))
    target = target or (MODEL.target, MODEL.params["target"])
    values = {
        "max_model_len": LIMIT,
        "max_num_seqs": 4,
        "block_size": 4,
        "batch_buckets": (4,),
        "max_num_batched_tokens": 32,
        "rounds_per_step": 1,
    }
    engine = EngineConfig(**(values | config))
    if plain:
        return LLM(target, config=engine)
    return LLM(target, (NGRAM.config(target[0], speculative), {}), speculative, config=engine)


def repeated(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Prompts that say the same twice and begin to say it again."""
    return [[*p, *p, *p[:2]] for p in random_prompts(lengths, seed)]


PROMPTS = [*repeated((5, 9, 3, 6)), *random_prompts((1, 17), seed=5)]
TEMPERATURES = (0.0, 0.6, 1.0, 0.0, 0.6, 0.0)
LENGTHS = (18, 9, 14, 1, 16, 12)


def sampling(lengths: tuple[int, ...]) -> list[SamplingParams]:
    return [
        SamplingParams(t, seed=i, max_tokens=n)
        for i, (t, n) in enumerate(zip(TEMPERATURES, lengths, strict=False))
    ]


@cache
def plain_texts() -> tuple[list[int], ...]:
    """Plain decoding's texts, each K + 1 tokens longer than LENGTHS, for what the last rounds
    accept."""
    lengths = tuple(n + K + 1 for n in LENGTHS)
    outputs = ngram_llm(plain=True).generate(PROMPTS, sampling(lengths))
    return tuple(o.token_ids for o in outputs)


def expected_metrics(
    prompt: list[int],
    text: list[int],
    max_tokens: int,
    num_allowed: Callable[[int], int] = lambda _: K,
) -> SpecDecodeMetrics:
    """Return what rounds propose and accept by the strict rule, 0 to K drafts each.

    num_allowed: the drafts that a round may have, by its number of cached tokens
    """
    metrics, done = SpecDecodeMetrics(K), 1  # prefill samples the first
    while done < max_tokens:
        known = prompt + text[:done]
        allowed = max(0, min(K, num_allowed(len(known) - 1)))
        drafts = reference(known, K, 5, 2)[:allowed]
        accepted = 0
        while accepted < allowed and drafts[accepted] == text[done + accepted]:
            accepted += 1
        metrics.observe(accepted, sum(token >= 0 for token in drafts))
        done += accepted + 1
    return metrics


def check(outputs: list[RequestOutput], lengths: tuple[int, ...]) -> None:
    """The first of PROMPTS have plain decoding's texts, in the rounds that plain Python expects."""
    assert len(outputs) == len(lengths)
    for output, prompt, text, n in zip(outputs, PROMPTS, plain_texts(), lengths, strict=False):
        assert output.token_ids == text[:n]
        assert output.metrics == expected_metrics(prompt, text, n)


@pytest.mark.parametrize(
    ("compilation", "rounds", "lengths"),
    [
        ("round", 1, LENGTHS),
        ("round", 3, LENGTHS),
        ("step", 1, LENGTHS),
        slow("eager", 1, (4, 3)),  # few tokens: nothing is compiled
    ],
)
def test_text_is_plain_decodings_in_every_compilation_mode(
    compilation: str, rounds: int, lengths: tuple[int, ...]
) -> None:
    """Requests are greedy, or sampled with a seed under the strict rule.

    They have different lengths, and are more than run together.
    """
    llm = ngram_llm(compilation=compilation, rounds_per_step=rounds)
    outputs = llm.generate(PROMPTS[: len(lengths)], sampling(lengths))
    check(outputs, lengths)
    if lengths == LENGTHS:
        assert llm.metrics.num_accepted_tokens > 5, "expected drafts that are accepted"


@pytest.mark.usefixtures("toy_families")
def test_nothing_compiled_drafts_the_same() -> None:
    """The compilation mode "eager", with a target of few operations."""
    llm = ngram_llm((ToyTarget(VOCAB), counting_table()), compilation="eager")
    (output,) = llm.generate([[i % 8 for i in range(20)]], SamplingParams(0.0, max_tokens=9))
    assert output.token_ids == [i % 8 for i in range(20, 29)]
    assert output.metrics.acceptance_histogram == [0, 0, 0, 2]


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_greedy_text_is_plain_decodings_under_every_rule(rule: str) -> None:
    llm = ngram_llm(spec={"rejection_sample_method": rule})
    greedy = [i for i, temperature in enumerate(TEMPERATURES) if temperature == 0]
    outputs = llm.generate(
        [PROMPTS[i] for i in greedy], [SamplingParams(0.0, max_tokens=LENGTHS[i]) for i in greedy]
    )
    for output, i in zip(outputs, greedy, strict=True):
        text = plain_texts()[i]
        assert output.token_ids == text[: LENGTHS[i]]
        assert output.metrics == expected_metrics(PROMPTS[i], text, LENGTHS[i])


def test_a_preempted_request_and_one_with_a_shared_prefix_draft_as_alone() -> None:
    """The pool has room for one request of the largest size.

    The second time, the blocks of some prompts are cached.
    """
    llm = ngram_llm(num_gpu_blocks_override=LIMIT // 4, max_num_seqs=4)
    longer = [[*p, *([7, 9] * 12)] for p in random_prompts((3, 5, 2, 4), seed=6)]
    params = [SamplingParams(0.0, max_tokens=32)] * 4
    for together in (True, False):
        llm.reset_metrics()
        outputs = llm.generate(longer, params)
        if together:
            assert llm.scheduling.num_preemptions > 0
        alone = [ngram_alone().generate([p], params[0])[0] for p in longer]
        assert [o.token_ids for o in outputs] == [o.token_ids for o in alone]
        assert [o.metrics for o in outputs] == [o.metrics for o in alone]
    shared = [[*longer[0], *p] for p in random_prompts((1, 3, 6), seed=7)]
    llm.reset_metrics()
    for prompt in (*shared, shared[0]):
        (output,), (other,) = (
            x.generate([prompt], SamplingParams(0.0, max_tokens=12)) for x in (llm, ngram_alone())
        )
        assert (output.token_ids, output.metrics) == (other.token_ids, other.metrics)
    assert llm.scheduling.num_prefix_hits > 24


@cache
def ngram_alone() -> LLM:
    """An engine of the same shapes, without a prefix cache, and with blocks for all."""
    return ngram_llm(enable_prefix_caching=False)


def test_a_full_round_leaves_the_blocks_of_others_alone() -> None:
    """It ends where the next block begins, which the request does not hold yet: its page is 0."""
    group = CacheGroup(block_size=4, max_model_len=16)
    cfg = toy_config(
        VOCAB,
        K,
        "strict",
        "greedy",
        draft=NgramConfig(VOCAB, lookup_max=2, lookup_min=1),
        target_groups=(group,),
        draft_groups=(group,),
    )
    state = NGRAM.init(cfg, 1, (3,), dtype=jnp.float32, cache_dtype=jnp.float32)
    state = jax.tree.map(lambda x: jnp.full_like(x, 9), state)
    no_target: Any = None
    seen = Observation(
        seq_lens=jnp.asarray([0], jnp.int32),
        active=jnp.asarray([True]),
        output_tokens=jnp.asarray([[5, 6, 7, 8]], jnp.int32),
        num_sampled=jnp.asarray([K + 1], jnp.int32),
        block_tables=(jnp.asarray([[1, 0, 0, 0]], jnp.int32),),
        target=no_target,
    )
    state = NGRAM.observe(cfg, {}, state, seen)
    assert state.caches[0].tokens.tolist() == [[9] * 4, [9, 5, 6, 7], [9] * 4]
    context = DraftContext(
        seq_lens=jnp.asarray([4], jnp.int32),
        next_token=jnp.asarray([8], jnp.int32),
        active=jnp.asarray([True]),
        block_tables=(jnp.asarray([[1, 2, 0, 0]], jnp.int32),),
        sampling=jax.tree.map(jnp.asarray, sampling_state([0])),
    )
    _, state = NGRAM.propose(cfg, {}, state, context)
    assert state.caches[0].tokens.tolist() == [[9] * 4, [9, 5, 6, 7], [8, 9, 9, 9]]


def counting_table(period: int = 8) -> Any:
    """After t comes t + 1, modulo the period."""
    table = np.zeros((VOCAB, VOCAB), np.float32)
    table[np.arange(VOCAB), (np.arange(VOCAB) + 1) % period] = PEAK
    return {"table": jnp.asarray(table)}


@pytest.mark.usefixtures("toy_families")
def test_a_repetitive_prompt_has_all_its_drafts_accepted() -> None:
    llm = ngram_llm((ToyTarget(VOCAB), counting_table()))
    (output,) = llm.generate(
        [[i % 8 for i in range(20)]], SamplingParams(0.0, max_tokens=1 + 5 * 4)
    )
    assert output.token_ids == [i % 8 for i in range(20, 41)]
    assert output.metrics.acceptance_histogram == [0, 0, 0, 5]


@pytest.mark.usefixtures("toy_families")
@pytest.mark.parametrize(("longest", "rounds"), [(30, 1), (30, 3), (28, 1)])
def test_no_drafts_past_the_drafts_own_context(longest: int, rounds: int) -> None:
    """A round of 28 cached tokens may have a draft, which is looked up after the token that follows
    them."""
    llm = ngram_llm(
        (ToyTarget(VOCAB), counting_table()),
        spec={"draft_max_model_len": longest},
        rounds_per_step=rounds,
    )
    prompt = [i % 8 for i in range(20)]
    (output,) = llm.generate([prompt], SamplingParams(0.0, max_tokens=30))
    text = [i % 8 for i in range(20, 60)]
    assert output.token_ids == text[:30]
    expected = expected_metrics(prompt, text, 30, lambda cached: longest + 1 - cached)
    assert output.metrics == expected and expected.num_drafts < 6


@pytest.mark.usefixtures("toy_families")
@pytest.mark.parametrize("rounds", [1, 3])
def test_rounds_without_drafts_keep_the_text(rounds: int) -> None:
    """Two requests run without drafts. The second goes on alone, and drafts from that text."""
    llm = ngram_llm(
        (ToyTarget(VOCAB), counting_table()),
        spec={"num_speculative_tokens_per_batch_size": ((2, 4, 0),)},
        rounds_per_step=rounds,
        batch_buckets=(1, 2, 4),
    )
    lengths = (16, 40)
    params = [SamplingParams(0.0, max_tokens=n) for n in lengths]
    outputs = llm.generate([[3], [5]], params)
    for output, first, n in zip(outputs, (4, 6), lengths, strict=True):
        assert output.token_ids == [(first + i) % 8 for i in range(n)]
    histogram = outputs[1].metrics.acceptance_histogram
    # The second prompt is prefilled after the first step.
    assert outputs[0].metrics.num_drafts <= rounds
    assert histogram[:K] == [0] * K and histogram[K] >= 4


@pytest.mark.usefixtures("toy_families")
def test_a_run_longer_than_any_text_finds_nothing() -> None:
    spec = {"prompt_lookup_max": 200, "prompt_lookup_min": 150}
    llm = ngram_llm((ToyTarget(VOCAB), counting_table()), spec=spec)
    (output,) = llm.generate([[i % 8 for i in range(20)]], SamplingParams(0.0, max_tokens=6))
    assert output.token_ids == [4, 5, 6, 7, 0, 1]
    assert output.metrics.num_accepted_tokens == 0


# ---- the distribution of sampled text

TRIALS, TEXT = 50_000, 32


def play(
    rule: str, chain: str, temperature: float, rounds: int, *, break_even: Any = None
) -> Trials:
    """Trials whose text offers the likeliest path from START, one token after the other.

    break_even: int32 [TRIALS], the acceptance rates below which it takes the place of a head; None
        without a head
    """
    path = [START]
    for _ in range(K):
        row = CHAINS[chain].target[path[-1]].copy()
        row[path] = -np.inf
        path.append(int(np.argmax(row)))
    other = next(t for t in range(CHAIN_VOCAB) if t not in path)
    text = [*path, other]  # START follows it, at position 4 + 1
    group = CacheGroup(TEXT, TEXT)
    lookup = NgramConfig(CHAIN_VOCAB, lookup_max=2, lookup_min=1)
    groups: dict[str, Any] = dict(target_groups=(group,), draft_groups=(group,))
    if break_even is None:  # one-hot
        cfg = toy_config(CHAIN_VOCAB, K, rule, "greedy", draft=lookup, **groups)
    else:
        groups |= dict(fallback=lookup, fallback_groups=(group,))
        cfg = toy_config(CHAIN_VOCAB, K, rule, adaptive=True, limits_drafts=True, **groups)
    keys = np.stack([np.full(TRIALS, 3), np.arange(TRIALS)], axis=1).astype(np.uint32)

    def full(value: Any, dtype: Any) -> jax.Array:
        return jnp.full(TRIALS, value, dtype)

    state = decode_state.init_state(
        cfg,
        SamplingState(jnp.asarray(keys), full(temperature, jnp.float32)),
        full(1000, jnp.int32),
        jnp.full((TRIALS, 1), -1, jnp.int32),
        (TRIALS,),
        dtype=jnp.float32,
        cache_dtype=jnp.float32,
    )
    state = replace(
        state,
        seq_lens=full(len(text), jnp.int32),
        next_token=full(START, jnp.int32),
        active=full(True, bool),
    )
    held = state.draft if break_even is None else state.text
    written = replace(
        held,
        caches=jax.tree.map(
            lambda x: x.at[:, : len(text)].set(jnp.asarray(text, jnp.int32)), held.caches
        ),
    )
    params: Any = {"target": {"table": jnp.asarray(CHAINS[chain].target)}, "draft": {}}
    if break_even is None:
        state = replace(state, draft=written)
    else:
        assert state.acceptance is not None
        pending = state.draft.pending_tokens.at[:, 0].set(START)
        state = replace(
            state,
            text=written,
            draft=replace(state.draft, pending_tokens=pending, num_pending=full(1, jnp.int32)),
            acceptance=replace(state.acceptance, break_even=break_even),
        )
        params["draft"] = {"table": jnp.asarray(CHAINS[chain].draft)}
    tables = (jnp.arange(TRIALS, dtype=jnp.int32)[:, None],)
    program, found = one_round(cfg), []
    for _ in range(rounds):
        verification, state = program(params, state, tables)
        found.append((np.asarray(verification.output_tokens), np.asarray(verification.num_sampled)))
    return Trials(np.stack([t for t, _ in found]), np.stack([c for _, c in found]))


@pytest.mark.usefixtures("toy_families")
@pytest.mark.parametrize(
    ("rule", "chain", "temperature"),
    [
        ("probabilistic", "independent", 0.4),
        ("block", "alike", 1.0),
        slow("probabilistic", "alike", 1.0),
        slow("block", "independent", 0.4),
    ],
)
def test_sampled_text_follows_the_target(rule: str, chain: str, temperature: float) -> None:
    """Every position by the token before it, and the first tokens together, over two rounds."""
    trials = play(rule, chain, temperature, rounds=2)
    assert min(trials.acceptance[:2]) > 0.02
    assert not biased_steps(trials, chain, temperature)
    assert within_limit(*joint_statistic(trials, chain, temperature))


# ---- bad values


@pytest.mark.parametrize(
    "values",
    [
        {"prompt_lookup_min": 0},
        {"prompt_lookup_min": 6},
        {"prompt_lookup_max": 1},
        {"prompt_lookup_max": -1, "prompt_lookup_min": -2},
        {"prompt_lookup_max": 2.5},
        {"prompt_lookup_max": "5"},
        {"prompt_lookup_min": None},
        {"prompt_lookup_min": True},
    ],
)
def test_lengths_that_cannot_be_looked_up_are_refused(values: dict[str, Any]) -> None:
    lengths = {"prompt_lookup_min": 2, "prompt_lookup_max": 5} | values
    low, high = lengths["prompt_lookup_min"], lengths["prompt_lookup_max"]
    with pytest.raises(ConfigError) as error:
        SpeculativeConfig(method="ngram", **values)
    assert str(error.value) == (
        "prompt_lookup_min, prompt_lookup_max: expected integers with 1 <= min <= max, "
        f"got {low!r} and {high!r}"
    )


def test_a_draft_model_is_refused() -> None:
    speculative = SpeculativeConfig(method="ngram", model="a-head")
    with pytest.raises(ConfigError) as error:
        NGRAM.config(MODEL.target, speculative)
    assert str(error.value) == "model: expected none with method 'ngram', got 'a-head'"


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_an_option_that_is_not_read_is_refused(method: str) -> None:
    speculative = SpeculativeConfig(method=method, draft_quantize="fp8")
    with pytest.raises(ConfigError, match=f"^draft_quantize: .* got it with '{method}'$"):
        MODEL_FREE[method].config(MODEL.target, speculative)


def test_no_model_is_needed() -> None:
    speculative = check_speculative({"method": "ngram", "prompt_lookup_max": 4})
    assert speculative is not None
    assert NGRAM.config(MODEL.target, speculative) == NgramConfig(VOCAB, 4, 2)
    with pytest.raises(
        ConfigError, match=f"^method: expected one of {', '.join(METHODS)}, got 'bigram'$"
    ):
        check_speculative({"method": "bigram"})
