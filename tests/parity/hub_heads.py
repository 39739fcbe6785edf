"""Heads as they lie on the hub: the real files' config keys and tensor names, with small widths.

The keys and names come from loaders and trainers (vLLM, SGLang, llama.cpp, speculators, SpecForge,
NVIDIA's Model-Optimizer and NeMo) and from issues that quote the files; the files themselves could
not be opened. Boundary ids of 36 layers become those of the 8 layers of tests.parity.ours.TARGET.
The weights are an oracle's, so that its logits say what the files mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.parity.oracles import (
    EAGLE1_CONFIG,
    SAFEAI_CONFIG,
    DraftOracle,
    eagle1_head,
    specforge_head,
    speculators_head,
)
from tests.parity.ours import shared_weights

LAYER = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "post_attention_layernorm",
)
LAYER3 = (*LAYER, "input_layernorm", "hidden_norm")


def weights(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}.weight" for name in names)


def layer(prefix: str, parts: tuple[str, ...]) -> tuple[str, ...]:
    return weights(*(f"{prefix}.{part}" for part in parts))


MAPS = ("d2t", "t2d")
# The flat part that the heads of the Llama kind share; speculators nests it.
SHAPE = dict(
    model_type="llama",
    hidden_act="silu",
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    rms_norm_eps=1e-3,
    vocab_size=128,
    attention_bias=False,
    mlp_bias=False,
    tie_word_embeddings=False,
    max_position_embeddings=2048,
)
YARN = dict(
    rope_type="yarn",
    factor=32.0,
    beta_fast=32.0,
    beta_slow=1.0,
    original_max_position_embeddings=16,
    truncate=False,
)
NVIDIA = dict(
    use_aux_hidden_state=True,
    use_input_layernorm_in_first_layer=True,
    use_last_layernorm=True,
    use_mtp_layernorm=False,
    next_layer_regular=True,
    parallel_draft_step=1,
    parallel_draft_heads_num_layers=1,
)


def speculators_said(algorithm: str, verifier: str | None) -> dict[str, Any]:
    return dict(
        algorithm=algorithm,
        default_proposal_method="greedy",
        proposal_methods=[
            dict(
                proposal_type="greedy",
                speculative_tokens=5,
                verifier_accept_k=1,
                accept_tolerance=0.0,
            )
        ],
        verifier=dict(name_or_path=verifier, architectures=["LlamaForCausalLM"]),
    )


@dataclass(frozen=True)
class HubHead:
    """One published head.

    config:   its config.json
    tensors:  the names in its file
    oracle:   makes the weights; oracle_name maps a name of the file to the oracle's
    expected: fields of our config
    guesses:  the keys that WARNINGs are about
    """

    config: Mapping[str, Any]
    tensors: tuple[str, ...]
    oracle: Callable[[], DraftOracle]
    needs: str
    expected: Mapping[str, Any]
    guesses: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)

    def save(self, oracle: DraftOracle, folder: Path) -> Path:
        """Write config.json and model.safetensors, and nothing that the real repository lacks."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(dict(self.config)))
        held = {k: v.numpy() for k, v in oracle.module.state_dict().items()}
        tensors = {name: held[self.oracle_name(name)] for name in self.tensors}
        save_file(
            {name: np.ascontiguousarray(t) for name, t in tensors.items()},
            folder / "model.safetensors",
        )
        return folder

    def oracle_name(self, name: str) -> str:
        for theirs, ours in self.renamed.items():
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return name


def aux(*ids: int, **switches: bool) -> Callable[[], DraftOracle]:
    return lambda: speculators_head(aux_layers=ids or None, **switches)


def last_hidden_state() -> DraftOracle:
    """A head without fc, by speculators' own: one feature, through an fc that changes nothing."""
    import torch

    oracle = speculators_head(aux_layers=(8,), draft_vocab=128)
    oracle.module.fc.weight.copy_(torch.eye(64))
    oracle.module.lm_head.weight.copy_(
        torch.from_numpy(np.array(shared_weights()["lm_head"].values.T))
    )
    return oracle


def eagle1(
    *, bias: bool = False, qkv_bias: bool = False, **config: Any
) -> Callable[[], DraftOracle]:
    """Return what makes a head of EAGLE-1; qkv_bias: as SafeAI's later code has them for Qwen2."""
    lm_head = np.array(shared_weights()["lm_head"].values.T)

    def make() -> DraftOracle:
        oracle = eagle1_head({**EAGLE1_CONFIG, **config}, lm_head, bias=bias)
        if qkv_bias:
            import torch

            rng = np.random.default_rng(5)
            for x in "qkv":
                product = getattr(oracle.module.layers[0].self_attn, f"{x}_proj")
                values = rng.normal(size=product.weight.shape[0]).astype(np.float32)
                product.bias = torch.nn.Parameter(torch.from_numpy(values), requires_grad=False)
        return oracle

    return make


