"""The tokenizer built from a GGUF's metadata: the same ids as transformers' own conversion where
that one is right."""

from __future__ import annotations

import unicodedata
from itertools import groupby

import pytest

from jaxspec.config import ConfigError
from jaxspec.loading import load_tokenizer
from jaxspec.loading.gguf_file import convert_gguf
from jaxspec.loading.tokenizer import Tokenizer
from tests.support import gguf_files
from tests.support.gguf_files import sentencepiece

# no run of two blanks, and no other numeral than 0-9, before a numeral: there transformers 5.23,
# which knows no "smollm", differs
TEXTS = [
    "",
    "Hello world",
    "  leading and trailing  ",
    "It's 2024: they'll've 1,234.50 apples, don't they?",
    "def f(x: int) -> int:\n    # doubled\n\treturn x*2 if x else {}\n\n\n",
    "naïve café, Ærøskøbing; Ελληνικά, русский, 日本語のテキスト, العربية, हिन्दी",
    "🙂👩‍👩‍👧‍👦🇫🇷 e\u0301 \u00a0 \u200b \ufeff",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<|im_start|user <repo_name>x",
    "tab\tseparated\r\nlines\r\r\n",
    "\x00\x7f control",
]
NUMERAL_TEXTS = [
    "a    12",
    "\n\n1. one\n2. two",
    "x =  7",
    "½ ２３ ² Ⅻ",
    "\t\t3",
    "  1  2   3",
    *TEXTS,
]
CHATS = [
    [{"role": "user", "content": "What is 12 + 30?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Ünïcode 日本"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b\n"},
        {"role": "user", "content": "c"},
    ],
]


@pytest.fixture(scope="module")
def theirs(smollm2_gguf):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


@pytest.fixture(scope="module")
def ours(smollm2_fresh) -> Tokenizer:
    return load_tokenizer(smollm2_fresh)


@pytest.mark.oracle
@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_ids_equal_transformers_from_the_same_gguf(ours, theirs, text):
    assert ours.encode(text) == list(theirs.encode(text))


@pytest.mark.oracle
@pytest.mark.parametrize("text", NUMERAL_TEXTS)
def test_smollm2_cuts_every_numeral_alone_as_llama_cpp_does(ours, theirs, text):
    """llama.cpp's "smollm": \\p{N} is cut out first, then GPT-2's pattern on each piece;
    transformers does the second part."""
    pieces: list[str] = []
    for numeral, run in groupby(text, key=lambda c: unicodedata.category(c).startswith("N")):
        piece = "".join(run)
        pieces += list(piece) if numeral else [piece]
    assert ours.encode(text) == [i for piece in pieces for i in theirs.encode(piece)]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello 123 wörld", [19556, 216, 33, 34, 35, 267, 29989, 400]),
        ("a    12", [81, 289, 33, 34]),
        ("<|im_start|>user", [1, 4093]),
    ],
)
def test_smollm2_ids_are_those_recorded_from_the_oracle(ours, text, ids):
    assert ours.encode(text) == ids


@pytest.mark.parametrize("text", NUMERAL_TEXTS)
def test_smollm2_decodes_to_the_same_text(ours, text):
    assert ours.decode(ours.encode(text), skip_special_tokens=False) == text


@pytest.mark.oracle
@pytest.mark.parametrize("chat", CHATS)
def test_smollm2_chat_template_renders_as_transformers_does(ours, theirs, chat):
    expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert ours.hf.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == expected
    assert ours.encode_chat(chat) == list(theirs.encode(expected))


@pytest.mark.oracle
def test_smollm2_special_tokens_equal_transformers(ours, theirs):
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert getattr(ours.hf, name) == getattr(theirs, name)
    assert len(ours.hf) == len(theirs) == 49152
    assert ours.hf.get_vocab() == theirs.get_vocab()


@pytest.mark.oracle
@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "gpt-2"])
@pytest.mark.parametrize(
    "text",
    [
        "the 123 123456 ints",
        "don't DON'T  x\n\n 12",
        "a<think>b</think><|im_end|>",
        "é e\u0301 日本\r\n\r\n",
    ],
)
def test_other_pre_tokenizers_give_transformers_ids(write_gguf, tmp_path, pre, text):
    from transformers import AutoTokenizer

    # not arch qwen2: AutoTokenizer would bring Qwen's own cutting, whatever the file that we wrote
    # says
    path = write_gguf("qwen3" if pre == "qwen2" else "llama", pre=pre)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # Qwen's own tokenizer composes characters first; a GGUF does not say so
    text_for_theirs = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    ours = load_tokenizer(convert_gguf(path, tmp_path / "out"))
    assert ours.encode(text) == list(theirs.encode(text_for_theirs))


def test_llama_bpe_takes_a_word_that_is_a_token_whole(write_gguf, tmp_path):
    """ "int" is in the vocabulary and its merge (in + t) is there, but "12" + "3" is reached by
    merges only for others."""
    path = write_gguf("llama", pre="llama-bpe", tokens=["wx"])
    ours = load_tokenizer(convert_gguf(path, tmp_path / "out"))
    assert ours.hf.convert_ids_to_tokens(ours.encode("wx")) == ["wx"]
    other = load_tokenizer(
        convert_gguf(write_gguf("llama", pre="smollm", tokens=["wx"]), tmp_path / "other")
    )
    assert other.hf.convert_ids_to_tokens(other.encode("wx")) == ["w", "x"]


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize(
    ("arch", "pre"),
    [
        ("llama", "smollm"),
        ("llama", "llama-bpe"),
        ("qwen2", "deepseek-r1-qwen"),
        ("qwen3", "qwen2"),
    ],
)
def test_add_bos_token_is_obeyed_for_prompts_and_not_repeated_in_chats(
    write_gguf, tmp_path, arch, pre, bos
):
    ours = load_tokenizer(convert_gguf(write_gguf(arch, pre=pre, bos=bos), tmp_path / "out"))
    assert (ours.encode("in")[0] == 1) is bos
    chat = ours.encode_chat([{"role": "user", "content": "in"}])
    assert (
        chat.count(1) == 2
    )  # <|im_start|>, which is the bos: of the user's and the assistant's turn


