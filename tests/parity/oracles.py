"""The other implementations, behind one small interface: targets from transformers, draft heads
from speculators, SpecForge and eagle-llm.

torch and the oracles are imported inside the functions, so that the test modules can be collected
where they are not installed.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from safetensors.numpy import load_file, save_file

TOLERANCE: dict[str, Any] = dict(
    rtol=1e-4, atol=1e-4
)  # float32 with another order of summation; a wrong switch moves logits by 1e-2 and more
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # small, so that a short prompt sees every branch of the scaling
    "original_max_position_embeddings": 32,
}


def randomise(module: Any, seed: int) -> Any:
    """Fill every parameter of a torch module: matrices N(0, 1/fan_in), embeddings N(0, 1), norms
    about 1, biases about 0.

    Libraries start from weights of 0.02, zero biases and norms of one, which hide a wrong switch.
    Returns it in float32, for inference.
    """
    import torch

    rng = np.random.default_rng(seed)
    module = module.float().eval().requires_grad_(False)
    for name, parameter in sorted(module.named_parameters()):
        noise = rng.normal(size=tuple(parameter.shape))
        if parameter.ndim == 1:
            value = 0.5 * noise if name.endswith("bias") else 1 + 0.4 * noise
        else:
            value = noise if "embed_tokens" in name else noise * parameter.shape[-1] ** -0.5
        parameter.copy_(torch.from_numpy(value.astype(np.float32)))
    for name, buffer in sorted(module.named_buffers()):
        if name.endswith("e_score_correction_bias"):  # of a router; zero in a new model
            buffer.copy_(
                torch.from_numpy((0.3 * rng.normal(size=tuple(buffer.shape))).astype(np.float32))
            )
    return module


# --- targets
# --------------------------------------------------------------------------------------------------

_SMALL = dict(
    vocab_size=160,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,  # not hidden_size / num_attention_heads
    max_position_embeddings=256,
    rms_norm_eps=1e-3,  # large enough to be seen in the output
    tie_word_embeddings=False,
    initializer_range=0.02,
)
TARGETS: dict[str, dict[str, Any]] = {
    "llama": dict(model_type="llama"),
    "llama_tied": dict(model_type="llama", tie_word_embeddings=True, num_key_value_heads=4),
    "llama_llama3_rope": dict(model_type="llama", rope_parameters=LLAMA3_ROPE),
    "llama_attention_bias": dict(model_type="llama", attention_bias=True, num_key_value_heads=1),
    "qwen2": dict(
        model_type="qwen2", rope_parameters={"rope_type": "default", "rope_theta": 1e6}, head_dim=12
    ),
    "qwen2_tied": dict(model_type="qwen2", tie_word_embeddings=True),
    "qwen3": dict(model_type="qwen3", rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen3_tied_bias": dict(model_type="qwen3", tie_word_embeddings=True, attention_bias=True),
}


def hf_target(folder: Path, seed: int = 0, **config: Any) -> Any:
    """A random transformers model, saved into folder and returned."""
    from transformers import AutoConfig, AutoModelForCausalLM

    cfg = AutoConfig.for_model(**{**_SMALL, **config})
    model = randomise(AutoModelForCausalLM.from_config(cfg, attn_implementation="eager"), seed)
    model.save_pretrained(folder)
    return model


def hf_outputs(model: Any, tokens: np.ndarray) -> SimpleNamespace:
    """tokens [T] -> logits [T, V], hidden [T, D] after the final norm, boundary: id -> [T, D] for 0
    .. num_layers (residual streams)."""
    import torch

    before_norm: list[Any] = []
    hook = model.model.norm.register_forward_pre_hook(
        lambda module, args: before_norm.append(args[0])
    )
    try:
        with torch.no_grad():
            out = model(
                input_ids=torch.from_numpy(np.asarray(tokens, np.int64))[None],
                output_hidden_states=True,
                use_cache=False,
            )
    finally:
        hook.remove()
    streams = [h[0].numpy() for h in out.hidden_states]  # the last one is after the norm
    return SimpleNamespace(
        logits=out.logits[0].numpy(),
        hidden=streams[-1],
        boundary=[*streams[:-1], before_norm[-1][0].numpy()],
    )


# --- drafts
# --------------------------------------------------------------------------------------------------


class DraftOracle:
    """One draft head of another implementation.

    module: the torch module. to_target [draft_vocab]: target id of each draft id. run(hidden,
    tokens, feedback) -> logits and feedback of every row: hidden float32 [T, W] are the target's
    hidden states of positions 0 .. T-1, tokens int [T + s] the ones after each row, and feedback
    [s, D] the head's own outputs that stand in for the hidden states of the last s rows. All rows
    are computed anew each time.
    """

    def __init__(
        self, module: Any, to_target: np.ndarray, run: Callable[[Any, Any, Any], tuple[Any, Any]]
    ) -> None:
        self.module, self.to_target, self._run = module, to_target, run

    def __call__(
        self, hidden: np.ndarray, tokens: np.ndarray, feedback: Sequence[np.ndarray] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """Logits [T + s, draft_vocab] and feedback [T + s, D]."""
        import torch

        width = self.module.fc.weight.shape[0] if hasattr(self.module, "fc") else hidden.shape[1]
        stacked = np.asarray(feedback, np.float32).reshape(-1, width)
        args = (
            torch.from_numpy(np.ascontiguousarray(hidden)),
            torch.from_numpy(np.asarray(tokens, np.int64)),
            torch.from_numpy(stacked),
        )
        with torch.no_grad():
            logits, fed_back = self._run(*args)
        return logits.numpy(), fed_back.numpy()

    def chain(
        self, hidden: np.ndarray, tokens: np.ndarray, num_steps: int, forced: Sequence[int] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draft num_steps tokens after tokens [T], greedily or as forced: (drafts [num_steps],
        logits [num_steps, draft_vocab])."""
        feedback: list[np.ndarray] = []
        drafts: list[int] = []
        steps = []
        for step in range(num_steps):
            logits, fed_back = self(
                hidden, np.concatenate([tokens, drafts]).astype(np.int64), feedback
            )
            steps.append(logits[-1])
            feedback.append(fed_back[-1])
            drafts.append(
                forced[step] if step < len(forced) else int(self.to_target[np.argmax(logits[-1])])
            )
        return np.array(drafts), np.stack(steps)


