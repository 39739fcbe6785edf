"""scripts/acceptance.py on the tiny models: the engine's own tokens and counts, theory within its
error, and what is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxspec import LLM, SamplingParams, SpeculativeConfig
from jaxspec.commands import acceptance
from jaxspec.config import ConfigError
from jaxspec.tools.acceptance import show
from jaxspec.tools.acceptance.rounds import Pair, Recorder, Requests
from jaxspec.tools.acceptance.summary import Case, Result, figures, length, rate, standard_error
from tests.commands.conftest import runner

PROMPTS = [
    "Hello there",
    "Why?",
    "A longer prompt, so that one of them takes more than a single chunk of tokens to be read.",
]
MAX_TOKENS = 40
BEGIN, END = show.markers(show.SCRIPT)


@pytest.fixture(scope="module")
def llm(target: Path, draft: Path) -> LLM:
    return load(target, draft, "probabilistic", "probabilistic", 3)


def load(target: Path, draft: Path, rule: str, drafts: str, K: int) -> LLM:
    speculative = SpeculativeConfig(
        model=str(draft),
        num_speculative_tokens=K,
        rejection_sample_method=rule,
        draft_sample_method=drafts,
        norm_output=True,
    )
    return LLM.from_pretrained(
        str(target), speculative=speculative, dtype="float32", max_model_len=512, max_num_seqs=4
    )


@pytest.fixture(scope="module")
def recorder(llm: LLM) -> Recorder:
    pair = Pair(
        llm.target_config,
        llm.draft_config,
        llm.params,
        4,
        llm.eos_token_ids,
        llm.dtype,
        llm.kernels,
    )
    return Recorder(pair, max_num_seqs=4, max_tokens=400)


@pytest.fixture(scope="module")
def encoded(llm: LLM) -> list[list[int]]:
    assert llm.tokenizer is not None
    return [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS]


@pytest.mark.parametrize(
    ("rule", "drafts", "temperature"),
    [
        ("probabilistic", "greedy", 0.0),
        ("block", "probabilistic", 1.0),
        pytest.param("strict", "probabilistic", 1.0, marks=pytest.mark.slow),
        pytest.param("probabilistic", "greedy", 1.0, marks=pytest.mark.slow),
    ],
)
def test_masked_drafts_are_the_engine_with_fewer(
    target, draft, recorder, encoded, rule, drafts, temperature
):
    """Tokens and counts: a program for K = 4 with 3 drafts wanted, against LLM.generate with K = 3
    and the same seeds."""
    engine = load(target, draft, rule, drafts, 3)
    params = [
        SamplingParams(temperature, seed=7 + i, max_tokens=MAX_TOKENS) for i in range(len(encoded))
    ]
    outputs = engine.generate(encoded, params)
    counts, texts = recorder.run(
        Requests(encoded, temperature, MAX_TOKENS, seed=7), rule, drafts, 3
    )
    assert texts == [output.token_ids for output in outputs]
    assert counts.rounds.sum() == engine.metrics.num_drafts
    assert counts.accepted.sum(axis=0).tolist() == engine.metrics.accepted_per_position
    assert counts.tokens.tolist() == [len(output.token_ids) for output in outputs]
    assert engine.metrics.num_accepted_tokens > 5


@pytest.mark.parametrize(
    "rule",
    [
        "block",
        pytest.param("strict", marks=pytest.mark.slow),
        pytest.param("probabilistic", marks=pytest.mark.slow),
    ],
)
def test_measured_acceptance_is_what_theory_expects(recorder, encoded, rule):
    """96 requests from three prompts: in mean length and in each position, within 4.5 standard
    errors; and the text is the target's."""
    counts, _ = recorder.run(
        Requests(encoded * 32, 1.0, MAX_TOKENS, seed=100), rule, "probabilistic", 4
    )
    f = figures(Result(Case("prompts", 1.0, rule, "probabilistic", 4), counts))
    assert (
        abs(f["measured_minus_expected_length"])
        < 4.5 * f["measured_minus_expected_length_standard_error"]
    )
    expected = np.array(f[f"expected_per_position_{rule}"])
    off = (counts.accepted - counts.expected[rule]) / 1.0
    error = np.sqrt((off**2).sum(axis=0)) / counts.rounds.sum()
    assert (np.abs(np.array(f["per_position"]) - expected) < 4.5 * error).all()
    assert expected[0] > 0.2 and f["measured_minus_expected_length_standard_error"] < 0.05
    assert abs(f["surprise_minus_entropy_standard_errors"]) < 4.5


