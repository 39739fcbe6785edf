"""scripts/bench.py and bench_kernels.py on a CPU with tiny dimensions: every part runs, the floor
counts bytes, the record holds all of it.

No time is asserted: these run on shared cores.
"""

from __future__ import annotations

import itertools
import json
import re
import types
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxspec import models
from jaxspec.commands import bench
from jaxspec.config import ConfigError, Ops
from jaxspec.decode import programs
from jaxspec.decode.verify import verify_rows
from jaxspec.drafts.families import layered
from jaxspec.drafts.mtp import LAYOUTS
from jaxspec.layers import op_choice
from jaxspec.parallel.layout import Placement
from jaxspec.tools.benchmark import timing, workload
from jaxspec.tools.benchmark.cases import MATRIX, PRESETS, TARGETS, Case, select, target_of
from jaxspec.tools.benchmark.dimensions import HYBRID, LARGE, MODELS, QUANTIZED
from jaxspec.tools.benchmark.floor import memory_needed, round_floor, seen_tokens
from scripts import bench_kernels
from tests.commands.conftest import runner
from tests.drafts.test_block_configs import read
from tests.support.devices import run_on_devices
from tests.support.slow import slow
from tests.support.tiny import sampling_state

TINY = Case("tiny", batch=3, context=70)
BF16 = {"dtype": jnp.bfloat16, "cache_dtype": jnp.bfloat16}
EFFORT = workload.Effort(rounds=8, repeats=1)
run_bench = runner(bench.main)
run_kernels = runner(bench_kernels.main)


@pytest.fixture(scope="module")
def weights() -> workload.Weights:
    return workload.Weights(jnp.float32)


# --- scripts/bench.py
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "temperature", "rule"),
    [
        ("eagle3", 1, "probabilistic"),
        ("dspark", 1, "block"),
        ("draft_model", 0, "strict"),
        slow("eagle", 0, "strict"),
        slow("draft_model", 1, "probabilistic"),
    ],
)
def test_every_part_of_a_case_is_timed_and_recorded(tmp_path, method, temperature, rule):
    path, profile = tmp_path / "bench.json", tmp_path / "trace"
    extra = ["--profile", profile] if method == "eagle3" else []
    # Seven of eight rows: one request may have a draft fewer.
    extra += ["--max-num-verify-tokens", 7] if method == "draft_model" else []
    parts = workload.OF_A_ROUND
    if method == "eagle":
        parts = workload.PARTS
        extra += ["--parts", ",".join(parts)]
    arguments = [
        "--model",
        "tiny",
        "--method",
        method,
        "--batch",
        2,
        "--temperature",
        temperature,
        "--rule",
        rule,
        "--context",
        70,
    ]
    rounds = 1 if method == "eagle3" else 2
    result = run_bench(
        *arguments,
        "--rounds",
        8 * rounds,
        "--rounds-per-step",
        rounds,
        "--repeats",
        1,
        "--output-json",
        path,
        *extra,
    )
    assert result.exit_code == 0, result.output
    record = json.loads(path.read_text())
    assert {
        "driver",
        "flags",
        "versions",
        "devices",
        "bytes_per_second",
        "flops_per_second",
        "memory_limit",
    } <= set(record)
    (case,) = record["cases"]
    absent = "rebuild" if method == "dspark" else "context"
    assert list(case["parts"]) == [part for part in parts if part != absent]
    assert all(part["seconds"] > 0 and len(part["samples"]) == 1 for part in case["parts"].values())
    assert (
        case["parts"]["engine"]["rounds_per_step"]
        == rounds
        == record["settings"]["rounds_per_step"]
    )
    assert 1 < case["parts"]["engine"]["acceptance_length"] <= 4
    if absent != "rebuild":
        assert case["parts"]["rebuild"]["share_of_round"] > 0
    assert (
        case["floor_over_round"] > 0
        and case["tokens_per_second"] > 0
        and case["floor"]["bytes"] > case["plain_floor"]["bytes"]
    )
    assert case["implementations"]["attention"] and case["name"] in result.stdout
    assert method != "eagle3" or list(profile.rglob("*.xplane.pb"))


@pytest.mark.parametrize("compilation", ["round", "step"])
def test_the_round_is_timed_on_donated_state(weights, compilation):
    """The caches of the state that a run starts from are gone, and those of the state that comes
    back are not zeros."""
    load = workload.Workload(replace(TINY, compilation=compilation), weights, {}, EFFORT)
    before = jax.tree.leaves((load.state.target_caches, load.state.draft.caches))
    load.time_round()
    assert all(x.is_deleted() for x in before)
    assert all(
        np.count_nonzero(x) > 0.99 * x.size
        for x in map(np.asarray, jax.tree.leaves(load.state.target_caches))
    )
    load.time_plain()
    load.time_round()  # the plain step hands back what it took


def test_the_engines_time_is_a_rounds_however_many_a_step_has(weights, monkeypatch):
    """By a clock that ticks when it is asked, as often in every step."""
    seconds = {}
    for rounds in (1, 2):
        load = workload.Workload(
            TINY, weights, {}, workload.Effort(rounds=32, repeats=1, rounds_per_step=rounds)
        )
        with monkeypatch.context() as patch:
            patch.setattr(workload.time, "perf_counter", itertools.count().__next__)
            seconds[rounds] = load.time_engine()["seconds"]
    assert seconds[1] == 2 * seconds[2] > 0


@pytest.mark.parametrize("batch", [slow(1), 3])
def test_first_tokens_are_of_prompts_that_are_computed_whole(weights, monkeypatch, batch):
    """In one call of prefill or several, by a clock that ticks when it is asked."""
    case = replace(TINY, batch=batch, context=900, temperature=1.0)
    load = workload.Workload(case, weights, {}, replace(EFFORT, rounds=16, repeats=2))
    rows = np.asarray(load.state.next_token), np.asarray(load.state.draft_limit)
    old = jax.tree.leaves(load.state.target_caches)
    chunks = []
    prefill = load.engine.runner.prefill

    def counted(features: Any, found: Any) -> Any:
        chunks.extend((chunk.request, len(chunk.token_ids)) for chunk in found)
        return prefill(features, found)

    monkeypatch.setattr(load.engine.runner, "prefill", counted)
    found = load.time_first_token()
    assert found["prompt_tokens"] == 900 and len(found["samples"]) == 2 and found["seconds"] > 0
    prompts = {tuple(request.prompt_token_ids) for request, _ in chunks}
    assert len(prompts) == 3 * batch and {len(prompt) for prompt in prompts} == {900}
    assert sum(count for _, count in chunks) == 3 * batch * 900
    assert load.llm.scheduling.num_prefix_hits == 0 and load.llm.metrics.num_drafts == 0
    assert all(request.num_generated == 1 for request, _ in chunks)
    # The parts after it find the rows that they start from, and one copy of the caches.
    assert all(x.is_deleted() for x in old) and load.engine.runner.resident._state is None
    assert not load.engine.has_requests
    now = np.asarray(load.state.next_token), np.asarray(load.state.draft_limit)
    np.testing.assert_array_equal(rows, now)
    assert load.time_round()["acceptance_length"] > 1 and load.time_engine()["seconds"] > 0


