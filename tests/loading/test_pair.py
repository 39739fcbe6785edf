"""A head that names its target: one id loads both, and every other combination is one sentence."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jaxspec import SpeculativeConfig
from jaxspec.config import ConfigError, DraftConfig
from jaxspec.config.speculative import DEFAULT_K
from jaxspec.drafts.families import BLOCKS
from jaxspec.loading.pair import resolve_pair, with_k
from tests.drafts.test_block_configs import FLAT
from tests.parity.ours import TARGET

MODEL = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, another model, the default target, and heads with and without a verifier."""
    default = importlib.import_module("jaxspec.loading.default_target")
    monkeypatch.setattr(default, "default_target", lambda: tmp_path / "default")
    for name in ("model", "other", "default"):
        write(tmp_path / name, MODEL)
    write(tmp_path / "head", head(str(tmp_path / "model")))
    write(tmp_path / "nameless", head(None))
    write(tmp_path / "lost", head(str(tmp_path / "nowhere" / "at all")))
    write(tmp_path / "flat", {"architectures": ["LlamaForCausalLMEagle3"]})
    return tmp_path


def write(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))


def head(verifier: str | None) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": verifier},
        },
    }


def test_one_name_loads_the_target_that_the_head_names_and_the_head(folder: Path) -> None:
    pair = resolve_pair(str(folder / "head"), None)
    assert (pair.target, pair.head) == (folder / "model", folder / "head")
    assert pair.speculative == SpeculativeConfig(str(folder / "head"), num_speculative_tokens=5)


def test_settings_beside_that_name_are_kept(folder: Path) -> None:
    given = SpeculativeConfig(num_speculative_tokens=2, rejection_sample_method="block")
    pair = resolve_pair(str(folder / "head"), given)
    assert (pair.target, pair.head) == (folder / "model", folder / "head")
    assert pair.speculative == SpeculativeConfig(
        str(folder / "head"), num_speculative_tokens=2, rejection_sample_method="block"
    )


def test_a_head_without_a_target_brings_its_own_or_else_the_default(folder: Path) -> None:
    named = resolve_pair(None, SpeculativeConfig(str(folder / "head")))
    assert (named.target, named.head) == (folder / "model", folder / "head")
    nameless = resolve_pair(None, SpeculativeConfig(str(folder / "nameless")))
    assert (nameless.target, nameless.head) == (folder / "default", folder / "nameless")
    assert resolve_pair(None, None).target == folder / "default"


def test_a_target_that_is_named_wins_over_the_heads(folder: Path) -> None:
    given = SpeculativeConfig(str(folder / "head"))
    pair = resolve_pair(str(folder / "other"), given)
    assert (pair.target, pair.head, pair.speculative) == (folder / "other", folder / "head", given)


def test_drafts_without_a_checkpoint_have_no_head(folder: Path) -> None:
    for method in ("mtp", "ngram"):
        pair = resolve_pair(str(folder / "model"), SpeculativeConfig(method=method))
        assert (pair.target, pair.head) == (folder / "model", None)


def test_a_committed_head_is_a_name_for_the_default_pair(folder: Path) -> None:
    pair = resolve_pair("smollm2-135m-instruct-eagle3", None)
    assert pair.target == folder / "default"
    assert pair.head is not None and pair.head.name == "smollm2-135m-instruct-eagle3"


@pytest.mark.parametrize(
    ("target", "speculative", "message"),
    [
        ("model", SpeculativeConfig(), "speculative model: expected a folder, .* got none"),
        (None, SpeculativeConfig(), "speculative model: expected a folder, .* got none"),
        ("model", SpeculativeConfig(method="eagle"), "speculative model: expected a folder"),
        ("nameless", None, "expected a model, got a draft head that names no target; name the"),
        ("flat", None, "expected a model, got a draft head that names no target; name the"),
        ("head", "head", "expected a model beside the head .*, got a draft head"),
        ("lost", None, "expected a verifier that can be loaded, or a target beside the head"),
    ],
)
def test_what_cannot_be_a_pair_is_one_sentence(
    target: str | None, speculative: SpeculativeConfig | str | None, message: str, folder: Path
) -> None:
    if isinstance(speculative, str):
        speculative = SpeculativeConfig(str(folder / speculative))
    with pytest.raises(ConfigError, match=message) as error:
        resolve_pair(target and str(folder / target), speculative)
    assert "\n" not in str(error.value)


PROPOSES_5: dict[str, Any] = head(None)


@pytest.mark.parametrize(
    ("method", "block", "config", "K"),
    [
        ("eagle", None, {}, DEFAULT_K),
        ("eagle", None, PROPOSES_5, 5),
        ("ngram", None, {}, DEFAULT_K),
        ("dspark", 7, {}, 7),  # the anchor's row drafts
        ("dflash", 7, {}, 6),
        ("dflash", 16, PROPOSES_5, 5),
        ("dspark", 2, PROPOSES_5, 2),  # more than the block holds
    ],
)
def test_a_draft_has_its_own_number_of_tokens_unless_the_caller_names_one(
    method: str, block: int | None, config: dict[str, Any], K: int
) -> None:
    draft = draft_of(method, block)
    assert with_k(SpeculativeConfig(), draft, config).num_speculative_tokens == K
    given = SpeculativeConfig(num_speculative_tokens=1)
    assert with_k(given, draft, config) is given


@pytest.mark.parametrize(("method", "most"), [("dspark", 4), ("dflash", 3)])
def test_more_tokens_than_a_block_holds_are_refused(method: str, most: int) -> None:
    draft = draft_of(method, 4)
    given = SpeculativeConfig(num_speculative_tokens=most)
    assert with_k(given, draft, {}) is given
    with pytest.raises(ConfigError) as error:
        with_k(SpeculativeConfig(num_speculative_tokens=most + 1), draft, {})
    assert str(error.value) == (
        f"num_speculative_tokens: expected at most {most}, the drafts of this head's block, "
        f"got {most + 1}"
    )


def test_a_schedule_must_fit_the_number_that_the_head_has() -> None:
    schedule = SpeculativeConfig(num_speculative_tokens_per_batch_size=((1, 4, 7),))
    assert with_k(schedule, draft_of("dspark", 7), {}).k_of_batch(2) == 7
    with pytest.raises(ConfigError, match="K from 0 to num_speculative_tokens 3, got"):
        with_k(schedule, draft_of("eagle", None), {})


def draft_of(method: str, block: int | None) -> DraftConfig:
    """Return the config of a draft, with a block of this size if it makes blocks."""
    if block is None:
        return cast(DraftConfig, SimpleNamespace(method=method))
    flat = {**FLAT, "block_size": block, "markov_rank": 4}
    speculative = SpeculativeConfig()
    found = BLOCKS[method].config_from_checkpoint(flat, {}, TARGET, speculative)
    return cast(DraftConfig, found)
