"""Random keywords and values of wrong types: a ConfigError comes back, or nothing is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec import LLM, ConfigError, EngineConfig, SamplingParams, SpeculativeConfig
from jaxspec.config import keys
from jaxspec.loading import load_tokenizer, pretrained
from tests.commands.conftest import write_target
from tests.engine.test_engine import ToyTarget, V, counting_table, engine

pytestmark = pytest.mark.once

# The same cases in every run; `make test-fuzz` is for others.
SETTINGS = settings(max_examples=300, deadline=None, derandomize=True, database=None)
SIMPLE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, 2, -1, 16, 2**31, 2**63, 2**64, 10**400]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["auto", "eagle", "eagle3", "mtp", "ngram", "strict", "float32", "round", "a"]),
    st.binary(max_size=4),
)
ODD = st.sampled_from(
    [
        object(),
        int,
        len,
        1j,
        {1, 2},
        range(3),
        np.int32(3),
        np.float32(0.5),
        np.arange(3),
        np.zeros((2, 2)),
        np.array("a"),
        np.array(None),
        Path("a"),
        iter([1]),
    ]
)


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Incomparable:
    def __eq__(self, _: object) -> bool:
        raise RuntimeError("no equality")

    __hash__ = object.__hash__


class Exhausting:
    """An iterable that fails, which looks like an array too."""

    def __iter__(self) -> Any:
        raise RuntimeError("no items")

    def tolist(self) -> list[Any]:
        raise RuntimeError("no list")


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


# Values that fail when they are printed, compared or iterated over, each with a reason of its own.
HOSTILE: list[Any] = [
    10**5000,  # Python prints no integer of more than 4,300 digits
    -(10**5000),
    [10**5000],
    {"a": 10**5000},
    {10**5000: 1},
    nested(100_000),
    {"a": nested(100_000)},
    Unprintable(),
    [Unprintable()],
    Incomparable(),
    Exhausting(),
    range(10**30),
    np.zeros(0),
    np.zeros(2, dtype=[("a", int)]),
    np.ma.array([1, 2], mask=[True, False]),
    b"ab",
    bytearray(b"ab"),
    memoryview(b"ab"),
    "x" * 5000,  # no file has such a name
    "~no-such-user/model",
]
VALUES = st.recursive(
    SIMPLE | ODD,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=6,
)


def keywords(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    """Some of these names, typing errors of them, and other words, with any values."""
    known = st.sampled_from(sorted(names))
    wrong = st.tuples(known, st.sampled_from(["s", "_", "x"])).map("".join)
    word = st.text("abcdef_", min_size=1, max_size=8)
    return st.dictionaries(st.one_of(known, known, known, wrong, word), VALUES, max_size=4)


def names_of(config: type, foreign: keys.ForeignKeys) -> list[str]:
    return [*(f.name for f in fields(config)), *foreign.values, *foreign.names]


def with_singles(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The keywords together, and each alone: the first wrong one hides the others."""
    return [values, *({name: value} for name, value in values.items())]


def only_config_errors(call: Callable[[], object]) -> bool:
    """Whether the call went well; any exception but a ConfigError of one line gets through."""
    try:
        call()
    except ConfigError as e:
        assert "\n" not in str(e) and len(str(e)) > 10
        return False
    return True


CONFIGS = {
    SpeculativeConfig: names_of(SpeculativeConfig, keys.SPECULATIVE),
    EngineConfig: names_of(EngineConfig, keys.ENGINE),
    SamplingParams: names_of(SamplingParams, keys.SAMPLING),
}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_a_setting(config: type) -> None:
    seen = set()

    @SETTINGS
    @given(keywords(*CONFIGS[config]), st.lists(VALUES, max_size=2))
    def check(values: dict[str, Any], positional: list[Any]) -> None:
        for each in with_singles(values):
            seen.add(only_config_errors(lambda each=each: config(**each)))
        only_config_errors(lambda: config(*positional, **values))
        if config is SpeculativeConfig:
            only_config_errors(lambda: SpeculativeConfig.from_dict(values))

    check()
    assert seen == {True, False}


@given(st.dictionaries(VALUES.filter(lambda v: isinstance(v, int | str | bytes)), VALUES))
@SETTINGS
def test_keys_of_a_speculative_config_that_are_no_words(values: dict[Any, Any]) -> None:
    only_config_errors(lambda: SpeculativeConfig.from_dict(values))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_a_setting_of_a_hostile_value(config: type) -> None:
    """Also where a value is assigned."""
    for name, value in product(CONFIGS[config], HOSTILE):
        only_config_errors(lambda name=name, value=value: config(**{name: value}))
        if config is SamplingParams:
            only_config_errors(lambda name=name, v=value: setattr(SamplingParams(), name, v))


