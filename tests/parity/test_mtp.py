"""MTP modules against transformers' own MtpModel, step by step: its layer run again over the whole
text for every draft, with what it gave before as the hidden states of the drafted rows. MiMo is no
class there: it is Qwen2 with the hidden state first, names mapped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec import LLM, SamplingParams, drafts
from jaxspec.config import ConfigError
from jaxspec.drafts import mtp
from jaxspec.layers.params import Params, Weight
from jaxspec.layers.products import rms_norm
from jaxspec.loading.model import load_target
from tests.parity.oracles import (
    TOLERANCE,
    DraftOracle,
    edit_config,
    edit_tensors,
    hf_outputs,
    hf_target,
    randomise,
)
from tests.parity.ours import PagedDraft, load
from tests.parity.test_families import DEEPSEEK, GLM
from tests.parity.test_rounds import assert_proposals_equal
from tests.support.slow import slow_unless

K = 5
TARGETS: dict[str, dict[str, Any]] = {
    "deepseek_v3": DEEPSEEK,
    "glm4_moe_lite": {**GLM, "num_mtp_layers": 1, "mtp_mlp_layer_types": ["sparse"]},
    "mimo": dict(
        model_type="qwen2",
        num_mtp_layers=1,
        mtp_layer_types=["full_attention"],
        mtp_hidden_states_first=True,
    ),
}
NAMES = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"}
MIMO_NAMES = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "post_norm": "final_layernorm",
}


@dataclass
class Checkpoint:
    folder: Path
    model: Any
    oracle: DraftOracle


def mtp_oracle(module: Any, *, zero_first: bool = False) -> DraftOracle:
    """MtpModel's only layer, run over the whole text."""
    import torch

    def run(hidden: Any, tokens: Any, feedback: Any) -> tuple[Any, Any]:
        embedded = module.embed_tokens(tokens)[None].clone()
        if zero_first:
            embedded[:, 0] = 0
        rows = torch.cat([hidden, feedback])[None]
        positions = torch.arange(rows.shape[1])[None]
        out = module.forward_layer(0, rows, positions, None, inputs_embeds=embedded)
        return module._project_to_logits(out)[0], out[0]

    return DraftOracle(module, np.arange(module.embed_tokens.weight.shape[0]), run)


def save_with_module(family: str, folder: Path) -> Checkpoint:
    """A target's folder with the module in it, by the names of the family's original checkpoint."""
    from transformers.modeling_layers import MtpModel

    model = hf_target(folder, **TARGETS[family])
    model.config._attn_implementation = "eager"
    module = randomise(MtpModel(model, 1), seed=3)
    module.config._attn_implementation = "eager"
    model.save_pretrained(
        folder
    )  # again: it shares its embedding and head with the module, and has new ones now
    prefix = (
        "model.mtp_layers.0"
        if family == "mimo"
        else f"model.layers.{model.config.num_hidden_layers}"
    )
    own = MIMO_NAMES if family == "mimo" else NAMES
    # transformers writes a layer of the target in the checkpoint's names; so the module's block
    # goes through a model of one layer
    block = type(model)._from_config(module.config, attn_implementation="eager").float()
    block.model.layers[0].load_state_dict(module.layers[0].mtp_block.state_dict())
    block.save_pretrained(folder / "block")
    written = load_file(folder / "block" / "model.safetensors")
    old = "model.layers.0."
    tensors = {
        f"{prefix}.{name.removeprefix(old)}": t
        for name, t in written.items()
        if name.startswith(old)
    }
    for name, value in module.layers[0].state_dict().items():
        top, _, rest = name.partition(".")
        if top in own:
            tensors[f"{prefix}.{own[top]}.{rest}"] = value.numpy()
    if family != "mimo":  # copies that the original files hold
        tensors[f"{prefix}.embed_tokens.weight"] = model.model.embed_tokens.weight.numpy()
        tensors[f"{prefix}.shared_head.head.weight"] = model.lm_head.weight.numpy()
    edit_tensors(folder, lambda held: held.update(tensors))
    if family == "mimo":
        edit_config(folder, lambda c: c.update(model_type="mimo"))
    return Checkpoint(folder, model, mtp_oracle(module))


@pytest.fixture(scope="module", params=list(TARGETS))
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    return save_with_module(request.param, tmp_path_factory.mktemp(request.param) / "target")


def loaded(checkpoint: Checkpoint, **overrides: Any) -> tuple[Any, Any, Params]:
    target, params = load_target(checkpoint.folder, jnp.float32)
    return target, *load(checkpoint.folder, "mtp", shared=params, target=target, **overrides)


