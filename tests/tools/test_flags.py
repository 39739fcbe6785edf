"""Flags from the fields of dataclasses: names, defaults, lists, mappings, and what main gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

import pytest
from typer.testing import CliRunner, Result

from jaxspec import EngineConfig, SamplingParams, SpeculativeConfig
from jaxspec.tools.cli import command, option
from jaxspec.tools.flags import Flag, Given, flag, flags_of, given_of


@dataclass(frozen=True)
class Options:
    """A field of each kind that a flag can have."""

    count: int = flag(3, "A count.", least=1)
    share: float | None = flag(None, "A share.")
    mode: Literal["fast", "exact"] = flag("fast", "A mode.")
    on: bool = flag(True, "On by default.")
    off: bool = flag(False, "Off by default.")
    maybe: bool | None = flag(None, "Neither by default.")
    sizes: tuple[int, ...] = flag((1, 8), "Sizes.", "--sizes", "--batch", least=1)
    rates: Sequence[float] = flag((), "Rates.")
    switches: tuple[bool, ...] = flag((False,), "Switches.")
    rules: tuple[str, ...] = flag(("a", "b"), "Rules.", among=("a", "b", "c"))
    words: str | Sequence[str] = flag((), "Words.")
    files: list[str] | None = flag(None, "Files.")
    bias: Mapping[int, float] = field(default_factory=dict, metadata={"help": "Biases."})


def run(main: Callable[..., None], *args: str) -> Result:
    return CliRunner().invoke(command(main), list(args))


def options_from(*args: str) -> Options:
    """The instance that main gets for these arguments."""
    got: list[Options] = []

    def main(options: Options) -> None:
        """Collect."""
        got.append(options)

    result = run(main, *args)
    assert result.exit_code == 0, result.output
    return got[0]


def test_without_arguments_every_field_has_its_default():
    assert options_from() == Options()


@pytest.mark.parametrize(
    ("args", "name", "value"),
    [
        (["--count", "5"], "count", 5),
        (["--share", "0.5"], "share", 0.5),
        (["--switches", "false,True"], "switches", (False, True)),
        (["--mode", "exact"], "mode", "exact"),
        (["--no-on"], "on", False),
        (["--off"], "off", True),
        (["--maybe"], "maybe", True),
        (["--no-maybe"], "maybe", False),
        (["--batch", "2, 4"], "sizes", (2, 4)),
        (["--rates", "0.5,1"], "rates", (0.5, 1.0)),
        (["--rules", "c,a"], "rules", ("c", "a")),
        (["--words", "a,b", "--words", "c"], "words", ["a,b", "c"]),
        (["--files", "x", "--files", "y"], "files", ["x", "y"]),
        (["--bias", '{"4": -1.5}'], "bias", {4: -1.5}),
    ],
)
def test_a_flag_sets_its_field_and_no_other(args, name, value):
    found = options_from(*args)
    assert getattr(found, name) == value
    for other in fields(Options):
        if other.name != name:
            assert getattr(found, other.name) == getattr(Options(), other.name)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--sizes", "1,x"], "error: --sizes: expected integers of at least 1 with commas"),
        (["--sizes", "1,0"], "error: --sizes: expected integers of at least 1 with commas"),
        (["--sizes", "1.5"], "error: --sizes: expected integers of at least 1 with commas"),
        (["--sizes", ""], "error: --sizes: expected integers of at least 1 with commas"),
        (["--rates", "1;2"], "error: --rates: expected numbers with commas between them, got"),
        (["--switches", "false,yes"], "error: --switches: expected true or false, commas between"),
        (["--rules", "a,d"], "error: --rules: expected among a, b, c, got d"),
        (["--bias", "[1]"], "error: --bias: expected a JSON object of numbers by token id"),
        (["--bias", '{"x": 1}'], "error: --bias: expected a JSON object of numbers by token id"),
        (["--count", "0"], "Invalid value for '--count'"),
        (["--no-off"], "No such option"),
    ],
)
def test_a_wrong_value_is_one_sentence_and_exit_code_2(args, sentence):
    def main(options: Options) -> None:
        """Never runs."""
        raise AssertionError(options)

    result = run(main, *args)
    assert result.exit_code == 2 and sentence in result.stderr, result.output
    assert "Traceback" not in result.output


def test_the_owner_checks_its_own_fields():
    def main(sampling: Annotated[SamplingParams, flags_of(SamplingParams, "top_p")]) -> None:
        """Never runs."""
        raise AssertionError(sampling)

    result = run(main, "--top-p", "2")
    assert result.exit_code == 2
    assert result.stderr == "error: top_p: expected a number in (0, 1], got 2.0\n"


def test_a_script_changes_default_help_and_name():
    got: list[Any] = []

    def main(
        speculative: Annotated[
            SpeculativeConfig,
            flags_of(
                SpeculativeConfig,
                "method",
                model=Flag("head", names=("--draft",)),
                num_speculative_tokens=Flag(5, "The K."),
            ),
        ],
    ) -> None:
        """Collect."""
        got.append(speculative)

    assert run(main).exit_code == run(main, "--draft", "other", "--method", "eagle").exit_code == 0
    assert got == [
        SpeculativeConfig("head", num_speculative_tokens=5),
        SpeculativeConfig("other", "eagle", 5),
    ]
    text = " ".join(run(main, "--help").output.split())
    assert "--draft" in text and "--model" not in text and "The K. [default: 5]" in text
    assert "--norm-output" not in text


def test_given_has_the_fields_of_the_command_line_and_the_changed_defaults_alone():
    got: list[Given] = []

    def main(
        engine: Annotated[
            Given,
            given_of(
                EngineConfig,
                "max_model_len",
                "enable_prefix_caching",
                max_num_seqs=Flag(80),
                kernels=Flag(help="Kernels."),
            ),
        ],
        extra: Annotated[int, option("An option of main's own.")] = 1,
    ) -> None:
        """Collect."""
        assert extra == 1
        got.append(engine)

    for args in ([], ["--max-model-len", "512", "--no-enable-prefix-caching"]):
        assert run(main, *args).exit_code == 0
    assert got == [
        {"max_num_seqs": 80},
        {"max_num_seqs": 80, "max_model_len": 512, "enable_prefix_caching": False},
    ]
    text = " ".join(run(main, "--help").output.split())
    assert "Tokens a request may hold, prompt included. [default: 2048]" in text
    assert "Requests that run together. [default: 80]" in text


def test_every_field_of_sampling_params_but_two_can_be_a_flag():
    sampling = flags_of(
        SamplingParams, leaving_out=("bad_words_token_ids", "num_speculative_tokens")
    )
    assert len(list(sampling.flags())) == len(fields(SamplingParams)) - 2
    assert all(each.help.endswith(".") for each in sampling.flags())