MIDLAYER = {"midlayer.": "layers.0."}
HEADS: dict[str, HubHead] = {
    "yuhuili/EAGLE-LLaMA3-Instruct-8B": HubHead(
        dict(EAGLE1_CONFIG, bias=False, pad_token_id=0, torch_dtype="float16"),
        (*weights("embed_tokens", "fc"), *layer("layers.0", LAYER)),
        eagle1(),
        "eagle",
        dict(method="eagle", own_embedding=True, own_lm_head=False, fc_bias=False),
    ),
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": HubHead(
        dict(SAFEAI_CONFIG, architectures=["LlamaForCausalLM"], torch_dtype="float16"),
        (*weights("fc", "norm", "lm_head"), *layer("midlayer", LAYER3), *MAPS),
        lambda: specforge_head(dict(SAFEAI_CONFIG)),
        "specforge",
        dict(method="eagle3", aux_layers=(2, 4, 5), own_embedding=False, draft_vocab_size=48),
        ("eagle_aux_hidden_state_layer_ids", "rope_theta"),
    ),
    "lmsys/sglang-EAGLE3 (SpecForge, nested ids that are the default)": HubHead(
        dict(
            SAFEAI_CONFIG,
            rope_theta=1e6,
            eagle_config=dict(
                eagle_aux_hidden_state_layer_ids=[1, 3, 4], use_aux_hidden_state=True
            ),
        ),
        (*weights("fc", "norm", "lm_head", "embed_tokens"), *layer("midlayer", LAYER3), *MAPS),
        lambda: specforge_head({**SAFEAI_CONFIG, "rope_theta": 1e6}),
        "specforge",
        dict(method="eagle3", aux_layers=(2, 4, 5), own_embedding=True),
    ),
    "RedHatAI/Qwen3-8B-speculator.eagle3": HubHead(
        dict(
            architectures=["Eagle3Speculator"],
            speculators_model_type="eagle3",
            speculators_version="0.1.0.dev42",
            draft_vocab_size=48,
            norm_before_residual=True,
            target_hidden_size=None,
            eagle_aux_hidden_state_layer_ids=None,
            transformer_layer_config=dict(SHAPE, rope_theta=10000.0, rope_scaling=None),
            speculators_config=speculators_said("eagle3", "Qwen/Qwen3-8B"),
        ),
        (
            *weights("fc", "norm", "lm_head", "embed_tokens"),
            *layer("layers.0", LAYER3),
            *MAPS,
        ),
        aux(2, 4, 5, norm_before_residual=True),
        "speculators",
        dict(
            method="eagle3",
            aux_layers=(2, 4, 5),
            norm_before_residual=True,
            norm_before_fc=False,
            own_embedding=True,
        ),
        ("eagle_aux_hidden_state_layer_ids",),
    ),
    "RedHatAI/gpt-oss-20b-speculator.eagle3": HubHead(
        dict(
            architectures=["Eagle3DraftModel"],
            speculators_model_type="eagle3",
            speculators_version="0.4.0",
            draft_vocab_size=48,
            norm_before_residual=True,
            norm_before_fc=True,
            embed_requires_grad=False,
            target_hidden_size=64,
            eagle_aux_hidden_state_layer_ids=[2, 4, 5],
            transformer_layer_config=dict(
                SHAPE, rope_parameters=dict(rope_type="default", rope_theta=10000.0)
            ),
            speculators_config=speculators_said("eagle3", "openai/gpt-oss-20b"),
        ),
        (
            *weights("fc", "norm", "lm_head", "embed_tokens", "input_norm"),
            *layer("layers.0", LAYER3),
            *MAPS,
        ),
        aux(2, 4, 5, norm_before_residual=True, norm_before_fc=True),
        "speculators",
        dict(aux_layers=(2, 4, 5), norm_before_residual=True, norm_before_fc=True),
    ),
    "nvidia/gpt-oss-120b-Eagle3-v3": HubHead(
        dict(
            SHAPE,
            architectures=["LlamaForCausalLMEagle3"],
            draft_vocab_size=48,
            rope_theta=10000.0,
            eagle_config=dict(
                NVIDIA, eagle_aux_hidden_state_layer_ids=[4, 6, 8], norm_before_fc=True
            ),
        ),
        (
            *weights("fc", "norm", "lm_head", "input_norm"),
            *layer("midlayer", LAYER3),
            *MAPS,
        ),
        aux(4, 6, 8, norm_before_fc=True),
        "speculators",
        dict(aux_layers=(4, 6, 8), norm_before_fc=True, norm_before_residual=False),
        renamed=MIDLAYER,
    ),
    "nvidia/gpt-oss-120b-Eagle3-short-context": HubHead(
        dict(
            SHAPE,
            architectures=["LlamaForCausalLMEagle3"],
            draft_vocab_size=None,
            rope_theta=10000.0,
            eagle_config=dict(
                NVIDIA, use_aux_hidden_state=False, eagle_aux_hidden_state_layer_ids=[]
            ),
        ),
        (*weights("norm"), *layer("midlayer", LAYER3)),
        last_hidden_state,
        "speculators",
        dict(aux_layers=(), own_lm_head=False, own_embedding=False, draft_vocab_size=128),
        renamed=MIDLAYER,
    ),
    "nebius/EAGLE3-gpt-oss-20b": HubHead(
        dict(
            SHAPE,
            architectures=["LlamaForCausalLM"],
            draft_vocab_size=48,
            truncated_vocab_size=48,
            rope_theta=150000.0,
            rope_scaling=YARN,
            eagle_aux_hidden_state_layer_ids=[2, 4, 6],
        ),
        (*weights("fc", "norm", "lm_head"), *layer("midlayer", LAYER3), *MAPS),
        lambda: speculators_head(
            aux_layers=(2, 4, 6), layer=dict(rope_parameters=dict(YARN, rope_theta=150000.0))
        ),
        "speculators",
        dict(method="eagle3", aux_layers=(2, 4, 6)),
        renamed=MIDLAYER,
    ),
    "NVIDIA-NeMo/Automodel (EAGLE-3.1)": HubHead(
        dict(
            SHAPE,
            architectures=["LlamaEagle3DraftModel"],
            draft_vocab_size=48,
            target_hidden_size=64,
            rope_theta=10000.0,
            fc_norm=True,
            norm_output=True,
            eagle_aux_hidden_state_layer_ids=[2, 4, 5],
        ),
        (
            *weights("model.fc", "model.norm", "lm_head"),
            *weights(*(f"model.fc_norm.{i}" for i in range(3))),
            *layer("model.layers.0", LAYER3),
            *MAPS,
        ),
        aux(2, 4, 5, fc_norm=True, norm_output=True),
        "speculators",
        dict(fc_norm=True, norm_output=True, aux_layers=(2, 4, 5)),
        ("norm_output",),
        renamed={"model.": ""},
    ),
    "speculators 0.3 EAGLE-1": HubHead(
        dict(
            architectures=["EagleSpeculator"],
            speculators_model_type="eagle",
            speculators_version="0.1.0.dev14",
            layernorms=False,
            fusion_bias=False,
            transformer_layer_architecture="LlamaDecoderLayer",
            transformer_layer_config=EAGLE1_CONFIG,
            speculators_config=speculators_said("eagle", "meta-llama/Llama-3.1-8B-Instruct"),
        ),
        (*weights("embed_tokens", "fusion_fc"), *layer("transformer", LAYER)),
        eagle1(),
        "eagle",
        dict(method="eagle", own_embedding=True, fc_bias=False),
        renamed={"fusion_fc.": "fc.", "transformer.": "layers.0."},
    ),
    "yuhuili/EAGLE-Vicuna-7B-v1.3 (a bias that no key names, and no key/value heads)": HubHead(
        {
            **{k: v for k, v in EAGLE1_CONFIG.items() if k != "num_key_value_heads"},
            "pad_token_id": 0,
            "tie_word_embeddings": False,
        },
        (*weights("embed_tokens", "fc"), "fc.bias", *layer("layers.0", LAYER)),
        eagle1(bias=True, num_key_value_heads=4),
        "eagle",
        dict(method="eagle", fc_bias=True, own_embedding=True),
    ),
    "yuhuili/EAGLE-Qwen2-7B-Instruct": HubHead(
        dict(
            EAGLE1_CONFIG,
            architectures=["Qwen2ForCausalLM"],
            model_type="qwen2",
            bias=True,
            qkv_bias=True,
            max_window_layers=28,
            sliding_window=131072,
            use_sliding_window=False,
        ),
        (
            *weights("embed_tokens", "fc"),
            "fc.bias",
            *layer("layers.0", LAYER),
            *(f"layers.0.self_attn.{x}_proj.bias" for x in "qkv"),
        ),
        eagle1(bias=True, qkv_bias=True),
        "eagle",
        dict(method="eagle", fc_bias=True, sliding_window=None),
    ),
    "EAGLE-1 as vLLM's conversion writes it": HubHead(
        dict(
            architectures=["EAGLEModel"],
            model_type="eagle",
            model=dict(EAGLE1_CONFIG),
            truncated_vocab_size=128,
        ),
        (*weights("model.embed_tokens", "fc"), *layer("model.layers.0", LAYER)),
        eagle1(),
        "eagle",
        dict(method="eagle", fc_bias=False, own_embedding=True),
        renamed={"model.": ""},
    ),
    "EAGLE-3 as vLLM's conversion writes it": HubHead(
        dict(
            architectures=["Eagle3LlamaForCausalLM"],
            model_type="eagle",
            method="eagle3",
            model=dict(SHAPE, rope_theta=10000.0, draft_vocab_size=48),
            eagle_aux_hidden_state_layer_ids=[2, 4, 6],
        ),
        (*weights("fc", "norm", "lm_head"), *layer("model.layers.0", LAYER3), *MAPS),
        aux(2, 4, 6),
        "speculators",
        dict(method="eagle3", aux_layers=(2, 4, 6), draft_vocab_size=48),
        renamed={"model.": ""},
    ),
    "AngelSlim/Qwen3-8B_eagle3": HubHead(
        dict(
            SHAPE,
            architectures=["LlamaForCausalLMEagle3"],
            draft_vocab_size=48,
            rope_theta=1e6,
            rope_scaling=None,
            sliding_window=None,
            use_sliding_window=False,
            max_window_layers=36,
            attention_dropout=0.0,
            initializer_range=0.02,
            use_cache=True,
        ),
        (*weights("fc", "norm", "lm_head"), *layer("midlayer", LAYER3), *MAPS),
        lambda: speculators_head(
            aux_layers=(2, 4, 5), layer=dict(rope_parameters=dict(rope_theta=1e6))
        ),
        "speculators",
        dict(aux_layers=(2, 4, 5), sliding_window=None, norm_before_residual=False),
        ("eagle_aux_hidden_state_layer_ids",),
        renamed=MIDLAYER,
    ),
    "SGLang's older norms of the aux layers, and null for an empty eagle_config": HubHead(
        dict(
            SHAPE,
            architectures=["LlamaForCausalLMEagle3"],
            draft_vocab_size=48,
            rope_theta=10000.0,
            eagle_config=None,
            fc_norm=True,
            eagle_aux_hidden_state_layer_ids=[2, 4, 5],
        ),
        (
            *weights("fc", "norm", "lm_head", "aux_norm_low", "aux_norm_mid", "aux_norm_high"),
            *layer("midlayer", LAYER3),
            *MAPS,
        ),
        aux(2, 4, 5, fc_norm=True),
        "speculators",
        dict(fc_norm=True, aux_layers=(2, 4, 5)),
        renamed={
            **MIDLAYER,
            "aux_norm_low.": "fc_norm.0.",
            "aux_norm_mid.": "fc_norm.1.",
            "aux_norm_high.": "fc_norm.2.",
        },
    ),
    "speculators, two layers of Qwen3's kind, a rope of mrope's shape": HubHead(
        dict(
            architectures=["Eagle3DraftModel"],
            speculators_model_type="eagle3",
            speculators_version="0.9.0",
            draft_vocab_size=48,
            norm_before_residual=False,
            norm_output=True,
            eagle_aux_hidden_state_layer_ids=[2, 4, 5],
            transformer_layer_config=dict(
                SHAPE,
                model_type="qwen3",
                num_hidden_layers=2,
                layer_types=["full_attention"] * 2,
                rope_parameters=dict(
                    rope_type="default", rope_theta=10000.0, mrope_section=[4, 4, 4]
                ),
            ),
            speculators_config=speculators_said("eagle3", "Qwen/Qwen3-VL-8B-Instruct"),
        ),
        (
            *weights("fc", "norm", "lm_head"),
            *layer("layers.0", (*LAYER3, "self_attn.q_norm", "self_attn.k_norm")),
            *layer("layers.1", (*LAYER, "input_layernorm", "self_attn.q_norm", "self_attn.k_norm")),
            *MAPS,
        ),
        lambda: speculators_head(
            aux_layers=(2, 4, 5),
            layer=dict(
                model_type="qwen3", num_hidden_layers=2, rope_parameters=dict(rope_theta=10000.0)
            ),
            norm_output=True,
        ),
        "speculators",
        dict(num_layers=2, norm_output=True, norm_before_residual=False),
    ),
    "eagle_config.layer_ids, which vLLM reads": HubHead(
        dict(
            SHAPE,
            architectures=["LlamaForCausalLMEagle3"],
            draft_vocab_size=48,
            rope_theta=10000.0,
            eagle_config=dict(layer_ids=[1, 4, 6], use_aux_hidden_state=True),
        ),
        (*weights("fc", "norm", "lm_head"), *layer("midlayer", LAYER3), *MAPS),
        aux(1, 4, 6),
        "speculators",
        dict(aux_layers=(1, 4, 6)),
        ("eagle_config.layer_ids",),
        renamed=MIDLAYER,
    ),
}