def test_a_control_token_is_one_token_and_skipped(write_gguf, tmp_path):
    ours = load_tokenizer(convert_gguf(write_gguf(), tmp_path / "out"))
    assert ours.encode("<|endoftext|>") == [0]  # neither bos nor eos here
    assert ours.decode([0]) == ""


def test_smollm_never_merges_digits_even_if_a_merge_exists(write_gguf, tmp_path):
    ours = load_tokenizer(convert_gguf(write_gguf(pre="smollm"), tmp_path / "out"))
    assert ours.hf.convert_ids_to_tokens(ours.encode("123")) == ["1", "2", "3"]
    llama3 = load_tokenizer(convert_gguf(write_gguf("llama", pre="llama-bpe"), tmp_path / "other"))
    assert llama3.hf.convert_ids_to_tokens(llama3.encode("123")) == ["123"]


def test_a_user_defined_token_is_one_token_but_is_not_skipped_as_special(write_gguf, tmp_path):
    ours = load_tokenizer(convert_gguf(write_gguf(), tmp_path / "out"))
    ids = ours.encode("a<think>b<|im_end|>")
    assert len(ids) == 4
    assert ours.decode(ids) == "a<think>b"


@pytest.mark.parametrize(
    ("arch", "kind"), [("llama", "t5"), ("llama", "no-such"), ("qwen2", "llama")]
)
def test_another_tokenizer_is_refused(write_gguf, tmp_path, arch, kind):
    with pytest.raises(ConfigError, match=rf"expected a byte-level BPE .*\('gpt2'\).*'{kind}'"):
        convert_gguf(write_gguf(arch, tokenizer_model=kind), tmp_path / "out")


SENTENCEPIECE_TEXT = (
    "the quick brown fox jumps over the lazy dog and then the dog sleeps under the other tree "
    "while the brown fox thinks about the number of jumps that the quick dog could do in 12 days"
)
SENTENCEPIECE_TEXTS = [
    "",
    "the brown fox",
    "  the  dog   sleeps ",
    " ",
    "The QUICK (brown) fox: 34 jumps!",
    "naïve 日本 🙂 \u0301",
    "line\none\t\r\n\ntwo",
    "<s>the<|im_start|>user\nthe dog<|im_end|>\nthe</s>",
    "a<think>the fox</think> dog",
    "<unk>the <0x0A>",
    "thethethe▁the",
]


@pytest.fixture(scope="module")
def sentencepiece_pair(tmp_path_factory):
    """(ours, transformers' own conversion) of one SentencePiece vocabulary."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("sentencepiece")
    path = gguf_files.write_gguf(folder, pieces=sentencepiece(SENTENCEPIECE_TEXT))
    theirs = AutoTokenizer.from_pretrained(folder, gguf_file=path.name)
    return load_tokenizer(convert_gguf(path, folder / "out")), theirs


@pytest.mark.oracle
@pytest.mark.parametrize("text", SENTENCEPIECE_TEXTS)
def test_sentencepiece_gives_transformers_ids_and_text(sentencepiece_pair, text):
    ours, theirs = sentencepiece_pair
    ids = list(theirs.encode(text))
    assert ids[0] == 1  # <s>: a SentencePiece vocabulary has it by default
    assert ours.encode(text) == ids
    assert ours.encode_word(text) == ids[1:]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.oracle
def test_sentencepiece_pieces_bytes_and_special_tokens_are_the_files(sentencepiece_pair):
    ours, theirs = sentencepiece_pair
    assert ours.hf.get_vocab() == theirs.get_vocab()
    assert ours.hf.convert_ids_to_tokens(ours.encode("the ü")) == [
        *("<s>", "▁the", "▁", "<0xC3>", "<0xBC>")
    ]
    assert ours.decode(ours.encode("<|im_start|>the<think> dog")) == "the<think> dog"
    for name in ("bos_token", "eos_token", "unk_token"):
        assert getattr(ours.hf, name) == getattr(theirs, name)


def test_sentencepiece_merges_the_best_score_first(write_gguf, tmp_path):
    """ "abc" is a+bc where bc scores better than ab, whatever the order of the ids."""
    base = [p for p in sentencepiece("a b c", merges=0) if p[0] != "▁a"]
    for scores, expected in (((-1.0, -2.0), ["ab", "c"]), ((-2.0, -1.0), ["a", "bc"])):
        path = write_gguf(pieces=[*base, ("ab", scores[0], 1), ("bc", scores[1], 1)])
        ours = load_tokenizer(convert_gguf(path, tmp_path / expected[0]))
        assert ours.hf.convert_ids_to_tokens(ours.encode_word("abc")) == ["▁", *expected]


@pytest.mark.parametrize("prefix", [True, False])
def test_add_space_prefix_is_obeyed(write_gguf, tmp_path, prefix):
    path = write_gguf(
        pieces=sentencepiece(SENTENCEPIECE_TEXT),
        kv={"tokenizer.ggml.add_space_prefix": prefix},
    )
    ours = load_tokenizer(convert_gguf(path, tmp_path / "out"))
    tokens = ours.hf.convert_ids_to_tokens(ours.encode("the"))
    assert (tokens == ["<s>", "▁the"]) is prefix
    assert ours.decode(ours.encode("the  dog")) == "the  dog"
