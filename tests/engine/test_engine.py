"""The engine: order, ends, limits, seeds, metrics, and one clear sentence for bad input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, SamplingParams, SpeculativeConfig
from jaxspec.config import ConfigError, EngineConfig
from jaxspec.decode import programs, slots
from jaxspec.decode.verify import Verification
from jaxspec.drafts.ngram import NgramConfig
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.engine.request import Request
from tests.support.toys import PEAK, ToyDraft, ToyTarget

V, K, LIMIT = 32, 3, 40
GREEDY = SamplingParams(0.0, max_tokens=13)

pytestmark = pytest.mark.usefixtures("toy_families")


def counting_table(wrong_after: tuple[int, ...] = ()) -> Any:
    """After t comes t + 1 (mod V); after a token of wrong_after, 0."""
    table = np.zeros((V, V), np.float32)
    for t in range(V):
        table[t, 0 if t in wrong_after else (t + 1) % V] = PEAK
    return {"table": jnp.asarray(table)}


class Digits:
    """A tokenizer whose texts are numbers with blanks between."""

    eos_token_ids = (20,)

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def encode_chat(self, messages: Any, options: Any = None) -> list[int]:
        del options
        return [t for message in messages for t in self.encode(message["content"])]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        left_out = self.eos_token_ids if skip_special_tokens else ()
        return " ".join(str(t) for t in token_ids if t not in left_out)


def engine(
    *,
    wrong_after: tuple[int, ...] = (),
    speculative: bool = True,
    target: Any = None,
    rule: str = "probabilistic",
    tokenizer: Any = None,
    **config: Any,
) -> LLM:
    return LLM(
        (ToyTarget(V), target or counting_table()),
        (ToyDraft(V), counting_table(wrong_after)) if speculative else None,
        SpeculativeConfig(method="eagle", num_speculative_tokens=K, rejection_sample_method=rule)
        if speculative
        else None,
        tokenizer=tokenizer,
        config=EngineConfig(
            **({"max_model_len": LIMIT, "max_num_seqs": 3, "block_size": 16} | config)
        ),
    )


def counted(first: int, count: int) -> list[int]:
    return [(first + i) % V for i in range(count)]


# ---- order and ends


@pytest.mark.parametrize("speculative", [True, False])
def test_outputs_come_in_the_order_of_more_prompts_than_run_together(speculative: bool) -> None:
    llm = engine(speculative=speculative, wrong_after=(5, 17))
    prompts = [[i] * (1 + i % 4) for i in (11, 3, 29, 7, 0, 23, 15)]
    limits = [SamplingParams(0.0, max_tokens=n) for n in (1, 9, 4, 13, 2, 7, 5)]
    outputs = llm.generate(prompts, limits)
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [o.token_ids for o in outputs] == [
        counted(p[0] + 1, s.max_tokens) for p, s in zip(prompts, limits, strict=True)
    ]
    assert {o.finish_reason for o in outputs} == {"length"}


@pytest.mark.parametrize("start", range(8, 20))
def test_nothing_leaks_past_an_end_of_text_inside_an_accepted_window(start: int) -> None:
    """20 ends a text, wherever it stands in a round's tokens."""
    llm = engine(tokenizer=Digits())
    (output,) = llm.generate([[start]], SamplingParams(0.0, max_tokens=30))
    assert output.token_ids == list(range(start + 1, 21)) and output.finish_reason == "stop"
    assert output.text == " ".join(map(str, range(start + 1, 20)))


def test_stop_token_ids_end_a_request_and_ignore_eos_passes_over_the_end_of_text() -> None:
    llm = engine(tokenizer=Digits())
    both = [
        SamplingParams(0.0, max_tokens=30, stop_token_ids=(12, 14)),
        SamplingParams(0.0, max_tokens=15, ignore_eos=True),
        SamplingParams(0.0, max_tokens=15, ignore_eos=True, stop_token_ids=(23,)),
    ]
    outputs = llm.generate([[9], [10], [11]], both)
    assert [o.token_ids for o in outputs] == [[10, 11, 12], counted(11, 15), list(range(12, 24))]
    assert [o.finish_reason for o in outputs] == ["stop", "length", "stop"]


def test_a_stop_token_from_prefill_ends_a_request_at_once() -> None:
    (output,) = engine(tokenizer=Digits()).generate([[19]], GREEDY)
    assert (
        output.token_ids == [20]
        and output.finish_reason == "stop"
        and output.metrics.num_drafts == 0
    )


