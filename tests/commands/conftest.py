"""A tiny llama folder and an EAGLE-3 head that is right most of the time, and commands that run in
this process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner, Result

from jaxspec.commands import generate
from jaxspec.tools.cli import command

HIDDEN, HEADS, HEAD_DIM, INNER, LAYERS = 32, 2, 16, 48, 3
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = 256 + len(SPECIAL)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Run = Callable[..., Result]


def text_weights() -> tuple[np.ndarray, np.ndarray]:
    """An embedding and an output head under which a token's successor is mostly a fixed other
    byte."""
    rng = np.random.default_rng(0)
    embedding = rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32)
    head = np.zeros_like(embedding)
    order = rng.permutation(256)
    head[np.roll(order, -1)] = embedding[order]
    return embedding, head


def write_target(folder: Path) -> Path:
    """A llama whose layers disturb that successor a little, with a byte tokenizer and a chat
    template."""
    rng = np.random.default_rng(1)
    embedding, head = text_weights()
    ones = np.ones(HIDDEN, np.float32)
    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": ones,
    }
    width = HEADS * HEAD_DIM
    for i in range(LAYERS):
        for name, shape in {
            "self_attn.q_proj": (width, HIDDEN),
            "self_attn.k_proj": (HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, width),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }.items():
            tensors[f"model.layers.{i}.{name}.weight"] = (0.15 * rng.normal(size=shape)).astype(
                np.float32
            )
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{name}.weight"] = ones
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "eos_token_id": 256,
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """One token a byte, and the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[0],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_draft(folder: Path) -> Path:
    """A head in speculators' layout that attends to its own row and knows the successor of three
    bytes in four."""
    embedding, head = text_weights()
    del embedding
    kept = np.array([t for t in range(256) if t % 4 != 3])
    eye, nothing, ones = (
        np.eye(HIDDEN, dtype=np.float32),
        np.zeros((HIDDEN, HIDDEN), np.float32),
        np.ones(HIDDEN, np.float32),
    )
    own_row = np.concatenate([eye, nothing], axis=1)  # of [embedding, hidden] just the embedding
    layer = {
        "self_attn.q_proj": 3 * own_row,
        "self_attn.k_proj": 3 * own_row,
        "self_attn.v_proj": own_row,
        "self_attn.o_proj": eye,
        "mlp.gate_proj": np.zeros((INNER, HIDDEN), np.float32),
        "mlp.up_proj": np.zeros((INNER, HIDDEN), np.float32),
        "mlp.down_proj": np.zeros((HIDDEN, INNER), np.float32),
        "input_layernorm": ones,
        "hidden_norm": ones,
        "post_attention_layernorm": ones,
    }
    tensors = {
        f"layers.0.{name}.weight": np.ascontiguousarray(value) for name, value in layer.items()
    }
    tensors |= {
        "fc.weight": np.zeros((HIDDEN, 3 * HIDDEN), np.float32),
        "norm.weight": 0.1
        * ones,  # with norm_output: what is fed back weighs little beside the next embedding
        "lm_head.weight": 10 * head[kept],
        "d2t": kept - np.arange(len(kept)),
        "t2d": np.isin(np.arange(VOCAB), kept),
    }
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(kept),
        "norm_before_residual": False,
        "norm_output": True,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "transformer_layer_config": {
            "model_type": "llama",
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "head_dim": HEAD_DIM,
        },
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_draft(tmp_path_factory.mktemp("models") / "draft")


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """edited(folder, config.json's changes, drop=file) -> a copy; a change to None removes the
    key."""

    def edit(folder: Path, changes: dict[str, Any] | None = None, drop: str | None = None) -> Path:
        copy = tmp_path / f"{folder.name}-copy"
        shutil.copytree(folder, copy)
        config = json.loads((copy / "config.json").read_text()) | (changes or {})
        (copy / "config.json").write_text(
            json.dumps({k: v for k, v in config.items() if v is not None})
        )
        if drop:
            (copy / drop).unlink()
        return copy

    return edit


def runner(main: Callable[..., None]) -> Run:
    app = command(main)
    return lambda *args: CliRunner().invoke(app, [str(a) for a in args])


@pytest.fixture(scope="session")
def run_generate() -> Run:
    """jaxspec generate with any arguments, in this process."""
    return runner(generate.main)


@pytest.fixture(scope="session")
def run_tiny(run_generate: Run, target: Path, draft: Path) -> Run:
    """The same on the tiny models: 24 tokens, two prompts unless the arguments say otherwise."""

    def run(*args: Any) -> Result:
        own = (
            []
            if {"--prompt", "--dataset"} & set(args)
            else ["--prompt", "Hello there", "--prompt", "Why?"]
        )
        return run_generate(
            "--target",
            target,
            "--draft",
            draft,
            "--max-tokens",
            24,
            "--max-model-len",
            512,
            *own,
            *args,
        )

    return run