def test_a_first_token_is_refused_if_its_prompt_was_seen(weights):
    load = workload.Workload(replace(TINY, batch=1), weights, {}, replace(EFFORT, rounds=16))
    load.engine.set_state(replace(load.state, active=jnp.zeros(1, bool)), [], [])
    load._first_tokens(np.random.default_rng(0))
    with pytest.raises(AssertionError, match="expected prompts that are new"):
        load._first_tokens(np.random.default_rng(0))


def test_first_tokens_have_a_column_if_they_are_timed():
    case = {"name": "a case", "floor": {"seconds": 0.001}}
    for parts, columns in (({"round": 0.003}, 11), ({"round": 0.003, "first_token": 0.25}, 12)):
        timed = {name: {"seconds": seconds} for name, seconds in parts.items()}
        table = bench.table([{"name": "too large", "skipped": "why"}, case | {"parts": timed}])
        assert len(table.columns) == columns
        headings = {str(column.header): list(column.cells)[1] for column in table.columns}
        assert headings.get("first_token") == ("250.000" if columns == 12 else None)


def test_rounds_and_plain_steps_are_programs_of_as_many_as_the_engines_step_has(
    weights, monkeypatch
):
    """By a clock that ticks when it is asked: the same number of rounds takes as long."""
    dispatched = []
    run_rounds = workload.run_rounds

    def counted(cfg, num_rounds, *args):
        dispatched.append(num_rounds)
        return run_rounds(cfg, num_rounds, *args)

    monkeypatch.setattr(workload, "run_rounds", counted)
    for part in ("round", "plain"):
        found = {}
        for rounds in (1, 2):
            load = workload.Workload(
                TINY, weights, {}, workload.Effort(rounds=8, repeats=1, rounds_per_step=rounds)
            )
            dispatched.clear()
            with monkeypatch.context() as patch:
                patch.setattr(timing.time, "perf_counter", itertools.count().__next__)
                found[rounds] = getattr(load, f"time_{part}")()
            # Five programs at most come before those that are timed.
            assert dispatched == [rounds] * (8 // rounds + min(5, 8 // rounds))
            assert found[rounds]["rounds_per_step"] == rounds
        assert found[1]["seconds"] == found[2]["seconds"] > 0
        assert found[1].get("acceptance_length") == found[2].get("acceptance_length")


def test_the_arrays_of_a_round_lie_where_a_program_of_several_devices_reads_them():
    """It would copy those of one device in each call."""
    printed = run_on_devices(2, "tests.commands.bench_on_devices")
    assert printed == "looked at 6 arrays on 2 devices\n"


def test_weights_are_shared_between_the_cases_of_a_model(weights):
    target, draft = weights.get(TINY)
    again, other = weights.get(replace(TINY, method="eagle", batch=1))
    assert (
        target is again
        and other["lm_head"] is target["lm_head"]
        and draft["lm_head"] is not target["lm_head"]
    )
    assert all(np.asarray(x).any() for x in jax.tree.leaves((target, draft)))
    head = np.asarray(target["lm_head"].values)
    assert head.std() == pytest.approx(head.shape[0] ** -0.5, rel=0.1)


def test_caches_have_a_dtype_of_their_own(weights):
    """It is counted, named and in the engine; float32 weights keep their dtype."""
    narrow = replace(TINY, kv_cache_dtype="bfloat16")
    loads = [workload.Workload(case, weights, {}, EFFORT) for case in (TINY, narrow)]
    bytes_of = [sum(x.nbytes for x in jax.tree.leaves(load.state.target_caches)) for load in loads]
    assert bytes_of[0] == 2 * bytes_of[1]
    kv = [load.floor(bandwidth=1.0, matmul_rate=1.0, plain=False)["kv"] for load in loads]
    assert kv[0] == 2 * kv[1]
    assert "KV bfloat16" in narrow.name and "KV" not in TINY.name
    of_draft = replace(narrow, draft_kv_cache_dtype="float32")
    load = workload.Workload(of_draft, weights, {}, EFFORT)
    dtypes = {x.dtype for x in jax.tree.leaves(load.state.target_caches)}
    draft: Any = load.state.draft
    assert (dtypes, {x.dtype for x in jax.tree.leaves(draft.caches)}) == (
        {jnp.dtype("bfloat16")},
        {jnp.dtype("float32")},
    )
    assert kv[1] < load.floor(bandwidth=1.0, matmul_rate=1.0, plain=False)["kv"] < kv[0]
    assert of_draft.name.endswith("KV bfloat16 draft KV float32")
    large = Case(batch=64, context=32768)
    reasons = [
        workload.does_not_fit(replace(large, kv_cache_dtype=dtype), jnp.bfloat16, {}, EFFORT, 1)
        for dtype in ("auto", "float32")
    ]
    narrow_gb, wide_gb = (
        float(re.findall(r"needs (\S+) GB", reason or "")[0]) for reason in reasons
    )
    assert narrow_gb > 200 and wide_gb > 1.8 * narrow_gb
    with pytest.raises(ConfigError, match="--kv-cache-dtype: expected among auto, .*, got 'int8'"):
        Case("tiny", kv_cache_dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--draft-kv-cache-dtype: expected among None, auto, .*"):
        Case("tiny", draft_kv_cache_dtype="int8")  # type: ignore[arg-type]


def test_a_drafts_weights_have_a_form_of_their_own(weights):
    """They are made, run, counted and named in it; the target's are as before."""
    narrow = replace(TINY, draft_quantize="fp8")
    loads = [workload.Workload(case, weights, {}, EFFORT) for case in (TINY, narrow)]
    (target, plain), (again, quantised) = (weights.get(case) for case in (TINY, narrow))
    assert target is again and quantised["lm_head"].values.dtype == plain["lm_head"].values.dtype
    codes = [x for x in jax.tree.leaves(quantised) if x.dtype == jnp.float8_e4m3fn]
    assert len(codes) > 3 and all(np.asarray(x, np.float32).any() for x in codes)
    assert not any(x.dtype == jnp.float8_e4m3fn for x in jax.tree.leaves((target, plain)))
    read = [
        load.floor(bandwidth=1.0, matmul_rate=1.0, plain=False)["draft_weights"] for load in loads
    ]
    steps = TINY.num_speculative_tokens
    assert read[0] - read[1] > 0.7 * steps * sum(x.size for x in codes)
    assert loads[1].time_round()["seconds"] > 0
    assert narrow.name == TINY.name + " draft fp8"
    with pytest.raises(ConfigError, match="--draft-quantize: expected among None, fp8, .*'int8'"):
        Case("tiny", draft_quantize="int8")
    mtp = next(name for name, each in MODELS.items() if each.target.model_type in LAYOUTS)
    with pytest.raises(ConfigError, match="--draft-quantize: expected None for mtp, .*'fp8'"):
        Case(mtp, method="mtp", num_speculative_tokens=1, draft_quantize="fp8")


def test_what_does_not_fit_is_skipped_with_the_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "environment", lambda: bench_environment(memory_limit=2 << 30))
    monkeypatch.setattr(
        bench, "measure_rates", lambda: {"bytes_per_second": 1e12, "flops_per_second": 1e15}
    )
    result = run_bench(
        "--batch",
        64,
        "--context",
        32768,
        "--temperature",
        0,
        "--output-json",
        tmp_path / "bench.json",
    )
    assert result.exit_code == 0, result.output
    (case,) = json.loads((tmp_path / "bench.json").read_text())["cases"]
    assert re.fullmatch(
        r"needs \d{3}\.\d GB of device memory, 2\.1 GB are there", case["skipped"]
    ), case


def bench_environment(memory_limit: int | None) -> dict[str, Any]:
    versions = {"jax": "0", "python": "3", "git_commit": "0"}
    return {
        "versions": versions,
        "devices": [{"kind": "none", "platform": "none"}],
        "driver": None,
        "flags": {},
        "memory_limit": memory_limit,
    }


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "gpt-5"], "--model: expected among llama-3-8b"),
        (["--batch", "one"], "--batch: expected integers with commas between them, got 'one'"),
        (["--preset", "all"], "--preset: expected one of targets, axes, full, hybrid, got 'all'"),
        (
            ["--preset", "targets", "--batch", "4"],
            "--preset targets: expected settings that some of its cases have",
        ),
        (["--temperature", "0,-1"], "--temperature: expected a number of at least 0, got -1"),
        (["--temperature", "nan"], "--temperature: expected a number of at least 0, got nan"),
        (
            ["--acceptance-length", "5"],
            "synthetic_acceptance_length: expected a number in [1, 4], got 5",
        ),
        (
            ["--implementation", "matmuls=x"],
            "--implementation: expected auto, a name, or op=name with op among",
        ),
        (["--parts", "round,all"], "--parts: expected among plain, draft"),
        (["--rounds", "2"], "--rounds, --repeats: expected at least 8 and 1"),
        (["--pause", "-1"], "--pause: expected 0 to 60 seconds, got -1.0"),
        (["--rounds-per-step", "0"], "rounds_per_step: expected None or an integer of at least 1"),
        (["--max-num-batched-tokens", "0"], "max_num_batched_tokens: expected an integer of at le"),
        (["--dtype", "int8"], "--dtype: expected one of auto"),
        (
            ["--model", "tiny", "--method", "medusa"],
            "--method: expected among eagle3, eagle, mtp, dflash, dspark, draft_model, got",
        ),
        (
            ["--model", "tiny", "--draft-layers", "2"],
            "--draft-layers: expected a method among dflash, dspark, got",
        ),
        (
            ["--model", "tiny", "--method", "dspark", "--draft-layers", "0"],
            "--draft-layers: expected at least 1, got 0",
        ),
        (
            ["--model", "tiny", "--method", "mtp", "--draft-vocab-size", "64"],
            "--draft-vocab-size: expected a method among eagle3, dflash, dspark, got mtp",
        ),
        (
            ["--model", "tiny", "--method", "dflash", "--draft-vocab-size", "97"],
            "--draft-vocab-size: expected 1 to 96, the size of the target's vocabulary, got 97",
        ),
        (
            ["--model", "tiny", "--sample-from-anchor", "true"],
            "--sample-from-anchor: expected a method among dflash, dspark, got eagle3",
        ),
        (
            ["--model", "tiny", "--method", "dspark", "--num-speculative-tokens", "17"],
            "--num-speculative-tokens: expected at most 16, the drafts of the longest block, got",
        ),
        (
            ["--model", "tiny", "--method", "dflash", "--num-speculative-tokens", "16"],
            "--num-speculative-tokens: expected at most 15, the drafts of the longest block, got",
        ),
        (
            ["--model", "smollm2-135m", "--method", "draft_model"],
            "--method draft_model: expected a model with a smaller one, among llama-3-8b, ",
        ),
        (
            ["--batch", "8", "--max-num-verify-tokens", "7"],
            "--max-num-verify-tokens: expected at least 8, a request's K + 1 rows and a row of ",
        ),
        (
            ["--max-num-verify-tokens", "3"],
            "--max-num-verify-tokens: expected at least 4, a request's K + 1 rows and a row of ",
        ),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence):
    result = run_bench(*arguments)
    assert result.exit_code == 2 and result.stderr.startswith(f"error: {sentence}"), result.output


