"""A chat template that never ends, grows without end or fails gives one sentence."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from jaxspec.config import ConfigError
from jaxspec.loading import Tokenizer, template_limits

CHAT = [{"role": "user", "content": "hi"}] * 3
LOOP = "{% set ns = namespace(x=START) %}{% for i in range(99) %}{% set ns.x = NEXT %}{% endfor %}"


def grown(start: str, after: str) -> str:
    return LOOP.replace("START", start).replace("NEXT", after) + "{{ ns.x }}"


def encode(template: str) -> str:
    """The text of CHAT by this template."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"": 0}, unk_token=""))
    hf = PreTrainedTokenizerFast(tokenizer_object=words)
    hf.chat_template = template
    seen: list[str] = []
    hf.encode = lambda text, **_: seen.append(text) or [0]  # type: ignore[method-assign]
    Tokenizer(hf, (), Path("folder")).encode_chat(CHAT)
    return seen[0]


@pytest.mark.parametrize(
    ("template", "got"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "more than 0.5 s of computing",
        ),
        (grown("'ab'", "ns.x ~ ns.x"), "a text of more than 16777216 characters"),
        (grown("[1]", "ns.x + ns.x"), "a text of more than 16777216 characters"),
        (grown("9 * 9", "ns.x * ns.x"), "a text of more than 16777216 characters"),
        (
            "{% set x = 'a' * 99999 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
            "a text of more than 16777216 characters",
        ),
        ("{{ 9 ** 9 ** 9 ** 9 }}", "the operator **"),
    ],
)
def test_a_template_without_end_is_stopped(
    template: str, got: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "computing" in got:
        monkeypatch.setattr(template_limits, "MOST_SECONDS", 0.5)
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    with pytest.raises(ConfigError) as e:
        encode(template)
    assert str(e.value) == (
        f"chat: expected a chat template in folder that ends soon with a text, got {got}"
    )
    assert time.thread_time() - begin < 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB
    assert sys.gettrace() is None


@pytest.mark.parametrize(
    ("template", "got"),
    [
        ("{{ 1 // 0 }}", "ZeroDivisionError: "),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError: "),
        ("{{ 'a' * 10000000000000000000 }}", "OverflowError: "),
        ("{{ range(1000000) }}", "OverflowError: Range too big"),
        ("{{ raise_exception('no system') }}", "no system"),
    ],
)
def test_a_template_that_fails_is_one_sentence(template: str, got: str) -> None:
    with pytest.raises(ConfigError) as e:
        encode(template)
    assert str(e.value).startswith(
        "chat: expected messages that the chat template of folder accepts, got " + got
    )


def test_what_templates_do_is_allowed_and_a_debugger_stays() -> None:
    template = (
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{{ m.role + ': ' + m['content'] | trim }}\n{% endfor %}{{ '-' * 3 }}"
    )
    before = sys.gettrace()
    sys.settrace(watch := lambda *_: None)
    try:
        assert encode(template) == "user: hi\nuser: hi\n---"
        assert sys.gettrace() is watch
    finally:
        sys.settrace(before)
