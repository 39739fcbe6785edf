"""Which implementation of each op an engine runs is chosen once, from the device, the dtype and the
models' shapes, and it says so."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from jaxspec import LLM, SamplingParams, SpeculativeConfig
from jaxspec.config import ConfigError, EngineConfig, Ops, RoundConfig
from jaxspec.config.ops import COPYING, HIDING
from jaxspec.config.quantization import Fp8Form, Int4Form, Quantization
from jaxspec.decode import programs
from jaxspec.decode import several_rounds as rounds
from jaxspec.decode.programs import Program
from jaxspec.engine import round_configs
from jaxspec.layers import op_choice
from jaxspec.layers.params import Weight
from jaxspec.parallel.layout import Placement
from jaxspec.tools.benchmark.dimensions import HYBRID, MODELS, draft_config
from pallas_kernels import hopper
from pallas_kernels.int4_matmul import Int4Weight
from tests.kernels.interpreter import needs_mosaic
from tests.support.tiny import tiny_model

OPS = tuple(Ops().names())
EVERY = Ops(**dict.fromkeys(OPS, "mosaic_gpu"))


def choose(
    requested: str,
    model: str = "llama-3-8b",
    dtype: Any = jnp.bfloat16,
    block_size: int = 64,
    method: str = "eagle3",
    cache_dtype: Any = None,
    draft_cache_dtype: Any = None,
) -> Ops:
    dimensions = MODELS[model]
    return op_choice.choose(
        requested,
        dimensions.target,
        draft_config(dimensions, method),
        block_size=block_size,
        dtype=dtype,
        cache_dtype=dtype if cache_dtype is None else cache_dtype,
        draft_cache_dtype=draft_cache_dtype,
    )


@pytest.fixture
def on_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as `choose` can tell."""
    monkeypatch.setattr(hopper, "missing", lambda: None)


def test_reference_is_asked_for_and_explained_by_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "jaxspec.layers.op_choice"):
        assert choose("reference") == Ops() == Ops(**dict.fromkeys(OPS, "reference"))
    assert not caplog.records


def test_auto_on_a_cpu_is_the_reference_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "jaxspec.layers.op_choice"):
        assert choose("auto") == Ops()
    assert sorted(r.getMessage() for r in caplog.records) == sorted(
        f"{op}: reference (the kernel expected an NVIDIA GPU, got cpu)" for op in OPS
    )


def test_kernels_that_cannot_run_are_an_error_with_the_reason() -> None:
    with pytest.raises(
        ConfigError, match="^kernels 'mosaic_gpu': attention: expected an NVIDIA GPU, got cpu$"
    ):
        choose("mosaic_gpu")
    with pytest.raises(
        ConfigError, match="^kernels: expected one of auto, reference, mosaic_gpu, got 'triton'$"
    ):
        choose("triton")


@needs_mosaic
@pytest.mark.usefixtures("on_a_hopper")
@pytest.mark.parametrize("requested", ["auto", "mosaic_gpu"])
@pytest.mark.parametrize("model", [name for name in MODELS if name not in ("tiny", *HYBRID)])
def test_every_real_model_runs_on_every_kernel(model: str, requested: str) -> None:
    assert choose(requested, model) == EVERY


@needs_mosaic
@pytest.mark.usefixtures("on_a_hopper")
def test_each_op_falls_back_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    """A block size that only attention minds, a width that products and heads mind, and a dtype
    that only float32 logits do not."""
    with caplog.at_level(logging.INFO, "jaxspec.layers.op_choice"):
        assert choose("auto", block_size=24) == replace(EVERY, attention="reference")
        assert choose("auto", "tiny").matmul == choose("auto", "tiny").rope_cache == "reference"
        assert choose("auto", "tiny").gumbel_sample == "reference"
        # There are no experts, and one device adds nothing.
        idle = ("moe", "all_reduce")
        left = dict.fromkeys(
            ("rejection_sampling", "gumbel_sample", "step_metadata", *idle), "mosaic_gpu"
        )
        assert choose("auto", dtype=jnp.float32) == replace(Ops(), **left)
    messages = "\n".join(r.getMessage() for r in caplog.records)
    assert (
        "attention: reference (the kernel block_size: expected" in messages
        and ", got 24)" in messages
    )
    assert (
        "matmul: reference (the kernel expected a depth and widths that are multiples of 64, got "
        "32 and (48,))" in messages
    )
    assert (
        "gumbel_sample: reference (the kernel expected at least 128 logits a row, got 96)"
        in messages
    )
    assert (
        "matmul: reference (the kernel expected bfloat16 operands, got float32 and float32)"
        in messages
    )
    with pytest.raises(
        ConfigError, match="^kernels 'mosaic_gpu': attention: block_size: expected .*, got 24$"
    ):
        choose("mosaic_gpu", block_size=24)


