"""Bad input to scripts/generate.py: exit code 2 and one sentence that says what was expected and
what was got."""

from __future__ import annotations

import json

import pytest
from safetensors.numpy import load_file, save_file

from jaxspec import LLM
from jaxspec.drafts import METHODS


@pytest.fixture(autouse=True)
def nothing_decoded(monkeypatch):
    """Bad input is found before anything is decoded."""
    decode = LLM._run
    calls = []
    monkeypatch.setattr(LLM, "_run", lambda *args: (calls.append(1), decode(*args)))
    yield
    assert not calls


@pytest.fixture
def not_loaded(monkeypatch):
    """For what is found before a model is opened, which may take minutes."""

    def refuse(*_, **__):
        raise AssertionError("a model was opened")

    monkeypatch.setattr(LLM, "from_pretrained", refuse)


def check(result, sentence: str) -> None:
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    assert sentence in lines[0], lines[0]
    assert "Traceback" not in result.output


@pytest.mark.usefixtures("not_loaded")
@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--temperature", "nan"], "temperature: expected a number of at least 0, got nan"),
        (["--temperature", "-1"], "temperature: expected a number of at least 0, got -1.0"),
        (["--temperature", "inf"], "temperature: expected a number of at least 0, got inf"),
        (["--top-p", "0"], "top_p: expected a number in (0, 1], got 0.0"),
        (["--top-p", "1.5"], "top_p: expected a number in (0, 1], got 1.5"),
        (["--top-p", "nan"], "top_p: expected a number in (0, 1], got nan"),
        (["--top-k", "-5"], "top_k: expected an integer"),
        (["--max-tokens", "0"], "max_tokens: expected an integer of at least 1 or None, got 0"),
        (["--seed", str(2**64)], "seed: expected a 64-bit integer"),
        (
            ["--num-speculative-tokens", "0"],
            "num_speculative_tokens: expected an integer of at least 1, got 0",
        ),
        (
            ["--num-speculative-tokens", "-3"],
            "num_speculative_tokens: expected an integer of at least 1, got -3",
        ),
        (["--method", "medusa"], f"method: expected one of {', '.join(METHODS)}, got 'medusa'"),
        (
            ["--rejection-sample-method", "lenient"],
            "rejection_sample_method: expected one of strict",
        ),
        (["--draft-sample-method", "beam"], "draft_sample_method: expected one of greedy"),
        (
            ["--rejection-sample-method", "synthetic"],
            "expected exactly one with rejection_sample_method 'synthetic'",
        ),
        (
            ["--synthetic-acceptance-rates", "0.5,x"],
            "--synthetic-acceptance-rates: expected numbers with commas between them, got '0.5,x'",
        ),
        (["--speculative-config", "{"], "--speculative-config: expected JSON, got"),
        (
            ["--speculative-config", "[1]"],
            "--speculative-config: expected a JSON object, got a list",
        ),
        (
            ["--speculative-config", '{"num_spec": 3}'],
            "num_speculative_tokens is the nearest, got 'num_spec'",
        ),
        (
            ["--speculative-config", '{"num_speculative_tokens": "3"}'],
            "num_speculative_tokens: expected an integer of at least 1, got '3'",
        ),
        (
            ["--speculative-config", '{"rejection_sample_method": ["strict"]}'],
            "rejection_sample_method: expected a name, got ['strict']",
        ),
        (["--no-speculation", "--compare"], "--compare: expected speculation"),
        (["--prompt", ""], "--prompt 0: expected a prompt, got an empty one"),
        (["--prompt", "a", "--prompt", " \n"], "--prompt 1: expected a prompt, got an empty one"),
        (
            ["--prompt", "a", "--dataset", "b.jsonl"],
            "--prompt, --dataset: expected one of them, got both",
        ),
        (["--num-prompts", "0"], "--num-prompts: expected at least 1, got 0"),
        (
            ["--dataset", "nowhere.jsonl"],
            "--dataset nowhere.jsonl: expected a .jsonl file or the id of a data set on the hub, "
            "got no such file",
        ),
        (["--dataset", "some/where.jsonl"], "got no such file"),
        (["--dataset", "/"], "or the id of a data set on the hub, got something else than a file"),
        (
            ["--output-json", "/nowhere/run.json"],
            "--output-json /nowhere/run.json: expected a place to write a file, got No such file",
        ),
        (["--output-json", "/"], "--output-json /: expected a file, got a folder"),
        (["--stop", "\udcff"], "stop: expected Unicode, got half a character"),
        (
            ["--output-json", "/dev/null"],
            "--output-json /dev/null: expected a file, got something else",
        ),
    ],
)
def test_a_wrong_value_is_refused_before_a_model_is_opened(run_tiny, args, sentence):
    check(run_tiny(*args), sentence)


