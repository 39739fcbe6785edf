"""DFlash and DSpark heads of speculators with random weights, and the files of each layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.parity.oracles import random_map, randomise

MASK = 77
SHAPE = dict(
    model_type="qwen3",
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    rms_norm_eps=1e-3,
    max_position_embeddings=8192,
)


class BlockOracle:
    """One block head of speculators.

    module: the torch module. to_target [draft_vocab]: target id of each draft id.
    """

    def __init__(self, module: Any, to_target: np.ndarray) -> None:
        self.module, self.to_target = module, to_target

    def blocks(
        self, features: np.ndarray, tokens: np.ndarray, anchors: Sequence[int]
    ) -> tuple[Any, np.ndarray]:
        """Hidden states [anchors, rows, D] (torch) and base logits [anchors, rows, Vd] of the block
        after each anchor: features [T, W] and tokens [T] of one text."""
        import torch

        module, size = self.module, self.module.block_size
        length = max(anchors) + size + 1  # what follows an anchor is no context of it
        text = np.zeros(length, np.int64)
        text[: min(length, len(tokens))] = tokens[:length]
        given = np.full((length, features.shape[1]), 9.0, np.float32)
        given[: min(length, len(features))] = features[:length]
        mask = torch.zeros(1, length)
        mask[0, list(anchors)] = 1
        with torch.no_grad():
            hidden, logits, *_ = module._backbone_forward(
                torch.from_numpy(given)[None],
                torch.from_numpy(text)[None],
                mask,
                torch.zeros(1, length, module.config.transformer_layer_config.hidden_size),
                torch.zeros(1, length, dtype=torch.long),
                max_anchors=len(anchors),
            )
        blocks = len(anchors), size
        return hidden.view(*blocks, -1), logits.view(*blocks, -1).numpy()

    def logits(
        self, features: np.ndarray, tokens: np.ndarray, anchors: Sequence[int], drafts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Logits [anchors, K, Vd] of drafts [anchors, K] (target ids) and their confidence, of the
        rows that draft."""
        import torch

        hidden, logits = self.blocks(features, tokens, anchors)
        module, first = self.module, 0 if self.module.config.sample_from_anchor else 1
        given = np.stack([tokens[a] for a in anchors])[:, None]
        previous = np.concatenate([np.repeat(given, first + 1, 1), drafts[:, :-1]], axis=1)
        previous = torch.from_numpy(previous.astype(np.int64))
        chances = None
        if getattr(module, "markov_head", None) is not None:
            with torch.no_grad():
                logits = (
                    logits
                    + module.markov_head.block_bias(
                        prev_token_ids=previous, hidden_states=hidden
                    ).numpy()
                )
        if getattr(module, "confidence_head", None) is not None:
            with torch.no_grad():
                features_ = hidden
                if module.config.confidence_head_with_markov:
                    w1 = module.markov_head.prev_embeddings(previous)
                    features_ = torch.cat([hidden, w1], dim=-1)
                chances = torch.sigmoid(module.confidence_head(features_)).numpy()[:, first:]
        return logits[:, first:], chances


def block_head(
    method: str,
    *,
    K: int,
    layer: dict[str, Any] | None = None,
    vocab: int = 128,
    draft_vocab: int | None = None,
    aux_layers: Sequence[int] = (2, 4, 7),
    seed: int = 0,
    **switches: Any,
) -> BlockOracle:
    """speculators' head of K drafts. layer: keys of the transformer layer's config."""
    draft_vocab = draft_vocab or vocab
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import AutoConfig

    layer_config = AutoConfig.for_model(**{**SHAPE, **(layer or {})})
    layer_config._attn_implementation = "eager"
    from_anchor = switches.setdefault("sample_from_anchor", method == "dspark")
    config_type, model_type = {
        "dflash": (DFlashSpeculatorConfig, DFlashDraftModel),
        "dspark": (DSparkSpeculatorConfig, DSparkDraftModel),
    }[method]
    if method == "dspark":
        switches.setdefault("markov_rank", 12)
    config = config_type(
        transformer_layer_config=layer_config,
        draft_vocab_size=draft_vocab,
        block_size=K if from_anchor else K + 1,
        aux_hidden_state_layer_ids=list(aux_layers),
        mask_token_id=MASK,
        speculators_config=SpeculatorsConfig(
            algorithm=method,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=K)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **switches,
    )
    module = randomise(model_type(config), seed)
    if method == "dspark" and module.markov_head is not None:
        w1 = module.markov_head.markov_w1.weight
        w1.mul_(w1.shape[1] ** 0.5)  # an embedding: rows of unit variance
    to_target = np.arange(draft_vocab)
    if draft_vocab != vocab:
        import torch

        to_target = random_map(vocab, draft_vocab, seed)
        t2d = torch.zeros(vocab, dtype=torch.bool)
        t2d[torch.from_numpy(to_target)] = True
        module.load_vocab_mappings(t2d, torch.from_numpy(to_target) - torch.arange(draft_vocab))
    return BlockOracle(module, to_target)


