"""The choice of a batch's program, over a resident state that has no devices."""

from __future__ import annotations

from typing import Any

import pytest

from jaxspec.config import EngineConfig, SamplingFeatures
from jaxspec.engine.buckets import Buckets
from jaxspec.engine.program_choice import ProgramChoice
from jaxspec.engine.variants import PrefillShape, RoundShape, Variant
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.processors.processor import Vocabulary
from jaxspec.sampling.rows import StateLayout

GREEDY = SamplingFeatures(sampled=False)
BIASED = SamplingFeatures(sampled=False, processors=frozenset({"logit_bias"}))
ROUNDS, PREFILL = RoundShape(2, 4, 3), PrefillShape(1, 4)


class FakeResident:
    """The layouts of a ResidentState."""

    def __init__(self) -> None:
        self.needed = self.layout = StateLayout(Vocabulary(32))
        self.changes = 0

    def change_layout(self, layout: StateLayout) -> bool:
        is_new = not layout.has_shapes_of(self.layout)
        self.layout, self.changes = layout, self.changes + 1
        return is_new


class FakeConfigs:
    """RoundConfigs whose configs are the features."""

    version = 0

    def get(self, features: SamplingFeatures, **_: Any) -> SamplingFeatures:
        return features


@pytest.fixture
def resident() -> FakeResident:
    return FakeResident()


@pytest.fixture
def choice(resident: FakeResident) -> ProgramChoice:
    configs: Any = FakeConfigs()
    made: Any = resident
    return ProgramChoice(made, configs, Buckets(EngineConfig(), prefill_tile=8, on_gpu=False))


def test_a_batch_runs_its_own_program_until_one_with_more_features_is_compiled(
    choice: ProgramChoice, resident: FakeResident
) -> None:
    own = choice.for_rounds(GREEDY, ROUNDS, False)
    assert own.is_exact and own.cfg == GREEDY and not choice.variants.knows(ROUNDS)
    assert choice.for_rounds(GREEDY, ROUNDS, False) is own, "chosen once"
    choice.variants.add(ROUNDS, Variant.of(BIASED, resident.needed))
    choice.forget_choices()
    larger = choice.for_rounds(GREEDY, ROUNDS, False)
    assert larger.cfg == BIASED and not larger.is_exact and larger.layout.held == {"logit_bias"}


def test_a_program_is_noted_after_its_first_run_alone(choice: ProgramChoice) -> None:
    serving = choice.for_rounds(GREEDY, ROUNDS, False)
    serving.noted()
    assert choice.variants.knows(ROUNDS) and serving.note is None
    choice.forget_choices()
    assert choice.for_rounds(GREEDY, ROUNDS, False).note is None


def test_a_prefill_runs_on_the_state_as_it_is_and_is_chosen_anew_for_other_arrays(
    choice: ProgramChoice, resident: FakeResident
) -> None:
    plain = choice.for_prefill(GREEDY, PREFILL)
    assert plain.is_exact and plain.cfg == GREEDY
    choice.set_layout(resident.needed.hold(BIASED))
    held = choice.for_prefill(GREEDY, PREFILL)
    assert held.cfg == BIASED and not held.is_exact, "the arrays stay"
    choice.set_layout(held.layout)
    assert choice.for_prefill(GREEDY, PREFILL) is held, "the same arrays in another layout"
    changes = resident.changes
    choice.set_layout(resident.layout)
    assert resident.changes == changes, "the layout that the state has"


def test_requests_that_need_other_sizes_and_other_settings_are_chosen_for_anew(
    choice: ProgramChoice, resident: FakeResident
) -> None:
    first = choice.for_rounds(GREEDY, ROUNDS, False)
    choice.set_needed(resident.needed.hold(BIASED))
    assert choice.for_rounds(GREEDY, ROUNDS, False) is first, "sizes are the same"
    many = SamplingParams(0.0, stop_token_ids=[*range(9)])
    choice.set_needed(resident.needed.fit(GREEDY, [many]))
    second = choice.for_rounds(GREEDY, ROUNDS, False)
    assert second is not first and second.layout.sizes != first.layout.sizes
    second.noted()
    choice._configs.version += 1  # type: ignore[attr-defined]
    assert choice.for_rounds(GREEDY, ROUNDS, False).note is not None, (
        "nothing is compiled for these"
    )


def test_a_larger_call_serves_rare_features_only_after_a_warm_up(
    choice: ProgramChoice, resident: FakeResident
) -> None:
    choice.variants.add(PREFILL, Variant.of(GREEDY, resident.needed))
    choice.variants.add(PrefillShape(4, 4), Variant.of(BIASED, resident.needed))
    assert choice.prefill_shape(BIASED, 1, 4) == PREFILL
    choice.is_warm = True
    assert choice.prefill_shape(BIASED, 1, 4) == PrefillShape(4, 4)
    assert choice.prefill_shape(GREEDY, 1, 4) == PREFILL
    assert choice.prefill_shape(BIASED, 2, 4) == PrefillShape(2, 4), "a size that was not warmed"
