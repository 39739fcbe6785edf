"""EAGLE-1 heads against eagle-llm 1.2.1: features and logits of every draft step, from safetensors
and from a pickle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafts.autoregressive import first_step, next_step
from tests.parity.oracles import EAGLE1_CONFIG, TOLERANCE, DraftOracle, eagle1_head, save_flat
from tests.parity.ours import TARGET, PagedDraft, load, shared_weights

pytestmark = pytest.mark.oracle("eagle")

K = 4
LENGTHS, PENDING = (3, 9, 85), (3, 1, K + 1)


def requests(seed: int = 5) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    hidden = [rng.normal(size=(n, TARGET.hidden_size)).astype(np.float32) for n in LENGTHS]
    return hidden, [rng.integers(0, TARGET.vocab_size, n) for n in LENGTHS]


CASES: dict[str, dict[str, Any]] = {
    "bias_unsaid": dict(
        bias=True
    ),  # SafeAI's older configs do not have the key, and their fc has a bias
    "bias_true": dict(bias=True, config=dict(bias=True)),
    "bias_false": dict(bias=False, config=dict(bias=False)),
    "bias_false_unsaid": dict(bias=False),
    "own_embedding": dict(bias=False, own_embedding=True),
    "pickle": dict(bias=True, own_embedding=True, pickled=True),
    "tied_target": dict(bias=False, tied=True),
    "two_layers": dict(bias=True, config=dict(num_hidden_layers=2)),
    "no_rope_theta": dict(bias=False, config=dict(rope_theta=10000.0), unsaid=["rope_theta"]),
}


@pytest.mark.parametrize("case", CASES)
def test_every_step_equals_eagle_llm(case: str, tmp_path: Path) -> None:
    import torch

    options = CASES[case]
    own_embedding, tied = options.get("own_embedding", False), options.get("tied", False)
    config = {**EAGLE1_CONFIG, **options.get("config", {})}
    shared = shared_weights()
    lm_head = np.array(shared["embed_tokens"] if tied else shared["lm_head"].values.T)
    target = replace(TARGET, tie_word_embeddings=tied)
    oracle = eagle1_head(config, lm_head, bias=options["bias"])
    if not own_embedding:
        oracle.module.embed_tokens.weight.copy_(torch.from_numpy(np.array(shared["embed_tokens"])))
    saved = {k: v for k, v in config.items() if k not in options.get("unsaid", [])}
    folder = save_flat(
        oracle,
        saved,
        tmp_path / "draft",
        own_embedding=own_embedding,
        pickled=options.get("pickled", False),
    )
    if tied:
        del shared["lm_head"]
    cfg, params = load(folder, "eagle", shared=shared, target=target)
    assert (cfg.fc_bias, cfg.own_embedding) == (options["bias"], own_embedding)

    hidden, tokens = requests()
    draft = PagedDraft(cfg, params, hidden, tokens, PENDING, K, target=target)
    proposal = draft.propose()
    results = [("propose", np.asarray(proposal.draft_tokens), np.asarray(proposal.draft_logits))]
    if case in ("bias_true", "two_layers"):
        results.append(("draft_step", *draft.steps()))
    for i, (h, t) in enumerate(zip(hidden, tokens, strict=True)):
        drafts, logits = oracle.chain(h, t, K)
        for what, our_drafts, ours in results:
            for step in range(K):
                np.testing.assert_allclose(
                    ours[i, step],
                    logits[step],
                    **TOLERANCE,
                    err_msg=f"{what}, request {i}, step {step}",
                )
            np.testing.assert_array_equal(our_drafts[i], drafts)
        assert_its_own_generate_agrees(oracle, lm_head, h, t, drafts)


def assert_its_own_generate_agrees(
    oracle: DraftOracle,
    lm_head: np.ndarray,
    hidden: np.ndarray,
    tokens: np.ndarray,
    drafts: np.ndarray,
) -> None:
    """eagle-llm's own loop over its own cache, which ends at token 2 (Llama-2's end of
    sequence)."""
    import torch

    head = lambda x: x @ torch.from_numpy(lm_head).T  # noqa: E731
    ids = torch.from_numpy(np.concatenate([[0], tokens]))[None]
    drafted = oracle.module.generate(
        torch.from_numpy(hidden)[None], ids, head, max_length=len(drafts), use_cache=True
    )[len(tokens) + 1 :]
    assert drafted and drafted == drafts[: len(drafted)].tolist()
    assert len(drafted) == len(drafts) or drafted[-1] == 2


@pytest.mark.parametrize("bias", [True, False])
def test_features_equal_eagle_llm(bias: bool, tmp_path: Path) -> None:
    """What a step hands to the next one, not only what the head makes of it."""
    shared = shared_weights()
    oracle = eagle1_head(EAGLE1_CONFIG, np.array(shared["lm_head"].values.T), bias=bias)
    cfg, params = load(
        save_flat(oracle, EAGLE1_CONFIG, tmp_path / "draft", own_embedding=True),
        "eagle",
        shared=shared,
    )
    hidden, tokens = requests()
    draft = PagedDraft(cfg, params, hidden, tokens, PENDING, K)
    carry = first_step(draft.cfg, params, draft.inputs, draft.caches)
    features = [np.asarray(carry.hidden[:, 0])]
    carry = next_step(draft.cfg, params, draft.inputs, jnp.int32(1), carry)
    features.append(np.asarray(carry.hidden[:, 0]))
    for i, (h, t) in enumerate(zip(hidden, tokens, strict=True)):
        logits, feedback = oracle(h, t)
        np.testing.assert_allclose(features[0][i], feedback[-1], **TOLERANCE)
        drafted = np.append(t, logits[-1].argmax())
        np.testing.assert_allclose(
            features[1][i], oracle(h, drafted, [feedback[-1]])[1][-1], **TOLERANCE
        )
