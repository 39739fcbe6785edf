"""Programs multiply float32 matrices in float32 on a GPU, unless the caller chose otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec import LLM, EngineConfig, SamplingParams, SpeculativeConfig
from jaxspec.decode.programs import Program
from jaxspec.layers import op_choice
from jaxspec.tools.benchmark.dimensions import MODELS
from pallas_kernels import hopper
from tests.engine.test_compilation_count import toy
from tests.support import toys
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.once

SEEN: list[str | None] = []


@pytest.fixture(autouse=True)
def no_setting() -> Iterator[None]:
    """The tests' own setting (conftest.py) is off."""
    before = chosen_precision()
    jax.config.update("jax_default_matmul_precision", None)
    yield
    jax.config.update("jax_default_matmul_precision", before)


def chosen_precision() -> str | None:
    config: Any = jax.config
    return config.jax_default_matmul_precision


def seeing(cfg: Any, x: jax.Array) -> jax.Array:
    SEEN.append(chosen_precision())
    return x @ x


@pytest.mark.parametrize(
    ("backend", "dtype", "expected"),
    [
        ("gpu", jnp.float32, True),
        ("gpu", jnp.bfloat16, False),
        ("cpu", jnp.float32, False),
    ],
)
@pytest.mark.parametrize("requested", ["reference", "auto"])
def test_ops_ask_for_it_in_float32_on_a_gpu(
    backend: str, dtype: Any, expected: bool, requested: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(hopper, "missing", lambda: "expected a Hopper GPU, got none")
    target = MODELS["tiny"].target
    ops = op_choice.choose(requested, target, None, block_size=16, dtype=dtype, cache_dtype=dtype)
    assert ops.full_float32 == expected


@pytest.mark.parametrize(
    ("full", "setting", "expected"),
    [(True, None, "highest"), (True, "tensorfloat32", "tensorfloat32"), (False, None, None)],
)
@pytest.mark.parametrize("ahead", [True, False])
def test_every_program_is_traced_with_it(
    full: bool, setting: str | None, expected: str | None, ahead: bool
) -> None:
    llm = engine()
    cfg = llm.round_config(sampled=False, truncated=False)
    cfg = replace(cfg, ops=replace(cfg.ops, full_float32=full))
    program, x = Program(seeing, donate=1), jnp.ones((2, 2))
    SEEN.clear()
    with jax.default_matmul_precision(setting):
        program.compile(cfg, x) if ahead else program(cfg, x)
    assert [expected] == SEEN
    assert chosen_precision() is None


@pytest.mark.usefixtures("toy_families")
@pytest.mark.parametrize("compilation", ["round", "step", "eager"])
def test_prefill_and_rounds_of_an_engine_run_with_it(
    compilation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of toys, which run in seconds where nothing is compiled."""
    spec = SpeculativeConfig(method="eagle", num_speculative_tokens=2)
    llm = toy(speculative=spec, max_model_len=64, block_size=16, compilation=compilation)
    ops = llm.round_config(sampled=False, truncated=False).ops
    llm.runner.configs.override(ops=replace(ops, full_float32=True))
    family = toys.TARGET_FAMILIES["toy"]
    forward = family.forward
    SEEN.clear()

    def seen(*args: Any, **options: Any) -> Any:
        SEEN.append(chosen_precision())
        return forward(*args, **options)

    monkeypatch.setattr(family, "forward", seen)
    llm.generate([[1, 2, 3]], SamplingParams(0.0, max_tokens=3))
    assert set(SEEN) == {"highest"}


def engine() -> LLM:
    model = tiny_model("eagle3")
    return LLM(
        (model.target, model.params["target"]),
        (model.draft, model.params["draft"]),
        SpeculativeConfig(method="eagle3", num_speculative_tokens=2),
        config=EngineConfig(max_model_len=64, block_size=16),
    )