def _captured(module: Any, pre: bool = False) -> tuple[list[Any], Any]:
    """A list that fills with what goes into (pre) or comes out of a submodule, and the hook's
    handle."""
    seen: list[Any] = []
    if pre:
        return seen, module.register_forward_pre_hook(lambda mod, args: seen.append(args[0]))
    return seen, module.register_forward_hook(lambda mod, args, output: seen.append(output))


def _fed_back(module: Any, feedback: Any) -> Any:
    """Let fc's last rows be the feedback instead of what fc computes: how a recycled hidden state
    enters a full pass."""
    import torch

    rows = feedback.shape[0]
    return module.fc.register_forward_hook(
        lambda mod, args, out: torch.cat([out[:, : out.shape[1] - rows], feedback[None]], dim=1)
    )


def random_map(vocab: int, draft_vocab: int, seed: int) -> np.ndarray:
    """Target id of each draft id, increasing, as trainers make it."""
    return np.sort(np.random.default_rng(seed).permutation(vocab)[:draft_vocab])


def speculators_head(
    *,
    layer: dict[str, Any] | None = None,
    vocab: int = 128,
    draft_vocab: int = 48,
    aux_layers: Sequence[int] | None = (2, 4, 7),
    seed: int = 0,
    **switches: bool,
) -> DraftOracle:
    """speculators' Eagle3DraftModel with random weights. layer: keys of the transformer layer's
    config, model_type among them."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import AutoConfig

    shape = dict(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
    )
    layer_config = AutoConfig.for_model(
        **{
            "model_type": "llama",
            "vocab_size": vocab,
            "rms_norm_eps": 1e-3,
            **shape,
            **(layer or {}),
        }
    )
    layer_config._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config,
        draft_vocab_size=draft_vocab,
        eagle_aux_hidden_state_layer_ids=None if aux_layers is None else list(aux_layers),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **switches,
    )
    module = randomise(Eagle3DraftModel(config), seed)
    return _speculators_oracle(module, random_map(vocab, draft_vocab, seed))


def _speculators_oracle(module: Any, to_target: np.ndarray) -> DraftOracle:
    import torch

    vocab, draft_vocab = module.embed_tokens.weight.shape[0], len(to_target)
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[torch.from_numpy(to_target)] = True
    module.load_vocab_mappings(t2d, torch.from_numpy(to_target) - torch.arange(draft_vocab))

    def run(hidden: Any, tokens: Any, feedback: Any) -> tuple[Any, Any]:
        logits, first = _captured(module.lm_head)
        inputs, second = _captured(module.layers[0], pre=True)
        padded = torch.cat([hidden, hidden.new_zeros(feedback.shape[0], hidden.shape[1])])
        hooks = [first, second, _fed_back(module, feedback)]
        try:
            module(
                padded[None],
                tokens[None],
                document_ids=torch.zeros(1, len(tokens), dtype=torch.long),
                ttt_steps=2,
            )
        finally:
            for hook in hooks:
                hook.remove()
        # What a step recycles is read off the second step's input, [embedding, hidden]: the oracle
        # itself chooses.
        return logits[0][0], inputs[1][0].chunk(2, dim=-1)[1]

    return DraftOracle(module, to_target, run)


def speculators_training_logits(
    oracle: DraftOracle, hidden: np.ndarray, tokens: np.ndarray, steps: int, first: int = 1
) -> np.ndarray:
    """Logits [steps, T, draft_vocab] of the training-time test: row i of step s is the (s+1)-th
    draft after tokens[i], with tokens[i+1], ... as the drafts before it (past the end: 0). first:
    the position of row 0 (speculators says 1)."""
    import torch

    logits, hook = _captured(oracle.module.lm_head)
    try:
        with torch.no_grad():
            oracle.module(
                torch.from_numpy(hidden)[None],
                torch.from_numpy(np.asarray(tokens, np.int64))[None],
                document_ids=torch.zeros(1, len(tokens), dtype=torch.long),
                position_ids=first + torch.arange(len(tokens))[None],
                ttt_steps=steps,
            )
    finally:
        hook.remove()
    return np.stack([x[0].numpy() for x in logits])


def save_speculators(oracle: DraftOracle, folder: Path, *, own_embedding: bool) -> Path:
    """speculators' own save_pretrained; it always writes the embedding, which most published heads
    leave out."""
    oracle.module.save_pretrained(folder)
    if not own_embedding:
        edit_tensors(folder, lambda tensors: tensors.pop("embed_tokens.weight"))
    return folder


def reload_speculators(folder: Path, to_target: np.ndarray) -> DraftOracle:
    """What speculators itself reads from a folder."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    with patch.object(
        Eagle3DraftModel, "load_verifier_weights"
    ):  # it looks for a verifier on the hub, even for one without a name
        return _speculators_oracle(
            Eagle3DraftModel.from_pretrained(folder, config=config).float().eval(), to_target
        )


