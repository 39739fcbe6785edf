"""Every parameter is checked when it is given, in one sentence; what a batch needs of its rounds
follows from its requests."""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import fields
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxspec.config import REFERENCE_OPS, CacheGroup, ConfigError, RoundConfig, SamplingFeatures
from jaxspec.engine.request import derive_seed
from jaxspec.sampling.params import SamplingParams, end_token_ids
from jaxspec.sampling.processors.processor import SampledRequest, Vocabulary
from jaxspec.sampling.rows import StateLayout, features_of, sampling_rows

# vLLM's defaults (vllm/sampling_params.py), where it has the parameter
VLLM = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "include_stop_str_in_output": False,
    "allowed_token_ids": None,
}

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": math.nan}, "temperature: expected a number of at least 0, got nan"),
    ({"temperature": True}, "temperature: expected a number of at least 0, got True"),
    ({"temperature": 1e-6}, "temperature: expected 0 (greedy) or at least 1e-5, got 1e-06"),
    ({"top_k": -2}, "top_k: expected an integer from 0 to 2**31 - 1 (0 or -1: off), got -2"),
    ({"top_k": 1.5}, "top_k: expected an integer"),
    ({"top_p": 0}, "top_p: expected a number in (0, 1], got 0"),
    ({"min_p": 1.1}, "min_p: expected a number from 0 to 1, got 1.1"),
    ({"min_p": math.nan}, "min_p: expected a number from 0 to 1, got nan"),
    ({"repetition_penalty": 0}, "repetition_penalty: expected a number from 0.01 to 100, got 0"),
    (
        {"repetition_penalty": math.inf},
        "repetition_penalty: expected a number from 0.01 to 100, got inf",
    ),
    ({"presence_penalty": 2.5}, "presence_penalty: expected a number from -2 to 2, got 2.5"),
    ({"frequency_penalty": "1"}, "frequency_penalty: expected a number from -2 to 2, got '1'"),
    ({"max_tokens": "16"}, "max_tokens: expected an integer of at least 1 or None, got '16'"),
    ({"logit_bias": [1]}, "logit_bias: expected numbers by token id, got [1]"),
    ({"logit_bias": {"a": 1}}, "logit_bias: expected token ids from 0 to 2**31 - 1, got 'a'"),
    (
        {"logit_bias": {1: 101}},
        "logit_bias: expected numbers from -100 to 100, got 101 for token 1",
    ),
    (
        {"logit_bias": {1: -math.inf}},
        "logit_bias: expected numbers from -100 to 100, got -inf for token 1",
    ),
    (
        {"allowed_token_ids": []},
        "allowed_token_ids: expected at least one id that is not banned, got ()",
    ),
    (
        {"allowed_token_ids": [3], "banned_token_ids": [3]},
        "allowed_token_ids: expected at least one id that is not banned, got (3,)",
    ),
    ({"allowed_token_ids": 5}, "allowed_token_ids: expected a list of token ids, got 5"),
    (
        {"banned_token_ids": [-1]},
        "banned_token_ids: expected token ids from 0 to 2**31 - 1, got [-1]",
    ),
    ({"stop_token_ids": "5"}, "stop_token_ids: expected a list of token ids, got '5'"),
    ({"stop_token_ids": b"ab"}, "stop_token_ids: expected a list of token ids, got b'ab'"),
    ({"banned_token_ids": {5: 1}}, "banned_token_ids: expected a list of token ids, got {5: 1}"),
    ({"stop": {"a": 1}}, "stop: expected a string or a list of strings, none of them empty, got {"),
    (
        {"bad_words_token_ids": 5},
        "bad_words_token_ids: expected lists of token ids, none of them empty, got 5",
    ),
    (
        {"allowed_token_ids": range(10**30)},
        "allowed_token_ids: expected a list of token ids, got range(0, 1000",
    ),
    ({"seed": 2**64}, "seed: expected a 64-bit integer or None, got 18446744073709551616"),
    ({"seed": 10**5000}, "seed: expected a 64-bit integer or None, got one int of too many digits"),
    ({"temperature": 10**400}, "temperature: expected a number of at least 0, got 1000"),
    ({"temperature": 1e39}, "temperature: expected at most 3.4e+38, got 1e+39"),
    ({"top_p": 10**5000}, "top_p: expected a number in (0, 1], got one int of too many digits"),
    (
        {"logit_bias": {1: 10**5000}},
        "logit_bias: expected numbers from -100 to 100, got one int of too many digits for token 1",
    ),
    ({"max_tokens": 2**31}, "max_tokens: expected at most 2**31 - 1 (None: no limit), got 2147483"),
    (
        {"min_tokens": 2**31, "max_tokens": None},
        "min_tokens: expected at most 2**31 - 1, got 2147483648",
    ),
    ({"stop": [10**5000]}, "stop: expected a string or a list of strings, none of them empty, got"),
    ({"max_tokens": 0}, "max_tokens: expected an integer of at least 1 or None, got 0"),
    ({"min_tokens": 17}, "min_tokens: expected an integer from 0 to max_tokens 16, got 17"),
    ({"min_tokens": -1}, "min_tokens: expected an integer of at least 0, got -1"),
    ({"ignore_eos": 1}, "ignore_eos: expected true or false, got 1"),
    (
        {"bad_words": "word"},
        "bad_words: expected a list of strings, none of them blank, got 'word'",
    ),
    (
        {"bad_words": ["a", " "]},
        "bad_words: expected a list of strings, none of them blank, got ['a', ' ']",
    ),
    ({"bad_words": [3]}, "bad_words: expected a list of strings, none of them blank, got [3]"),
    ({"bad_words": 3}, "bad_words: expected a list of strings, none of them blank, got 3"),
    (
        {"bad_words_token_ids": [[]]},
        "bad_words_token_ids: expected lists of token ids, none of them empty, got [[]]",
    ),
    ({"bad_words_token_ids": [3]}, "bad_words_token_ids: expected a list of token ids, got 3"),
    ({"stop": ""}, "stop: expected a string or a list of strings, none of them empty, got ''"),
    (
        {"stop": ["a", 5]},
        "stop: expected a string or a list of strings, none of them empty, got ['a', 5]",
    ),
    (
        {"include_stop_str_in_output": None},
        "include_stop_str_in_output: expected true or false, got None",
    ),
    ({"logprobs": 21}, "logprobs: expected an integer from 0 to 20, -1 for all or None, got 21"),
    ({"prompt_logprobs": -1}, "prompt_logprobs: expected an integer from 0 to 20 or None, got -1"),
    (
        {"prompt_logprobs": True},
        "prompt_logprobs: expected an integer from 0 to 20 or None, got True",
    ),
    ({"n": 0}, "n: expected an integer from 1 to 1024, got 0"),
    (
        {"n": 2, "temperature": 0},
        "n: expected 1 with temperature 0, whose texts would all be the same, got 2",
    ),
]


