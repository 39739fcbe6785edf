"""A round with a DSpark head of Qwen3-8B's dimensions compiled for an H200: one program, caches in
place, a loop of few launches."""

from __future__ import annotations

import functools
import math
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec import drafts, models
from jaxspec.config import Ops, RoundConfig
from jaxspec.decode import programs
from jaxspec.decode import state as decode_state
from jaxspec.drafts import DSparkConfig
from jaxspec.sampling.state import SamplingState
from jaxspec.tools.benchmark.dimensions import MODELS
from tests.aot.test_round_aot import GROUP, PAGES, Compiled, body_of, parse_thunks
from tests.support import h200

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(h200.unavailable() is not None, reason=str(h200.unavailable())),
]

BATCH, K = 4, 7
LAUNCHES_OF_A_DRAFT = 9


def configured(num_layers: int) -> RoundConfig:
    dimensions = MODELS["qwen3-8b"]
    target = replace(dimensions.target, num_layers=3)
    draft = DSparkConfig(
        target_hidden_size=target.hidden_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        attention=target.attention,
        rms_norm_eps=target.rms_norm_eps,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        aux_layers=(0, 1, 2),
        draft_block_size=K,
        mask_token_id=7,
        sample_from_anchor=True,
        windows=(None,) * num_layers,
        causal=(False,) * num_layers,
        markov_rank=256,
        has_confidence=True,
        confidence_reads_token=True,
    )
    return RoundConfig(
        target=target,
        target_groups=(GROUP,),
        draft=draft,
        draft_groups=(GROUP,),
        num_speculative_tokens=K,
        rule="probabilistic",
        sampled=True,
        ops=Ops(**dict.fromkeys(Ops().names(), "mosaic_gpu")),
        cuda_graphs=True,
    )


@functools.cache
def compiled(num_layers: int, batch: int = BATCH, cfg: RoundConfig | None = None) -> Compiled:
    """cfg: of a draft of so many layers; None: configured(num_layers)"""
    cfg = cfg or configured(num_layers)
    struct = jax.ShapeDtypeStruct
    weights = lambda specs: jax.tree.map(lambda spec: struct(spec.shape, jnp.bfloat16), specs)  # noqa: E731
    target = weights(models.family(cfg.target).param_specs(cfg.target))
    shared = {name: target[name] for name in ("embed_tokens", "lm_head")}
    draft: Any = cfg.draft
    params = {
        "target": target,
        "draft": {**shared, **weights(drafts.family(draft).param_specs(draft))},
    }
    ints, floats = struct((batch,), jnp.int32), struct((batch,), jnp.float32)
    sampling = SamplingState(struct((batch, 2), jnp.uint32), floats)  # type: ignore[arg-type]
    state = jax.eval_shape(
        lambda sampling, ints: decode_state.init_state(
            cfg,
            sampling,
            ints,
            jnp.zeros((batch, 4), jnp.int32),
            (batch * PAGES,),
            dtype=jnp.bfloat16,
            cache_dtype=jnp.bfloat16,
        ),
        sampling,
        ints,
    )
    with tempfile.TemporaryDirectory() as folder, h200.ptxas_report() as report:
        executable = h200.compile_for_h200(
            programs.decode_round_in_place,
            cfg,
            params,
            *programs.split_donated(state),
            (struct((batch, PAGES), jnp.int32),),
            static_argnums=(0,),
            donate_argnums=2,
            options=dict(cfg.compiler_options) | {"xla_dump_to": folder},
        )
        [thunks] = Path(folder).glob("*jit_decode_round*.thunk_sequence_after_thunk_passes.txt")
        aliased = executable.memory_analysis().alias_size_in_bytes
        text = thunks.read_text()
        return Compiled(cfg, 1, executable.as_text(), parse_thunks(text), report(), aliased)


@pytest.fixture
def case() -> Compiled:
    return compiled(2)


def test_caches_are_updated_in_place(case: Compiled) -> None:
    shape = (BATCH * PAGES, GROUP.block_size, 8, 128)
    made = re.findall(
        rf"= \(?[^=(]*bf16\[{','.join(map(str, shape))}\][^=]*? "
        r"(?:copy|copy-start|fusion|transpose|scatter|dynamic-update-slice)\(.*",
        case.hlo,
    )
    assert not made
    assert case.aliased >= 2 * (3 + 2) * math.prod(shape) * 2


def test_the_loop_over_drafts_is_one_while_of_k_trips_of_few_launches(case: Compiled) -> None:
    loops = [line for line in case.hlo.splitlines() if re.search(r" while\(", line)]
    trips = [n for line in loops for n in re.findall(r'"known_trip_count":{"n":"(\d+)"}', line)]
    assert trips == [str(K)] and len(loops) == 1
    launches = body_of(case.round).launches()
    assert launches.total() <= LAUNCHES_OF_A_DRAFT, dict(launches)


def test_a_round_is_three_cuda_graphs(case: Compiled) -> None:
    """What lies before, in and after the loop over drafts; the host launches nothing else."""
    kinds = [thunk.kind for thunk in case.round.inside]
    assert kinds == ["kCommandBuffer", "kWhile", "kCommandBuffer"]
    assert [thunk.kind for thunk in body_of(case.round).inside] == ["kCommandBuffer"]
    assert not {"kDynamicSliceFusion", "kAsyncStart"} & set(case.thunks.launches())


def test_launches_of_a_draft_layer() -> None:
    """Eight as a target layer has, and one that writes the context: its keys and values come from a
    product that all layers share, and are read where they lie."""
    more = compiled(3, batch=1).thunks.launches()
    more.subtract(compiled(2, batch=1).thunks.launches())
    assert more.total() == 9, dict(more)


def test_nothing_calls_the_host_and_no_weight_is_copied(case: Compiled) -> None:
    assert not re.findall(r" (?:sort|topk|infeed|outfeed|send|recv|async-start)\(.*", case.hlo)
    weights = r"bf16\[(?:151936,4096|4096,151936|256,151936|151936,256|4096,4096)\]"
    assert not re.findall(rf"= \(?{weights}\S* (?:copy|fusion|transpose)\(.*", case.hlo)


def test_no_kernel_spills(case: Compiled) -> None:
    report = h200.stack_and_spills(case.ptxas)
    assert report and {(spills, loads) for _, spills, loads in report} == {(0, 0)}