class ReachedTheWeightsError(ConfigError):
    """All settings are right as far as they can be checked before anything is read."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_target(tmp_path_factory.mktemp("llm") / "target"))


@pytest.fixture
def without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models end where weights would be read, and nothing asks a hub."""

    def stop(*_: object, **__: object) -> None:
        raise ReachedTheWeightsError("weights: expected none to be read, got here")

    monkeypatch.setattr(pretrained, "load_target", stop)
    # The package's attribute of that name is the function.
    monkeypatch.setattr(import_module("jaxspec.loading.resolve"), "_from_hub", stop)


@pytest.mark.usefixtures("without_weights")
def test_a_model_by_name(target: str) -> None:
    own = ["speculative_config", "speculative", "revision", "tokenizer", "dtype", "mxfp4"]
    names = [*CONFIGS[EngineConfig], *own, "draft", "config", "eos_token_ids", "weights"]

    @SETTINGS
    @given(keywords(*names), keywords(*CONFIGS[SpeculativeConfig]), VALUES)
    def check(values: dict[str, Any], speculative: dict[str, Any], model: Any) -> None:
        for settings_ in (*with_singles(values), {"speculative_config": speculative}):
            for name in (target, model):
                with pytest.raises(ConfigError):
                    LLM(name, **settings_)
                with pytest.raises(ConfigError):
                    LLM.from_pretrained(name, **settings_)

    check()


@pytest.mark.usefixtures("without_weights")
def test_a_hostile_value_beside_or_as_a_model(target: str) -> None:
    own = ["speculative_config", "revision", "tokenizer", "dtype", "mxfp4", "generation_config"]
    loaded = ["draft", "eos_token_ids", "config", "weights"]
    toy = (ToyTarget(V), counting_table())
    for model in ((SamplingParams(), {}), (ToyTarget, {}), (ToyTarget(V), {"a": np.zeros(3)})):
        with pytest.raises(ConfigError, match="^target: expected a .config, params. pair"):
            LLM(cast(Any, model))
    for value in HOSTILE:
        for name in own + loaded:
            only_config_errors(lambda name=name, value=value: LLM(target, **{name: value}))
        for name in loaded:
            only_config_errors(lambda name=name, value=value: LLM(toy, **{name: value}))
        for model in (value, (value, {}), (ToyTarget(V), value), (SamplingParams(), value)):
            with pytest.raises(ConfigError):
                LLM(model)
        with pytest.raises(ConfigError):
            LLM(target, speculative_config={"model": value, "method": "eagle3"})


@SETTINGS
@given(
    keywords("draft", "speculative", "tokenizer", "eos_token_ids", "config", "dtype", "weights"),
    VALUES,
)
def test_a_loaded_model(values: dict[str, Any], junk: Any) -> None:
    for each in with_singles(values):
        only_config_errors(lambda each=each: LLM((ToyTarget(V), counting_table()), **each))
    for pair in ((junk, {}), (junk,), [junk, junk, junk]):
        with pytest.raises(ConfigError):
            LLM(pair, **values)


@pytest.fixture(scope="module")
def chatty(target: str) -> LLM:
    return engine(tokenizer=replace(load_tokenizer(target), eos_token_ids=(20,)))


def test_chat_and_generate(chatty: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the requests, which are all checked before any runs."""

    def make_requests(prompts: Any, params: Any, shows: bool, callback: Any, chat: Any) -> list:
        chatty._inputs.make_requests(prompts, params, streams=False, chat=chat)
        return []

    monkeypatch.setattr(chatty, "_generate", make_requests)
    names = keys.keywords_of(LLM.chat)[1:] + list(keys.GENERATE.values)
    message = st.fixed_dictionaries(
        {"role": VALUES, "content": VALUES}, optional={"tool_calls": VALUES, "name": VALUES}
    )
    chats = VALUES | st.lists(message | VALUES, max_size=3)
    seen = set()

    @SETTINGS
    @given(chats, VALUES, keywords(*names))
    def check(messages: Any, params: Any, options: dict[str, Any]) -> None:
        given_params = {} if "sampling_params" in options else {"sampling_params": params}
        for call in (chatty.chat, chatty.generate):
            only_config_errors(lambda call=call: call(messages, **given_params, **options))
            seen.add(only_config_errors(lambda call=call: call(messages, None)))

    check()
    assert False in seen
    user = [{"role": "user", "content": "a"}]
    for value in HOSTILE:
        for prompts in (value, [value], [1, value], {"prompt_token_ids": value}, {"prompt": value}):
            only_config_errors(lambda prompts=prompts: chatty.generate(prompts))
        for params in (value, [value]):
            only_config_errors(lambda params=params: chatty.generate("a", params))
        for message in (
            value,
            {"role": value, "content": "a"},
            {"role": "user", "content": value},
            {"role": "user", "content": [value]},
            {"role": "user", "content": [{"type": value, "text": "a"}]},
            {"role": "assistant", "tool_calls": value},
            {"role": "assistant", "tool_calls": [{"function": value}]},
        ):
            only_config_errors(lambda message=message: chatty.chat([message]))
        for name in names:
            options = {name: value}
            only_config_errors(lambda options=options: chatty.chat(user, **options))
