"""A whole decode against the oracles: after several rounds of accepted and rejected drafts, what
the draft proposes from its incremental cache and its pending rows is what the oracle proposes from
the whole text and transformers' hidden states of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import REFERENCE_OPS, RoundConfig
from jaxspec.decode import programs
from jaxspec.decode import round as decode
from jaxspec.decode import state as decode_state
from jaxspec.drafts.autoregressive import draft_inputs, propose
from jaxspec.drafts.drafter import PromptChunk
from jaxspec.loading.model import load_target
from jaxspec.sampling.state import SamplingState
from tests.parity.oracles import (
    EAGLE1_CONFIG,
    TOLERANCE,
    DraftOracle,
    eagle1_head,
    edit_config,
    hf_outputs,
    hf_target,
    save_flat,
    save_speculators,
    speculators_head,
)
from tests.parity.ours import MAX_MODEL_LEN, load, shuffled_block_table
from tests.parity.test_families import GPT_OSS, QWEN3_MOE, YARN

K, ROUNDS, CHUNK, BLOCK_SIZE = 3, 7, 4, 4
PROMPTS = (1, 6, 70)
TARGETS: dict[str, dict[str, Any]] = {
    "llama": dict(model_type="llama", num_hidden_layers=3),
    "llama_tied": dict(model_type="llama", num_hidden_layers=2, tie_word_embeddings=True),
    "gpt_oss": dict(**GPT_OSS),
    "qwen3": dict(
        model_type="qwen3",
        num_hidden_layers=7,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "qwen3_moe": dict(**QWEN3_MOE, num_hidden_layers=7, mlp_only_layers=[0, 3]),
}
HEADS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "eagle3": (
        "llama",
        "eagle3",
        dict(draft_vocab=112, aux_layers=(0, 2, 3), norm_before_residual=True),
    ),
    "eagle3_default_aux_qwen3": (
        "qwen3",
        "eagle3",
        dict(
            draft_vocab=128,
            aux_layers=None,
            norm_output=True,
            fc_norm=True,
            layer=dict(model_type="qwen3"),
        ),
    ),
    "eagle3_gpt_oss": (
        "gpt_oss",
        "eagle3",
        dict(
            draft_vocab=112,
            aux_layers=(0, 1, 2),
            norm_before_residual=True,
            norm_before_fc=True,
            layer=dict(
                sliding_window=5,
                layer_types=["sliding_attention"],
                use_sliding_window=True,
                rope_parameters=YARN,
            ),
        ),
    ),
    "eagle3_default_aux_qwen3_moe": ("qwen3_moe", "eagle3", dict(draft_vocab=112, aux_layers=None)),
    "eagle1": ("llama_tied", "eagle", {}),
}


def make_head(method: str, options: dict[str, Any], model: Any, folder: Path) -> DraftOracle:
    embedding = model.model.embed_tokens.weight
    if method == "eagle":
        oracle = eagle1_head(EAGLE1_CONFIG, model.lm_head.weight.detach().numpy(), bias=False)
    else:
        oracle = speculators_head(**options)
        oracle.module.lm_head.weight.mul_(0.3)
    oracle.module.embed_tokens.weight.copy_(embedding)
    if method == "eagle":
        save_flat(oracle, EAGLE1_CONFIG, folder, own_embedding=False)
    else:
        save_speculators(oracle, folder, own_embedding=False)
    return oracle


def target_rows(model: Any, aux_layers: tuple[int, ...], tokens: list[int]) -> np.ndarray:
    """What a draft reads of transformers' pass over tokens: [T, W]."""
    out = hf_outputs(model, np.array(tokens))
    return (
        np.concatenate([out.boundary[i] for i in aux_layers], axis=-1) if aux_layers else out.hidden
    )


@pytest.mark.oracle("speculators", "eagle", "transformers")
@pytest.mark.parametrize("head", HEADS)
def test_proposals_after_many_rounds_equal_the_oracle_on_the_whole_text(
    head: str, tmp_path: Path
) -> None:
    which, method, options = HEADS[head]
    model = hf_target(tmp_path / "target", vocab_size=128, hidden_size=64, **TARGETS[which])
    model.lm_head.weight.mul_(
        0.05 if model.config.tie_word_embeddings else 0.3
    )  # flat distributions overlap: some drafts are accepted
    model.save_pretrained(tmp_path / "target")
    oracle = make_head(method, options, model, tmp_path / "draft")

    target_cfg, target = load_target(tmp_path / "target", jnp.float32)
    draft_cfg, draft = load(tmp_path / "draft", method, shared=target, target=target_cfg)
    if options.get("aux_layers", ()) is None:
        assert draft_cfg.aux_layers == (2, 3, 4)
    assert_proposals_equal((target_cfg, target), (draft_cfg, draft), model, oracle)