# --- cases
# --------------------------------------------------------------------------------------------------


def test_the_targets_preset_holds_every_case_that_has_a_target():
    cases = select("targets", {})
    assert {(c.model, c.batch, c.temperature) for c in cases} == {
        (*key, t) for key in TARGETS for t in (0.0, 1.0)
    }
    assert all(target_of(case) for case in cases)
    assert (
        target_of(replace(cases[0], context=4096)) is None
        and target_of(replace(cases[0], num_speculative_tokens=5)) is None
    )


@pytest.mark.parametrize("preset", ["axes", "full"])
def test_the_presets_reach_every_value_of_the_matrix(preset):
    cases = select(preset, {})
    for name, values in MATRIX.items():
        assert {getattr(case, name) for case in cases} >= set(values), name
    assert {c.batch for c in cases if c.acceptance_length == 1} == {1, 2}
    assert {c.model for c in cases} == set(MODELS) - {
        "tiny",
        "llama-3.2-1b",
        *HYBRID,
        *LARGE,
        *QUANTIZED,
    }
    assert len({case.name for case in cases}) == len(cases) and len(cases) < 700
    models_in_order = [case.model for case in cases]
    assert (
        sorted(models_in_order, key=list(MODELS).index) == models_in_order
    )  # weights are made once a model


