"""A folder or a GGUF file as an independent draft: loaded, inferred, cut to the target's width, or
refused in one sentence where its vocabulary is another."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec import LLM, ConfigError, SamplingParams, SpeculativeConfig
from jaxspec.drafts import DraftModelConfig
from jaxspec.loading.gguf_file import convert_gguf
from jaxspec.loading.model import load_draft, load_target
from jaxspec.loading.same_vocabulary import check_same_vocabulary
from tests.support import quantized

K = 2


@pytest.fixture
def gguf(write_gguf: Callable[..., Path]) -> Path:
    return write_gguf()


@pytest.fixture
def target(gguf: Path, tmp_path: Path) -> Path:
    return convert_gguf(gguf, tmp_path / "target")


@pytest.fixture
def draft(target: Path, tmp_path: Path) -> Path:
    """The target itself, under another name."""
    return shutil.copytree(target, tmp_path / "draft")


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def vocab_size(folder: Path) -> int:
    return json.loads((folder / "config.json").read_text())["vocab_size"]


def pad(folder: Path, more: int) -> None:
    """Add rows that stand for no token to the embedding and the head, or take some away."""
    width = vocab_size(folder) + more
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            rows = np.pad(tensors[name], ((0, max(more, 0)), (0, 0)), constant_values=0.01)
            tensors[name] = np.ascontiguousarray(rows[:width])
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, vocab_size=width)


def load(target: Path, draft: Path, method: str | None = "draft_model", **settings: Any) -> LLM:
    config = {"model": str(draft), "num_speculative_tokens": K} | settings
    if method is not None:
        config["method"] = method
    return LLM.from_pretrained(
        target,
        speculative=config,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=1,
        block_size=8,
        max_num_batched_tokens=16,
    )


def accepts_everything(llm: LLM) -> bool:
    llm.generate([[5, 9, 200, 7]], SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    return llm.metrics.num_accepted_tokens == llm.metrics.num_draft_tokens > 5


def test_a_gguf_file_drafts_and_a_model_needs_no_method(gguf: Path, target: Path) -> None:
    llm = load(target, gguf)
    assert isinstance(llm.draft_config, DraftModelConfig)
    assert accepts_everything(llm)
    assert "draft: draft_model, vocabulary" in llm.describe()


@pytest.mark.parametrize("more", [3, -3])
def test_a_vocabulary_of_another_width_is_cut_or_mapped(
    more: int, target: Path, draft: Path
) -> None:
    """The tokenizers agree. The method is read from the folder."""
    if more < 0:
        pad(target, -more)  # as Qwen2.5-7B's is wider than Qwen2.5-0.5B's
    else:
        pad(draft, more)
    llm = load(target, draft, None)
    assert llm.speculative is not None and llm.speculative.method == "draft_model"
    config = llm.draft_config
    assert isinstance(config, DraftModelConfig)
    assert config.maps_vocabulary == (more < 0)
    assert config.draft_vocab_size == min(vocab_size(target), vocab_size(draft))
    assert accepts_everything(llm)


def test_a_tensor_that_is_wider_than_its_own_config_says_is_an_error(
    target: Path, draft: Path
) -> None:
    width = vocab_size(draft)
    pad(draft, 3)
    edit_config(draft, vocab_size=width)
    with pytest.raises(ConfigError, match=r"misshapen: .*model\.embed_tokens\.weight"):
        load(target, draft)


def test_drafts_end_where_the_drafts_positions_do(
    target: Path, draft: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit_config(draft, max_position_embeddings=32)
    with caplog.at_level(logging.WARNING):
        llm = load(target, draft)
    assert llm.speculative is not None and llm.speculative.draft_max_model_len == 32
    assert "draft_max_model_len: 32, the draft's max_position_embeddings" in caplog.text
    shorter = load(target, draft, draft_max_model_len=20)
    assert shorter.speculative is not None and shorter.speculative.draft_max_model_len == 20


@pytest.mark.parametrize("width", [88, 90])
def test_a_head_in_4_bits_is_cut_to_the_targets_width(width: int, tmp_path: Path) -> None:
    """Its codes come in eights of rows, with the shape of the whole matrix."""
    narrow = quantized.NARROW | {"vocab_size": width}
    cfg, params = load_target(quantized.plain_checkpoint(tmp_path / "target", narrow), jnp.float32)
    source = quantized.plain_checkpoint(tmp_path / "source", seed=1)
    draft = quantized.compressed_int4(source, tmp_path / "draft", lm_head=True)
    settings = SpeculativeConfig(str(draft), "draft_model")
    _, loaded = load_draft(draft, cfg, params, settings, jnp.float32)
    stored = quantized.tensors_of(source)
    head = quantized.floats(*quantized.asymmetric(stored["lm_head.weight"], 128))
    np.testing.assert_array_equal(loaded["lm_head"].values, head[:width].T)
    np.testing.assert_array_equal(
        loaded["embed_tokens"], stored["model.embed_tokens.weight"][:width]
    )


# --- errors
# --------------------------------------------------------------------------------------------------


def swap_tokens(folder: Path) -> tuple[str, str]:
    """Exchange the ids of two tokens, and return both."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    one, other = sorted(vocab, key=vocab.__getitem__)[40:42]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    file.write_text(json.dumps(content))
    return one, other