def test_the_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert {name: getattr(params, name) for name in VLLM} == VLLM
    assert (params.stop, params.stop_token_ids, params.logit_bias) == ((), (), {})
    assert features_of([params]) == SamplingFeatures()


@pytest.mark.parametrize(("values", "sentence"), WRONG, ids=[s[:60] for _, s in WRONG])
def test_a_wrong_value_is_refused_in_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        SamplingParams(**values)
    assert str(error.value).startswith(sentence) and "\n" not in str(error.value)


NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.sampled_from([2**31 - 1, 2**31, 2**63, 2**64 - 1, 10**400, np.int64(3), np.float32(0.5)]),
    st.floats(),
    st.floats(0, 1),
    st.sampled_from([None, True, "1", np.ones(()), 1j, object]),
)
FIELDS = [
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seed", "max_tokens", "min_tokens", "logprobs", "n"),
]


@given(
    st.dictionaries(st.sampled_from(FIELDS), NUMBERS, min_size=1, max_size=3),
    st.dictionaries(st.just(3), NUMBERS, max_size=1),
)
@example({"min_tokens": 2**31 - 1}, {})
@example({"temperature": 3.4e38, "seed": -(2**63)}, {3: 1e-300})
def test_any_number_is_refused_or_fits_the_arrays_of_the_device(
    values: dict[str, Any], bias: dict[int, Any]
) -> None:
    """Accepted values reach the rows of the state as finite numbers, after a prompt too."""
    try:
        params = SamplingParams(**{"max_tokens": None} | values, logit_bias=bias)
    except ConfigError:
        return
    seed = derive_seed(params.seed, 0)
    request = SampledRequest(params, seed, prompt_token_ids=[1] * 30)
    layout = StateLayout(Vocabulary(8, (7,))).fit(features_of([params]), [params])
    with warnings.catch_warnings(action="error"):
        rows = sampling_rows(layout, [request])
    for array in jax.tree.leaves(rows):
        assert np.isfinite(array).all()


