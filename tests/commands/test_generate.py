"""scripts/generate.py: what it prints and writes, and when its exit code is not 0."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from jaxspec import LLM, Interrupted
from jaxspec.commands import generate
from jaxspec.drafts import MODEL_FREE
from jaxspec.drafts.head_layout import head_method
from jaxspec.loading import open_checkpoint
from jaxspec.loading.resolve import CHECKPOINTS
from jaxspec.tools import prompts, report
from tests.support.slow import slow

ROOT = Path(__file__).resolve().parents[2]
HEAD = generate.DEFAULT_DRAFTS["eagle3"]
SAMPLED = ("--temperature", 1, "--max-tokens", 24)


def outcome(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def test_it_prints_texts_table_and_vllms_lines(run_tiny, tmp_path):
    result = run_tiny("--output-json", tmp_path / "run.json")
    assert result.exit_code == 0, result.output
    run = outcome(tmp_path / "run.json")
    metrics = run["metrics"]
    assert metrics["num_accepted_tokens"] > 0  # else most of this shows nothing
    for request in run["requests"]:
        assert f"prompt: {request['prompt']}\n" in result.stdout
        assert f"text (24 tokens, length): {request['text']}" in result.stdout
    assert "Acceptance of draft tokens" in result.stdout
    accepted = metrics["accepted_per_position"]
    for i, rate in enumerate(metrics["per_position_acceptance"]):
        cells = [str(i), f"{accepted[i]} / {metrics['num_drafts']}", f"{rate:.1%}"]
        before = accepted[i - 1] if i else metrics["num_drafts"]
        cells.append(f"{accepted[i] / before:.1%}" if before else "-")
        assert re.search(r"\s*│\s*".join(re.escape(c) for c in cells), result.stdout), cells
    lines = result.stdout.splitlines()
    start = lines.index("total_num_output_tokens: 48")
    assert lines[start : start + 9] == [
        "total_num_output_tokens: 48",
        f"num_drafts: {metrics['num_drafts']}",
        f"num_draft_tokens: {3 * metrics['num_drafts']}",
        f"num_accepted_tokens: {metrics['num_accepted_tokens']}",
        f"mean acceptance length: {1 + metrics['num_accepted_tokens'] / metrics['num_drafts']:.2f}",
        "-" * 50,
        *(
            f"acceptance at token {i}: {rate:.2f}"
            for i, rate in enumerate(metrics["per_position_acceptance"])
        ),
    ]
    assert "aux layers (boundary ids) [1, 2, 3]" in result.stdout
    assert "speculative decoding" in result.stderr


def test_quiet_prints_figures_only(run_tiny):
    result = run_tiny("--quiet")
    assert result.exit_code == 0 and "mean acceptance length" in result.stdout
    assert "prompt:" not in result.stdout and "target:" not in result.stdout and result.stderr == ""


def test_json_holds_the_run(run_tiny, tmp_path):
    path = tmp_path / "run.json"
    assert run_tiny("--output-json", path, "--seed", 7).exit_code == 0
    run = outcome(path)
    assert run["total_num_output_tokens"] == sum(len(r["token_ids"]) for r in run["requests"]) == 48
    assert [r["prompt"] for r in run["requests"]] == ["Hello there", "Why?"]
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert run["metrics"][name] == sum(r["metrics"][name] for r in run["requests"]) > 0
    for request in run["requests"]:
        assert request["prompt_token_ids"][0] == 257  # the chat template's <|im_start|>
        assert request["finish_reason"] == "length" and request["text"]
    assert run["timings"]["decode_seconds"] > 0 and run["timings"]["num_rounds"] > 0
    assert (
        run["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
        and run["versions"]["jax"] == jax.__version__
    )
    assert set(run["versions"]) == {"python", "jax", "jaxlib", "jaxspec", "git_commit"}
    assert run["devices"][0]["platform"] == jax.default_backend()
    assert (
        run["settings"]["seed"] == 7
        and run["settings"]["speculative"]["num_speculative_tokens"] == 3
    )
    assert run["texts_agree"] is None and run["comparison"] is None


def test_a_record_names_the_commit_of_its_checkout():
    assert (report.git_commit() is not None) == (ROOT / ".git").exists()


def test_flags_go_before_the_json_config(run_tiny, tmp_path):
    path = tmp_path / "run.json"
    config = (
        '{"method": "eagle3", "num_speculative_tokens": 5, "rejection_sample_method": '
        '"block", "draft_sample_method": "greedy"}'
    )
    result = run_tiny(
        "--speculative-config",
        config,
        "--num-speculative-tokens",
        2,
        "--output-json",
        path,
        "--quiet",
    )
    assert result.exit_code == 0, result.output
    speculative = outcome(path)["settings"]["speculative"]
    assert (speculative["num_speculative_tokens"], speculative["rejection_sample_method"]) == (
        2,
        "block",
    )
    assert speculative["draft_sample_method"] == "greedy"


def test_no_speculation_decodes_plainly_to_the_same_text(run_tiny, tmp_path):
    assert run_tiny("--quiet", "--output-json", tmp_path / "a.json").exit_code == 0
    result = run_tiny("--no-speculation", "--quiet", "--output-json", tmp_path / "b.json")
    assert (
        result.exit_code == 0
        and "num_drafts" not in result.stdout
        and "total_num_output_tokens: 48" in result.stdout
    )
    tokens = [
        [r["token_ids"] for r in outcome(tmp_path / name)["requests"]]
        for name in ("a.json", "b.json")
    ]
    assert tokens[0] == tokens[1]


def test_ignore_eos_goes_on(run_tiny, edited, target, tmp_path):
    path = tmp_path / "run.json"
    assert run_tiny("--quiet", "--output-json", path).exit_code == 0
    first = outcome(path)["requests"][0]["token_ids"]
    ends_early = edited(target, {"eos_token_id": first[9]})
    args = ("--target", ends_early, "--quiet", "--output-json", path)
    assert run_tiny(*args).exit_code == 0
    stopped = outcome(path)["requests"][0]
    assert (
        stopped["finish_reason"] == "stop"
        and stopped["token_ids"] == first[: first.index(first[9]) + 1]
    )
    assert run_tiny(*args, "--ignore-eos").exit_code == 0
    assert outcome(path)["requests"][0]["token_ids"] == first


def test_every_sampling_parameter_has_its_option(run_tiny, tmp_path):
    path = tmp_path / "run.json"
    flags = {
        "--temperature": 0.8,
        "--top-p": 0.9,
        "--top-k": 200,
        "--min-p": 0.001,
        "--repetition-penalty": 1.1,
        "--presence-penalty": 0.2,
        "--frequency-penalty": 0.3,
        "--logit-bias": '{"97": 3, "98": -2.5}',
        "--allowed-token-ids": ",".join(map(str, range(90, 200))),
        "--banned-token-ids": "100,101",
        "--min-tokens": 4,
        "--stop": "zz",
        "--stop-token-ids": "99",
        "--logprobs": 1,
        "--prompt-logprobs": 0,
        "--n": 2,
    }
    result = run_tiny(
        *(x for flag in flags.items() for x in flag),
        "--include-stop-str-in-output",
        "--max-tokens",
        8,
        "--output-json",
        path,
    )
    assert result.exit_code == 0, result.output
    run = outcome(path)
    settings = run["settings"]
    for flag, value in flags.items():
        name = flag.removeprefix("--").replace("-", "_")
        if name in ("allowed_token_ids", "banned_token_ids", "stop_token_ids"):
            value = [int(token) for token in value.split(",")]
        expected = {"logit_bias": {"97": 3, "98": -2.5}, "stop": ["zz"]}.get(name, value)
        assert settings[name] == expected, name
    assert settings["include_stop_str_in_output"] is True
    for request in run["requests"]:
        assert [len(place) for place in request["prompt_logprobs"][1:]] == [1] * (
            len(request["prompt_token_ids"]) - 1
        )
        assert request["prompt_logprobs"][0] is None
        for text in (request, *request["further_texts"]):
            assert (
                set(text["token_ids"]) <= set(range(90, 200)) - {100, 101}
                and 99 not in text["token_ids"][:4]
            )
            assert all(
                str(token) in place
                for token, place in zip(text["token_ids"], text["logprobs"], strict=True)
            )
        assert len(request["further_texts"]) == 1
    assert result.stdout.count("text (") == 4


@pytest.mark.parametrize(
    ("flag", "value", "sentence"),
    [
        (
            "--logit-bias",
            "[1]",
            "--logit-bias: expected a JSON object of numbers by token id, got '[1]'",
        ),
        ("--logit-bias", "{", "--logit-bias: expected a JSON object"),
        (
            "--stop-token-ids",
            "1;2",
            "--stop-token-ids: expected integers with commas between them, got '1;2'",
        ),
        ("--min-p", 2, "min_p: expected a number from 0 to 1, got 2.0"),
        (
            "--banned-token-ids",
            999999,
            "banned_token_ids: expected token ids in 0..258, got 999999",
        ),
    ],
)
def test_a_wrong_sampling_option_is_one_sentence(run_tiny, flag, value, sentence):
    result = run_tiny(flag, value)
    assert result.exit_code == 2 and sentence in result.stderr and "Traceback" not in result.output


def test_raw_prompts_skip_the_chat_template(run_tiny, tmp_path):
    path = tmp_path / "run.json"
    assert run_tiny("--no-chat-template", "--quiet", "--output-json", path).exit_code == 0
    assert [len(r["prompt_token_ids"]) for r in outcome(path)["requests"]] == [
        len("Hello there"),
        len("Why?"),
    ]


def test_each_prompt_has_its_own_seed_and_a_run_repeats(run_tiny, tmp_path):
    args = (
        *SAMPLED,
        "--prompt",
        "Why?",
        "--prompt",
        "Why?",
        "--seed",
        5,
        "--quiet",
        "--output-json",
        tmp_path / "run.json",
    )
    runs = []
    for _ in range(2):
        assert run_tiny(*args).exit_code == 0
        runs.append([r["token_ids"] for r in outcome(tmp_path / "run.json")["requests"]])
    assert runs[0] == runs[1] and runs[0][0] != runs[0][1]


# --- --compare
# --------------------------------------------------------------------------------------------------


# Of two strict texts test_one_wrong_token_fails has one that agrees.
@pytest.mark.parametrize("extra", [(), slow((*SAMPLED, "--rejection-sample-method", "strict"))])
def test_greedy_and_strict_texts_agree_with_plain_decoding(run_tiny, tmp_path, extra):
    result = run_tiny("--compare", "--output-json", tmp_path / "run.json", *extra)
    assert result.exit_code == 0, result.output
    assert "texts agree: yes (2 of 2)" in result.stdout
    assert re.search(
        r"speed-up over plain decoding: \d+\.\d\dx .*both warm, compilation not counted",
        result.stdout,
    )
    run = outcome(tmp_path / "run.json")
    assert run["texts_agree"] is True and run["comparison"]["differences"] == []
    assert run["metrics"]["num_accepted_tokens"] > 0
    assert (
        run["comparison"]["speed_up"] > 0
        and run["comparison"]["plain_timings"]["num_output_tokens"] == 48
    )
    assert run["settings"]["dtype"] == "float32"  # where texts must agree


def test_sampled_texts_need_not_agree(run_tiny, tmp_path):
    for extra in (
        (*SAMPLED, "--seed", 3),
        ("--rejection-sample-method", "synthetic", "--synthetic-acceptance-length", 4),
    ):
        result = run_tiny("--compare", "--output-json", tmp_path / "run.json", *extra)
        assert result.exit_code == 0, result.output
        assert outcome(tmp_path / "run.json")["texts_agree"] is False
        expected = (
            "only their distribution is the same"
            if "--seed" in extra
            else "not compared; the synthetic schedule"
        )
        assert expected in result.stdout


def test_wrong_text_fails_and_its_place_is_named(run_tiny, tmp_path, monkeypatch):
    """The synthetic rule accepts what the target would not: a wrong rejection rule, if it were said
    to keep the text."""
    monkeypatch.setattr(report, "expected_agreement", lambda *_: "tokens")
    wrong = ("--rejection-sample-method", "synthetic", "--synthetic-acceptance-rates", "1,1,1")
    result = run_tiny("--compare", "--output-json", tmp_path / "wrong.json", *wrong)
    assert result.exit_code == 1
    assert (
        run_tiny(
            "--no-speculation", "--output-json", tmp_path / "plain.json", "--dtype", "float32"
        ).exit_code
        == 0
    )
    run, plain = outcome(tmp_path / "wrong.json"), outcome(tmp_path / "plain.json")
    d = run["comparison"]["differences"][0]
    pairs = [
        (a["token_ids"], b["token_ids"])
        for a, b in zip(run["requests"], plain["requests"], strict=True)
    ]
    assert run["texts_agree"] is False
    assert all(a == b for a, b in pairs[: d["prompt"]])
    ours, theirs = pairs[d["prompt"]]
    assert ours[: d["position"]] == theirs[: d["position"]]
    assert (ours[d["position"]], theirs[d["position"]]) == (
        d["speculative_token_id"],
        d["plain_token_id"],
    )
    assert d["speculative_token_id"] != d["plain_token_id"]
    place = (
        f"prompt {d['prompt']}, token {d['position']}: "
        f"{d['speculative_token_id']} against {d['plain_token_id']}"
    )
    assert re.search(
        rf"texts agree: NO, \d of 2 \({place}, \S+ apart in float32, \S+ bfloat16 ulp",
        result.stdout,
    )


@pytest.mark.parametrize("extra", [(), (*SAMPLED, "--rejection-sample-method", "strict")])
def test_one_wrong_token_fails(run_tiny, monkeypatch, extra):
    decode = LLM.generate

    def wrong(self, *args, **kwargs):
        outputs = decode(self, *args, **kwargs)
        if self.speculative is None:
            outputs[1].token_ids[17] += 1
        return outputs

    monkeypatch.setattr(LLM, "generate", wrong)
    result = run_tiny("--compare", *extra)
    assert result.exit_code == 1 and "texts agree: NO, 1 of 2 (prompt 1, token 17:" in result.stdout


def test_nothing_compiles_while_it_is_timed(run_tiny, monkeypatch):
    """--compare's ratio: both engines are warm before their clocks run."""
    compiled, timing = [], [False]
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: (
            compiled.append(name) if timing[0] and "backend_compile" in name else None
        )
    )
    decode = LLM.generate

    def timed(self, *args, **kwargs):
        timing[0] = True
        outputs = decode(self, *args, **kwargs)
        timing[0] = False
        return outputs

    monkeypatch.setattr(LLM, "generate", timed)
    shape_of_its_own = (
        "--max-num-seqs",
        3,
        "--num-speculative-tokens",
        2,
        "--max-model-len",
        300,
        "--max-tokens",
        200,
        "--prompt",
    )
    assert run_tiny("--compare", *shape_of_its_own, "Hello " * 6).exit_code == 0
    assert compiled == []


