"""bad_words through the engine: as the tokenizer writes them, as vLLM counts them, and at no cost
to who has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, EngineConfig, SamplingParams, SpeculativeConfig
from jaxspec.config import ConfigError
from jaxspec.engine.inputs import encode_words
from jaxspec.sampling.logits import observe_tokens
from jaxspec.sampling.processors.bad_words import BadWords
from jaxspec.sampling.processors.processor import SampledRequest, Vocabulary
from jaxspec.sampling.rows import StateLayout, change_layout, features_of, sampling_rows
from tests.support.compilations import counting_compilations
from tests.support.toys import ToyDraft, ToyTarget

V, K = 24, 3
RNG = np.random.default_rng(1)
TABLE = {"table": jnp.asarray(2 * RNG.normal(size=(V, V)), jnp.float32)}
PROMPTS = [[1, 2, 3], [4, 5]]
PAIRS = [(a, b) for a in range(V) for b in range(V) if (a + b) % 3 == 0]

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("toy_families")]


class Letters:
    """A tokenizer whose tokens are letters (0 to 11) and letters with a blank before (12 to 23);
    blanks of their own are lost."""

    eos_token_ids = ()

    def encode_word(self, text: str) -> list[int]:
        return [
            ord(c) - ord("a") + 12 * (i > 0 and text[i - 1] == " ")
            for i, c in enumerate(text)
            if c != " "
        ]

    encode = encode_word

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(" " * (t >= 12) + chr(ord("a") + t % 12) for t in ids)


def engine(*, tokenizer: Any = None, speculative: bool = True, **config: Any) -> LLM:
    settings = {
        "max_model_len": 64,
        "max_num_seqs": 2,
        "batch_buckets": (2,),
        "block_size": 16,
        "max_num_batched_tokens": 32,
    } | config
    return LLM(
        (ToyTarget(V), TABLE),
        (ToyDraft(V), TABLE) if speculative else None,
        SpeculativeConfig(method="eagle", num_speculative_tokens=K) if speculative else None,
        tokenizer=tokenizer,
        eos_token_ids=(),
        config=EngineConfig(**settings),
    )


@pytest.fixture
def llm() -> LLM:
    return engine(tokenizer=Letters())


def test_a_word_has_the_tokens_that_vllm_gives_it() -> None:
    """After a blank only where that begins with another token and has as many; blanks before it are
    not looked at."""
    table = {
        "cat": [3],
        " cat": [8],
        "dog": [4, 5],
        " dog": [9, 5],
        "ox": [6, 7],
        " ox": [10],
        "ant": [1, 2],
        " ant": [1, 3],
        "no": [],
        " no": [0],
    }

    class Table(Letters):
        def encode_word(self, text: str) -> list[int]:
            return table[text]

    tokenizer: Any = Table()
    assert encode_words(["cat", "  dog"], tokenizer) == ((3,), (8,), (4, 5), (9, 5))
    assert encode_words(["ox", "ant"], tokenizer) == ((6, 7), (1, 2))
    with pytest.raises(
        ConfigError, match="bad_words: expected words of at least one token, got 'no'"
    ):
        encode_words(["no"], tokenizer)


def test_a_target_without_a_tokenizer_takes_words_as_token_ids() -> None:
    llm = engine()
    with pytest.raises(
        ConfigError,
        match=(
            r"prompt 0: bad_words: expected a target with a tokenizer \(or "
            r"bad_words_token_ids\), got none"
        ),
    ):
        llm.generate(PROMPTS, SamplingParams(0.0, bad_words=["a"]))
    with pytest.raises(ConfigError, match="bad_words: expected a target with a tokenizer"):
        llm.warmup(sampling_params=[SamplingParams(0.0, bad_words=["a"])])


def test_words_do_not_appear_in_a_text_that_had_them_and_a_prompt_begins_none(llm: LLM) -> None:
    free = llm.generate(PROMPTS, SamplingParams(0.0, max_tokens=12))
    first = free[0].token_ids
    words = [Letters().decode(first[i : i + n]) for i, n in ((1, 1), (4, 3))]
    for temperature in (0.0, 1.0):
        for output in llm.generate(
            PROMPTS, SamplingParams(temperature, seed=1, max_tokens=30, bad_words=words)
        ):
            assert not [w for w in words if w in output.text or " " + w.strip() in output.text], (
                words,
                output.text,
            )
    # The word whose beginning is the prompt's end may follow it, and does; in the text it may not.
    word = (PROMPTS[0][-1], first[0])
    assert (
        llm.generate(PROMPTS[0], SamplingParams(0.0, max_tokens=12, bad_words_token_ids=[word]))[
            0
        ].token_ids[0]
        == first[0]
    )
    inside = tuple(first[1:4])
    others = llm.generate(
        PROMPTS[0], SamplingParams(0.0, max_tokens=12, bad_words_token_ids=[inside])
    )[0].token_ids
    assert others[:3] == first[:3] and others[3] != first[3]


def test_longer_words_of_a_newcomer_leave_the_texts_of_who_runs_as_they_are() -> None:
    """The state's words grow while a request that has words is between its first token and its
    last."""
    words = [PAIRS[:100], [(a, a + 1, a + 2, a + 3, a + 4) for a in range(15)] + PAIRS, PAIRS[5:9]]
    params = [
        SamplingParams(0.0, max_tokens=n, bad_words_token_ids=w)
        for n, w in zip((40, 30, 3), words, strict=True)
    ]
    prompts = [[1, 2], [3], [5, 6]]
    order = [0, 2, 1]  # the last one comes when the second has ended
    together = engine().generate([prompts[i] for i in order], [params[i] for i in order])
    plain = engine(speculative=False)
    for i, output in zip(order, together, strict=True):
        assert output.token_ids == plain.generate(prompts[i], params[i])[0].token_ids
        found = list(zip(*(output.token_ids[n:] for n in range(2)), strict=False))
        assert not set(found) & {w for w in words[i] if len(w) == 2}


def test_the_last_tokens_are_those_of_the_text_however_they_come() -> None:
    """Some, none, or more than are kept in a round; and longer words push none out."""
    params = [
        SamplingParams(0.0, bad_words_token_ids=[[1, 2, 3, 4]]),
        SamplingParams(0.0, bad_words_token_ids=[[5, 6]]),
    ]
    features = features_of(params)
    texts = [[7, 8], []]
    layout = StateLayout(Vocabulary(V), features.processors, {"bad_words": (4,)})
    requests = [SampledRequest(p, 0, [9], text) for p, text in zip(params, texts, strict=True)]
    state = jax.tree.map(jnp.asarray, sampling_rows(layout, requests))
    for tokens in (
        [[3, -1, -1], [1, 2, 3]],
        [[-1, -1, -1], [4, 5, -1]],
        [[10, 11, 12], [-1, -1, -1]],
        [[13, 14, 15], [6, -1, -1]],
    ):
        state = observe_tokens(features, state, jnp.asarray(tokens, jnp.int32))
        texts = [
            [*text, *(t for t in new if t >= 0)] for text, new in zip(texts, tokens, strict=True)
        ]
        assert state.processors["bad_words"].recent.tolist() == [
            ([-1] * 3 + text)[-3:] for text in texts
        ]
    longer = replace(layout, sizes={"bad_words": (8,)})
    larger = change_layout(state, longer)
    wider = larger.processors["bad_words"]
    assert wider.recent.tolist() == [[-1] * 4 + text[-3:] for text in texts]
    assert wider.token_ids.tolist() == [[1, 2, 3, 4, *[-1] * 4], [5, 6, *[-1] * 6]]
    again = change_layout(larger, layout)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), again, state))


def sizes_of(layout: StateLayout) -> int:
    return layout.sizes["bad_words"][0]


def test_the_state_has_the_sum_of_the_words_and_shrinks_when_they_are_gone() -> None:
    """Not the product of the number of words and the longest one."""
    long = SamplingParams(0.0, bad_words_token_ids=[range(2000)])
    many = SamplingParams(0.0, bad_words_token_ids=[[i % V] for i in range(2000)])
    short = SamplingParams(0.0, bad_words_token_ids=[[1, 2]])
    features = features_of([long])
    layout = StateLayout(Vocabulary(V)).fit(features, [long, many, short])
    assert sizes_of(layout) == 2048
    rows = sampling_rows(layout, [SampledRequest(p) for p in (long, many, short)])
    held = sum(a.nbytes for a in jax.tree.leaves(rows.processors["bad_words"]))
    assert held < 3 * 4 * 4 * 2048
    assert sizes_of(layout.fit(features, [short])) == 32
    half = SamplingParams(0.0, bad_words_token_ids=[range(1000)])
    assert sizes_of(layout.fit(features, [half])) == 2048  # no program more for little memory
    warmed = layout.with_room([half])
    assert sizes_of(warmed.fit(features, [short])) == 2048 // 2


def test_long_and_many_words_change_no_neighbour_and_the_engine_goes_on_after_them() -> None:
    llm = engine(max_model_len=64)
    short = SamplingParams(0.0, max_tokens=12, bad_words_token_ids=PAIRS[:4])
    huge = SamplingParams(0.0, max_tokens=6, bad_words_token_ids=[[1] * 300, *PAIRS])
    alone = llm.generate(PROMPTS[0], short)[0].token_ids
    for mixture in ([short, huge], [huge, short], [short, short]):
        together = llm.generate([PROMPTS[0]] * 2, mixture)
        assert [o.token_ids for o, p in zip(together, mixture, strict=True) if p is short] == [
            alone
        ] * mixture.count(short)
    recent = llm.runner.resident.state.sampling.processors["bad_words"].recent
    assert recent.shape == (2, 31)


@pytest.mark.parametrize(("where", "tokens"), [("row", 32), ("arrays", 32), ("arrays", 128)])
def test_a_request_without_memory_for_its_words_fails_alone(
    where: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the host (its row) and on the device (larger arrays for all).

    tokens: of a prefill call, with room for one of the prompts or for all
    """
    llm = engine(max_num_seqs=3, batch_buckets=(4,), max_num_batched_tokens=tokens)
    short = SamplingParams(0.0, max_tokens=8, bad_words_token_ids=PAIRS[:4])
    plain = SamplingParams(0.0, max_tokens=8)
    # It has more stop tokens than the arrays of the others have columns.
    stops = range(15, V)
    huge = SamplingParams(0.0, max_tokens=8, bad_words_token_ids=PAIRS, stop_token_ids=stops)
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[1]]
    params = [short, huge, plain]
    expected = [llm.generate(*both)[0].token_ids for both in zip(prompts, params, strict=True)]

    def broken(self: BadWords, *args: Any) -> Any:
        sizes = args[-1]
        if sizes[0] > 32 and (where == "arrays" or args[0].params.bad_words_token_ids == huge_ids):
            raise MemoryError("no room")
        return kept(self, *args)

    name = "resize" if where == "arrays" else "init"
    kept, huge_ids = getattr(BadWords, name), huge.bad_words_token_ids
    with monkeypatch.context() as patch:
        patch.setattr(BadWords, name, broken)
        llm.generate(PROMPTS[0], short)  # so that arrays of words exist and have to grow
        first = llm.generate(prompts, params)
    assert [first[0].token_ids, first[2].token_ids] == [expected[0], expected[2]]
    assert len(first[1].token_ids) == (tokens == 128)  # its prompt was prefilled
    assert [o.outputs[0].finish_reason for o in first] == ["length", "error", "length"]
    assert str(first[1].outputs[0].error) == (
        "sampling_params: expected memory for the request's features (bad_words), got no room"
    )
    later = llm.generate(prompts, params)
    assert [o.token_ids for o in later] == expected


def test_nothing_compiles_after_warm_up_with_words_and_nothing_else_changes() -> None:
    llm = engine(max_model_len=32)
    free, bad = (
        SamplingParams(0.0, max_tokens=8),
        SamplingParams(0.0, max_tokens=8, bad_words_token_ids=[*PAIRS[:9], [1, 2, 3, 4, 5]]),
    )
    llm.warmup(sampling_params=[free, bad])
    with counting_compilations() as compiled:
        for mixture in ([free, free], [bad, free], [bad, bad], [free, free]):
            llm.generate(PROMPTS, mixture)
    assert not compiled
    with (
        counting_compilations() as compiled
    ):  # more words than it was warmed for compile once; who has none runs what he ran
        llm.generate(PROMPTS, SamplingParams(0.0, max_tokens=8, bad_words_token_ids=PAIRS))
    assert compiled
    with counting_compilations() as compiled:
        llm.generate(PROMPTS, [free, free])
    assert not compiled
