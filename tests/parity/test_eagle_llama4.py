"""EAGLE-1 for Llama 4, step by step against transformers' Llama 4 layer between fc and a norm, as
vLLM's llama4_eagle.py joins them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.config import ConfigError
from jaxspec.loading.model import load_target
from tests.parity.oracles import (
    TOLERANCE,
    DraftOracle,
    edit_config,
    hf_outputs,
    hf_target,
    randomise,
)
from tests.parity.ours import MAX_MODEL_LEN, PagedDraft, load
from tests.parity.test_families import LLAMA4

K = 4
LAYERS: dict[str, dict[str, Any]] = {
    "rope_experts": {"no_rope_layers": [1], "moe_layers": [0]},
    "no_rope_dense": {"no_rope_layers": [0], "moe_layers": []},
}


def saved_head(kind: str, target_folder: Path, folder: Path) -> tuple[Any, DraftOracle]:
    """A random target and a random head for it, both saved."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = hf_target(target_folder, **LLAMA4)
    keys = {
        **json.loads((target_folder / "config.json").read_text()),
        **LAYERS[kind],
        "num_hidden_layers": 1,
    }
    keys["layer_types"] = ["chunked_attention" if keys["no_rope_layers"][0] else "full_attention"]
    one_layer = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**keys), attn_implementation="eager"
    )
    one_layer = randomise(one_layer, seed=3)
    one_layer.model.fc = randomise(torch.nn.Linear(96, 48, bias=False), seed=4)

    def run(hidden: Any, tokens: Any, feedback: Any) -> tuple[Any, Any]:
        joined = torch.cat(
            [model.model.embed_tokens(tokens), torch.cat([hidden, feedback])], dim=-1
        )
        out = one_layer.model(
            inputs_embeds=one_layer.model.fc(joined)[None], use_cache=False
        ).last_hidden_state[0]
        return model.lm_head(out), out

    tensors = {
        name.removeprefix("model."): value.numpy()
        for name, value in one_layer.state_dict().items()
        if name.startswith(("model.layers.", "model.norm.", "model.fc."))
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(keys))
    return model, DraftOracle(one_layer.model, np.arange(160), run)


@pytest.mark.oracle("transformers")
@pytest.mark.parametrize("kind", LAYERS)
def test_every_step_equals_transformers_layer(kind: str, tmp_path: Path) -> None:
    """Across chunks and blocks, with one to K+1 pending rows."""
    model, oracle = saved_head(kind, tmp_path / "target", tmp_path / "draft")
    target, shared = load_target(tmp_path / "target", jnp.float32)
    cfg, params = load(tmp_path / "draft", "eagle", shared=shared, target=target)
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, 160, n + 1) for n in (1, 7, 82)]
    hidden, tokens = [hf_outputs(model, t[:-1]).hidden for t in texts], [t[1:] for t in texts]
    draft = PagedDraft(cfg, params, hidden, tokens, num_pending=(1, 3, 5), K=K, target=target)
    drafted = np.asarray(draft.propose().draft_tokens)
    _, stepped = draft.steps(forced=drafted)
    expected = np.stack(
        [
            oracle.chain(h, t, K, forced=f)[1]
            for h, t, f in zip(hidden, tokens, drafted, strict=True)
        ]
    )
    np.testing.assert_array_equal(drafted, expected.argmax(-1))
    np.testing.assert_allclose(stepped, expected, **TOLERANCE)
    if kind == "rope_experts":
        assert cfg.cache_groups(4, MAX_MODEL_LEN)[0].chunk == 6
        wider = replace(cfg, target=replace(cfg.target, chunk_size=7))
        _, other = PagedDraft(
            wider, params, hidden, tokens, num_pending=(1, 3, 5), K=K, target=target
        ).steps(forced=drafted)
        assert np.abs(other - expected).max() > 0.01


@pytest.mark.oracle("transformers")
def test_a_head_of_two_layers_is_refused(tmp_path: Path) -> None:
    saved_head("no_rope_dense", tmp_path / "target", tmp_path / "draft")
    target, shared = load_target(tmp_path / "target", jnp.float32)
    edit_config(
        tmp_path / "draft",
        lambda c: c.update(
            num_hidden_layers=2, no_rope_layers=[0, 0], layer_types=["full_attention"] * 2
        ),
    )
    with pytest.raises(
        ConfigError, match="num_hidden_layers: expected 1 in an EAGLE head for Llama 4, got 2"
    ):
        load(tmp_path / "draft", "eagle", shared=shared, target=target)
