"""Several rounds as one program: what comes of it is what single rounds give, the caches stay in
place, and the host dispatches less often.

The engine's property tests (test_engine_requests.py, test_engine_groups.py, test_scheduler.py) run
with several rounds a step too.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, ConfigError, EngineConfig, SamplingParams, SpeculativeConfig
from jaxspec.decode import several_rounds as rounds
from jaxspec.decode.several_rounds import (
    BELOW_BYTES_SHARED,
    SEVERAL_SHARED,
    each_round,
    rounds_per_step,
    run_rounds,
)
from tests.decode.test_donation import HOST, cache_copies
from tests.support.slow import slow_unless
from tests.support.tiny import agreeing_model, block_tables, random_prompts, sampling_state, start
from tests.support.toys import ToyDraft, ToyTarget

LENGTHS, K, R = (5, 9, 1), 3, 4
V, LIMIT = 32, 48


def state_of(cfg: Any, params: Any) -> tuple[Any, tuple[np.ndarray, ...]]:
    """Requests of which the second ends within the first rounds; in a pool larger than what
    attention gathers of it."""
    tables, num_blocks = block_tables(3, cfg, shuffle_seed=0, guard=5)
    sampling = sampling_state([1, 2, 3], 1.0)
    return start(
        cfg, params, random_prompts(LENGTHS), sampling, tables, num_blocks, max_tokens=[64, 5, 64]
    )[1], tables


def test_a_step_of_rounds_is_as_many_single_rounds() -> None:
    """Tokens, counts and every integer of the state exactly; in the request that ends, the rounds
    after are idle."""
    model = agreeing_model("eagle3")
    cfg = model.round_config(K)
    state, tables = state_of(cfg, model.params)
    kept = jax.tree.map(jnp.copy, state)
    together, after = run_rounds(cfg, R, model.params, kept, tables, "round")
    assert together.output_tokens.shape == (R, 3, K + 1)
    for found in each_round(together):
        expected, state = run_rounds(cfg, 1, model.params, state, tables, "round")
        np.testing.assert_array_equal(found.output_tokens, expected.output_tokens)
        np.testing.assert_array_equal(found.num_sampled, expected.num_sampled)
    num_sampled = np.asarray(together.num_sampled)
    assert (
        not num_sampled[-1, 1] and num_sampled[:, [0, 2]].all() and len(set(num_sampled.flat)) > 2
    )
    for x, y in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(
            x, y, rtol=1e-5 if jnp.issubdtype(x.dtype, jnp.floating) else 0, atol=1e-5
        )


def test_a_step_of_rounds_is_one_program_with_donated_caches_that_nothing_copies() -> None:
    model = agreeing_model("eagle3")
    cfg = model.round_config(K)
    state, tables = state_of(cfg, model.params)
    compiled = rounds._rounds.jitted(cfg).lower(cfg, R, model.params, state, tables).compile()
    text, caches = compiled.as_text(), jax.tree.leaves((state.target_caches, state.draft.caches))
    assert text.count("ENTRY ") == 1 and not HOST.search(text) and not cache_copies(text, caches)
    trips = re.findall(r'"known_trip_count":{"n":"(\d+)"}', text)
    assert {str(R), str(K - 1)} <= set(trips)
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(x.nbytes for x in caches)


# ---- the engine


def table_of(seed: int) -> Any:
    return {"table": jnp.asarray(np.random.default_rng(seed).normal(size=(V, V)), jnp.float32)}


def engine(*, speculative: bool = True, spec: dict[str, Any] | None = None, **config: Any) -> LLM:
    tokenizer: Any = SimpleNamespace(
        eos_token_ids=(20,), decode=lambda ids: "".join(chr(65 + t) for t in ids)
    )
    return LLM(
        (ToyTarget(V), table_of(0)),
        (ToyDraft(V), table_of(0)) if speculative else None,
        SpeculativeConfig(method="eagle", num_speculative_tokens=K, **(spec or {}))
        if speculative
        else None,
        tokenizer=tokenizer,
        config=EngineConfig(
            **(
                {"max_model_len": LIMIT, "max_num_seqs": 3, "block_size": 4, "batch_buckets": (3,)}
                | config
            )
        ),
    )


KINDS = {
    "usual": {},
    "stopped": {"stop": ["AB", "C"], "stop_token_ids": (3, 9)},
    "scored": {"logprobs": 3, "prompt_logprobs": 2},
    "listed": {"logprobs": -1},
    "punished": {"presence_penalty": 0.5, "repetition_penalty": 1.3, "min_tokens": 3},
    "words": {
        "bad_words_token_ids": ((4, 5), (6,)),
        "logit_bias": {7: 2.0},
        "min_p": 0.05,
        "top_k": 9,
    },
}
KINDS["everything"] = {k: v for kind in KINDS.values() for k, v in kind.items()}


@pytest.mark.once
@pytest.mark.usefixtures("toy_families")
@pytest.mark.parametrize("kind", slow_unless(["usual", "everything"], KINDS))
def test_requests_of_every_kind_have_what_single_rounds_give_them(kind: str) -> None:
    """Tokens, texts, log-probabilities, counts and increments, sampled and greedy; more requests
    than run together, blocks for few."""
    prompts = random_prompts([1 + i % 7 for i in range(8)], seed=1, vocab=V)
    params = [SamplingParams(i % 2, seed=i, max_tokens=3 + 4 * i, **KINDS[kind]) for i in range(8)]
    found, scores = {}, {}
    for count in (1, R):
        llm, increments = engine(rounds_per_step=count, num_gpu_blocks_override=14), []
        outputs = llm.generate(prompts, params, callback=increments.append)
        each = [[i for i in increments if i.index == index] for index in range(8)]
        found[count] = [
            (
                o.outputs[0].token_ids,
                o.text,
                o.finish_reason,
                ranks(o.outputs[0].logprobs),
                ranks(o.prompt_logprobs),
                o.metrics,
            )
            for o in outputs
        ]
        scores[count] = [
            score.logprob
            for o in outputs
            for of_token in (*(o.outputs[0].logprobs or ()), *(o.prompt_logprobs or ()))
            for score in (of_token or {}).values()
        ]
        assert [[t for i in own for t in i.token_ids] for own in each] == [
            o.token_ids for o in outputs
        ]
        assert [len(own) for own in each] == [1 + o.metrics.num_drafts for o in outputs], (
            "one a round, and the prefill's"
        )
        assert all(g.pool.num_free == g.pool.num_blocks for g in llm.engine.scheduler.groups)
    assert found[1] == found[R]
    # A request may be scored by a program of more features, whose last bits differ.
    np.testing.assert_allclose(scores[1], scores[R], rtol=0, atol=2e-6)


def ranks(logprobs: Any) -> Any:
    """Token ids and ranks of each token's log-probabilities, in their order."""
    if logprobs is None:
        return None
    return [of and [(token, score.rank) for token, score in of.items()] for of in logprobs]