def test_another_token_is_one_sentence_that_names_it(target: Path, draft: Path) -> None:
    swap_tokens(draft)
    with pytest.raises(ConfigError) as error:
        load(target, draft)
    said = str(error.value)
    assert f"speculative model {draft}: expected the target's tokens, where " in said
    assert "(2 of " in said and "\n" not in said


def test_a_special_token_with_another_text_is_refused(target: Path, draft: Path) -> None:
    file = draft / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab, token = content["model"]["vocab"], content["added_tokens"][-1]
    vocab["<|other|>"] = vocab.pop(token["content"])
    token["content"] = "<|other|>"
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"got '<\|other\|>'"):
        check_same_vocabulary(target, draft)


def test_without_tokenizers_only_one_width_is_taken(
    target: Path, draft: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (draft / "tokenizer.json").unlink()
    with caplog.at_level(logging.WARNING):
        check_same_vocabulary(target, draft)
    assert "no tokenizers show that its ids are those of" in caplog.text
    edit_config(draft, vocab_size=vocab_size(draft) + 64)
    with pytest.raises(ConfigError, match="or a tokenizer beside each model to show that"):
        check_same_vocabulary(target, draft)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(method="eagle3"), "expected a draft head, with fc.weight"),
        (dict(norm_before_fc=True), "norm_before_fc: expected it only with method 'eagle3'"),
        (dict(draft_tensor_parallel_size=3), "draft_tensor_parallel_size: expected 1 or"),
    ],
)
def test_what_does_not_fit_is_one_sentence(
    change: dict[str, Any], message: str, target: Path, draft: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        load(target, draft, **change)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_head_is_no_whole_model(target: Path, draft: Path) -> None:
    tensors = load_file(draft / "model.safetensors")
    save_file(tensors | {"fc.weight": np.ones((2, 2), np.float32)}, draft / "model.safetensors")
    with pytest.raises(ConfigError, match="expected a whole model, got a draft head"):
        load(target, draft)


def test_a_name_that_is_no_model_is_named(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"draft model .*nowhere at all"):
        load(target, tmp_path / "nowhere at all")


def test_plain_weights_are_quantised_while_they_load(target: Path, draft: Path) -> None:
    llm = load(target, draft, draft_quantize="fp8")
    assert isinstance(llm.draft_config, DraftModelConfig)
    model: Any = llm.draft_config.model
    assert model.quantization is not None
    llm.generate([[5, 9, 200, 7]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert llm.metrics.num_draft_tokens > 0