def test_the_demo_compares_and_has_the_default_models(run_generate, target, draft, monkeypatch):
    """Without arguments: the built-in prompts, greedy, K = 3, compared; here on the tiny models."""
    asked = {}
    load = LLM.from_pretrained

    def tiny(name, *, speculative, **kwargs):
        asked.update(target=name, speculative=speculative, **kwargs)
        return load(str(target), speculative=type(speculative)(model=str(draft)), **kwargs)

    monkeypatch.setattr(LLM, "from_pretrained", tiny)
    result = run_generate()
    assert result.exit_code == 0, result.output
    assert asked["target"] is None and asked["speculative"].model == HEAD
    assert asked["speculative"].max_k == 3 and asked["dtype"] == "float32"
    assert all(f"prompt: {text}" in result.stdout for text in prompts.DEMO)
    assert "texts agree: yes" in result.stdout


@pytest.mark.slow
@pytest.mark.skipif(
    not (CHECKPOINTS / HEAD).is_dir(),
    reason=f"no {HEAD} under checkpoints/",
)
def test_the_trained_head_speeds_the_demo_up(run_generate, tmp_path):
    result = run_generate("--max-tokens", 48, "--output-json", tmp_path / "run.json")
    assert result.exit_code == 0, result.output
    run = outcome(tmp_path / "run.json")
    assert run["texts_agree"] is True and run["metrics"]["mean_acceptance_length"] > 1.3