def test_lists_and_single_strings_are_settled_and_the_whole_can_be_hashed() -> None:
    params = SamplingParams(
        stop="END", stop_token_ids=[np.int64(4)], allowed_token_ids=iter([1, 2]), logit_bias={3: 1}
    )  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids, params.allowed_token_ids) == (
        ("END",),
        (4,),
        (1, 2),
    )
    assert hash(params) == hash(
        SamplingParams(
            stop=["END"], stop_token_ids=(4,), allowed_token_ids=(1, 2), logit_bias={3: 1}
        )
    )
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]


def test_numpys_integers_are_as_good_as_pythons() -> None:
    """They would overflow: a seed is taken modulo 2**64, max_tokens is added to the prompt's
    length."""
    params = SamplingParams(
        seed=np.int64(5), max_tokens=np.uint8(200), n=np.int32(2), top_k=np.int8(3)
    )  # type: ignore[arg-type]
    assert params == SamplingParams(seed=5, max_tokens=200, n=2, top_k=3)
    assert all(type(x) is int for x in (params.seed, params.max_tokens, params.n, params.top_k))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"allowed_token_ids": [1, 50]}, "allowed_token_ids: expected token ids in 0..49, got 50"),
        ({"banned_token_ids": [50]}, "banned_token_ids: expected token ids in 0..49, got 50"),
        ({"logit_bias": {99: 1}}, "logit_bias: expected token ids in 0..49, got 99"),
        ({"stop_token_ids": [51]}, "stop_token_ids: expected token ids in 0..49, got 51"),
        (
            {"banned_token_ids": range(50)},
            "banned_token_ids: expected fewer than the vocabulary's 50, got all of them",
        ),
        (
            {"allowed_token_ids": [7, 8], "stop_token_ids": [8], "min_tokens": 1},
            "min_tokens: expected 0, since allowed_token_ids",
        ),
        (
            {"banned_token_ids": range(7), "allowed_token_ids": range(8), "min_tokens": 2},
            "min_tokens: expected 0, since",
        ),
        (
            {"bad_words_token_ids": [[1, 50]]},
            "bad_words_token_ids: expected token ids in 0..49, got 50",
        ),
        (
            {"bad_words_token_ids": [[t] for t in range(50)]},
            "bad_words: expected some token to be left after any text, got none after token ids []",
        ),
        (
            {"allowed_token_ids": [1, 2], "bad_words_token_ids": [[1, 2, 1], [2, 2]]},
            "bad_words: expected some token to be left after any text, got none after token ids "
            "[1, 2]",
        ),
        (
            {"allowed_token_ids": [1, 7], "bad_words_token_ids": [[1, 1]], "min_tokens": 3},
            "bad_words: expected some token to be left",
        ),
    ],
)
def test_ids_are_checked_against_the_vocabulary(values: dict[str, Any], sentence: str) -> None:
    """And a row of logits always keeps some token."""
    with pytest.raises(ConfigError) as error:
        SamplingParams(**values).check_vocabulary(50, (7,))
    assert str(error.value).startswith(sentence)
    SamplingParams(allowed_token_ids=[7, 8], min_tokens=1, stop_token_ids=[9]).check_vocabulary(
        50, (7,)
    )
    SamplingParams(
        allowed_token_ids=[1, 2], bad_words_token_ids=[[1, 1], [2, 2], [3, 1, 2]]
    ).check_vocabulary(50, (7,))
    SamplingParams(bad_words_token_ids=[[3, t] for t in range(49)]).check_vocabulary(50, ())


