"""A tiny random DeepSeek-V4 of transformers, saved by the names of the original checkpoints, with a
module of multi-token prediction."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.parity.oracles import DraftOracle, edit_tensors, hf_target, randomise

# Windows and rates are shorter than the prompts, and no multiples of a block.
CONFIG: dict[str, Any] = dict(
    model_type="deepseek_v4",
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=16,
    qk_rope_head_dim=8,
    q_lora_rank=24,
    o_groups=2,
    o_lora_rank=12,
    sliding_window=6,
    layer_types=[
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ],
    compress_rates={"compressed_sparse_attention": 3, "heavily_compressed_attention": 7},
    # with few, all scores of an entry are often 0, and which of equals is chosen is not defined
    index_n_heads=8,
    index_head_dim=12,
    index_topk=3,
    n_routed_experts=8,
    num_experts_per_tok=2,
    intermediate_size=20,  # of an expert: transformers reads it as moe_intermediate_size
    swiglu_limit=0.5,  # so that both clamps are felt
    num_hash_layers=1,
    hc_mult=3,
    hc_sinkhorn_iters=4,
)
YARN = dict(
    rope_type="yarn", factor=8.0, original_max_position_embeddings=16, beta_fast=4.0, beta_slow=1.0
)


def original_name(name: str) -> str:
    """The name in DeepSeek's own files of a tensor that transformers wrote: its renaming back does
    not undo the one on loading."""
    name = name.removeprefix("model.")
    name = {"embed_tokens.weight": "embed.weight", "lm_head.weight": "head.weight"}.get(name, name)
    return re.sub(r"\.attn\.norm\.", ".attn.kv_norm.", name).replace("hc_head.hc_", "hc_head_")


def save_target(folder: Path, seed: int = 0, **config: Any) -> Any:
    """The transformers model, its folder in the original names."""
    import torch

    model = hf_target(folder, seed, **{**CONFIG, **config})
    rng = np.random.default_rng(seed)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):  # zeros in a new model
            ids = np.stack(
                [
                    rng.permutation(model.config.n_routed_experts)[: buffer.shape[1]]
                    for _ in range(buffer.shape[0])
                ]
            )
            buffer.copy_(torch.from_numpy(ids))
    model.save_pretrained(folder)

    def rename(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[original_name(name)] = tensors.pop(name)

    edit_tensors(folder, rename)
    return model


def streams(model: Any, tokens: np.ndarray) -> np.ndarray:
    """The residual streams [T, streams * D] that transformers collapses after the last layer of a
    pass over tokens [T]."""
    import torch

    seen: list[Any] = []
    hook = model.model.hc_head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    try:
        with torch.no_grad():
            model(input_ids=torch.from_numpy(np.asarray(tokens, np.int64))[None], use_cache=False)
    finally:
        hook.remove()
    return seen[0][0].flatten(1).numpy()


def save_module(folder: Path, model: Any, seed: int = 3, **config: Any) -> DraftOracle:
    """A random module of multi-token prediction, added to a folder of save_target. transformers has
    none: its layer, final norm and head are those of a model of one layer, and the rest is written
        down here from DeepSeek's inference/model.py (class MTPBlock)."""
    import torch

    one_layer = dict(num_hidden_layers=1, layer_types=["sliding_attention"], num_hash_layers=0)
    block = save_target(folder / "module", seed, **{**config, **one_layer})
    norms = {
        name: type(block.model.norm)(model.config.hidden_size, eps=model.config.rms_norm_eps)
        for name in ("enorm", "hnorm")
    }
    projections = {
        name: torch.nn.Linear(model.config.hidden_size, model.config.hidden_size, bias=False)
        for name in ("e_proj", "h_proj")
    }
    own = randomise(torch.nn.ModuleDict({**norms, **projections}), seed + 1)
    written = load_file(folder / "module" / "model.safetensors")
    tensors = {
        f"mtp.0.{n.removeprefix('layers.0.')}": t
        for n, t in written.items()
        if not n.startswith(("embed.", "head."))
    }
    tensors |= {f"mtp.0.{name}": value.numpy() for name, value in own.state_dict().items()}
    edit_tensors(folder, lambda held: held.update(tensors))

    def run(hidden: Any, tokens: Any, feedback: Any) -> tuple[Any, Any]:
        rows = torch.cat([hidden, feedback])[None].unflatten(-1, (model.config.hc_mult, -1))
        embedded = own["e_proj"](own["enorm"](model.model.embed_tokens(tokens)))[None]
        x = own["h_proj"](own["hnorm"](rows)) + embedded.unsqueeze(2)
        layer, after = block.model.layers[0], []
        hooks = [
            layer.register_forward_pre_hook(lambda module, args: (x, *args[1:])),
            layer.register_forward_hook(lambda module, args, output: after.append(output)),
        ]
        try:
            out = block.model(input_ids=tokens[None], use_cache=False).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        return model.lm_head(out)[0], after[0][0].flatten(1)

    return DraftOracle(own, np.arange(model.config.vocab_size), run)
