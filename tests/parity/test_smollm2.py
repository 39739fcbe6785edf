"""The default target against transformers, which reads the same GGUF file by its own loader."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.loading import open_checkpoint
from jaxspec.loading.default_target import default_target
from jaxspec.loading.model import load_target
from tests.loading.test_gguf_file import assert_bit_equal, assert_same_config
from tests.parity.oracles import hf_outputs
from tests.parity.ours import PagedTarget, by_position
from tests.support.smollm2 import gguf_file

PROMPTS = [
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
    "Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\nThe "
    "capital of",
    "<|im_start|>user\nWrite a haiku about the sea.<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    ",
]


@pytest.fixture(scope="module")
def theirs() -> Any:
    """The model as transformers dequantises and renames it, which takes 10 s."""
    import torch
    from transformers import AutoModelForCausalLM

    path = gguf_file()
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.mark.oracle("transformers", "accelerate")
def test_the_converted_target_is_bit_equal_to_transformers_loader(theirs: Any) -> None:
    """Of the cached folder; tests/loading/test_gguf_file.py compares that with a fresh one."""
    opened = open_checkpoint(default_target())
    assert len(opened.tensors) == 272
    expected = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    assert_bit_equal(opened, expected, tied=True)
    assert_same_config(opened.config, theirs.config)


@pytest.mark.oracle("transformers", "accelerate")
def test_default_target_equals_transformers_reading_the_same_gguf(theirs: Any) -> None:
    from transformers import AutoTokenizer

    folder, model = default_target(), theirs
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(p, add_special_tokens=False).input_ids for p in PROMPTS]
    cfg, params = load_target(folder, jnp.float32)
    assert np.array_equal(params["embed_tokens"], model.model.embed_tokens.weight.detach().numpy())
    assert np.array_equal(
        params["layers"][3]["self_attn"]["qkv_proj"].values[:, : cfg.hidden_size],
        model.model.layers[3].self_attn.q_proj.weight.detach().numpy().T,
    )

    aux_layers = (2, 15, 27)
    target = PagedTarget(cfg, params, len(prompts), block_size=16, aux_layers=aux_layers)
    target.prefill(prompts, chunk=32)
    for i, prompt in enumerate(prompts):
        expected = hf_outputs(model, np.array(prompt))
        logits = by_position(target.logits[i])
        # Logits reach 30 here, after 30 layers in float32: 1e-4 of the largest, and the same token
        # everywhere.
        np.testing.assert_allclose(
            logits, expected.logits, rtol=0, atol=1e-4 * np.abs(expected.logits).max()
        )
        np.testing.assert_array_equal(logits.argmax(-1), expected.logits.argmax(-1))
        for layer, ours in zip(
            aux_layers, np.split(by_position(target.aux[i]), 3, axis=-1), strict=True
        ):
            theirs = expected.boundary[layer]  # residual streams hold a few huge entries
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max())
    assert (
        tokenizer.decode(by_position(target.logits[0])[-1].argmax()).strip() == "France"
    )  # and it is the model, not a scrambled one