def test_a_seed_gives_the_same_counts_again(recorder, encoded):
    a, b = (
        recorder.run(Requests(encoded, 1.0, 12, seed=3), "probabilistic", "probabilistic", 2)[0]
        for _ in range(2)
    )
    assert a.accepted.tolist() == b.accepted.tolist() and a.accepted.shape == (3, 2)


def test_standard_errors_are_those_of_repeated_samples(recorder, encoded):
    """Of independent prompts: the bootstrap against the spread over many draws; a paired difference
    of equal samples has none."""
    rng = np.random.default_rng(0)

    def draw():
        base, _ = recorder.run(
            Requests(encoded[:1], 1.0, 2, seed=0), "probabilistic", "probabilistic", 2
        )
        rounds = rng.integers(10, 30, 60)
        accepted = np.stack([rng.binomial(rounds, 0.6), np.zeros(60, int)], axis=1)
        accepted[:, 1] = rng.binomial(accepted[:, 0], 0.5)
        return type(base)(
            **(
                vars(base)
                | {"rounds": rounds, "accepted": accepted, "tokens": rounds, "expected": {}}
            )
        )

    samples = [draw() for _ in range(60)]
    spread = np.std([1 + s.accepted.sum() / s.rounds.sum() for s in samples])
    assert float(standard_error(length, samples[0])) == pytest.approx(spread, rel=0.35)
    assert float(standard_error(rate, samples[0], samples[0])) == 0


@pytest.fixture(scope="module")
def files(target, draft, tmp_path_factory) -> Path:
    """What a run over two data sets leaves."""
    folder = tmp_path_factory.mktemp("acceptance")
    for name, texts in (("one", PROMPTS[:2]), ("two", PROMPTS[2:])):
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"prompt": t}) for t in texts))
    (folder / "page.md").write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    args = [
        "--target",
        target,
        "--draft",
        draft,
        "--dataset",
        folder / "one.jsonl",
        "--dataset",
        folder / "two.jsonl",
        "--max-num-seqs",
        4,
    ]
    args += [
        "--num-speculative-tokens",
        2,
        "--sweep",
        3,
        "--max-tokens",
        12,
        "--rules",
        "strict,probabilistic",
    ]
    args += ["--temperature", 1, "--drafts", "probabilistic", "--output-json", folder / "run.json"]
    result = runner(acceptance.main)(*args, "--markdown", folder / "page.md")
    assert result.exit_code == 0, result.output
    (folder / "stdout").write_text(result.stdout)
    return folder


def test_the_drafts_caches_have_a_dtype_of_their_own(target, draft, tmp_path, monkeypatch):
    """In the engine of the recorded rounds; the run ends before its first round."""
    recorded = []

    def record(pair: Pair, **sizes: int) -> Recorder:
        recorded.append(Recorder(pair, **sizes).config("strict", "probabilistic", sampled=True))
        raise ConfigError("no round")

    monkeypatch.setattr(acceptance, "Recorder", record)
    (tmp_path / "one.jsonl").write_text(json.dumps({"prompt": "Why?"}))
    args = ["--target", target, "--draft", draft, "--dataset", tmp_path / "one.jsonl"]
    args += ["--dtype", "float32", "--max-num-seqs", 1, "--draft-kv-cache-dtype", "bfloat16"]
    result = runner(acceptance.main)(*args)
    assert result.exit_code == 2 and "no round" in result.stderr, result.output
    [cfg] = recorded
    assert cfg.draft_cache_dtype == "bfloat16"


def test_every_case_is_written(files):
    record = json.loads((files / "run.json").read_text())
    cases = [tuple(r["case"].values()) for r in record["results"]]
    first = [
        ("one", 1.0, rule, "probabilistic", k)
        for rule in ("strict", "probabilistic")
        for k in (1, 2, 3)
    ]
    assert cases == [*first, ("two", 1.0, "probabilistic", "probabilistic", 2)]
    assert record["settings"]["dtype"] == "float32"  # what ran, not "auto"
    assert record["num_programs"] == 3  # strict, probabilistic, and prefill