@needs_mosaic
@pytest.mark.usefixtures("on_a_hopper")
@pytest.mark.parametrize(
    ("model", "method", "caches", "fp8"),
    [
        (
            "llama-3-8b",
            "eagle3",
            "caches of bfloat16 or float8_e4m3fn",
            ", and it or float8_e4m3fn",
        ),
        ("glm-4.7-flash", "mtp", "a cache of bfloat16", ""),
    ],
)
def test_a_cache_of_another_dtype_leaves_its_ops_to_the_reference(
    model: str, method: str, caches: str, fp8: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The other kernels read no cache, and stay."""
    with caplog.at_level(logging.INFO, "jaxspec.layers.op_choice"):
        chosen = choose("auto", model, method=method, cache_dtype=jnp.float32)
    assert chosen == replace(EVERY, attention="reference", rope_cache="reference")
    attention, rope_cache = (r.getMessage() for r in caplog.records)
    assert attention.startswith("attention: reference (the kernel dtypes of q and the cache")
    assert attention.endswith(f": expected bfloat16{fp8}, got bfloat16 and float32)")
    reason = f"expected {caches}, got float32"
    assert rope_cache == f"rope_cache: reference (the kernel {reason})"
    with pytest.raises(ConfigError, match=f"^kernels 'mosaic_gpu': rope_cache: {reason}$"):
        choose("rope_cache=mosaic_gpu", model, method=method, cache_dtype=jnp.float32)
    with pytest.raises(ConfigError, match="^kernels 'mosaic_gpu': attention: dtypes of q and"):
        choose("mosaic_gpu", model, method=method, cache_dtype=jnp.float32)


@needs_mosaic
@pytest.mark.usefixtures("on_a_hopper")
def test_caches_in_fp8_have_kernels_and_a_drafts_dtype_counts_too() -> None:
    options = {"method": "eagle3", "cache_dtype": jnp.float8_e4m3fn}
    assert choose("mosaic_gpu", "llama-3-8b", **options) == EVERY
    plain = choose("auto", "llama-3-8b", **options, draft_cache_dtype=jnp.float32)
    assert plain == replace(EVERY, attention="reference", rope_cache="reference")


def test_compiler_options_go_with_the_matmul_kernel() -> None:
    cfg = tiny_model("eagle").round_config(2)
    assert cfg.compiler_options == () == replace(cfg, cuda_graphs=False).compiler_options
    assert replace(cfg, ops=Ops(attention="mosaic_gpu")).compiler_options == ()
    ours = replace(cfg, ops=Ops(matmul="mosaic_gpu"))
    flags = {
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_enable_dynamic_slice_fusion": False,
        "xla_gpu_experimental_enable_fusion_autotuner": False,
        "xla_gpu_enable_analytical_sol_latency_estimator": False,
    }
    assert dict(ours.compiler_options) == flags
    assert dict(replace(ours, cuda_graphs=False).compiler_options) == flags | {
        "xla_gpu_enable_command_buffer": ""
    }


@pytest.mark.parametrize(
    ("size", "all_reduce", "hides", "copies"),
    [
        (1, "reference", False, False),
        (2, "mosaic_gpu", True, True),
        (2, "reference", True, False),  # no access to the other's memory, or several processes
        (4, "mosaic_gpu", True, False),
    ],
)
def test_copy_engines_exchange_where_two_devices_reach_each_other(
    size: int, all_reduce: str, hides: bool, copies: bool
) -> None:
    cfg = replace(
        tiny_model("eagle").round_config(2),
        ops=Ops(matmul="mosaic_gpu", all_reduce=all_reduce),
        placement=Placement(AbstractMesh((size,), ("model",)) if size > 1 else None),
    )
    usual = set(cfg.compiler_options)
    added = {*(HIDING if hides else ()), *(COPYING if copies else ())}
    assert set(cfg.prefill_options) == usual | added


def test_rows_are_alike_on_a_cpu_where_numbers_are_rounded_to_fp8() -> None:
    target = tiny_model("eagle").target
    forms = {
        "plain": None,
        "fp8": Quantization((("", Fp8Form("channel", "token", "floats")),)),
        "int4": Quantization((("", Int4Form(128, has_zeros=False, source="floats")),)),
    }

    def rows_alike(form: str, cache_dtype: Any = jnp.float32, kernels: str = "auto") -> bool:
        cfg = replace(target, quantization=forms[form])  # type: ignore[type-var]
        ops = op_choice.choose(
            kernels, cfg, None, block_size=4, dtype=jnp.float32, cache_dtype=cache_dtype
        )
        assert bool(ops.compiler_options(cuda_graphs=True)) == ops.rows_alike
        return ops.rows_alike

    assert rows_alike("fp8") and rows_alike("fp8", kernels="reference")
    assert rows_alike("plain", jnp.float8_e4m3fn) and rows_alike("int4", jnp.float8_e4m3fn)
    assert not rows_alike("plain") and not rows_alike("int4")


def test_a_program_is_compiled_once_for_each_config_and_shape_with_the_configs_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []
    jit = jax.jit
    monkeypatch.setattr(
        jax,
        "jit",
        lambda f, **options: given.append(options["compiler_options"]) or jit(f, **options),
    )
    program = Program(lambda cfg, x, y: (x + cfg.num_speculative_tokens, y), donate=2)
    assert program.cache_size() == 0
    cfg = tiny_model("eagle").round_config(2)
    ours = replace(cfg, ops=Ops(matmul="mosaic_gpu"))

    def call(cfg: RoundConfig, size: int) -> jax.Array:
        y = jnp.zeros(size)
        x, _ = program(cfg, jnp.zeros(size, jnp.int32), y)
        assert y.is_deleted()
        return x

    for _ in range(2):
        assert call(cfg, 3).tolist() == [2, 2, 2]
    assert program.cache_size() == 1
    call(cfg, 4)
    call(replace(cfg, sampled=False), 4)
    call(ours, 4)
    assert program.cache_size() == 4
    assert given == [None, dict(ours.compiler_options)]


def engine(method: str = "eagle3", **config: Any) -> LLM:
    model = tiny_model(method)
    return LLM(
        (model.target, model.params["target"]),
        (model.draft, model.params["draft"]),
        SpeculativeConfig(method=method, num_speculative_tokens=2),
        config=EngineConfig(max_model_len=64, block_size=16, **config),
    )


@pytest.mark.parametrize("requested", ["auto", "reference"])
def test_the_engine_names_its_kernels_and_its_rounds_run_them(
    requested: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(kernels=requested)
    assert llm.describe().splitlines()[0].endswith("kernels: reference")
    chosen = Ops(attention="mosaic_gpu", rejection_sampling="mosaic_gpu")
    asked: list[Any] = []
    monkeypatch.setattr(
        op_choice,
        "choose",
        lambda *args, **options: asked.append((args[0], options["block_size"])) or chosen,
    )
    llm = engine(kernels=requested)
    assert asked == [(requested, 16)]
    assert llm.round_config(sampled=True, truncated=False).ops == chosen
    assert llm.describe().splitlines()[0].endswith(f"kernels: {chosen}")


def test_a_large_targets_rounds_are_cuda_graphs_where_their_rows_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def graphs(*batches: int) -> list[bool]:
        llm = engine(kernels="reference")  # K = 2
        return [
            llm.round_config(sampled=False, truncated=False, batch=batch).cuda_graphs
            for batch in batches
        ]

    monkeypatch.setattr(round_configs, "GRAPHS_LAUNCH_EARLY", False)
    assert graphs(1, 64) == [True, True]
    monkeypatch.setattr(round_configs, "GRAPHS_BELOW_BYTES", 0)
    assert graphs(1, 5, 6, 21, 22, 64) == [True, True, False, False, True, True]
    monkeypatch.setattr(round_configs, "GRAPHS_BELOW_BYTES_A_LAYER", 0)
    assert graphs(1, 21, 22, 64) == [False, False, True, True]
    ran: list[tuple[int, bool]] = []
    prefills: list[bool] = []
    run_rounds, run_prefill = rounds.run_rounds, programs.run_prefill

    def recorded(cfg: RoundConfig, num_rounds: int, params: Any, state: Any, *rest: Any) -> Any:
        ran.append((state.active.shape[0], cfg.cuda_graphs))
        return run_rounds(cfg, num_rounds, params, state, *rest)

    def recorded_prefill(cfg: RoundConfig, *rest: Any, **named: Any) -> Any:
        prefills.append(cfg.cuda_graphs)
        return run_prefill(cfg, *rest, **named)

    monkeypatch.setattr(rounds, "run_rounds", recorded)
    monkeypatch.setattr(programs, "run_prefill", recorded_prefill)
    llm = engine(kernels="reference", max_num_seqs=32, batch_buckets=[2, 32])
    llm.generate([[1, 2, 3]] * 32, SamplingParams(0.0, max_tokens=3))
    llm.generate([[1, 2, 3]], SamplingParams(0.0, max_tokens=3))
    assert set(ran) == {(32, True), (2, False)}
    monkeypatch.setattr(round_configs, "GRAPHS_LAUNCH_EARLY", True)
    ran.clear()
    llm = engine(kernels="reference", max_num_seqs=32, batch_buckets=[2, 32])
    llm.generate([[1, 2, 3]], SamplingParams(0.0, max_tokens=3))
    assert set(ran) == {(2, True)} and set(prefills) == {False}


def test_kernels_name_the_commonest_and_what_differs() -> None:
    assert str(Ops()) == "reference"
    assert str(replace(EVERY, rms_norm="reference")) == "mosaic_gpu (rms_norm reference)"


def test_single_ops_may_be_named(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        ConfigError, match="^kernels 'mosaic_gpu': matmul: expected an NVIDIA GPU, got cpu$"
    ):
        choose("matmul=mosaic_gpu")
    with caplog.at_level(logging.INFO, "jaxspec.layers.op_choice"):
        assert choose("attention=reference,rms_norm=auto") == Ops()
    assert not any(r.getMessage().startswith("attention") for r in caplog.records), (
        "asked for, not fallen back to"
    )
    with pytest.raises(
        ConfigError,
        match=(
            "^kernels: expected auto, a name, or op=name with op among "
            "attention, .*, got 'norm=auto'$"
        ),
    ):
        choose("norm=auto")


@needs_mosaic
@pytest.mark.usefixtures("on_a_hopper")
def test_experts_run_on_the_kernel_packed_or_not() -> None:
    def chosen(requested: str, target: Any) -> str:
        return op_choice.choose(
            requested, target, None, block_size=64, dtype=jnp.bfloat16, cache_dtype=jnp.bfloat16
        ).moe

    assert {name: chosen("auto", model.target) for name, model in HYBRID.items()} == dict.fromkeys(
        HYBRID, "mosaic_gpu"
    )
    packed = HYBRID["gpt-oss-20b-mxfp4"].target
    narrow = replace(packed, moe=replace(packed.moe, intermediate_size=96))
    assert chosen("auto", narrow) == "reference"
    with pytest.raises(
        ConfigError,
        match="^kernels 'mosaic_gpu': moe: expected .* multiples of 64, got 2880 and 96$",
    ):
        chosen("moe=mosaic_gpu", narrow)


@needs_mosaic
@pytest.mark.usefixtures("on_a_hopper")
def test_one_op_exchanged_leaves_the_others() -> None:
    assert choose("rope_cache=reference", "llama-3-8b") == replace(EVERY, rope_cache="reference")


def test_an_engine_refuses_kernels_that_it_cannot_run() -> None:
    with pytest.raises(
        ConfigError, match="^kernels 'mosaic_gpu': attention: expected an NVIDIA GPU, got cpu$"
    ):
        engine(kernels="mosaic_gpu")
    with pytest.raises(ConfigError, match="^kernels: expected one of"):
        engine(kernels="cuda")


@needs_mosaic
@pytest.mark.usefixtures("on_a_hopper")
def test_latent_attention_has_kernels_of_its_own_under_the_names_of_the_ops(
    caplog: pytest.LogCaptureFixture,
) -> None:
    glm = HYBRID["glm-4.7-flash"]
    options: dict[str, Any] = {
        "block_size": 64,
        "dtype": jnp.bfloat16,
        "cache_dtype": jnp.bfloat16,
    }
    assert op_choice.choose("mosaic_gpu", glm.target, draft_config(glm, "mtp"), **options) == EVERY
    odd = replace(glm.target, attention=replace(glm.target.attention, rope_head_dim=32))
    with caplog.at_level(logging.INFO, "jaxspec.layers.op_choice"):
        assert op_choice.choose("auto", odd, None, **options) == replace(
            EVERY, attention="reference", rope_cache="reference"
        )
    assert (
        "attention: reference (the kernel expected a kv_lora_rank of a multiple of 64 up to 512 "
        "and a rope_head_dim of 64, got" in caplog.text
    )
    assert (
        "rope_cache: reference (the kernel expected a rope_head_dim of 64, got 32)" in caplog.text
    )


# --- what a user with a GPU is told


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("too_old", "missing", "dtype", "expected"),
    [
        (
            "expected jax 0.11 or later, got 0.10.2",
            None,
            jnp.bfloat16,
            ["expected jax 0.11 or later, got 0.10.2; use Python 3.12 or later with jax 0.11"],
        ),
        (
            None,
            "expected compute capability 9.0 (Hopper), got 8.0",
            jnp.bfloat16,
            ["expected compute capability 9.0 (Hopper), got 8.0; kernels run on Hopper GPUs"],
        ),
        (
            None,
            None,
            jnp.float32,
            ["expected bfloat16 operands, got float32 and float32; dtype='bfloat16' has kernels"],
        ),
    ],
)
def test_a_gpu_without_kernels_is_a_warning_with_reason_and_remedy(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    too_old: str | None,
    missing: str | None,
    dtype: Any,
    expected: list[str],
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(hopper, "missing", lambda: missing)
    monkeypatch.setattr(hopper, "too_old", lambda: too_old)
    assert choose("auto", dtype=dtype).matmul == "reference"
    said = warnings_of(caplog)
    assert all(any(part in line for line in said) for part in expected), said
    caplog.clear()
    choose("reference", dtype=dtype)
    assert warnings_of(caplog) == []  # the caller chose it


def test_a_gpu_that_jax_does_not_see_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(op_choice, "gpu_names", lambda: ["NVIDIA H100"])
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    choose("auto")
    assert warnings_of(caplog) == [
        "NVIDIA H100 is present, but jax computes on cpu, without kernels: install jaxspec[cuda] "
        "(or jaxspec[cuda12] for a driver older than 580)"
    ]
    caplog.clear()
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    choose("auto")
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(op_choice, "gpu_names", list)
    choose("auto")
    assert warnings_of(caplog) == []


@pytest.mark.parametrize(
    ("wanted", "target", "in_order"),
    [
        (None, "small", True),
        (None, "large", False),
        (None, "large int4", True),
        (None, "large, experts in int4", False),
        (True, "large", True),
        (False, "small", False),
        (False, "large int4", False),
    ],
)
def test_small_and_int4_targets_sum_prompts_in_order_unless_the_caller_says_otherwise(
    wanted: bool | None, target: str, in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op_choice, "IN_ORDER_BELOW_BYTES", 1 << 20)
    plain = jnp.zeros(((1 << 20) - (target == "small"),), jnp.uint8)
    params: dict[str, Any] = {"layers": [{"o": Weight(plain)}]}
    if "int4" in target:
        words, scales = jnp.zeros((1, 1, 128), jnp.uint32), jnp.ones((1, 16), jnp.bfloat16)
        name = "experts" if "experts" in target else "o"
        params["layers"].append({name: Int4Weight(words, scales)})
    assert op_choice.with_prefill_order(EVERY, wanted, params).prefill_in_order is in_order
    assert op_choice.with_prefill_order(Ops(), wanted, params) == Ops(), "no kernel sums"


@pytest.mark.parametrize("wanted", [None, False, True])
def test_an_engine_passes_the_order_of_prompts_on(
    wanted: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To prefill and to rounds, which do not ask for it."""
    monkeypatch.setattr(op_choice, "choose", lambda *args, **named: EVERY)
    ops = engine("eagle", prefill_in_order=wanted).runner.configs.greedy.ops
    assert ops == replace(EVERY, prefill_in_order=wanted is not False)