@pytest.mark.once
@pytest.mark.usefixtures("toy_families")
def test_greedy_text_is_plain_decodings_with_rounds_of_either_kind() -> None:
    prompts, params = (
        random_prompts([2, 5, 9, 3], vocab=V),
        SamplingParams(0.0, max_tokens=30, ignore_eos=True),
    )
    texts = [
        [
            o.token_ids
            for o in engine(speculative=speculative, rounds_per_step=count).generate(
                prompts, params
            )
        ]
        for speculative in (True, False)
        for count in (1, R)
    ]
    assert texts[0] == texts[1] == texts[2] == texts[3]


@pytest.mark.once
@pytest.mark.usefixtures("toy_families")
@pytest.mark.parametrize("depth", [0, 1])
def test_no_round_of_a_step_drafts_past_the_drafts_context(depth: int) -> None:
    """The draft is always right: every round until then gives K + 1 tokens, and every one after it
    a single one."""
    for longest in range(12, 16):
        llm, increments = engine(rounds_per_step=R, spec={"draft_max_model_len": longest}), []
        llm.engine.depth = depth
        llm.generate(
            [[1, 2]],
            SamplingParams(0.0, max_tokens=30, ignore_eos=True),
            callback=increments.append,
        )
        held, counts = (
            2,
            [len(i.token_ids) for i in increments[1:]],
        )  # in the target's cache before the round
        for count in counts[:-1]:
            assert count == min(K, max(0, longest + 1 - held)) + 1
            held += count
        assert 1 in counts and K + 1 in counts


@pytest.mark.once
@pytest.mark.usefixtures("toy_families")
def test_the_host_dispatches_once_for_all_rounds_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(0.0, max_tokens=40, ignore_eos=True, num_speculative_tokens=0)
    for count, dispatched in ((1, 39), (R, 10)):
        llm, calls = engine(rounds_per_step=count), []
        run = llm.runner.round
        monkeypatch.setattr(
            llm.runner,
            "round",
            lambda *a, calls=calls, run=run, **k: (calls.append(1), run(*a, **k))[1],
        )
        llm.generate([[1]], params)
        assert len(calls) == dispatched and llm.timings.num_rounds == 39


@pytest.mark.usefixtures("toy_families")
def test_one_round_a_step_is_the_single_rounds_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_rounds", lambda *_: pytest.fail("a loop of one round"))
    assert (
        len(
            engine(rounds_per_step=1)
            .generate([[1]], SamplingParams(0.0, max_tokens=9))[0]
            .token_ids
        )
        == 9
    )


@pytest.mark.parametrize(
    ("values", "on_gpu", "weight_bytes", "expected"),
    [
        ({}, True, (1 << 30) - 1, 4),
        ({}, True, 1 << 30, 2),
        ({}, True, (6 << 30) - 1, 2),
        ({}, True, 6 << 30, 1),
        ({}, False, 1, 1),
        ({"compilation": "step"}, True, 1, 1),
        ({"rounds_per_step": 3}, False, 6 << 30, 3),
        ({"rounds_per_step": 1}, True, 1, 1),
        ({"tensor_parallel_size": 2}, True, BELOW_BYTES_SHARED - 1, SEVERAL_SHARED),
        ({"tensor_parallel_size": 2}, True, (1 << 30) - 1, 4),
        ({"tensor_parallel_size": 2}, True, BELOW_BYTES_SHARED, 1),
        ({"tensor_parallel_size": 2}, False, 1, 1),
        ({"tensor_parallel_size": 2, "rounds_per_step": 1}, True, 1, 1),
    ],
)
def test_several_rounds_a_step_are_chosen_where_a_round_is_short(
    values: Any, on_gpu: bool, weight_bytes: int, expected: int
) -> None:
    assert (
        rounds_per_step(EngineConfig(**values), on_gpu=on_gpu, weight_bytes=weight_bytes)
        == expected
    )


@pytest.mark.parametrize(
    ("per_step", "compilation"),
    [(0, "round"), (True, "round"), (2.0, "round"), ("4", "round"), (2, "step"), (2, "eager")],
)
def test_a_number_of_rounds_that_cannot_be_is_named_in_one_sentence(
    per_step: Any, compilation: Any
) -> None:
    with pytest.raises(
        ConfigError, match="rounds_per_step: expected None or an integer of at least 1"
    ) as raised:
        EngineConfig(rounds_per_step=per_step, compilation=compilation)
    assert repr(per_step) in str(raised.value) and ". " not in str(raised.value)