@pytest.mark.usefixtures("not_loaded")
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("loop", "--output-json loop: expected a place to write a file, got"),
        ("mine.jsonl", "expected another file than the run reads, got mine.jsonl"),
        ("link", "expected another file than the run reads, got mine.jsonl"),
    ],
)
def test_a_record_takes_no_file_that_the_run_reads(
    run_generate, target, tmp_path, monkeypatch, name, sentence
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "link").symlink_to("mine.jsonl")
    (tmp_path / "mine.jsonl").write_text('{"prompt": "Hello"}\n')
    args = ["--target", target, "--no-speculation", "--dataset", "mine.jsonl"]
    check(run_generate(*args, "--output-json", name), sentence)
    assert (tmp_path / "mine.jsonl").read_text() == '{"prompt": "Hello"}\n'


@pytest.mark.usefixtures("not_loaded")
def test_another_target_needs_a_draft_of_its_own(run_generate, target):
    check(
        run_generate("--target", target),
        f"--draft: expected a draft head for {target} (or --no-speculation), got none",
    )


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--dtype", "int8"], "dtype: expected one of auto, float32, bfloat16, got 'int8'"),
        (["--compilation", "jit"], "compilation: expected one of round, step, eager, got 'jit'"),
        (
            ["--kernels", "triton"],
            "kernels: expected one of auto, reference, mosaic_gpu, got 'triton'",
        ),
        (
            ["--kernels", "mosaic_gpu"],
            "kernels 'mosaic_gpu': attention: expected an NVIDIA GPU, got cpu",
        ),
        (["--rounds-per-step", "0"], "rounds_per_step: expected None or an integer of at least 1"),
        (
            ["--rounds-per-step", "2", "--compilation", "step"],
            "which is 1 unless compilation is 'round', got 2 with compilation 'step'",
        ),
        (["--max-num-seqs", "0"], "max_num_seqs: expected an integer of at least 1, got 0"),
        (
            ["--max-model-len", "5000"],
            "max_model_len: expected at most the target's max_position_embeddings 4096, got 5000",
        ),
        (
            ["--prompt", "long " * 200],
            "prompt 0: expected fewer tokens than max_model_len 512, got",
        ),
        (
            ["--prompt", "a", "--prompt", "long " * 200],
            "prompt 1: expected fewer tokens than max_model_len 512, got",
        ),
        (
            ["--rejection-sample-method", "synthetic", "--synthetic-acceptance-rates", "0.5,0.4"],
            "expected 3 numbers",
        ),
    ],
)
def test_a_wrong_setting_of_the_engine_is_refused(run_tiny, args, sentence):
    check(run_tiny(*args), sentence)


@pytest.mark.parametrize(
    ("which", "changes", "drop", "sentence"),
    [
        ("target", {"model_type": "mamba"}, None, "model_type"),
        ("target", {"model_type": None}, None, "model_type"),
        (
            "target",
            {"hidden_size": None},
            None,
            "expected hidden_size to be an integer of at least 1, got None",
        ),
        ("target", {"num_hidden_layers": 4}, None, "model.layers.3"),
        (
            "target",
            {},
            "model.safetensors",
            "expected model.safetensors, model.safetensors.index.json or pytorch_model.bin, got",
        ),
        ("target", {}, "config.json", "config.json: expected a JSON file, got No such file"),
        ("target", {}, "tokenizer.json", "tokenizer"),
        (
            "draft",
            {},
            "model.safetensors",
            "expected model.safetensors, model.safetensors.index.json or pytorch_model.bin, got",
        ),
        (
            "draft",
            {"target_hidden_size": 64},
            None,
            "draft and target do not fit: expected target_hidden_size 32 as the target has, got 64",
        ),
        (
            "draft",
            {"vocab_size": 300},
            None,
            "draft and target do not fit: expected vocab_size 259 as the target has, got 300",
        ),
        ("draft", {"draft_vocab_size": 100}, None, "100"),
        ("draft", {"fc_norm": True}, None, "fc_norm"),
        (
            "draft",
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]},
            None,
            "aux layer ids: expected increasing boundary ids within 0..3",
        ),
        ("draft", {"eagle_aux_hidden_state_layer_ids": [1, 2]}, None, "draft fc.weight: expected"),
    ],
)
def test_a_wrong_checkpoint_is_refused(
    run_generate, edited, target, draft, which, changes, drop, sentence
):
    folders = {"target": target, "draft": draft}
    folders[which] = edited(folders[which], changes, drop)
    check(
        run_generate(
            "--target",
            folders["target"],
            "--draft",
            folders["draft"],
            "--max-model-len",
            512,
            "--prompt",
            "Hi",
        ),
        sentence,
    )