def test_greedy_cases_and_other_kinds_of_drafts_are_planned():
    cases = [
        tuple(vars(c).values())
        for c in acceptance.plan(
            ["a", "b"],
            acceptance.GridOptions(temperature=[0.0, 0.5], rules=("block",)),
            K=2,
            ks=[1, 2],
        )
    ]
    greedy = [
        ("a", 0.0, "probabilistic", "greedy", 1),
        ("a", 0.0, "probabilistic", "greedy", 2),
        ("b", 0.0, "probabilistic", "greedy", 2),
    ]
    sampled = [
        ("a", 0.5, "block", "probabilistic", 1),
        ("a", 0.5, "block", "probabilistic", 2),
        ("a", 0.5, "block", "greedy", 2),
    ]
    assert cases == [*greedy, *sampled, ("b", 0.5, "probabilistic", "probabilistic", 2)]


@pytest.mark.slow
def test_the_engine_counts_what_the_recorded_rounds_do(target, draft, files, tmp_path):
    args = [
        "--target",
        target,
        "--draft",
        draft,
        "--dataset",
        files / "one.jsonl",
        "--max-num-seqs",
        4,
        "--num-speculative-tokens",
        2,
    ]
    args += [
        "--sweep",
        0,
        "--max-tokens",
        24,
        "--temperature",
        0,
        "--dtype",
        "float32",
        "--check-engine",
    ]
    result = runner(acceptance.main)(*args, "--output-json", tmp_path / "run.json")
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "run.json").read_text())
    [ours] = [r["figures"] for r in record["results"]]
    counted = record["check"]["engine"]
    assert counted["mean_acceptance_length"] == pytest.approx(ours["mean_acceptance_length"])
    assert counted["num_drafts"] == ours["num_rounds"]
    assert (
        f"LLM.generate has length {counted['mean_acceptance_length']:.3f}, this script"
        in result.output
    )


def test_tables_and_sentences(files):
    page, shown = (files / "page.md").read_text(), (files / "stdout").read_text()
    assert (
        page.startswith("before\n") and page.endswith(f"{END}\n\nafter\n") and "\nold\n" not in page
    )
    for text in (
        "Acceptance at K = 2",
        "Mean acceptance length by K",
        "of each rule on the same rounds",
        "probabilistic over strict",
        "on one",
    ):
        assert text in page and text in shown, text


def test_the_figure_is_drawn(files, tmp_path):
    pytest.importorskip("matplotlib")
    result = runner(acceptance.main)(
        "--from-json", files / "run.json", "--plot", tmp_path / "figure.png"
    )
    assert result.exit_code == 0, result.output
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_record_is_shown_again_without_measuring(files, tmp_path, monkeypatch):
    monkeypatch.setattr(LLM, "from_pretrained", None)
    again = tmp_path / "page.md"
    again.write_text(f"before\n\n{BEGIN}\n{END}\n\nafter\n")
    result = runner(acceptance.main)("--from-json", files / "run.json", "--markdown", again)
    assert result.exit_code == 0, result.output
    assert again.read_text() == (files / "page.md").read_text()


def test_a_record_of_0_1_0_is_shown(files, tmp_path):
    """It has no date and no lengths of prompts; outside a checkout no commit either."""
    record = json.loads((files / "run.json").read_text())
    date = record.pop("date")
    record["versions"]["git_commit"] = None
    for result in record["results"]:
        del result["counts_per_prompt"]["prompt_tokens"]
    (tmp_path / "old.json").write_text(json.dumps(record))
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    args = ("--from-json", tmp_path / "old.json", "--markdown", page)
    result = runner(acceptance.main)(*args)
    assert result.exit_code == 0, result.output
    shown, expected = page.read_text(), (files / "page.md").read_text()
    assert "\n1 x cpu, float32, jax" in shown and "commit" not in shown and "None" not in shown
    changed = set(expected.splitlines()) - set(shown.splitlines())
    assert {line for line in changed if not line.startswith(date)} == {"before", "after"}