# --- files and processes
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "code"),
    [(KeyboardInterrupt(), 130), (OSError(28, "No space left on device", "x"), 2)],
)
def test_a_failed_run_leaves_the_old_file(run_tiny, tmp_path, monkeypatch, failure, code):
    path = tmp_path / "run.json"
    path.write_text("old")

    def fail(*_, **__):
        raise failure

    monkeypatch.setattr(LLM, "generate", fail)
    result = run_tiny("--output-json", path, "--quiet")
    assert result.exit_code == code and len(result.stderr.splitlines()) == 1, result.output
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_ctrl_c_shows_the_texts_that_were_finished(run_tiny, monkeypatch):
    decode = LLM.generate

    def interrupted(self, *args, **kwargs):
        raise Interrupted(decode(self, *args, **kwargs)[1:])

    whole = run_tiny()
    monkeypatch.setattr(LLM, "generate", interrupted)
    result = run_tiny()
    assert result.exit_code == 130 and result.stderr.splitlines()[-1] == "interrupted"
    second = whole.stdout[whole.stdout.index("[2/2]") :].splitlines()[:2]
    assert (
        "\n".join(second).replace("[2/2]", "[1/1]") in result.stdout and "[2/" not in result.stdout
    )


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    path.write_text("old")
    file = report.JsonFile(path)
    with pytest.raises(ValueError, match="JSON compliant"):
        file.write({"x": float("nan")})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        file.write({"x": 1})
    monkeypatch.undo()
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    file.write({"x": 1})
    assert json.loads(path.read_text()) == {"x": 1} and list(tmp_path.iterdir()) == [path]


