"""The training-time test against propose, which it has to predict, and against speculators."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.arrays import init_cache
from jaxspec.cache.metadata import build_metadata
from jaxspec.config import REFERENCE_OPS, RoundConfig
from jaxspec.drafts import eagle3
from jaxspec.drafts.autoregressive import DraftInputs, propose
from jaxspec.layers.context import Pass
from jaxspec.layers.params import is_spec, separate, separate_table
from jaxspec.sampling.state import SamplingState
from jaxspec.training.eagle3 import forward_steps as forward_steps_eager
from tests.support.slow import slow
from tests.training.conftest import DRAFT_VOCAB, VOCAB, make_pair

forward_steps = jax.jit(forward_steps_eager, static_argnums=(1, 4))
ROWS, STEPS = 11, 4
TOLERANCE = 2e-5  # float32: another order of the same sums

SWITCHES = [
    {},
    {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
    {"norm_before_residual": True, "norm_before_fc": True},
    {"num_layers": 2, "norm_output": True},
    {"sliding_window": 5},
    {"sliding_window": 2},  # a step's own earlier keys leave it too
]


def inputs(seed: int = 0) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    tokens = jnp.asarray(rng.integers(0, VOCAB, (1, ROWS)), jnp.int32)
    return tokens, jnp.asarray(rng.normal(size=(1, ROWS, 96)), jnp.float32)


@pytest.mark.parametrize(
    ("switches", "row"),
    # Rows with a cache and without one: of a head without switches all, of the others one.
    [
        (slow if switches and row != (4, 0)[i % 2] else pytest.param)(
            switches, row, id=f"{row}-{switches}"
        )
        for i, switches in enumerate(SWITCHES)
        for row in (0, 4, 5)
    ],
)
def test_step_logits_equal_those_that_propose_writes(switches: dict[str, Any], row: int) -> None:
    pair = make_pair(1, **switches)
    cfg = pair.draft_cfg
    tokens, aux = inputs()
    groups = cfg.cache_groups(4, 32)
    block_tables = (jnp.asarray([[3, 1, 5, 0, 2, 4]], jnp.int32),)
    caches = init_cache(cfg.attention, (6,) * cfg.num_layers, 4, jnp.dtype(jnp.float32))
    fused = eagle3.fuse(pair.bound, cfg, aux, REFERENCE_OPS)
    if row:  # the target has seen positions 0 .. row; all but the last are in the draft's cache
        metadata = build_metadata(
            groups,
            block_tables,
            jnp.zeros(1, jnp.int32),
            jnp.asarray([row], jnp.int32),
            row,
            attention=cfg.attention,
            ops=REFERENCE_OPS,
        )
        pass_ = Pass(metadata, REFERENCE_OPS)
        caches = eagle3.forward(
            pair.bound, cfg, tokens[:, 1 : row + 1], fused[:, :row], pass_, caches
        ).caches
    pending = jnp.zeros((1, STEPS + 1), jnp.int32).at[0, 0].set(tokens[0, row + 1])
    hidden = jnp.zeros((1, STEPS + 1, 96), jnp.float32).at[0, 0].set(aux[0, row])
    one = lambda dtype: jnp.ones(1, dtype)  # noqa: E731
    # Sampled drafts keep their logits, and differ from step to step, which greedy ones of a random
    # head do not.
    sampling = SamplingState(jnp.full((1, 2), 7, jnp.uint32), jnp.ones(1))
    state = DraftInputs(
        jnp.asarray([row + 1], jnp.int32), pending, hidden, one(jnp.int32), block_tables, sampling
    )
    round_cfg = RoundConfig(
        target=pair.target_cfg,
        target_groups=groups,
        ops=REFERENCE_OPS,
        draft=cfg,
        draft_groups=groups,
        num_speculative_tokens=STEPS,
        rule="probabilistic",
    )
    proposal = propose(round_cfg, pair.bound, state, caches).proposal
    assert proposal.draft_logits is not None

    # The text that the draft would have been right about: its own tokens follow token row + 1.
    forced = tokens.at[0, row + 2 : row + 2 + STEPS].set(proposal.draft_tokens[0])
    outputs = forward_steps(pair.bound, cfg, forced, aux, STEPS)
    for step, head_input in enumerate(outputs):
        ours = eagle3.logits(pair.bound, cfg, head_input, REFERENCE_OPS)[0, row]
        np.testing.assert_allclose(
            ours,
            proposal.draft_logits[0, step],
            atol=TOLERANCE,
            rtol=TOLERANCE,
            err_msg=f"step {step}",
        )
    assert (
        len({int(t) for t in proposal.draft_tokens[0]}) > 1
    )  # equal drafts could hide a wrong shift


@pytest.mark.oracle("speculators")
@pytest.mark.parametrize(
    "flags",
    # Any two flags together have all four values.
    [
        (pytest.param if sum(flags) % 2 == 0 else slow)(flags, id=str(flags))
        for flags in itertools.product([False, True], repeat=3)
    ],
)
def test_step_logits_equal_speculators_training_forward(
    flags: tuple[bool, bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    switches = dict(zip(("norm_before_residual", "fc_norm", "norm_output"), flags, strict=True))
    pair = make_pair(2, **switches)
    attention = pair.draft_cfg.attention
    layer = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=attention.num_heads,
        num_key_value_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": attention.rope.theta},
    )
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCAB,
        eagle_aux_hidden_state_layer_ids=list(pair.draft_cfg.aux_layers),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **switches,
    )
    oracle = Eagle3DraftModel(config).float().eval()
    state = oracle.state_dict()
    table = eagle3.param_specs(pair.draft_cfg)
    specs = jax.tree.leaves(separate_table(table), is_leaf=is_spec)
    for spec, array in zip(specs, jax.tree.leaves(separate(table, pair.draft)), strict=True):
        value = torch.tensor(np.asarray(array.T if spec.transpose else array))
        assert state[spec.name].shape == value.shape
        state[spec.name].copy_(value)
    state["embed_tokens.weight"].copy_(torch.tensor(np.asarray(pair.target["embed_tokens"])))
    tokens, aux = inputs(3)
    found: list[torch.Tensor] = []
    hook = oracle.lm_head.register_forward_hook(
        lambda module, args, out: found.append(out.detach())
    )
    with torch.no_grad():
        # speculators reads x_{i+1} beside h_i: its dataset shifts the ids by one before the model
        # sees them.
        oracle(
            hidden_states=torch.tensor(np.asarray(aux)),
            input_ids=torch.tensor(np.asarray(jnp.pad(tokens[:, 1:], ((0, 0), (0, 1))))).long(),
            document_ids=torch.zeros(1, ROWS, dtype=torch.long),
            ttt_steps=STEPS,
        )
    hook.remove()
    outputs = forward_steps(pair.bound, pair.draft_cfg, tokens, aux, STEPS)
    assert len(found) == STEPS
    for step, (head_input, expected) in enumerate(zip(outputs, found, strict=True)):
        rows = ROWS - 1 - step
        ours = eagle3.logits(pair.bound, pair.draft_cfg, head_input, REFERENCE_OPS)[:, :rows]
        np.testing.assert_allclose(
            ours, expected[:, :rows].numpy(), atol=1e-4, rtol=1e-4, err_msg=f"step {step}"
        )


def test_a_row_depends_on_nothing_behind_what_it_has_read(pair: Any) -> None:
    """Step i of row p reads tokens up to p+1+i and the target up to p."""
    tokens, aux = inputs(4)
    row = 5
    outputs = forward_steps(pair.bound, pair.draft_cfg, tokens, aux, STEPS)
    other_aux = aux.at[:, row + 1 :].add(1.0)
    for step in range(STEPS):
        other_tokens = tokens.at[:, row + 2 + step :].set((tokens[:, row + 2 + step :] + 1) % VOCAB)
        same = forward_steps(pair.bound, pair.draft_cfg, other_tokens, other_aux, STEPS)
        np.testing.assert_allclose(
            same[step][0, : row + 1], outputs[step][0, : row + 1], atol=TOLERANCE
        )
        changed = tokens.at[:, row + 1 + step].set((tokens[:, row + 1 + step] + 1) % VOCAB)
        assert not np.allclose(
            forward_steps(pair.bound, pair.draft_cfg, changed, aux, STEPS)[step][0, row],
            outputs[step][0, row],
            atol=1e-3,
        )
