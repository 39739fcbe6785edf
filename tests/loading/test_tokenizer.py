"""The frame around a checkpoint's tokenizer: end ids from every file that names them, and its
sentences."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys

import pytest

from jaxspec.config import ConfigError
from jaxspec.engine import inputs
from jaxspec.loading import load_tokenizer
from jaxspec.loading.gguf_file import convert_gguf


@pytest.fixture
def folder(write_gguf, tmp_path):
    return convert_gguf(write_gguf(), tmp_path / "model")


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (7, 9, (2, 7)),  # generation_config.json goes before config.json
        ([7, 2, 5], None, (2, 5, 7)),
        (None, 9, (2, 9)),
        (None, [9, 8], (2, 8, 9)),
        (None, None, (2,)),
    ],
)
def test_end_ids_come_from_the_configs_and_the_tokenizer(folder, generation, config, expected):
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        content = json.loads((folder / name).read_text()) | {"eos_token_id": value}
        (folder / name).write_text(json.dumps(content))
    assert load_tokenizer(folder).eos_token_ids == expected


def test_a_folder_without_generation_config_is_fine(folder):
    (folder / "generation_config.json").unlink()
    assert load_tokenizer(folder).eos_token_ids == (2,)


@pytest.mark.parametrize("value", ["</s>", [1, "2"], True, 1.5])
def test_an_end_id_that_is_no_id_is_named(folder, value):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(
        ConfigError,
        match=r"generation_config\.json: expected eos_token_id to be an id or a list of ids",
    ):
        load_tokenizer(folder)


def test_a_missing_chat_template_is_said_and_prompts_still_work(folder):
    content = json.loads((folder / "tokenizer_config.json").read_text())
    del content["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("in")
    with pytest.raises(
        ConfigError,
        match=(
            "expected a chat template in the tokenizer's files, got "
            "none; give a plain prompt instead"
        ),
    ):
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("chat", [[], ["hi"], [{"role": "user"}], [{"content": "hi"}]])
def test_a_chat_that_is_no_list_of_messages_is_refused(folder, chat):
    with pytest.raises(
        ConfigError, match="chat: expected a list of objects with 'role' and 'content'"
    ):
        load_tokenizer(folder).encode_chat(chat)


def test_what_the_template_itself_refuses_is_one_sentence(folder):
    content = json.loads((folder / "tokenizer_config.json").read_text())
    content["chat_template"] = "{{ raise_exception('roles must alternate') }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    with pytest.raises(
        ConfigError,
        match="expected messages that the chat template of .* accepts, got roles must alternate",
    ):
        load_tokenizer(folder).encode_chat([{"role": "user", "content": "hi"}])


def test_half_a_character_is_refused_wherever_it_stands(folder):
    """JSON can write the half of a UTF-16 pair, which tokenizers answer with a TypeError; and the
    prompt that it stands in is named."""
    tokenizer, sentence = (
        load_tokenizer(folder),
        r"text: expected Unicode, got half a character \(a lone surrogate\), '\\ud800', at 3",
    )
    for text in (json.loads(r'"in \ud800"'), "in \ud800 in"):
        for encode in (tokenizer.encode, tokenizer.encode_word):
            with pytest.raises(ConfigError, match=sentence):
                encode(text)
        with pytest.raises(ConfigError, match="prompt 4: text: expected Unicode"):
            inputs.encode(4, [{"role": "user", "content": text}], tokenizer)
        with pytest.raises(ConfigError, match=f"prompt 5: {sentence}"):
            inputs.encode(5, text, tokenizer)


def test_the_chat_ends_where_the_assistant_starts(folder):
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert (
        tokenizer.decode(ids, skip_special_tokens=False)
        == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(ids) == "user\nhi\nassistant\n"


def test_a_word_is_tokenised_without_the_special_tokens_of_a_prompt(folder):
    from tokenizers.processors import TemplateProcessing

    tokenizer = load_tokenizer(folder)
    bos = tokenizer.hf.convert_tokens_to_ids("<|im_start|>")
    post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    tokenizer.hf.backend_tokenizer.post_processor = post_processor
    word = tokenizer.encode_word("the int")
    assert word and tokenizer.encode("the int") == [bos, *word]


def test_decoding_does_not_tidy_blanks(folder):
    tokenizer = load_tokenizer(folder)
    text = "it 's here , isn 't it ? n't"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("damage", ["missing", "not json", "not a tokenizer"])
def test_missing_or_damaged_files_are_one_sentence(folder, damage):
    path = folder / "tokenizer.json"
    if damage == "missing":
        path.unlink()
    else:
        path.write_text("{" if damage == "not json" else "{}")
    with pytest.raises(ConfigError, match=rf"^{folder}: expected a tokenizer .*got .*") as e:
        load_tokenizer(folder)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("first line\nsecond line", "first line"),
        ("error for 'x':\n    no id\nmore", "error for 'x': no id"),
    ],
)
def test_a_reason_of_several_lines_is_cut_to_one(lines, sentence, folder, monkeypatch):
    import transformers

    def fail(*args, **kwargs):
        raise OSError(lines)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(ConfigError, match=f"got {sentence}$"):
        load_tokenizer(folder)


def test_code_in_the_folder_never_runs(folder):
    ran = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    content = json.loads((folder / "tokenizer_config.json").read_text()) | {
        "tokenizer_class": "Evil",
        "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    with contextlib.suppress(ConfigError):
        load_tokenizer(folder)
    assert not ran.exists()


def test_tokenizing_needs_no_torch_and_prints_no_advice(folder):
    """In a fresh interpreter where torch cannot be imported, as on a plain installation."""
    code = (
        "import sys\nfrom importlib.machinery import PathFinder\nfind = PathFinder.find_spec\n"
        "PathFinder.find_spec = lambda name, *rest: None if name == 'torch' else find(name, "
        "*rest)\n"
        "from jaxspec.loading import "
        f"load_tokenizer\nprint(load_tokenizer({str(folder)!r}).encode('in'))\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(load_tokenizer(folder).encode("in"))
    assert done.stderr == ""


def test_the_tokenizer_of_a_copied_folder_is_the_same(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").encode("the 12 ints") == load_tokenizer(folder).encode(
        "the 12 ints"
    )