def texts(
    checkpoint: Checkpoint, lengths: tuple[int, ...] = (1, 7, 83)
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """hidden [T, D] of positions 0 .. T-1 by transformers, and the tokens after each."""
    rng = np.random.default_rng(5)
    rows = [rng.integers(0, 160, n + 1) for n in lengths]
    return [hf_outputs(checkpoint.model, t[:-1]).hidden for t in rows], [t[1:] for t in rows]


def expected(oracle: DraftOracle, hidden: Any, tokens: Any, forced: np.ndarray) -> np.ndarray:
    return np.stack(
        [oracle.chain(h, t, K, forced=f)[1] for h, t, f in zip(hidden, tokens, forced, strict=True)]
    )


@pytest.mark.oracle("transformers")
def test_every_step_equals_transformers(checkpoint: Checkpoint) -> None:
    """One module, K times, across blocks, with one to K+1 pending rows; the compiled loop and eager
    steps."""
    target, cfg, params = loaded(checkpoint, mtp_zero_first_embedding=False)
    hidden, tokens = texts(checkpoint)
    draft = PagedDraft(cfg, params, hidden, tokens, num_pending=(1, 3, 6), K=K, target=target)
    proposal = draft.propose()
    drafted = np.asarray(proposal.draft_tokens)
    logits = expected(checkpoint.oracle, hidden, tokens, drafted)
    np.testing.assert_array_equal(drafted, logits.argmax(-1))
    _, stepped = draft.steps(forced=drafted)
    np.testing.assert_allclose(stepped, logits, **TOLERANCE)


@pytest.mark.oracle("transformers")
def test_the_row_of_position_0_can_go_without_its_embedding(checkpoint: Checkpoint) -> None:
    target, cfg, params = loaded(checkpoint, mtp_zero_first_embedding=True)
    hidden, tokens = texts(checkpoint)
    draft = PagedDraft(cfg, params, hidden, tokens, num_pending=(1, 7, 2), K=K + 1, target=target)
    drafted, stepped = draft.steps()
    zeroed = expected(
        mtp_oracle(checkpoint.oracle.module, zero_first=True), hidden, tokens, drafted[:, :K]
    )
    plain = expected(checkpoint.oracle, hidden, tokens, drafted[:, :K])
    np.testing.assert_allclose(stepped[:, :K], zeroed, **TOLERANCE)
    assert np.abs(zeroed - plain).max() > 0.01


@pytest.mark.oracle("transformers")
def test_proposals_after_many_rounds_equal_the_oracle_on_the_whole_text(
    checkpoint: Checkpoint,
) -> None:
    """Through prefill in chunks, accepted and rejected drafts: each row pairs the hidden state of a
    position with the token after it."""
    target, params = load_target(checkpoint.folder, jnp.float32)
    params = {
        **params,
        "lm_head": Weight(0.3 * params["lm_head"].values),
    }  # flat distributions overlap: some drafts are accepted
    flat = DraftOracle(
        checkpoint.oracle.module,
        checkpoint.oracle.to_target,
        lambda *args: _scaled(checkpoint.oracle._run(*args)),
    )
    draft = load(
        checkpoint.folder, "mtp", shared=params, target=target, mtp_zero_first_embedding=False
    )
    assert_proposals_equal((target, params), draft, checkpoint.model, flat)


def _scaled(output: tuple[Any, Any]) -> tuple[Any, Any]:
    return 0.3 * output[0], output[1]


@pytest.mark.oracle("transformers")
@pytest.mark.parametrize(
    "checkpoint", slow_unless(["glm4_moe_lite"], TARGETS), indirect=True, scope="module"
)
def test_the_targets_folder_alone_is_enough(checkpoint: Checkpoint) -> None:
    load_it = partial(
        LLM.from_pretrained,
        str(checkpoint.folder),
        dtype="float32",
        max_model_len=64,
        max_num_seqs=1,
    )
    llm, plain = load_it(speculative={"method": "mtp", "num_speculative_tokens": 2}), load_it()
    texts = [
        engine.generate([[3, 1, 2]], SamplingParams(temperature=0, max_tokens=6))[0].token_ids
        for engine in (llm, plain)
    ]
    assert texts[0] == texts[1] and llm.metrics.num_drafts > 0


def test_what_each_family_does_with_position_0_is_stated() -> None:
    assert {name: layout.zero_first_embedding for name, layout in mtp.LAYOUTS.items()} == {
        "deepseek_v3": False,
        "glm4_moe_lite": False,
        "mimo": True,
    }


MISTAKES: dict[str, Callable[[Any, Params], tuple[Any, Params]]] = {
    "norms_swapped": lambda cfg, p: (
        cfg,
        {**p, "embedding_norm": p["hidden_norm"], "hidden_norm": p["embedding_norm"]},
    ),
    "projection_order": lambda cfg, p: (
        cfg,
        {**p, "projection": _halves_swapped(p["projection"].values)},
    ),
    "output_norm_dropped": lambda cfg, p: (cfg, {**p, "norm": jnp.ones_like(p["norm"])}),
}


def _halves_swapped(weight: jax.Array) -> Weight:
    return Weight(jnp.roll(weight, weight.shape[0] // 2, axis=0))


@pytest.mark.oracle("transformers")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_sees_a_mistake(mistake: str, checkpoint: Checkpoint) -> None:
    target, cfg, params = loaded(checkpoint, mtp_zero_first_embedding=False)
    cfg, params = MISTAKES[mistake](cfg, params)
    hidden, tokens = texts(checkpoint)
    draft = PagedDraft(cfg, params, hidden, tokens, num_pending=(1, 3, 6), K=K, target=target)
    drafted, stepped = draft.steps()
    assert (
        np.abs(stepped[:, 0] - expected(checkpoint.oracle, hidden, tokens, drafted)[:, 0]).max()
        > 0.01
    )


@pytest.mark.oracle("transformers")
def test_recycling_before_the_norm_is_seen_from_the_second_draft_on(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM's glm4_moe_lite_mtp did: step 0 is right, and greedy text too, so that only an
    oracle sees it."""
    target, cfg, params = loaded(checkpoint, mtp_zero_first_embedding=False)

    def recycled(params: Params, *args: Any, **kwargs: Any) -> Any:
        out = mtp.forward(params, *args, **kwargs)
        with patch.object(
            mtp,
            "rms_norm",
            lambda x, gain, *rest: x if gain is params["norm"] else rms_norm(x, gain, *rest),
        ):
            return replace(out, feedback=mtp.forward(params, *args, **kwargs).feedback)

    monkeypatch.setitem(
        drafts.FAMILIES, "unnormed", SimpleNamespace(**{**vars(mtp), "forward": recycled})
    )
    hidden, tokens = texts(checkpoint)
    cfg = replace(cfg, method="unnormed")
    draft = PagedDraft(cfg, params, hidden, tokens, num_pending=(1, 3, 6), K=K, target=target)
    drafted, stepped = draft.steps()
    right = expected(checkpoint.oracle, hidden, tokens, drafted)
    np.testing.assert_allclose(stepped[:, 0], right[:, 0], **TOLERANCE)
    assert np.abs(stepped[:, 1:] - right[:, 1:]).max() > 0.01


REFUSED: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "no_module": (
        lambda f: edit_tensors(f, _drop_module),
        {},
        r"expected tensors model\.layers\.2\.\* in the checkpoint, got none",
    ),
    "missing": (
        lambda f: edit_tensors(f, lambda t: t.pop("model.layers.2.enorm.weight")),
        {},
        r"missing: model\.layers\.2\.enorm\.weight",
    ),
    "extra": (
        lambda f: edit_tensors(
            f, lambda t: t.update({"model.layers.2.fnorm.weight": np.zeros(3, np.float32)})
        ),
        {},
        r"unexpected: model\.layers\.2\.fnorm\.weight",
    ),
    "eagle3_switch": (
        lambda f: None,
        dict(fc_norm=True),
        r"fc_norm: expected it only with method 'eagle3', got it with 'mtp'",
    ),
    "another_target": (
        lambda f: edit_config(f, lambda c: c.update(model_type="llama")),
        {},
        r"expected the target's own checkpoint .*got 'llama'",
    ),
}


def _drop_module(tensors: dict[str, np.ndarray]) -> None:
    for name in [n for n in tensors if n.startswith("model.layers.2.")]:
        del tensors[name]


@pytest.mark.oracle("transformers")
@pytest.mark.parametrize("case", REFUSED)
def test_a_checkpoint_whose_module_does_not_fit_is_refused(case: str, tmp_path: Path) -> None:
    damage, overrides, message = REFUSED[case]
    checkpoint = save_with_module("deepseek_v3", tmp_path / "target")
    target, params = load_target(checkpoint.folder, jnp.float32)
    damage(checkpoint.folder)
    with pytest.raises(ConfigError, match=message):
        load(checkpoint.folder, "mtp", shared=params, target=target, **overrides)
