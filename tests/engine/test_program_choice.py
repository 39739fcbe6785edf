"""The choice of a batch's program, over a resident state that has no devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxspec.cache.group_blocks import RequestBlocks
from jaxspec.config import EngineConfig, SamplingFeatures
from jaxspec.engine.buckets import Buckets
from jaxspec.engine.program_choice import ProgramChoice
from jaxspec.engine.request import Request
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


OF_PREFILL = "of prefill"


class FakeConfigs:
    """RoundConfigs whose configs are the features, of prefill with OF_PREFILL beside them.

    numbers: the K of so many requests, where that is not 3
    """

    version = 0
    always_limits_drafts = False

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}

    def get(self, features: SamplingFeatures, **_: Any) -> SamplingFeatures:
        return features

    def for_prefill(self, features: SamplingFeatures) -> tuple[str, SamplingFeatures]:
        return OF_PREFILL, features

    def k_of_batch(self, batch_size: int) -> int:
        return self.numbers.get(batch_size, 3)


@pytest.fixture
def resident() -> FakeResident:
    return FakeResident()


@pytest.fixture
def choice(resident: FakeResident) -> ProgramChoice:
    configs: Any = FakeConfigs()
    made: Any = resident
    config = EngineConfig(max_num_seqs=8, block_size=32)
    return ProgramChoice(made, configs, Buckets(config, prefill_tile=8, on_gpu=False))


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
    assert plain.is_exact and plain.cfg == (OF_PREFILL, GREEDY)
    choice.set_layout(resident.needed.hold(BIASED))
    held = choice.for_prefill(GREEDY, PREFILL)
    assert held.cfg == (OF_PREFILL, BIASED) and not held.is_exact, "the arrays stay"
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


def requests_of(*draft_limits: int) -> list[Request]:
    """Greedy requests that hold a block each, and have so many drafts at most."""
    return [
        Request([1], SamplingParams(0.0), 9, draft_limit=n, blocks=[RequestBlocks(0, [0])])
        for n in draft_limits
    ]


def compile_rounds(choice: ProgramChoice, batches: dict[int, Variant], *numbers: int) -> None:
    for batch, variant in batches.items():
        for K in numbers:
            choice.variants.add(RoundShape(batch, 4, K), variant)


def test_a_larger_batch_serves_rare_features_only_after_a_warm_up(
    choice: ProgramChoice, resident: FakeResident
) -> None:
    one, greedy = requests_of(3), Variant.of(GREEDY, resident.needed)
    compile_rounds(choice, dict.fromkeys((1, 2, 4), greedy), 3)
    compile_rounds(choice, {4: Variant.of(BIASED, resident.needed)}, 3)
    assert choice.batch_for(BIASED, one, 1) == 1
    choice.is_warm = True
    assert [choice.batch_for(BIASED, one * n, n) for n in (1, 2, 4)] == [4, 4, 4]
    assert [choice.batch_for(GREEDY, one * n, n) for n in (1, 2, 4)] == [1, 2, 4]
    assert choice.batch_for(replace(BIASED, prompt_logprobs=True), one, 1) == 4, "of prefill alone"
    assert choice.batch_for(BIASED, [], 1) == 1, "no request"
    compile_rounds(choice, {8: Variant.of(BIASED, resident.needed)}, 3)
    assert choice.batch_for(BIASED, one * 5, 8) == 8
    choice.forget_choices()
    compile_rounds(choice, {1: Variant.of(BIASED, resident.needed)}, 3)
    assert choice.batch_for(BIASED, one, 1) == 1, "its own batch is compiled"


def test_a_batch_that_was_not_warmed_stays_although_a_larger_one_is_compiled(
    choice: ProgramChoice, resident: FakeResident
) -> None:
    choice.is_warm = True
    compile_rounds(choice, {2: Variant.of(GREEDY, resident.needed)}, 3)
    compile_rounds(choice, {4: Variant.of(BIASED, resident.needed)}, 3)
    one = requests_of(3)
    assert choice.batch_for(BIASED, one, 1) == 1
    assert choice.batch_for(BIASED, one * 2, 2) == 4
    one[0].blocks = [RequestBlocks(0, [*range(5)])]
    assert choice.batch_for(BIASED, one * 2, 2) == 2, "other pages"
    choice.variants.add(RoundShape(2, 8, 3), Variant.of(GREEDY, resident.needed))
    assert choice.batch_for(BIASED, one * 2, 2) == 2, "the larger one has other pages"
    choice._configs.version += 1  # type: ignore[attr-defined]
    one[0].blocks = [RequestBlocks(0, [0])]
    assert choice.batch_for(BIASED, one * 2, 2) == 2, "nothing is compiled for these"


def test_a_batch_serves_whichever_of_its_requests_generate(
    choice: ProgramChoice, resident: FakeResident
) -> None:
    """Two together have no drafts. One, while the other is prefilled, has up to three."""
    choice._configs.numbers = {2: 0}  # type: ignore[attr-defined]
    choice.is_warm = True
    compile_rounds(choice, dict.fromkeys((1, 2, 4), Variant.of(GREEDY, resident.needed)), 0, 3)
    limited = Variant.of(GREEDY, resident.needed, limits_drafts=True)
    compile_rounds(choice, {4: limited}, 0, 3)
    assert choice.batch_for(GREEDY, requests_of(3, 3), 2) == 2
    assert choice.batch_for(GREEDY, requests_of(3, 1), 2) == 4
    assert choice.batch_for(GREEDY, requests_of(3), 1) == 1