def share(oracle: BlockOracle, shared: dict[str, Any]) -> None:
    """Let the head read the target's embedding, and its lm_head with the target's vocabulary."""
    import torch

    module = oracle.module
    module.embed_tokens.weight.copy_(torch.from_numpy(np.array(shared["embed_tokens"])))
    if len(oracle.to_target) == 128:
        module.lm_head.weight.copy_(torch.from_numpy(np.array(shared["lm_head"].values).T))


def tensors_of(oracle: BlockOracle, *, own: bool) -> dict[str, np.ndarray]:
    """The head's tensors by name, with its embedding and lm_head if they are its own."""
    left_out = ("verifier_", "t2d", "d2t", *(() if own else ("embed_tokens", "lm_head")))
    state = oracle.module.state_dict()
    return {n: t.numpy().copy() for n, t in state.items() if not n.startswith(left_out)}


def save(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {n: np.ascontiguousarray(t) for n, t in tensors.items()}, folder / "model.safetensors"
    )
    return folder


def save_speculators(oracle: BlockOracle, folder: Path) -> Path:
    """speculators' own save_pretrained."""
    oracle.module.save_pretrained(folder)
    return folder


def _flat(oracle: BlockOracle, **changes: Any) -> dict[str, Any]:
    layer = oracle.module.config.transformer_layer_config
    return {
        "attention_bias": layer.attention_bias,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "hidden_size": layer.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": layer.intermediate_size,
        "layer_types": list(layer.layer_types),
        "max_position_embeddings": 40960,
        "max_window_layers": layer.num_hidden_layers,
        "model_type": "qwen3",
        "num_attention_heads": layer.num_attention_heads,
        "num_hidden_layers": layer.num_hidden_layers,
        "num_key_value_heads": layer.num_key_value_heads,
        "num_target_layers": 8,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": layer.rope_parameters["rope_theta"],
        "sliding_window": layer.sliding_window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": layer.sliding_window is not None,
        "vocab_size": 128,
        **changes,
    }


def save_zlab(oracle: BlockOracle, folder: Path, *, prefix: str = "", **changes: Any) -> Path:
    """z-lab's layout: a flat config with dflash_config, and no embedding and head."""
    config = _flat(
        oracle,
        architectures=["DFlashDraftModel"],
        auto_map={"AutoModel": "dflash.DFlashDraftModel"},
        block_size=oracle.module.block_size,
        dflash_config={
            "mask_token_id": MASK,
            "target_layer_ids": [i - 1 for i in oracle.module.config.aux_hidden_state_layer_ids],
        },
        **changes,
    )
    tensors = {prefix + n: t for n, t in tensors_of(oracle, own=False).items()}
    return save(folder, config, tensors)


def save_deepspec(oracle: BlockOracle, folder: Path, **changes: Any) -> Path:
    """DeepSpec's layout: a flat config, and an embedding and a head of the draft's own."""
    theirs = oracle.module.config
    config = _flat(
        oracle,
        architectures=["Qwen3DSparkModel"],
        block_size=oracle.module.block_size,
        confidence_head_with_markov=theirs.confidence_head_with_markov,
        enable_confidence_head=theirs.enable_confidence_head,
        markov_head_type=theirs.markov_head_type,
        markov_rank=theirs.markov_rank,
        mask_token_id=MASK,
        num_anchors=512,
        target_layer_ids=[i - 1 for i in theirs.aux_hidden_state_layer_ids],
        **changes,
    )
    return save(folder, config, tensors_of(oracle, own=True))


def use_zlab_windows(oracle: BlockOracle) -> None:
    """Give the module z-lab's mask of sliding layers: a window of the tokens up to each row."""
    import torch

    def mask(*, total_seq_len: int, anchor_positions: Any, **options: Any) -> Any:
        o = SimpleNamespace(**options)
        window, size = o.sliding_window, oracle.module.block_size
        anchors = anchor_positions.repeat_interleave(size)[:, None]
        block = torch.arange(len(anchor_positions)).repeat_interleave(size)
        position = anchors + torch.arange(size).repeat(len(anchor_positions))[:, None]
        context = torch.arange(total_seq_len)[None]
        sees_context = (context < anchors) & (
            True if window is None else position - context < window
        )
        same = block[:, None] == block[None]
        if window is not None:
            same &= (position >= position.T) & (position - position.T < window)
        seen = torch.cat([sees_context, same], dim=1)
        return torch.where(seen, 0.0, float("-inf"))[None, None]

    oracle.module._create_attention_mask = mask