def test_a_draft_without_its_vocabulary_map_is_refused(run_tiny, edited, draft):
    copy = edited(draft)
    tensors = load_file(copy / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k != "d2t"}, copy / "model.safetensors")
    check(
        run_tiny("--draft", copy),
        "d2t: expected it in the draft, whose vocabulary of 192 is not the target's 259, got none",
    )


@pytest.mark.parametrize("which", ["target", "draft"])
@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda data: data[: len(data) // 2], "(truncated or damaged)"),
        (lambda data: data[:-1], "(truncated or damaged)"),
        (lambda data: data[:5], "expected a safetensors file with a whole header"),
        (lambda data: b"", "expected a safetensors file with a whole header"),
        (lambda data: data[:8] + b"\xff" * 40 + data[48:], "expected a safetensors header"),
    ],
    ids=["half", "all but a byte", "five bytes", "empty", "overwritten"],
)
def test_a_damaged_safetensors_file_is_refused(
    run_generate, edited, target, draft, which, damage, sentence
):
    folders = {"target": target, "draft": draft}
    copy = folders[which] = edited(folders[which])
    (copy / "model.safetensors").write_bytes(damage((copy / "model.safetensors").read_bytes()))
    result = run_generate(
        "--target",
        folders["target"],
        "--draft",
        folders["draft"],
        "--max-model-len",
        512,
        "--prompt",
        "Hi",
    )
    check(result, sentence)
    assert str(copy) in result.stderr


@pytest.mark.parametrize(
    "args", [["--target", "/nowhere/at all", "--no-speculation"], ["--draft", "/nowhere/at all"]]
)
def test_a_missing_folder_is_refused(run_tiny, args):
    check(run_tiny(*args), "/nowhere/at all: expected an existing folder")


def test_a_damaged_tokenizer_is_refused(run_tiny, edited, target):
    copy = edited(target)
    (copy / "tokenizer.json").write_text('{"version": "1.0"')
    check(run_tiny("--target", copy), "expected a tokenizer that transformers can read")


@pytest.mark.usefixtures("not_loaded")
@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"turns": ["a"', "expected valid JSON, got"),
        ("\ufffd", "expected valid JSON, got"),
        ('"text"', "expected an object with one of turns, prompt, question, got a str"),
        ("[]", "expected an object with one of turns, prompt, question, got a list"),
        (
            '{"text": "a"}',
            "expected an object with one of turns, prompt, question, got the keys ['text']",
        ),
        ('{"turns": []}', "turns: expected a prompt, got an empty one"),
        ('{"turns": [5]}', "turns: expected a prompt, got a int"),
        ('{"prompt": "  "}', "prompt: expected a prompt, got an empty one"),
        ('{"question": null}', "question: expected a prompt, got a NoneType"),
        ("[" * 100_000, "expected valid JSON, got"),
    ],
)
def test_a_malformed_line_is_named(run_tiny, tmp_path, line, sentence):
    path = tmp_path / "data.jsonl"
    path.write_text(
        json.dumps({"prompt": "fine"})
        + "\n\n"
        + line
        + "\n"
        + json.dumps({"prompt": "fine"})
        + "\n"
    )
    result = run_tiny(
        "--dataset", path, "--num-prompts", 1
    )  # the whole file is checked, not what is used of it alone
    check(result, sentence)
    assert f"{path}, line 3" in result.stderr


@pytest.mark.usefixtures("not_loaded")
def test_bytes_that_are_no_text_and_an_empty_file_are_named(run_tiny, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    check(run_tiny("--dataset", path), f"{path}, line 1: expected valid JSON, got")
    path.write_bytes(b"\n")
    check(run_tiny("--dataset", path), f"{path}: expected at least one prompt, got none")


def test_a_flag_of_the_wrong_kind_is_one_sentence(run_generate):
    result = run_generate("--rounds-per-step", "2.5")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith(
        "Error: Invalid value for '--rounds-per-step': Input should be a valid integer"
    )


def test_help_shows_the_defaults_that_its_text_names(run_generate):
    text = " ".join(run_generate("--help").output.split())
    default = (
        "[default: on a GPU 4 for a target below 1 GiB, 2 below 6 GiB or shared by GPUs, else 1]"
    )
    assert f"Rounds that one program runs. {default}" in text
