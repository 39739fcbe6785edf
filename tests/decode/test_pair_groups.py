"""Whoever runs a target and a draft without the engine gives each its KV-cache groups: its tokens
are those of plain decoding."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, EngineConfig, SamplingParams
from jaxspec.config import REFERENCE_OPS, CacheGroup, RoundConfig
from jaxspec.tools.acceptance.rounds import Pair, Recorder, Requests
from jaxspec.tools.losslessness import _last_logits
from jaxspec.training.generation import GenerationConfig, Generator, Turn
from jaxspec.training.target import greedy_tokens, target_states
from tests.support.families import family_model
from tests.support.tiny import Model, random_prompts

pytestmark = pytest.mark.once

LENGTH, PROMPT = 20, random_prompts([11])[0]  # past the window of 5, past several blocks
FAMILIES = (("gpt_oss", "eagle", 7), ("llama4_text", "eagle_llama4", None))


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda p: p[0])
def model(request: pytest.FixtureRequest) -> Model:
    family, method, window = request.param
    return family_model(family, method, window=window)


@pytest.fixture(scope="module")
def text(model: Model) -> list[int]:
    config = EngineConfig(max_model_len=32, max_num_seqs=1, block_size=4)
    (output,) = LLM((model.target, model.params["target"]), config=config).generate(
        [PROMPT], SamplingParams(0.0, max_tokens=LENGTH)
    )
    return output.token_ids


def test_training_computes_the_hidden_states_that_decoding_sees(
    model: Model, text: list[int]
) -> None:
    whole = jnp.asarray([[*PROMPT, *text]], jnp.int32)
    hidden, _ = target_states(
        model.params["target"], model.target, whole, jnp.asarray([whole.shape[1]]), ()
    )
    following = greedy_tokens(model.params["target"], model.target, hidden)[0, len(PROMPT) - 1 : -1]
    assert following.tolist() == text


def test_trainings_generation_writes_plain_decodings_text(model: Model, text: list[int]) -> None:
    cfg = GenerationConfig(num_slots=2, max_len=32, prefill_rows=1, steps=4, block_size=4)
    generator = Generator(cfg, model.target, model.params["target"], [], jnp.float32)
    queue, ended = [Turn(np.asarray(PROMPT, np.int32), 0.0, LENGTH, False)], []
    while not ended:
        generator.refill(lambda: queue.pop(0) if queue else None)
        ended = generator.step()
    assert ended[0][1].tolist() == [*PROMPT, *text]


def test_recorded_rounds_write_plain_decodings_text(model: Model, text: list[int]) -> None:
    recorder = Recorder(
        Pair(model.target, model.draft, model.params, 3, ()),
        max_num_seqs=1,
        max_tokens=32,
        block_size=4,
    )
    _, texts = recorder.run(Requests([PROMPT], 0.0, LENGTH), "probabilistic", "probabilistic", 3)
    assert texts == [text]


def test_logits_of_a_difference_are_those_that_decoding_takes_the_argmax_of(
    model: Model, text: list[int]
) -> None:
    for count in (0, LENGTH - 1):
        logits = _last_logits(
            model.target, model.params["target"], np.float32, [*PROMPT, *text[:count]]
        )
        assert int(logits.argmax()) == text[count]


@pytest.mark.parametrize(
    ("family", "method", "window", "groups", "pool"),
    [
        ("gpt_oss", "eagle", None, [{}, {"window": 5}], 0),
        ("gpt_oss", "eagle", 5, [{}, {"window": 5}], 1),
        ("gpt_oss", "eagle", 7, [{}, {"window": 5}, {"window": 7}], 2),
        ("llama4_text", "eagle_llama4", None, [{}, {"chunk": 5}], 1),
        ("deepseek_v4", "mtp", None, [{}, {"window": 5}], 1),
        ("glm4_moe_lite", "mtp", None, [{}], 0),
        ("mimo", "mtp", None, [{}], 0),
    ],
)
def test_a_draft_has_a_group_of_its_own_unless_it_sees_just_as_far(
    family: str, method: str, window: int | None, groups: list[dict[str, Any]], pool: int
) -> None:
    model = family_model(family, method, window=window)
    cfg = RoundConfig.for_models(
        model.target,
        model.draft,
        ops=REFERENCE_OPS,
        block_size=4,
        max_model_len=64,
        draft_context=24,
    )
    sights = [CacheGroup(4, 64, **sight) for sight in groups]
    assert [(g.window, g.chunk) for g in cfg.cache_groups] == [
        (g.window, g.chunk) for g in sights
    ] and cfg.draft_pools == (pool,)
    assert [g.max_model_len for g in cfg.draft_groups] == [24] and cfg.max_model_len == 64
    tables = tuple(range(len(groups)))
    assert cfg.draft_tables(tables) == (pool,)
    assert cfg.target_tables(tables) == tables[: 2 if len(groups) > 1 else 1]


@pytest.mark.parametrize(
    ("draft_sights", "pools", "own"),
    [
        ([{"window": 5}, {}], (1, 0), []),
        ([{"window": 7}, {}], (2, 0), [0]),
        ([{}, {"window": 7}, {"chunk": 5}], (0, 2, 3), [1, 2]),
    ],
)
def test_each_of_several_draft_groups_shares_a_pool_or_has_its_own(
    draft_sights: list[dict[str, Any]], pools: tuple[int, ...], own: list[int]
) -> None:
    """Beside a target with full attention and a window of 5; own: the draft groups that share no
    pool."""
    model = family_model("gpt_oss", "eagle")
    cfg = RoundConfig(
        target=model.target,
        target_groups=model.target.cache_groups(4, 64),
        ops=REFERENCE_OPS,
        draft=model.draft,
        draft_groups=tuple(CacheGroup(4, 24, **sight) for sight in draft_sights),
        num_speculative_tokens=3,
    )
    assert cfg.draft_pools == pools
    assert cfg.cache_groups == (*cfg.target_groups, *(cfg.draft_groups[i] for i in own))
    tables = tuple(f"table {i}" for i in range(len(cfg.cache_groups)))
    assert cfg.target_tables(tables) == ("table 0", "table 1")
    assert cfg.draft_tables(tables) == tuple(f"table {pool}" for pool in pools)


def test_a_round_without_ops_is_an_error() -> None:
    model = family_model("gpt_oss", "eagle")
    groups: Any = {"target": model.target, "target_groups": model.target.cache_groups(4, 64)}
    with pytest.raises(TypeError, match="ops"):
        RoundConfig(**groups)
    with pytest.raises(TypeError, match="ops"):
        RoundConfig.for_models(model.target, block_size=4, max_model_len=64)  # type: ignore[call-arg]