def assert_proposals_equal(
    target_pair: tuple[Any, Any], draft_pair: tuple[Any, Any], model: Any, oracle: DraftOracle
) -> None:
    """Prefill in chunks, then rounds at temperature 1; before each verification the proposal is
    compared."""
    (target_cfg, target), (draft_cfg, draft) = target_pair, draft_pair
    cfg = RoundConfig.for_models(
        target_cfg,
        draft_cfg,
        ops=REFERENCE_OPS,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        num_speculative_tokens=K,
        rule="probabilistic",
        draft_sampling="probabilistic",
    )
    params = {"target": target, "draft": draft}
    texts, state, tables = prefill(cfg, params)
    compiled_propose = jax.jit(propose, static_argnums=0)
    verify_and_commit = jax.jit(decode.verify_and_commit, static_argnums=0)
    accepted = []
    for _ in range(ROUNDS):
        inputs = draft_inputs(state.draft, decode_state.draft_context(cfg, state, tables))
        carry = compiled_propose(cfg, draft, inputs, state.draft.caches)
        drafts, logits = (
            np.asarray(carry.proposal.draft_tokens),
            np.asarray(carry.proposal.draft_logits),
        )
        for i, text in enumerate(texts):
            assert int(state.seq_lens[i]) == len(text) - 1
            hidden = target_rows(model, draft_cfg.aux_layers, text[:-1])
            _, expected = oracle.chain(hidden, np.array(text[1:]), K, forced=drafts[i])
            np.testing.assert_allclose(
                logits[i], expected, **TOLERANCE, err_msg=f"request {i}, text of {len(text)}"
            )
        state = replace(state, draft=replace(state.draft, caches=carry.caches))
        verification, state = verify_and_commit(cfg, params, state, tables, carry.proposal)
        output, num = np.asarray(verification.output_tokens), np.asarray(verification.num_sampled)
        for i, text in enumerate(texts):
            text += output[i, : num[i]].tolist()
        accepted += [int(n) - 1 for n in num]
    assert {0, K} <= set(accepted) and len(set(accepted)) > 2, (
        accepted
    )  # rejected at once, in between, and not at all


def prefill(cfg: RoundConfig, params: Any) -> tuple[list[list[int]], decode_state.DecodeState, Any]:
    """Ragged prompts in chunks; texts are the prompts and the first token of each."""
    batch = len(PROMPTS)
    rng = np.random.default_rng(4)
    texts = [rng.integers(0, cfg.target.vocab_size, n).tolist() for n in PROMPTS]
    sampling = SamplingState(
        keys=jnp.asarray(rng.integers(0, 2**32, (batch, 2)), jnp.uint32),
        temperature=jnp.ones(batch, jnp.float32),
    )
    table = shuffled_block_table(batch, BLOCK_SIZE)
    tables = (jnp.asarray(table),) * len(cfg.cache_groups)
    num_blocks = (table.size,) * len(cfg.cache_groups)
    no_stop = jnp.full((batch, 1), -1, jnp.int32)
    state = decode_state.init_state(
        cfg,
        sampling,
        jnp.full(batch, 999, jnp.int32),
        no_stop,
        num_blocks,
        dtype=jnp.float32,
        cache_dtype=jnp.float32,
    )
    first = [0] * batch
    for start in range(0, max(PROMPTS), CHUNK):
        rows = [t[start : start + CHUNK] for t in texts]
        tokens = np.array([[*r, *[9] * (CHUNK - len(r))] for r in rows], np.int32)
        following = np.array(
            [t[start + CHUNK] if start + CHUNK < len(t) else -1 for t in texts], np.int32
        )
        num = np.array([len(r) for r in rows], np.int32)
        arrays = (tokens, np.full(batch, start, np.int32), num, following)
        chunk = PromptChunk(*map(jnp.asarray, arrays))
        verification, state = programs.run_prefill(
            cfg, params, state, tables, chunk, compilation="round"
        )
        for i in np.flatnonzero(np.asarray(verification.num_sampled)):
            first[i] = int(verification.output_tokens[i, 0])
    return [[*t, f] for t, f in zip(texts, first, strict=True)], state, tables


@pytest.mark.oracle("speculators", "transformers")
def test_other_aux_layers_are_seen(tmp_path: Path) -> None:
    """The comparison above would fail for ids that are one off: the residual stream changes from
    layer to layer."""
    model = hf_target(
        tmp_path / "target", vocab_size=128, hidden_size=64, num_hidden_layers=7, model_type="llama"
    )
    oracle = speculators_head(aux_layers=(1, 3, 5))
    save_speculators(oracle, tmp_path / "draft", own_embedding=True)
    edit_config(
        tmp_path / "draft",
        lambda c: c.update(eagle_aux_hidden_state_layer_ids=None, eagle_config={}),
    )
    tokens = np.arange(3, 15)
    right, wrong = (
        target_rows(model, layers, tokens[:-1].tolist()) for layers in ((1, 3, 5), (2, 4, 6))
    )
    error = np.abs(oracle(right, tokens[1:])[0] - oracle(wrong, tokens[1:])[0]).max()
    assert error > 0.1