@pytest.mark.parametrize(
    ("values", "feature"),
    [
        ({"top_k": 3}, "truncation"),
        ({"top_p": 0.9}, "truncation"),
        ({"min_p": 0.1}, "min_p"),
        ({"repetition_penalty": 1.1}, "penalties"),
        ({"presence_penalty": -0.1}, "penalties"),
        ({"frequency_penalty": 0.1}, "penalties"),
        ({"logit_bias": {1: 1}}, "logit_bias"),
        ({"allowed_token_ids": [1]}, "logit_bias"),
        ({"banned_token_ids": [1]}, "logit_bias"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"bad_words": ["word"]}, "bad_words"),
        ({"bad_words_token_ids": [[1, 2]]}, "bad_words"),
        ({"logprobs": 0}, "logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ],
)
def test_a_batch_needs_what_any_of_its_requests_uses(values: dict[str, Any], feature: str) -> None:
    features = features_of([SamplingParams(0), SamplingParams(**values)])
    is_flag = feature in (f.name for f in fields(SamplingFeatures))
    processors = frozenset() if is_flag else frozenset({feature})
    flags = {feature: True} if is_flag else {}
    assert features == SamplingFeatures(processors=processors, **flags)
    assert features_of([SamplingParams(0)]) | features == features
    cfg = RoundConfig(
        target=None, target_groups=(CacheGroup(4, 64),), ops=REFERENCE_OPS
    ).with_features(features)
    used = ("sampled", feature if is_flag else "processors")
    assert [f.name for f in fields(SamplingFeatures) if getattr(cfg, f.name)] == [
        f.name for f in fields(SamplingFeatures) if f.name in used
    ]
    assert cfg.processors == processors


def test_rows_hold_a_requests_seed_and_its_stops_and_idle_rows_are_neutral() -> None:
    params = SamplingParams(stop_token_ids=[4], min_tokens=3, ignore_eos=True, top_k=-1)
    assert end_token_ids(params, (7, 4)) == (4, 7)
    features = features_of([params]) | SamplingFeatures(processors=frozenset({"truncation"}))
    rows = sampling_rows(
        StateLayout(Vocabulary(10, (7, 4))).fit(features, [params]),
        [SampledRequest(params, -2, [1, 2], [5])],
        batch=2,
    )
    assert rows.keys.tolist() == [[2**32 - 1, 2**32 - 2], [0, 0]]
    min_tokens, truncation = rows.processors["min_tokens"], rows.processors["truncation"]
    assert min_tokens.min_len.tolist() == [5, 0]
    assert min_tokens.stop_token_ids[0].tolist() == [4, 7, -1, -1]
    assert rows.temperature.tolist() == [1, 0]
    assert (truncation.top_k.tolist(), truncation.top_p.tolist()) == ([0, 0], [1, 1])


def test_a_field_may_be_assigned_and_its_value_is_checked() -> None:
    params = SamplingParams(temperature=0.8, min_tokens=2)
    params.max_tokens = np.int64(5)  # type: ignore[assignment]
    params.stop = "END"
    assert params == SamplingParams(temperature=0.8, min_tokens=2, max_tokens=5, stop=("END",))
    assert type(params.max_tokens) is int
    before = params.clone()
    for name, value, sentence in (
        ("max_tokens", 0, "max_tokens: expected an integer of at least 1 or None, got 0"),
        ("min_tokens", -1, "min_tokens: expected an integer of at least 0, got -1"),
        ("temperature", "hot", "temperature: expected a number of at least 0, got 'hot'"),
        ("logit_bias", {-1: 1.0}, "logit_bias: expected token ids"),
        ("max_token", 3, "of which max_tokens is the nearest, got 'max_token'"),
        ("guided_decoding", "json", "guided_decoding: expected None"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            setattr(params, name, value)
        assert params == before and hash(params) == hash(before)


def test_assignments_may_come_in_any_order() -> None:
    """As in vLLM: what two fields must fulfil together is checked when a request takes them."""
    params = SamplingParams()
    for name, value, sentence in (
        ("min_tokens", 20, "min_tokens: expected an integer from 0 to max_tokens 16, got 20"),
        ("max_tokens", 30, None),
        ("n", 2, None),
        ("temperature", 0, "n: expected 1 with temperature 0"),
        ("n", 1, None),
        ("banned_token_ids", [3], None),
        ("allowed_token_ids", [3], "allowed_token_ids: expected at least one id that is not"),
        ("banned_token_ids", [4], None),
    ):
        setattr(params, name, value)
        assert params.clone() == params  # a copy, as it is
        if sentence is None:
            params.checked_copy()
            continue
        with pytest.raises(ConfigError, match=sentence):
            params.checked_copy()
    expected = {"temperature": 0, "min_tokens": 20, "max_tokens": 30}
    assert params == SamplingParams(**expected, allowed_token_ids=[3], banned_token_ids=[4])


def test_vllms_values_that_change_nothing_stay_readable() -> None:
    given = SamplingParams(detokenize=True)  # type: ignore[call-arg]
    assigned = SamplingParams()
    setattr(assigned, "detokenize", True)  # noqa: B010
    for params in (given, assigned, assigned.clone()):
        assert getattr(params, "detokenize") is True  # noqa: B009
        assert params == SamplingParams() and hash(params) == hash(SamplingParams())


def test_a_copy_shares_nothing_that_can_change() -> None:
    params = SamplingParams(logit_bias={1: 2.0})
    copies = [params.clone(), copy.copy(params), copy.deepcopy(params)]
    params.logit_bias = {1: 3.0}
    assert all(each.logit_bias == {1: 2.0} for each in copies)
    copies[0].max_tokens = 3
    assert params.max_tokens == copies[1].max_tokens == 16
