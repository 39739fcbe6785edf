"""A warm-up finds the programs of an earlier process on disk, the small ones too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxspec import LLM, SamplingParams, SpeculativeConfig
from jaxspec.config import EngineConfig
from jaxspec.decode import programs, slots
from jaxspec.decode.kept_jit import KeptJit
from jaxspec.loading import executables, program_names
from tests.support.compilations import counting_compilations
from tests.support.tiny import agreeing_model, random_prompts

SMALL = ("move", "put_back", "deactivate", "take_rows", "admit_packed")
GREEDY = SamplingParams(0.0, max_tokens=6)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(executables, "STORE", executables.Store())
    monkeypatch.setattr(program_names, "VARIABLES_AT_IMPORT", program_names._chosen())
    executables.keep_in(tmp_path)
    yield tmp_path
    executables.STORE.write_waiting()


def forget_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold no compiled program, as a process that starts."""
    jax.clear_caches()
    for program in (programs.prefill_program, programs.round_program):
        monkeypatch.setattr(program, "_made", {})
    for name in SMALL:
        monkeypatch.setattr(getattr(slots, name), "_compiled", {})
        monkeypatch.setattr(getattr(slots, name), "_recent", {})


def engine() -> LLM:
    model = agreeing_model("eagle")
    return LLM(
        (model.target, model.params["target"]),
        (model.draft, model.params["draft"]),
        SpeculativeConfig(method="eagle", num_speculative_tokens=1),
        config=EngineConfig(max_model_len=32, max_num_seqs=2, batch_buckets=(1, 2), block_size=32),
    )


def texts(llm: LLM) -> list[Any]:
    results = llm.generate(random_prompts((5, 3)), GREEDY)
    return [result.outputs[0].token_ids for result in results]


def test_a_warm_up_compiles_what_no_earlier_one_has(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_programs(monkeypatch)
    expected = texts(engine())
    found, number = [], 0
    for _ in range(2):
        forget_programs(monkeypatch)
        with counting_compilations() as compiled:
            llm = engine()
            number = llm.warmup(sampling_params=[GREEDY])
        found.append([name for name in compiled if "init_state" not in name])
        with counting_compilations() as compiled:
            assert texts(llm) == expected
        assert not compiled
        rounds, prefills = programs.round_program, programs.prefill_program
        assert rounds.cache_size() == 2 and rounds.cache_size() + prefills.cache_size() == number
    assert any("decode_round" in name for name in found[0])
    assert any("put_back" in name for name in found[0])
    assert not found[1]
    assert len([*folder.iterdir()]) >= number + 4


@pytest.mark.usefixtures("toy_families")
def test_nothing_is_kept_where_a_family_is_not_ours(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later process might register another one by the same name."""
    forget_programs(monkeypatch)
    texts(engine())
    executables.STORE.write_waiting()
    assert not [*folder.iterdir()]
    assert isinstance(slots.move, KeptJit) and not slots.put_back._compiled