@pytest.mark.parametrize("key", ["settings", "versions", "results", "devices"])
def test_a_record_that_lacks_a_key_is_one_sentence_that_names_it(files, tmp_path, key):
    record = json.loads((files / "run.json").read_text())
    del record[key]
    (tmp_path / "run.json").write_text(json.dumps(record))
    result = runner(acceptance.main)("--from-json", tmp_path / "run.json")
    assert result.exit_code == 2
    said = f"that --output-json wrote, got another, without the key '{key}'"
    assert said in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("results", []),
        ("results", {}),
        ("check", "x"),
        ("check", 5),
        ("counts_per_prompt", "x"),
        ("counts_per_prompt", [1]),
        ("counts_per_prompt", None),
    ],
)
def test_a_damaged_record_is_one_sentence(
    files: Path, tmp_path: Path, key: str, value: object
) -> None:
    record = json.loads((files / "run.json").read_text())
    owner = record if key in record else record["results"][0]
    assert key in owner
    owner[key] = value
    (tmp_path / "run.json").write_text(json.dumps(record))
    result = runner(acceptance.main)("--from-json", tmp_path / "run.json")
    assert result.exit_code == 2, result.output
    assert "expected a file that --output-json wrote, got another" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "--dataset: expected at least one"),
        (
            ["--dataset", "x.jsonl", "--rules", "stern"],
            "--rules: expected among strict, probabilistic, block",
        ),
        (
            ["--dataset", "x.jsonl", "--draft-quantize", "fp4"],
            "draft_quantize: expected None, one of fp8, fp8-block, int4, or a checkpoint's own",
        ),
        (["--dataset", "nowhere.jsonl"], "--dataset nowhere.jsonl: expected"),
        (
            ["--dataset", "x.jsonl", "--num-speculative-tokens", 0],
            "num_speculative_tokens: expected an integer of at least 1, got 0",
        ),
        (
            ["--from-json", "x.jsonl"],
            "--from-json x.jsonl: expected a file that --output-json wrote, got another",
        ),
        (
            ["--from-json", "y.json"],
            "--from-json y.json: expected a file that --output-json wrote, got No such file",
        ),
        (
            ["--dataset", "x.jsonl", "--markdown", "x.jsonl"],
            "--markdown x.jsonl: expected a file with the lines",
        ),
    ],
)
def test_bad_input_is_one_sentence(args, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text('{"prompt": "Why?"}\n')
    run: Callable = runner(acceptance.main)
    result = run(*args)
    assert result.exit_code == 2 and result.stderr.startswith(f"error: {sentence}"), result.output


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--max-tokens", 0], "--max-tokens: expected at least 1, got 0"),
        (["--seed", -1], "--seed: expected an integer from 0 to 2^63 - 1, got -1"),
        (["--sweep", -1], "--sweep: expected at least 0, got -1"),
        (["--plot", "x.xyz"], "--plot x.xyz: expected a .png or .svg file in a folder"),
        (["--plot", "nowhere/x.png"], "--plot nowhere/x.png: expected a .png or .svg file in a"),
        (
            ["--dataset", "p.jsonl", "--output-json", "p.jsonl"],
            "expected another file than the run",
        ),
        (
            ["--from-json", "r", "--output-json", "o"],
            "--output-json: expected none with --from-json",
        ),
        (["--markdown", "latin"], "--markdown latin: expected a page in UTF-8, got"),
    ],
)
def test_bad_options_are_found_before_a_model_is_opened(
    args: list[object],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a model was opened")

    monkeypatch.setattr(LLM, "from_pretrained", refuse)
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text('{"prompt": "Hello"}\n')
    Path("latin").write_bytes(b"\xff")
    result = runner(acceptance.main)(*args)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ") and sentence in result.stderr, result.stderr
    assert Path("p.jsonl").read_text() == '{"prompt": "Hello"}\n'


def test_a_page_keeps_its_ends_of_lines_and_survives_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_bytes(f"a\r\n{BEGIN}\r\nold\r\n{END}\r\nz\r\n".encode())
    before = page.read_bytes()
    with pytest.raises(ConfigError, match="half a character"):
        show.write_section(page, show.SCRIPT, "new \ud800")
    assert page.read_bytes() == before
    show.write_section(page, show.SCRIPT, "new")
    assert page.read_bytes().startswith(b"a\r\n") and page.read_bytes().endswith(b"z\r\n")