# A background job of a shell starts with SIGINT ignored, and so do its children: give the script
# the handler it has at a terminal.
WITH_CTRL_C = (
    "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); del "
    "sys.argv[0]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


def start(*args: object) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-c",
        WITH_CTRL_C,
        str(ROOT / "scripts" / "generate.py"),
        *map(str, args),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "COLUMNS": "100"}
    return subprocess.Popen(
        command,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=ROOT.parent,
    )


def test_as_a_program(target, draft, tmp_path, monkeypatch):
    """A run, a wrong value, a wrong flag, and Ctrl-C, side by side: imports are most of each."""
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    tiny = ("--target", target, "--draft", draft, "--max-model-len", 4096, "--prompt", "Hello")
    good = start(*tiny, "--max-tokens", 8, "--output-json", tmp_path / "run.json")
    bad = start(*tiny, "--temperature", "nan")
    unknown = start("--tempreture", 1)
    endless = start(
        *tiny * 9, "--max-tokens", 4000, "--ignore-eos", "--output-json", tmp_path / "endless.json"
    )
    assert endless.stdout is not None
    assert endless.stdout.readline().startswith(
        "target: llama"
    )  # loaded: compiling and 36,000 tokens lie ahead
    time.sleep(1)
    endless.send_signal(signal.SIGINT)
    out, err = endless.communicate(timeout=240)
    assert (
        endless.returncode == 130
        and err.splitlines()[-1] == "interrupted"
        and "Traceback" not in err
    )
    assert not (tmp_path / "endless.json").exists()

    out, err = good.communicate(timeout=240)
    assert good.returncode == 0, err
    assert "mean acceptance length: " in out and "Traceback" not in err
    assert outcome(tmp_path / "run.json")["total_num_output_tokens"] == 8
    assert (tmp_path / "cache" / "compiled").is_dir()  # JAX's compilation cache, under ours

    out, err = bad.communicate(timeout=240)
    assert (bad.returncode, out) == (2, "")
    assert err == "error: temperature: expected a number of at least 0, got nan\n"

    out, err = unknown.communicate(timeout=240)
    assert unknown.returncode == 2 and "No such option" in err and "Traceback" not in err