SAFEAI_CONFIG = dict(
    architectures=["LlamaForCausalLMEagle3"],
    model_type="llama",
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-3,
    hidden_act="silu",
    vocab_size=128,
    draft_vocab_size=48,
    tie_word_embeddings=False,
)


def specforge_head(config: dict[str, Any], seed: int = 0) -> DraftOracle:
    """SpecForge's LlamaForCausalLMEagle3 (SafeAI's layout, `midlayer.*`) for a flat config.json,
    with random weights."""
    import torch
    from transformers import LlamaConfig

    with warnings.catch_warnings():  # that flash_attn is not installed
        warnings.simplefilter("ignore")
        from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

    module = randomise(LlamaForCausalLMEagle3(LlamaConfig(**config)), seed)
    to_target = random_map(config["vocab_size"], config["draft_vocab_size"], seed)
    module.d2t.copy_(torch.from_numpy(to_target) - torch.arange(len(to_target)))
    module.t2d.zero_()[torch.from_numpy(to_target)] = True

    def run(hidden: Any, tokens: Any, feedback: Any) -> tuple[Any, Any]:
        outputs, first = _captured(module.norm, pre=True)
        padded = torch.cat([hidden, hidden.new_zeros(feedback.shape[0], hidden.shape[1])])
        hooks = [first, _fed_back(module, feedback)]
        try:
            with torch.compiler.set_stance("force_eager"):  # it compiles its rotary embedding
                module(padded[None], module.embed_input_ids(tokens[None]))
                recycled = outputs[0]  # the layer's output; SpecForge trains on it without the norm
                return module.compute_logits(recycled)[0], recycled[0]
        finally:
            for hook in hooks:
                hook.remove()

    return DraftOracle(module, to_target, run)


EAGLE1_CONFIG = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-3,
    rope_theta=500.0,
    vocab_size=128,
)


def eagle1_head(
    config: dict[str, Any], lm_head: np.ndarray, *, bias: bool, seed: int = 0
) -> DraftOracle:
    """eagle-llm's Model with random weights, its output read by the target's lm_head [vocab, D]."""
    import torch
    from eagle.model.cnets import LlamaRotaryEmbedding, Model

    needed = dict(pad_token_id=None, rope_scaling=None, pretraining_tp=1, hidden_act="silu")
    module = randomise(Model(SimpleNamespace(**{**needed, **config}), bias=bias), seed)
    head = torch.from_numpy(lm_head)
    for layer in (
        module.layers
    ):  # 1.2.1 never reads rope_theta; SafeAI's later code (cnets1.py), vLLM and SGLang do
        attention = layer.self_attn
        attention.rotary_emb = LlamaRotaryEmbedding(
            attention.head_dim, config["max_position_embeddings"], base=config["rope_theta"]
        )

    def run(hidden: Any, tokens: Any, feedback: Any) -> tuple[Any, Any]:
        out = module(torch.cat([hidden, feedback])[None], input_ids=tokens[None], use_cache=False)[
            0
        ]
        return out @ head.T, out

    return DraftOracle(module, np.arange(config["vocab_size"]), run)


def save_flat(
    oracle: DraftOracle,
    config: dict[str, Any],
    folder: Path,
    *,
    own_embedding: bool,
    pickled: bool = False,
) -> Path:
    """A head in SafeAI's layout: the module's own tensor names beside a flat config.json."""
    import torch

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        name: t.contiguous()
        for name, t in oracle.module.state_dict().items()
        if own_embedding or name != "embed_tokens.weight"
    }
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({name: t.numpy() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


# --- editing a saved checkpoint
# --------------------------------------------------------------------------------------------------


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def edit_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(
        {name: np.ascontiguousarray(t) for name, t in tensors.items()}, folder / "model.safetensors"
    )
    return folder