def test_flags_pick_from_a_preset_and_greedy_rules_are_one():
    assert {c.batch for c in select("full", {"batch": [1, 4]})} == {1, 4}
    assert (
        len(
            select(
                None, {"model": ["tiny"], "temperature": [0.0], "rule": ["strict", "probabilistic"]}
            )
        )
        == 1
    )
    assert set(PRESETS) == {"targets", "axes", "full", "hybrid"}


@pytest.mark.parametrize("wanted", [None, False, True])
def test_programs_sum_prompts_in_the_order_that_the_engine_chose(
    wanted: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = Ops(**dict.fromkeys(Ops().names(), "mosaic_gpu"))
    monkeypatch.setattr(op_choice, "choose", lambda *args, **named: every)
    effort = workload.Effort(prefill_in_order=wanted)
    for cfg in workload.configure(TINY, "float32", {"rms_norm": "reference"}, effort)[:2]:
        assert cfg.ops == replace(every, rms_norm="reference", prefill_in_order=wanted is not False)


# --- the floor
# --------------------------------------------------------------------------------------------------


# Forms of quantised weights, and the bits of a number with its share of the scales.
forms = pytest.mark.parametrize(
    ("form", "bits"), [("fp8", 8), ("fp8-block", 8 + 32 / 128**2), ("int4", 4 + 16 / 128)]
)


def configured(case: Case, **changes: Any) -> tuple[Any, Any]:
    cfg, plain, _ = workload.configure(case, "bfloat16", {}, workload.Effort())
    return replace(cfg, **changes), plain


def test_the_floor_of_an_8b_round_is_what_it_must_read():
    """15.01 GB of target weights, 2.35 GB of three draft steps."""
    cfg, plain = configured(Case("llama-3-8b"))
    floor = round_floor(cfg, 1, 400, **BF16)
    assert floor.target_weights == pytest.approx(
        15.01e9, rel=1e-3
    ) and floor.draft_weights == pytest.approx(2.347e9, rel=1e-3)
    assert floor.kv == 400 * 2 * 8 * 128 * 2 * (32 + 3)
    assert floor.logits == 2 * 4 * 4 * 128256 + 2 * 4 * 3 * 32000
    step = round_floor(plain, 1, 400, **BF16)
    assert step.draft_weights == 0 and step.target_weights == pytest.approx(
        floor.target_weights, rel=1e-4
    )
    assert (
        step.bytes
        < floor.bytes
        == floor.target_weights + floor.draft_weights + floor.kv + floor.logits
    )


@forms
def test_quantised_weights_are_read_as_they_are_stored(form: str, bits: float) -> None:
    """The head stays in bfloat16, and so does the draft; the arithmetic is the same."""
    plain, stored = (configured(Case(name))[0] for name in ("llama-3-8b", f"llama-3-8b-{form}"))
    one, other = (round_floor(cfg, 1, 400, **BF16) for cfg in (plain, stored))
    layers = 32 * (4096 * (6144 + 4096) + 3 * 4096 * 14336)
    saved = layers * (16 - bits) / 8
    assert one.target_weights - other.target_weights == pytest.approx(saved, rel=2e-3)
    assert (one.draft_weights, one.kv, one.logits, one.flops) == (
        other.draft_weights,
        other.kv,
        other.logits,
        other.flops,
    )
    needed = [
        memory_needed(cfg, 1, 400, dtype="bfloat16", cache_dtype="bfloat16")
        for cfg in (plain, stored)
    ]
    assert needed[0] - needed[1] == pytest.approx(saved, rel=2e-3)


@forms
def test_a_quantised_drafts_layer_is_read_each_step_and_its_fc_once(form: str, bits: float) -> None:
    plain, stored = (
        configured(Case("llama-3-8b", draft_quantize=each))[0] for each in (None, form)
    )
    one, other = (round_floor(cfg, 1, 400, **BF16) for cfg in (plain, stored))
    layer, fc = 8192 * 6144 + 4096 * 4096 + 3 * 4096 * 14336, 12288 * 4096
    saved = (3 * layer + fc) * (16 - bits) / 8
    assert one.draft_weights - other.draft_weights == pytest.approx(saved, rel=2e-3)
    assert (one.target_weights, one.flops) == (other.target_weights, other.flops)


@forms
def test_quantised_experts_are_read_as_they_are_stored(form: str, bits: float) -> None:
    """Of the experts, a round reads those that are hit; memory holds all."""
    plain, stored = (
        configured(Case(name))[0] for name in ("qwen3-30b-a3b", f"qwen3-30b-a3b-{form}")
    )
    one, other = (round_floor(cfg, 1, 400, **BF16) for cfg in (plain, stored))
    experts = 48 * 128 * 3 * 2048 * 768
    attention = 48 * (2048 * (32 + 2 * 4) * 128 + 32 * 128 * 2048)
    hit = 1 - (1 - 8 / 128) ** 4
    saved = one.target_weights - other.target_weights
    assert saved == pytest.approx((attention + hit * experts) * (16 - bits) / 8, rel=4e-3)
    assert (one.draft_weights, one.flops) == (other.draft_weights, other.flops)
    needed = [
        memory_needed(cfg, 1, 400, dtype="bfloat16", cache_dtype="bfloat16")
        for cfg in (plain, stored)
    ]
    assert needed[0] - needed[1] == pytest.approx((attention + experts) * (16 - bits) / 8, rel=4e-3)


def test_each_layer_of_a_draft_sees_as_far_as_its_own_window():
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    draft = read(num_hidden_layers=3, layer_types=kinds, sliding_window=8)
    groups = draft.cache_groups(64, 4096)
    assert seen_tokens(groups, draft.group_of_layer, 400) == [8, 400, 8]
    assert seen_tokens(groups, draft.group_of_layer, 5) == [5, 5, 5]


def test_the_arithmetic_floor_counts_two_operations_a_weight_and_row():
    cfg, _ = configured(Case("llama-3-8b", batch=64))
    floor = round_floor(cfg, 64, 400, **BF16)
    target = 2 * (15.01e9 / 2) * 256 + 4 * 256 * 400 * 32 * 4096
    fc, qkv, o, mlp, head = 12288 * 4096, 8192 * 6144, 4096 * 4096, 3 * 4096 * 14336, 4096 * 32000
    draft = 2 * (
        256 * (fc + qkv) + 64 * (o + mlp) + 2 * 64 * (qkv + o + mlp) + 3 * 64 * head
    )  # step 0, the other two, all three
    draft += 4 * (256 + 2 * 64) * 400 * 4096
    assert floor.flops == pytest.approx(target + draft, rel=1e-4)
    times = floor.to_dict(4.5e12, 750e12)
    assert (
        times["seconds"]
        == max(times["bytes_seconds"], times["arithmetic_seconds"])
        == times["arithmetic_seconds"]
    )


def test_each_of_two_devices_reads_half_of_what_is_cut():
    cfg, _ = configured(Case())
    placed = replace(cfg, placement=Placement(AbstractMesh((2,), ("model",))))
    one, two = (round_floor(each, 16, 400, **BF16) for each in (cfg, placed))
    whole = 2 * (65 + 64) * 4096  # norms, and the rows of the embedding
    assert two.target_weights == (one.target_weights - whole) // 2 + whole
    assert (two.kv, two.logits) == (one.kv // 2, one.logits // 2)
    assert 0.5 < two.flops / one.flops < 0.51  # fc is whole
    assert 0.5 < two.draft_weights / one.draft_weights < 0.6


@pytest.mark.parametrize("rule", ["probabilistic", "strict"])
def test_noise_need_not_move(rule):
    greedy, sampled = (
        configured(Case("smollm2-135m", temperature=t, rule=rule))[0] for t in (0.0, 1.0)
    )
    assert round_floor(sampled, 2, 400, **BF16) == round_floor(greedy, 2, 400, **BF16)


def test_a_tied_head_is_read_and_eagle_reads_the_targets_head_every_step():
    smol, _ = configured(Case("smollm2-135m"))
    specs = jax.tree.leaves(models.family(smol.target).param_specs(smol.target))
    numbers = sum(np.prod(spec.shape) for spec in specs)
    assert round_floor(smol, 1, 400, **BF16).target_weights == 2 * (numbers + 4 * 576)
    eagle, _ = configured(Case("llama-3-8b", method="eagle"))
    head = 3 * 4096 * 128256 * 2
    assert head < round_floor(eagle, 1, 400, **BF16).draft_weights < head + 3 * 600e6


def test_the_dtype_of_the_caches_moves_their_bytes_alone() -> None:
    cfg, _, _ = workload.configure(TINY, jnp.bfloat16, {}, EFFORT)
    wide = {"dtype": jnp.bfloat16, "cache_dtype": jnp.float32}
    both, narrow = (round_floor(cfg, 2, 64, **dtypes) for dtypes in (wide, BF16))
    assert both == replace(narrow, kv=2 * narrow.kv) != narrow
    assert memory_needed(cfg, 2, 64, **wide) > memory_needed(cfg, 2, 64, **BF16)


def test_memory_is_weights_caches_and_logits():
    cfg, _ = configured(Case("llama-3-8b"), ops=Ops(attention="mosaic_gpu"))
    base, longer = (memory_needed(cfg, 64, slots, **BF16) for slots in (512, 33280))
    assert 16e9 < base < 25e9 and longer - base == 64 * (33280 - 512) * 2 * 8 * 128 * 2 * 33


def test_the_floor_counts_the_experts_that_are_hit_and_the_tokens_that_a_window_shows():
    """gpt-oss-20b: 2.4 GB that every pass reads, 32 experts of 49.8 MB in each of 24 layers."""
    cfg, plain = configured(Case("gpt-oss-20b"))
    one, four = round_floor(plain, 1, 4000, **BF16), round_floor(cfg, 1, 4000, **BF16)
    experts = 24 * 32 * (2880 * 2 * 2880 + 2880 * 2880 + 3 * 2880) * 2
    fixed = one.target_weights - experts * 4 / 32
    assert fixed == pytest.approx(
        2 * (201088 * 2880 + 24 * 26.6e6), rel=0.01
    )  # the head, and attention
    assert four.target_weights - fixed == pytest.approx(experts * (1 - (1 - 4 / 32) ** 4), rel=1e-2)
    assert one.kv == 12 * (4000 + 128) * 2 * 8 * 64 * 2


def test_the_floor_of_many_small_experts_is_mostly_of_those_that_are_hit():
    """Qwen3-30B-A3B: 128 experts of 9.4 MB in each of 48 layers, 8 for each row."""
    cfg, _ = configured(Case("qwen3-30b-a3b"))
    weights = round_floor(cfg, 1, 400, **BF16).target_weights
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    attention = 2 * 48 * (2048 * (32 + 2 * 4) * 128 + 32 * 128 * 2048)
    fixed = 2 * 151936 * 2048 + attention + 2 * 48 * 2048 * 128
    assert weights == pytest.approx(fixed + experts * (1 - (1 - 8 / 128) ** 4), rel=1e-3)


def test_the_floor_of_an_mtp_module_is_that_of_a_layer_of_the_target():
    cfg, _ = configured(Case("glm-4.7-flash", method="mtp"))
    floor = round_floor(cfg, 1, 400, **BF16)
    head, attention, expert = 2048 * 154880, 21e6, 3 * 2048 * 1536
    hit = 64 * 3 * 4 / 64  # of the row that each step is read of
    assert floor.draft_weights == pytest.approx(
        2 * (3 * (head + attention + 2 * 2048 * 2048 + expert) + hit * expert), rel=0.05
    )
    assert floor.kv == 400 * 576 * 2 * (47 + 3)
    with pytest.raises(ConfigError, match="--method eagle3: expected mtp with latent attention"):
        Case("glm-4.7-flash")
    with pytest.raises(ConfigError, match="--method mtp: expected a model of"):
        Case("llama-3-8b", method="mtp")


DSPARK = Case("qwen3-8b", method="dspark", num_speculative_tokens=7)
LAYER = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 12288  # a layer's matrices
FC, CONTEXT_KV, W2 = 5 * 4096 * 4096, 5 * 4096 * 2048, 256 * 151936


def test_the_floor_of_a_block_reads_its_layers_once_and_w2_for_each_draft():
    cfg, plain = configured(DSPARK)
    floor, step = (round_floor(each, 16, 400, **BF16) for each in (cfg, plain))
    looked_up = 16 * 7 * (4096 + 256)
    once = FC + CONTEXT_KV + 5 * LAYER + 4096 * 151936 + looked_up
    assert floor.draft_weights == pytest.approx(2 * (once + 7 * W2), rel=1e-4)
    assert floor.kv - step.kv == 16 * 400 * 2 * 8 * 128 * 2 * 5
    greedy, kept = 16 * 7 * 151936, 2 * 16 * 7 * 151936  # q: the head's logits, and the corrected
    assert floor.logits == 2 * 4 * (16 * 8 * 151936 + greedy)
    sampled, _ = configured(replace(DSPARK, temperature=1.0))
    assert round_floor(sampled, 16, 400, **BF16).logits == 2 * 4 * (16 * 8 * 151936 + kept)
    matrices = (FC + CONTEXT_KV) * 8 + 5 * LAYER * 7 + 7 * (4096 * 151936 + W2)
    attention = 4 * 7 * 400 * 4096 * 5
    target = round_floor(replace(cfg, draft=None), 16, 400, **BF16).flops
    assert floor.flops - target == pytest.approx(16 * (2 * matrices + attention), rel=1e-3)


def test_the_floor_of_a_block_follows_its_head():
    """Two layers, a small vocabulary, and the anchor's row, which drafts nothing."""
    shaped = replace(DSPARK, method="dflash", draft_layers=2, draft_vocab_size=32000)
    found = {
        case: round_floor(configured(case)[0], 16, 400, **BF16)
        for case in (shaped, replace(shaped, sample_from_anchor=True))
    }
    after, at = found.values()
    once = FC + CONTEXT_KV * 2 / 5 + 2 * LAYER + 4096 * 32000
    assert after.draft_weights == pytest.approx(2 * (once + 16 * 8 * 4096), rel=1e-4)
    assert after.draft_weights - at.draft_weights == 2 * 16 * 4096
    assert after.logits == at.logits == 2 * 4 * 16 * (8 * 151936 + 7 * 32000)
    assert after.flops - at.flops == pytest.approx(
        16 * 2 * (2 * LAYER + 2 * 400 * 4096 * 2), rel=1e-3
    )
    assert len({case.name for case in found}) == 2 and shaped.name.endswith(
        "K7 T0 greedy layers 2 vocabulary 32000"
    )


def test_the_floor_of_a_draft_model_reads_its_own_layers_and_head_for_each_draft():
    """Qwen3-0.6B: 28 layers of 15.7 million weights, and a tied embedding of 156 million."""
    cfg, plain = configured(Case("qwen3-8b", method="draft_model", batch=16))
    floor, step = (round_floor(each, 16, 400, **BF16) for each in (cfg, plain))
    attention, mlp = 1024 * 4096 + 2048 * 1024, 3 * 1024 * 3072
    head, rows = 1024 * 151936, 16 * (2 + 1 + 1)  # step 0 may read the draft before next_token
    assert floor.draft_weights == pytest.approx(
        2 * (3 * (28 * (attention + mlp) + head) + rows * 1024), rel=1e-3
    )
    assert floor.kv - step.kv == 3 * 16 * 400 * 2 * 8 * 128 * 2 * 28
    assert floor.logits - 4 * step.logits == 2 * 4 * 16 * 3 * 151936
    target = round_floor(replace(cfg, draft=None), 16, 400, **BF16).flops
    last_row = 16 * (1024 * 2048 + mlp)  # of step 0, which goes on after the last attention
    products = rows * 28 * (attention + mlp) - last_row + 3 * 16 * head
    assert floor.flops - target == pytest.approx(
        2 * products + 4 * rows * 400 * 2048 * 28, rel=1e-3
    )


def test_uneven_drafts_fill_the_rows_of_a_verify_pass():
    padded = Case("qwen3-8b", method="dspark", batch=64, num_speculative_tokens=7)
    flat = replace(padded, max_num_verify_tokens=256, acceptance_length=4.7)
    assert flat.drafts.sum() + 64 == 256 and len(set(flat.drafts)) > 4
    assert flat.drafts.min() >= 0 and flat.drafts.max() <= 7
    cut = [min(3.7, most) for most in flat.drafts.tolist()]
    assert flat.tokens_a_round == pytest.approx(1 + sum(cut) / 64)
    wide = replace(flat, max_num_verify_tokens=600)
    assert set(padded.drafts) == set(wide.drafts) == {7}
    assert wide.tokens_a_round == pytest.approx(4.7) and flat.name.endswith("rows 256 length 4.7")
    cfg, other = configured(flat)[0], configured(wide)[0]
    assert cfg.limits_drafts and not other.limits_drafts
    few, many = (round_floor(each, 64, 400, **BF16) for each in (cfg, other))
    assert many.logits - few.logits == 2 * 4 * 256 * 151936 and many.kv == few.kv
    assert many.target_weights - few.target_weights == 2 * 256 * 4096
    assert (few.draft_weights, few.kv) == (many.draft_weights, many.kv)


def test_a_round_of_few_rows_has_them_filled_and_no_request_waits(weights):
    case = replace(TINY, method="draft_model", batch=4, max_num_verify_tokens=10)
    load = workload.Workload(replace(case, acceptance_length=4.0), weights, {}, EFFORT)
    verification, state = programs.run_round(
        load.cfg, load.params, load.state, load.block_tables, "round"
    )
    assert load.cfg.flat_rows(4) == 10 and verification.num_sampled.sum() == 10
    assert verification.num_sampled.tolist() == (case.drafts + 1).tolist()
    assert state.waited is not None and state.waited.tolist() == [0] * 4
    load.state = state
    load.time_engine()
    assert load.llm.metrics.num_drafts > 8 and load.llm.scheduling.num_waits == 0


def test_the_page_has_a_row_for_each_flag_of_a_case():
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    rows = set(re.findall(r"^\| `--([a-z-]+)`", page, re.MULTILINE))
    assert rows == {field.name.replace("_", "-") for field in fields(bench.CaseOptions)}


def test_a_case_without_a_requested_part_is_skipped(weights):
    arguments = (weights, {}, EFFORT, ["context"], {"memory_limit": None}, None)
    assert bench.run_case(TINY, *arguments) == {"skipped": "has none of the parts: context"}


def test_heads_of_one_method_have_weights_each(weights):
    cases = [replace(TINY, method="dspark"), replace(TINY, method="dspark", draft_layers=2)]
    (target, five), (again, two) = (weights.get(case) for case in cases)
    assert target is again and weights.get(cases[0])[1] is five
    assert [len(head["layers"]) for head in (five, two)] == [5, 2]
    assert five["lm_head"] is two["lm_head"] is target["lm_head"]


# --- forced acceptance
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["probabilistic", "strict", "block"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_acceptance_has_the_rates_and_keeps_the_rules_last_token(weights, rule, temperature):
    case = replace(TINY, batch=400, rule=rule, temperature=temperature)
    cfg, _, _ = workload.configure(case, "float32", {}, EFFORT)
    batch, keys = case.batch, jax.random.split(jax.random.key(5), 3)
    _, draft = weights.get(case)
    tokens = draft["draft_to_target"][
        jax.random.randint(keys[0], (batch, 3), 0, layered(cfg.draft).draft_vocab_size, jnp.int32)
    ]
    q = (
        jax.random.normal(keys[1], (batch, 3, layered(cfg.draft).draft_vocab_size))
        if cfg.keeps_draft_logits
        else None
    )
    proposal = workload.Proposal(tokens, q)
    logits = jax.random.normal(keys[2], (batch, 4, cfg.target.vocab_size))
    sampling = jax.tree.map(jnp.asarray, sampling_state(range(batch), temperature))
    active = jnp.arange(batch) != 7
    seq_lens = jnp.full(batch, 70, jnp.int32)

    def run(cfg: Any) -> tuple[np.ndarray, np.ndarray]:
        found = jax.jit(verify_rows, static_argnums=0)(
            cfg, logits, proposal, draft["target_to_draft"], sampling, seq_lens, active
        )
        return np.asarray(found.output_tokens), np.asarray(found.num_sampled)

    rates = (
        0.8,
        0.5,
        0.5,
    )  # each given that those before it were accepted: 1 + 0.8 + 0.4 + 0.2 tokens a round
    (real, real_counts), (forced, counts) = (
        run(replace(cfg, acceptance_rates=None)),
        run(replace(cfg, acceptance_rates=rates)),
    )
    assert counts[7] == 0 and (forced[7] == -1).all()
    live = np.arange(batch) != 7
    shares = [(counts[live] > accepted).mean() for accepted in range(5)]
    np.testing.assert_allclose(
        shares, [1, 0.8, 0.4, 0.2, 0], atol=0.08
    )  # three standard deviations of 399 draws
    for row in np.flatnonzero(live):
        n = counts[row]
        assert (
            forced[row, : n - 1].tolist() == np.asarray(tokens)[row, : n - 1].tolist()
            and (forced[row, n:] == -1).all()
        )
        assert forced[row, n - 1] == real[row, real_counts[row] - 1]


@pytest.mark.parametrize(("length", "expected"), [(1.0, 1), (4.0, 4)])
def test_a_whole_round_accepts_what_is_forced(weights, length, expected):
    load = workload.Workload(
        replace(TINY, temperature=1.0, acceptance_length=length), weights, {}, EFFORT
    )
    verification, _ = programs.run_round(
        load.cfg, load.params, load.state, load.block_tables, "round"
    )
    assert verification.num_sampled.tolist() == [expected] * TINY.batch


# --- timing
# --------------------------------------------------------------------------------------------------


def test_back_to_back_waits_once_a_repeat_and_rewinds_between():
    calls, rewound = [], []

    def step(x: jax.Array) -> jax.Array:
        calls.append(1)
        return x + 1

    def rewind(x: jax.Array) -> jax.Array:
        rewound.append(1)
        return jnp.zeros((), jnp.int32)

    found, last = timing.back_to_back(
        step, jnp.zeros((), jnp.int32), count=7, repeats=3, rewind=rewind
    )
    assert len(calls) == timing.DISCARDED + 3 * 7 and len(rewound) == 4 and int(last) == 7
    assert (
        len(found.samples) == 3
        and found.best <= found.median
        and 0 < found.host <= max(found.samples)
    )


def test_a_pause_is_before_each_repeat_and_in_no_sample(monkeypatch: pytest.MonkeyPatch):
    now, slept = [0.0], []

    def passes(seconds: float) -> None:
        now[0] += seconds

    def step(x: jax.Array) -> jax.Array:
        passes(1.0)
        return x

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(
        timing.time, "sleep", lambda seconds: (slept.append(seconds), passes(seconds))
    )
    found, _ = timing.back_to_back(step, jnp.zeros((), jnp.int32), count=2, repeats=3, pause=1.5)
    assert slept == [1.5] * 3 and found.samples == (1.0,) * 3


def test_a_chain_keeps_every_call_and_its_zero_stays_zero():
    """Four copies, four products in the compiled program, although they hold the same values."""
    x = jax.random.normal(jax.random.key(0), (64, 64))
    copies = [{"x": jnp.copy(x), "seq_lens": jnp.full(2, 3, jnp.int32)} for _ in range(4)]
    compiled = (
        jax.jit(timing.chain(lambda x, seq_lens: (x @ x, seq_lens)))
        .lower(copies, jnp.zeros((), jnp.int32))
        .compile()
    )
    assert compiled.as_text().count(" dot(") == 4, compiled.as_text()
    assert int(compiled(copies, jnp.zeros((), jnp.int32))) == 0


# --- scripts/bench_kernels.py
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FakeShape:
    rows: int


def fake_op(
    x: jax.Array, mask: jax.Array, *, scale: float, implementation: str = "reference"
) -> jax.Array:
    if implementation == "kernel" and x.shape[0] > 4:
        raise ValueError(f"x: expected at most 4 rows, got {x.shape[0]}")
    return jnp.where(mask[:, None], x * scale, 0.0)


def fake_inputs(shape: FakeShape, seed: int) -> dict[str, Any]:
    x = jax.random.normal(jax.random.key(seed), (shape.rows, 128))
    return {"x": x, "mask": jnp.ones(shape.rows, bool), "scale": 2.0}


@pytest.fixture
def fake(monkeypatch):
    shapes: Any = types.ModuleType("shapes")
    shapes.SHAPES = {"small, 4 rows": FakeShape(4), "large, 8 rows": FakeShape(8)}
    shapes.make_inputs, shapes.bytes_moved = fake_inputs, lambda shape: shape.rows * 128 * 4 * 2
    shapes.flops = lambda shape: 10**15 if shape.rows == 8 else 1
    monkeypatch.setattr(
        bench_kernels,
        "discover",
        lambda: [bench_kernels.Op("fake", fake_op, ("reference", "kernel"), shapes)],
    )


def test_an_op_is_timed_on_its_named_shapes_and_what_is_unsupported_is_skipped_with_the_reason(
    fake, tmp_path
):
    path = tmp_path / "kernels.json"
    result = run_kernels("--repeats", 1, "--output-json", path)
    assert result.exit_code == 0, result.output
    kernels = {
        (k["shape"], k["implementation"]): k for k in json.loads(path.read_text())["kernels"]
    }
    assert set(kernels) == {
        (s, i) for s in ("small, 4 rows", "large, 8 rows") for i in ("reference", "kernel")
    }
    assert kernels["large, 8 rows", "kernel"] == {
        "op": "fake",
        "shape": "large, 8 rows",
        "implementation": "kernel",
        "skipped": "x: expected at most 4 rows, got 8",
    }
    assert (
        kernels["small, 4 rows", "kernel"]["bytes"] == 4096
        and kernels["small, 4 rows", "kernel"]["seconds"] > 0
    )
    assert "flops" not in kernels["small, 4 rows", "kernel"]  # its bytes take longer
    large = kernels["large, 8 rows", "reference"]
    assert (
        large["flops"] == 10**15
        and f"{large['flops_per_second'] / 1e12:.0f} TFLOP/s" in result.stdout
    )


def test_ops_shapes_and_implementations_are_picked_by_name(fake):
    result = run_kernels(
        "--op", "fake", "--shape", "small, 4", "--implementation", "kernel", "--repeats", 1
    )
    assert (
        result.exit_code == 0
        and "fake small, 4 rows kernel:" in result.stdout
        and "large" not in result.stdout
    )
    for arguments, sentence in (
        (["--op", "nothing"], "error: --op: expected among fake, got nothing"),
        (
            ["--shape", "huge"],
            "error: --op, --shape, --implementation: expected some that go together",
        ),
    ):
        result = run_kernels(*arguments)
        assert result.exit_code == 2 and result.stderr.startswith(sentence), result.output


def test_every_op_runs_on_the_inputs_of_its_shapes():
    """Traced: each takes the inputs of its first shape, or says why it does not."""
    refused = {
        "fp8_matmul.measured_swiglu": "measured_swiglu: expected a kernel, swiglu and",
        "fp8_matmul.quantised_swiglu": "quantised_swiglu: expected swiglu and no residual",
    }
    for op in bench_kernels.discover():
        make, shape = op.shapes.make_inputs, next(iter(op.shapes.SHAPES.values()))

        def run(op: Any = op, make: Any = make, shape: Any = shape) -> Any:
            given = make(shape, 0)
            if isinstance(given, dict):
                return op.function(**given, implementation="reference")
            return op.function(given, implementation="reference")

        if op.name in refused:
            with pytest.raises(ValueError, match=f"^{refused[op.name]}"):
                jax.eval_shape(run)
        else:
            assert jax.tree.leaves(jax.eval_shape(run)), op.name


def test_every_kernel_package_with_shapes_is_found_by_its_public_op():
    for op in bench_kernels.discover():
        assert "reference" in op.implementations and op.shapes.SHAPES, op.name
        for shape in op.shapes.SHAPES.values():
            assert op.shapes.bytes_moved(shape) > 0


def test_ops_that_share_a_folder_have_names_of_their_own():
    ops = bench_kernels.discover()
    names = [op.name for op in ops]
    assert len(set(names)) == len(names)
    assert {"attention", "markov_head.markov_argmax", "markov_head.markov_draw"} <= set(names)

    def picked(text: str) -> list[str]:
        return [op.name for op in bench_kernels.pick_ops(ops, text)]

    assert picked("markov_head,attention") == [
        "attention",
        "markov_head.markov_argmax",
        "markov_head.markov_draw",
    ]
    assert picked("markov_head.markov_draw") == ["markov_head.markov_draw"]


def test_ops_that_share_a_folder_have_bytes_of_their_own():
    """Of a Markov head's two, one reads more, and writes the logits."""
    ops = {op.function.__name__: op for op in bench_kernels.discover()}
    shapes = ops["markov_draw"].shapes.SHAPES.values()
    for shape in shapes:
        largest, logits = (
            ops[name].bytes_moved(shape) for name in ("markov_argmax", "markov_draw")
        )
        assert logits - largest == shape.rows * (4 * shape.vocab + 12)


def test_an_implementation_names_every_op_or_one():
    assert workload.implementations("auto") == {}
    assert workload.implementations("rejection_sampling=fast,attention=auto") == {
        "rejection_sampling": "fast"
    }
    assert workload.implementations("fast,matmul=auto") == {
        op: "fast" for op in Ops().names() if op != "matmul"
    }
    for text in ("attention=", "attentions=fast"):
        with pytest.raises(ConfigError, match="op=name"):
            workload.implementations(text)
    cfg, plain, _ = workload.configure(TINY, "float32", {"attention": "fast"}, EFFORT)
    assert cfg.ops.attention == plain.ops.attention == "fast" and cfg.ops.matmul == "reference"


def test_cuda_graphs_are_the_engines_choice_unless_one_is_given():
    own, given = (
        workload.configure(TINY, "float32", {}, replace(EFFORT, cuda_graphs=graphs))[0]
        for graphs in (None, False)
    )
    assert own.cuda_graphs and given == replace(own, cuda_graphs=False)


def test_rounds_start_as_far_before_the_context_as_they_end_after_it():
    made = workload.Workload(
        replace(TINY, context=70),
        workload.Weights("float32"),
        {},
        replace(EFFORT, rounds=8, repeats=1),
    )
    grown = 2.56 * 8
    assert made.start == 70 - int(grown / 2)
    assert made.time_round()["acceptance_length"] == pytest.approx(2.56, abs=0.5)
    assert np.asarray(made.state.seq_lens).mean() == pytest.approx(made.start + grown, abs=4)
    assert (
        workload.Workload(
            replace(TINY, context=3), workload.Weights("float32"), {}, replace(EFFORT, rounds=8)
        ).start
        == 1
    )
