"""The real models' configs pass a load by shape against the tensor names of their original files,
without any weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import pytest

from jaxspec import drafts, models
from jaxspec.config import ConfigError, SpeculativeConfig
from jaxspec.drafts import mtp
from jaxspec.layers.params import is_spec
from jaxspec.loading import check_shapes
from tests.support.full_size import BILLIONS, CONFIGS, tensors


def size(specs: object) -> int:
    return sum(math.prod(s.shape) for s in jax.tree.leaves(specs, is_leaf=is_spec))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_of_the_original_files_is_expected_and_no_other(name: str) -> None:
    cfg = models.config_from_hf(CONFIGS[name])
    family, held = models.family(cfg), tensors(name)
    ignore = lambda tensor: family.ignored_tensor(cfg, tensor)  # noqa: E731
    check_shapes(family.param_specs(cfg), held, ignore=ignore, source=name)
    for missing in (
        "model.layers.1.input_layernorm.weight",
        list(held)[-1] if not held_by_mtp(list(held)[-1], name) else "lm_head.weight",
    ):
        without = {k: s for k, s in held.items() if k != missing}
        with pytest.raises(ConfigError, match="1 missing"):
            check_shapes(family.param_specs(cfg), without, ignore=ignore)
    with pytest.raises(ConfigError, match=r"1 unexpected: model\.layers\.0\.mlp\.extra"):
        check_shapes(
            family.param_specs(cfg), {**held, "model.layers.0.mlp.extra": (1,)}, ignore=ignore
        )


def held_by_mtp(tensor: str, name: str) -> bool:
    return tensor not in tensors(name, mtp=False)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_number_of_parameters_is_the_published_one(name: str) -> None:
    cfg: Any = models.config_from_hf(CONFIGS[name])
    if getattr(cfg, "mxfp4", None):
        cfg = replace(cfg, mxfp4="dequantised")  # a number for each parameter
    assert size(models.family(cfg).param_specs(cfg)) / 1e9 == pytest.approx(
        BILLIONS[name], rel=0.01
    )


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
def test_packed_experts_come_from_the_same_tensors(name: str) -> None:
    cfg: Any = models.config_from_hf(CONFIGS[name])
    assert cfg.mxfp4 == "packed"
    check_shapes(models.family(cfg).param_specs(cfg), tensors(name), source=name)


def test_a_head_of_one_llama_layer_fits_a_target_with_experts() -> None:
    """SpecForge's dimensions of the EAGLE-3 heads for Qwen3-30B-A3B, in SafeAI's layout."""
    target = models.config_from_hf(CONFIGS["Qwen3-30B-A3B"])
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 2048,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 48,
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "vocab_size": 151936,
        "draft_vocab_size": 32000,
    }
    layer = {
        "self_attn.q_proj": (4096, 4096),
        "self_attn.k_proj": (512, 4096),
        "self_attn.v_proj": (512, 4096),
        "self_attn.o_proj": (2048, 4096),
        "mlp.gate_proj": (12288, 2048),
        "mlp.up_proj": (12288, 2048),
        "mlp.down_proj": (2048, 12288),
        "hidden_norm": (2048,),
        "input_layernorm": (2048,),
        "post_attention_layernorm": (2048,),
    }
    held = {f"midlayer.{name}.weight": shape for name, shape in layer.items()} | {
        "fc.weight": (2048, 3 * 2048),
        "norm.weight": (2048,),
        "lm_head.weight": (32000, 2048),
        "d2t": (32000,),
        "t2d": (151936,),
    }
    family = drafts.family_of_checkpoint("eagle3", config, held)
    shapes = {family.canonical_name(name): shape for name, shape in held.items()}
    draft = family.config_from_checkpoint(
        config, shapes, target, SpeculativeConfig(method="eagle3")
    )
    assert (draft.aux_layers, draft.draft_vocab_size) == ((2, 24, 45), 32000)
    ignore = lambda name: family.ignored_tensor(draft, name)  # noqa: E731
    check_shapes(family.param_specs(draft), shapes, ignore=ignore)


@pytest.mark.parametrize("name", ["DeepSeek-V3", "GLM-4.7-Flash", "MiMo-7B"])
def test_the_mtp_module_is_the_rest_of_the_file(name: str) -> None:
    """What the target ignores, the draft expects, but for copies of the embedding and the head."""
    target, held = models.config_from_hf(CONFIGS[name]), tensors(name)
    draft = mtp.config_from_checkpoint(CONFIGS[name], held, target, SpeculativeConfig(method="mtp"))
    check_shapes(
        mtp.param_specs(draft), held, ignore=lambda n: mtp.ignored_tensor(draft, n), source=name
    )
    ignored = [n for n in held if models.family(target).ignored_tensor(target, n)]
    read = [n for s in jax.tree.leaves(mtp.param_specs(draft), is_leaf=is_spec) for n in s.tensors]
    copies = [
        f"model.layers.{target.num_layers}.{x}.weight" for x in ("embed_tokens", "shared_head.head")
    ]
    assert sorted(set(read)) == sorted(set(ignored) - set(copies))