def test_the_file_is_whole_before_the_texts_are_printed(run_tiny, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(generate, "show", full)
    assert run_tiny("--quiet", "--output-json", tmp_path / "run.json").exit_code == 1
    assert outcome(tmp_path / "run.json")["total_num_output_tokens"] == 48


@pytest.mark.parametrize("method", MODEL_FREE)
@pytest.mark.parametrize("target", ["somewhere", None])
def test_a_method_without_a_model_needs_no_draft(method: str, target: str | None):
    assert generate.read_speculative(None, {"method": method}, target).model is None


def test_an_mtp_module_needs_no_draft():
    """It is in the target's own folder."""
    assert generate.read_speculative(None, {"method": "mtp"}, "somewhere").model is None
    assert (
        generate.read_speculative('{"method": "mtp", "model": "elsewhere"}', {}, "somewhere").model
        == "elsewhere"
    )
    assert generate.read_speculative(None, {}, None).model == HEAD


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_method_alone_gets_the_committed_head_of_that_method(method: str):
    config = generate.read_speculative(None, {"method": method}, None)
    assert config.model is not None
    head = open_checkpoint(CHECKPOINTS / config.model)
    assert head_method(head.config, head.tensors) == method


def test_a_head_that_names_its_target_is_target_and_draft(
    run_generate, target, draft, edited, tmp_path
):
    said = {"algorithm": "eagle3", "verifier": {"name_or_path": str(target)}}
    head = edited(draft, {"speculators_config": said})
    settings = ("--prompt", "Hello", "--max-tokens", 24, "--max-model-len", 256)
    results = []
    for name, *pair in (("one", head), ("two", target, "--draft", draft)):
        path = tmp_path / f"{name}.json"
        done = run_generate("--target", *pair, *settings, "--output-json", path)
        assert done.exit_code == 0, done.output
        results.append(outcome(path))
    one, two = results
    assert one["settings"]["speculative"]["method"] == "eagle3"
    assert one["metrics"] == two["metrics"] and one["metrics"]["num_accepted_tokens"] > 0
    texts = [[r["text"] for r in run["requests"]] for run in results]
    assert texts[0] == texts[1]


def test_the_flags_of_vllms_example_run(
    run_generate, target: Path, draft: Path, tmp_path: Path
) -> None:
    """examples/offline_inference/spec_decode.py, with its own words."""
    questions, record = tmp_path / "questions.jsonl", tmp_path / "record.json"
    questions.write_text('{"turns": ["Hello there"]}\n{"turns": ["Why?"]}\n')
    result = run_generate(
        *("--model-dir", target, "--eagle-dir", draft, "--method", "eagle3"),
        *("--num-spec-tokens", 2, "--dataset-name", "hf", "--dataset-path", questions),
        *("--num-prompts", 1, "--temp", 0, "--top-p", 1.0, "--top-k", -1, "--output-len", 8),
        *("--tp", 1, "--max-model-len", 128, "--gpu-memory-utilization", 0.5, "--seed", 0),
        *("--enforce-eager", "--enable-chunked-prefill", "--print-output"),
        *("--output-json", record),
    )
    assert result.exit_code == 0, result.output
    assert "mean acceptance length" in result.stdout
    settings = json.loads(record.read_text())["settings"]
    assert settings["speculative"]["num_speculative_tokens"] == 2
    assert settings["max_tokens"] == 8 and settings["max_model_len"] == 128
    assert len(json.loads(record.read_text())["requests"]) == 1