@pytest.mark.parametrize("speculative", [True, False])
def test_max_tokens_1_and_a_prompt_one_short_of_the_limit_give_one_token(speculative: bool) -> None:
    llm = engine(speculative=speculative)
    short, long = llm.generate(
        [[1], [2] * (LIMIT - 1)],
        [SamplingParams(0.0, max_tokens=1), SamplingParams(0.0, max_tokens=99)],
    )
    assert (short.token_ids, short.finish_reason) == ([2], "length")
    assert (long.token_ids, long.finish_reason) == ([3], "length")


@pytest.mark.parametrize("length", [1, LIMIT // 2, LIMIT - 5, LIMIT - 2])
def test_a_request_ends_at_max_model_len(length: int) -> None:
    (output,) = engine(wrong_after=(5,)).generate(
        [[3] * length], SamplingParams(0.0, max_tokens=1000)
    )
    assert len(output.token_ids) == LIMIT - length and output.finish_reason == "length"
    assert output.token_ids == counted(4, LIMIT - length)


def test_max_tokens_none_leaves_max_model_len() -> None:
    (output,) = engine().generate([[3] * 7], SamplingParams(0.0, max_tokens=None))
    assert output.token_ids == counted(4, LIMIT - 7) and output.finish_reason == "length"


def test_one_prompt_texts_and_chats_are_understood() -> None:
    llm = engine(tokenizer=Digits())
    two = SamplingParams(0.0, max_tokens=2)
    chat = [{"role": "user", "content": "1 2"}]
    for prompts, texts in (
        ("7", ["8 9"]),
        ([7], ["8 9"]),
        (["7", "1 2"], ["8 9", "3 4"]),
        (chat, ["3 4"]),
        ([chat, chat], ["3 4"] * 2),
    ):
        assert [o.text for o in llm.generate(prompts, two)] == texts
    assert llm.chat(chat, two)[0].text == "3 4"


@pytest.mark.parametrize("array", [np.array, jnp.array, iter])
def test_token_ids_may_come_as_an_array_or_an_iterator(array: Any) -> None:
    llm, two = engine(), SamplingParams(0.0, max_tokens=2)
    for prompts in (array([7]), [array([7])], [{"prompt_token_ids": array([7])}]):
        assert [o.token_ids for o in llm.generate(prompts, two)] == [[8, 9]]


# ---- seeds


@pytest.mark.parametrize("rule", ["strict", "probabilistic", "block"])
def test_a_seed_gives_the_same_text_again_and_another_seed_another(rule: str) -> None:
    rng = np.random.default_rng(0)
    llm = engine(target={"table": jnp.asarray(rng.normal(size=(V, V)), jnp.float32)}, rule=rule)

    def text(seed: int | None, prompts: int = 1) -> list[int]:
        others = [SamplingParams(1.0, seed=99, max_tokens=20)] * (prompts - 1)
        return llm.generate(
            [[1], [2], [3]][:prompts], [SamplingParams(1.0, seed=seed, max_tokens=20), *others]
        )[0].token_ids

    assert text(7) == text(7) == text(7, prompts=3)
    assert len({tuple(text(seed)) for seed in (7, 8, 7 + 2**32, -7, 2**63)}) == 5, (
        "both halves of a seed count"
    )
    assert text(None) != text(None)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_requests_take_the_same_rounds_and_drafts_again(temperature: float) -> None:
    rng = np.random.default_rng(0)
    llm = engine(target={"table": jnp.asarray(rng.normal(size=(V, V)), jnp.float32)})
    params = SamplingParams(temperature, seed=5, max_tokens=20)
    runs = []
    for _ in range(2):
        llm.reset_metrics()
        outputs = llm.generate([[1], [2], [3]], params)
        runs.append((llm.metrics.to_dict(), [o.token_ids for o in outputs], llm.timings.num_rounds))
    assert runs[0] == runs[1] and runs[0][0]["num_drafts"] > 0


# ---- metrics


def test_metrics_of_an_example_worked_out_by_hand() -> None:
    """The draft is wrong after 5 and 8. From 0, prefill gives 1, and rounds give 2 3 4 5 | 6 | 7 8
    9 | 10 11 12 13."""
    llm = engine(wrong_after=(5, 8))
    (output,) = llm.generate([[0]], GREEDY)
    m = output.metrics
    assert output.token_ids == counted(1, 13)
    assert (m.num_drafts, m.num_draft_tokens, m.num_accepted_tokens) == (4, 12, 3 + 0 + 2 + 3)
    assert m.acceptance_histogram == [1, 0, 1, 2] and m.accepted_per_position == [3, 3, 2]
    assert m.per_position_acceptance == [0.75, 0.75, 0.5]
    assert m.acceptance_rate == pytest.approx(8 / 12) and m.mean_acceptance_length == pytest.approx(
        3.0
    )
    assert vars(llm.metrics) == vars(m)


def test_metrics_count_a_last_round_whole_as_vllm_does() -> None:
    """Two tokens fewer are asked for; what the last round accepted is counted all the same."""
    (output,) = engine(wrong_after=(5, 8)).generate([[0]], SamplingParams(0.0, max_tokens=11))
    assert output.token_ids == counted(1, 11) and output.metrics.num_accepted_tokens == 8


def test_drafts_past_a_stop_string_are_not_counted() -> None:
    """Prefill gives 1, rounds give 2 3 4 5 | 6 7 8 9, and 7 ends the text."""
    (output,) = engine(tokenizer=Digits()).generate(
        [[0]], SamplingParams(0.0, max_tokens=30, stop="7")
    )
    assert (
        output.token_ids == counted(1, 7)
        and output.text == "1 2 3 4 5 6 "
        and output.finish_reason == "stop"
    )
    assert (
        output.metrics.acceptance_histogram == [0, 0, 1, 1]
        and output.metrics.num_accepted_tokens == 3 + 2
    )


def test_engine_metrics_are_the_sum_over_requests_and_can_be_reset() -> None:
    llm = engine(wrong_after=(5, 8, 20))
    outputs = llm.generate([[0], [4], [19], [7], [30]], GREEDY)
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert getattr(llm.metrics, name) == sum(getattr(o.metrics, name) for o in outputs) > 0
    llm.reset_metrics()
    assert (
        llm.metrics.num_drafts == 0
        and llm.metrics.mean_acceptance_length == 1.0
        and llm.timings.num_rounds == 0
    )


def test_a_draft_that_is_always_right_is_accepted_whole_in_every_compilation_mode() -> None:
    for mode in ("round", "step", "eager"):
        llm = engine(compilation=mode)
        (output,) = llm.generate([[0]], GREEDY)
        assert output.token_ids == counted(1, 13) and output.metrics.acceptance_histogram == [
            0,
            0,
            0,
            3,
        ]


# ---- bad input

PROMPTS = {
    "prompt 0: expected at least one token, got an empty prompt": [[]],
    "prompt 1: expected at least one token": [[1], []],
    "prompt 0: expected token ids in 0..31, got 32": [[1, 32]],
    "prompt 2: expected token ids in 0..31, got -1": [[1], [2], [-1, 3]],
    f"prompt 0: expected fewer tokens than max_model_len {LIMIT}, got {LIMIT}": [[1] * LIMIT],
    "prompt 0: expected token ids (the target comes without a tokenizer), got text": ["hello"],
}
SETTINGS: dict[str, Any] = {
    "temperature: expected a number of at least 0, got nan": lambda: SamplingParams(math.nan),
    "temperature: expected a number of at least 0, got -0.5": lambda: SamplingParams(-0.5),
    "temperature: expected a number of at least 0, got inf": lambda: SamplingParams(math.inf),
    "top_p: expected a number in (0, 1], got 0": lambda: SamplingParams(top_p=0),
    "top_p: expected a number in (0, 1], got 1.5": lambda: SamplingParams(top_p=1.5),
    "top_p: expected a number in (0, 1], got nan": lambda: SamplingParams(top_p=math.nan),
    "top_k: expected an integer": lambda: SamplingParams(top_k=-2),
    "max_tokens: expected an integer of at least 1 or None, got 0": lambda: SamplingParams(
        max_tokens=0
    ),
    "seed: expected a 64-bit integer": lambda: SamplingParams(seed=2**64),
    "stop_token_ids: expected token ids": lambda: SamplingParams(stop_token_ids=(-1,)),
    "num_speculative_tokens: expected an integer of at least 1, got 0": lambda: SpeculativeConfig(
        num_speculative_tokens=0
    ),
    "num_speculative_tokens: expected an integer of at least 1, got -3": lambda: SpeculativeConfig(
        num_speculative_tokens=-3
    ),
    "method: expected one of eagle, eagle3": lambda: LLM.from_pretrained(
        speculative=SpeculativeConfig(method="medusa")
    ),
    "rejection_sample_method: expected one of": lambda: SpeculativeConfig(
        rejection_sample_method="lenient"
    ),
    "draft_sample_method: expected one of": lambda: SpeculativeConfig(draft_sample_method="beam"),
    "speculative config: expected known settings, of which num_speculative_tokens is": lambda: (
        SpeculativeConfig.from_dict({"model": "x", "num_tokens": 3})
    ),
    "compilation: expected one of round, step, eager, got 'fast'": lambda: EngineConfig(
        compilation="fast"
    ),  # type: ignore[arg-type]
    "kv_cache_dtype: expected one of auto, bfloat16, float32, fp8, got 'int8'": lambda: (
        EngineConfig(kv_cache_dtype="int8")
    ),  # type: ignore[arg-type]
    "kv_cache_dtype: expected one of auto, bfloat16, float32, fp8, got None": lambda: EngineConfig(
        kv_cache_dtype=None
    ),  # type: ignore[arg-type]
    "max_num_seqs: expected an integer of at least 1, got 0": lambda: EngineConfig(max_num_seqs=0),
    "block_size: expected an integer of at least 1, got True": lambda: EngineConfig(
        block_size=True
    ),
    "batch_buckets: expected batch sizes": lambda: EngineConfig(
        max_num_seqs=8, batch_buckets=(1, 4)
    ),
    "dtype: expected one of auto, float32, bfloat16, got 'int8'": lambda: LLM.from_pretrained(
        dtype="int8"
    ),
    "mxfp4: expected auto, packed or dequantised, got 'no'": lambda: LLM.from_pretrained(
        mxfp4="no"
    ),
    "sampling_params: expected one for all or one for each of 2": lambda: engine().generate(
        [[1], [2]], [GREEDY]
    ),
    "sampling_params: expected SamplingParams, or a list of them, got 'greedy'": lambda: (
        engine().generate([[1]], "greedy")
    ),  # type: ignore
    "prompt 1: sampling_params: expected SamplingParams, got None": lambda: engine().generate(
        [[1], [2]], [GREEDY, None]
    ),  # type: ignore
    "prompt 1: stop_token_ids: expected token ids in 0..31, got 32": lambda: engine().generate(
        [[1], [2]], [GREEDY, SamplingParams(stop_token_ids=[V])]
    ),
    "method: expected 'ngram', which the given draft is (or none, to read it from the draft), "
    "got 'eagle3'": lambda: LLM(
        (ToyTarget(V), {}), (NgramConfig(V, 3, 1), {}), SpeculativeConfig(method="eagle3")
    ),
    "draft_sliding_window: expected it only with method 'eagle'": lambda: LLM(
        (ToyTarget(V), {}), (NgramConfig(V, 3, 1), {}), SpeculativeConfig(draft_sliding_window=8)
    ),
    "draft and speculative: expected both or neither": lambda: LLM(
        (ToyTarget(V), {}), None, SpeculativeConfig()
    ),
    "max_model_len: expected at most the target's": lambda: LLM(
        (ToyTarget(V, max_position_embeddings=16), {})
    ),
}


def assert_one_sentence(raised: pytest.ExceptionInfo[ConfigError], message: str) -> None:
    text = str(raised.value)
    assert text.startswith(message)
    assert "expected" in text and "\n" not in text and ". " not in text


@pytest.mark.parametrize("message", PROMPTS)
def test_a_bad_prompt_is_named_in_one_sentence_before_anything_runs(
    message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine()
    monkeypatch.setattr(llm, "_run", lambda *_: pytest.fail("a batch ran"))
    with pytest.raises(ConfigError) as raised:
        llm.generate(PROMPTS[message], GREEDY)
    assert_one_sentence(raised, message)


@pytest.mark.parametrize("message", SETTINGS)
def test_a_bad_setting_is_named_in_one_sentence(message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        SETTINGS[message]()
    assert_one_sentence(raised, message)


def test_no_prompts_give_no_outputs() -> None:
    assert engine().generate([], GREEDY) == []


def test_scores_have_the_text_of_each_token_by_itself() -> None:
    class WithoutSeven(Digits):
        """Knows no token 7."""

        def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
            if token_ids == [7]:
                raise KeyError(7)
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    scored = SamplingParams(0.0, max_tokens=3, logprobs=2, prompt_logprobs=1)
    [output] = engine(tokenizer=WithoutSeven()).generate([[6, 17, 18]], scored)
    places = [*(output.prompt_logprobs or [])[1:], *(output.logprobs or [])]
    assert (output.prompt_logprobs or [1])[0] is None and output.token_ids == [19, 20]
    for place in places:
        for token, score in place.items() if place else ():
            assert score.decoded_token == (None if token == 7 else str(token))  # 20 ends a text
    assert any(7 in place for place in places if place)
    plain = SimpleNamespace(eos_token_ids=(), decode=lambda ids: f"{ids}")  # knows no keyword
    [output] = engine(tokenizer=plain).generate([[6, 17, 18]], scored)
    assert (output.logprobs or [])[0][19].decoded_token == "[19]"
    [output] = engine().generate([[6, 17, 18]], scored)
    assert {s.decoded_token for place in output.logprobs or [] for s in place.values()} == {None}


def test_a_tokenizer_is_any_object_with_its_methods() -> None:
    assert (
        engine(tokenizer=SimpleNamespace(eos_token_ids=(), decode=lambda ids: f"{len(ids)}"))
        .generate([[1]], GREEDY)[0]
        .text
        == "13"
    )


# --- what tools use ------------------------------------------------------------------------------


def test_rounds_are_observed_with_the_requests_whose_rows_they_have() -> None:
    llm = engine(wrong_after=(5, 9), rounds_per_step=2)
    seen: dict[Request, list[int]] = {}

    def observe(verification: Verification, rows: Sequence[tuple[Request, int]]) -> None:
        assert isinstance(verification.num_sampled, np.ndarray)
        assert verification.output_tokens.shape[0] == 2  # rounds of a step
        for request, row in rows:
            tokens = verification.output_tokens[:, row]
            seen.setdefault(request, []).extend(tokens[tokens >= 0].tolist())

    llm.engine.on_rounds = observe
    outputs = llm.generate([[1], [7], [3, 4]], GREEDY)
    assert sorted(request.index for request in seen) == [0, 1, 2]
    for request, tokens in seen.items():
        written = outputs[request.index].outputs[0].token_ids
        assert [written[0], *tokens][: len(written)] == written  # the first one is prefill's


PROCESSED = SamplingParams(0.5, top_p=0.9, stop_token_ids=[3], logit_bias={1: 2.0})


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (GREEDY, ["prefill_program"]),
        (SamplingParams(0.5), ["prefill_program"]),
        (PROCESSED, ["admit_packed", "take_rows", "prefill_program"]),
    ],
    ids=["greedy", "sampled", "processed"],
)
def test_few_programs_with_one_array_of_the_host_each_run_before_a_first_token(
    params: SamplingParams, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each program and each copy takes time before the first token."""
    llm, launched = engine(), []
    llm.generate([1, 2, 3], params)

    def noted(module: Any, name: str) -> None:
        program = getattr(module, name)

        def run(*args: Any) -> Any:
            arrays = [x for x in jax.tree.leaves(args) if isinstance(x, np.ndarray)]
            assert len(arrays) == 1, name
            launched.append(name)
            return program(*args)

        monkeypatch.setattr(module, name, run)

    for name in ("admit_packed", "take_rows", "move", "deactivate"):
        noted(slots, name)
    noted(programs, "prefill_program")
    assert next(llm.stream([1, 2, 3], params)).token_ids
    assert launched == expected


def test_an_engine_goes_on_from_a_state_made_elsewhere() -> None:
    one, other = engine(max_num_seqs=1), engine(max_num_seqs=1)
    [request] = one.make_requests([[1, 2, 3]], GREEDY)
    one.engine.add(request)
    one.engine.step()
    cached, following = request.all_token_ids[:-1], request.all_token_ids[-1]
    later = Request(cached, GREEDY, 6, draft_limit=K, metrics=SpecDecodeMetrics(K))
    with pytest.raises(ConfigError, match="expected no requests in the engine, got some that run"):
        one.engine.set_state(one.runner.resident.state, [later], [request.blocks[0].blocks])
    other.engine.set_state(one.engine.take_state(), [later], [request.blocks[0].blocks])
    while other.engine.has_requests:
        other.engine.step()
    assert later.token_ids == counted(following + 1, 6)
    other.engine.take_state()
    with pytest.raises(AssertionError, match="expected a state, got none"):
        other.engine.take_state()
    assert other.generate([[1]], GREEDY)[0].token_ids == counted(2, 13)  # with a new state
