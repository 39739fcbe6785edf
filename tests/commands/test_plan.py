"""scripts/plan.py: from configs alone, figures that follow from the published dimensions."""

from __future__ import annotations

import importlib
import json
import re
import time
from pathlib import Path
from typing import Any, get_args

import jax
import pytest
from typer.testing import CliRunner

from jaxspec import models
from jaxspec.cache.pool_sizes import demand
from jaxspec.commands import plan as script
from jaxspec.config import CacheGroup, EngineConfig, Ops, SpeculativeConfig
from jaxspec.config.quantization import Quantize
from jaxspec.drafts import mtp
from jaxspec.engine.buckets import Buckets
from jaxspec.loading.conversion import convert_checkpoint
from jaxspec.loading.default_target import NAMES
from jaxspec.loading.model import load_target
from jaxspec.tools.benchmark import dimensions
from jaxspec.tools.cli import command
from jaxspec.tools.known_models import known_config
from jaxspec.tools.memory_plan import MemoryPlan, memory_plan
from tests.support import quantized
from tests.support.families import draft_config
from tests.support.full_size import CONFIGS, tensors

resolve_module = importlib.import_module("jaxspec.loading.resolve")  # the package has a function


def plan_of(name: str, *, draft: object = None, **changes: Any) -> MemoryPlan:
    target = models.config_from_hf(CONFIGS[name])
    config = EngineConfig(**{"max_model_len": 8192, "max_num_seqs": 16, **changes})
    return memory_plan(
        target, draft, config, memory=141e9, dtype="bfloat16", num_speculative_tokens=3
    )


def test_llama_takes_two_bytes_a_parameter_and_128_kib_a_token() -> None:
    plan = plan_of("Llama-3.1-8B")
    assert plan.target_weights == 2 * 8_030_261_248
    assert plan.token_bytes == 32 * 2 * 8 * 128 * 2 == 128 * 1024
    assert plan.draft_weights == plan.draft_buffers == 0
    assert plan.logits == 16 * 128256 * 4


def test_a_window_s_pool_is_that_of_the_engine_on_a_gpu() -> None:
    """Prefill calls of 2,048 tokens are 43 tiles of 48 rows."""
    config = EngineConfig(max_model_len=8192, max_num_seqs=16)
    chunk = Buckets(config, Ops(attention="mosaic_gpu").prefill_tile, on_gpu=True).max_chunk
    (pool,) = {g.pool for g in plan_of("gpt-oss-20b").groups if g.pool is not None}
    group = CacheGroup(64, 8192, window=128)
    needed = demand(group, max_model_len=8192, head_room=1, max_chunk=chunk, rounds_per_step=1)
    assert (chunk, pool) == (2064, needed.of_requests(16, caching=True) * 64)


def test_caches_of_float32_take_twice_the_bytes_and_weights_the_same() -> None:
    plan, auto = (plan_of("gpt-oss-20b", kv_cache_dtype=dtype) for dtype in ("float32", "auto"))
    assert [g.token_bytes for g in plan.groups] == [2 * g.token_bytes for g in auto.groups]
    assert plan.target_weights == auto.target_weights


def test_fp8_caches_take_a_byte_a_number_and_a_draft_may_keep_two() -> None:
    target = models.config_from_hf(CONFIGS["Llama-3.1-8B"])
    draft = draft_config("eagle3", target)
    config = EngineConfig(max_model_len=8192, max_num_seqs=16, kv_cache_dtype="fp8")
    plans = [
        memory_plan(
            target,
            draft,
            config,
            memory=141e9,
            dtype="bfloat16",
            num_speculative_tokens=3,
            draft_kv_cache_dtype=dtype,
        )
        for dtype in (None, "bfloat16")
    ]
    tokens = [[group.token_bytes for group in plan.groups] for plan in plans]
    assert tokens[0][0] == tokens[1][0] == 32 * 2 * 8 * 128
    assert 2 * tokens[0][1] == tokens[1][1] > 0


def test_caches_are_planned_as_the_checkpoint_names_them(tmp_path: Path, runner: tuple) -> None:
    folder = quantized.modelopt_fp8(
        quantized.plain_checkpoint(tmp_path / "plain"), tmp_path / "out"
    )
    cli, app = runner
    flags = ["--target", str(folder), "--gpu", "1", "--max-model-len", "64"]
    for dtype, size in (("auto", "0.25"), ("fp8", "0.25"), ("bfloat16", "0.50")):
        done = cli.invoke(app, [*flags, "--kv-cache-dtype", dtype])  # 2 layers of 2 heads of 32
        assert re.search(rf"full .* {size} ", done.output), done.output


def test_gpt_oss_has_two_groups_of_twelve_layers() -> None:
    plan = plan_of("gpt-oss-20b")
    assert [(g.name, g.num_layers, g.token_bytes, g.window) for g in plan.groups] == [
        ("target: full attention", 12, 12 * 2048, None),
        ("target: a window of 128", 12, 12 * 2048, 128),
    ]
    full, window = plan.groups
    assert (full.held, full.pool) == (8192, None)
    assert window.held == 64 * (-(-(127 + 4 - 1) // 64) + 1), (
        "window and four rounds of one row, wherever they lie in blocks"
    )
    assert window.pool == 2 * (16 * window.held + 2 * 64 * (-(-(127 + 2064 - 1) // 64) + 1))
    assert plan.token_bytes == 12 * 2048 and plan.window_bytes == 12 * 2048 * window.pool
    held = (plan.cache_bytes - plan.window_bytes) // (64 * 12 * 2048)
    assert plan.cache_tokens == 64 * held and plan.num_requests == held // 128


def test_experts_are_counted_whatever_few_of_them_a_row_takes() -> None:
    plan = plan_of("Qwen3-30B-A3B")
    assert plan.target_weights == 2 * 30_532_122_624
    assert plan.token_bytes == 48 * 2 * 4 * 128 * 2 == 96 * 1024


@pytest.mark.parametrize("form", [None, *get_args(Quantize), "deepseek"])
def test_quantised_experts_take_the_bytes_that_loading_holds(
    form: Any, tmp_path: Path, runner: tuple
) -> None:
    folder = quantized.plain_checkpoint(tmp_path / "plain", quantized.EXPERTS)
    if form == "deepseek":
        folder = quantized.deepseek_fp8(folder, tmp_path / "out")
    elif form is not None:
        folder = convert_checkpoint(folder, tmp_path / "out", form)
    cfg, params = load_target(folder, "bfloat16")
    config = EngineConfig(max_model_len=64)
    plan = memory_plan(cfg, None, config, memory=1e9, dtype="bfloat16", num_speculative_tokens=1)
    assert plan.target_weights == sum(array.nbytes for array in jax.tree.leaves(params))
    cli, app = runner
    done = cli.invoke(app, ["--target", str(folder), "--gpu", "0.01", "--max-model-len", "64"])
    assert f"{plan.target_weights / 2**30:.3f}" in done.output, done.output


def test_a_latent_cache_holds_576_numbers_a_token_and_the_mtp_layer_its_own() -> None:
    target = models.config_from_hf(CONFIGS["GLM-4.7-Flash"])
    draft = mtp.config_from_checkpoint(
        CONFIGS["GLM-4.7-Flash"], tensors("GLM-4.7-Flash"), target, SpeculativeConfig(method="mtp")
    )
    plan = plan_of("GLM-4.7-Flash", draft=draft)
    assert [(g.name, g.token_bytes) for g in plan.groups] == [
        ("target: latent attention", 47 * 576 * 2),
        ("draft: latent attention", 576 * 2),
    ]
    assert plan.draft_buffers == 16 * (4 * (2048 * 2 + 4) + 3 * (154880 * 4 + 4))


def test_a_block_draft_keeps_one_array_of_logits_and_no_pending_rows() -> None:
    """Corrected logits take the place of the head's (tests/aot/test_block_round_aot.py)."""
    qwen = dimensions.MODELS["qwen3-8b"]
    draft = dimensions.draft_config(qwen, "dspark")
    plan = memory_plan(
        qwen.target,
        draft,
        EngineConfig(max_model_len=8192, max_num_seqs=16),
        memory=141e9,
        dtype="bfloat16",
        num_speculative_tokens=7,
    )
    assert plan.draft_buffers == 16 * 7 * (151936 * 4 + 4)


def test_what_fits_is_in_whole_blocks_and_whole_requests() -> None:
    plan = plan_of("Llama-3.1-8B", block_size=64, max_model_len=1000)
    assert (
        plan.cache_tokens % 64 == 0
        and plan.cache_tokens * plan.token_bytes
        <= plan.cache_bytes
        < (plan.cache_tokens + 64) * plan.token_bytes
    )
    assert plan.num_requests == plan.cache_tokens // 1024


def test_windows_alone_hold_as_many_requests_as_may_run_whatever_their_length() -> None:
    config = CONFIGS["gpt-oss-20b"] | {"layer_types": ["sliding_attention"] * 24}
    target, engine = (
        models.config_from_hf(config),
        EngineConfig(max_model_len=8192, max_num_seqs=16),
    )

    def plan_on(memory: float) -> MemoryPlan:
        return memory_plan(
            target, None, engine, memory=memory, dtype="bfloat16", num_speculative_tokens=3
        )

    plan = plan_on(141e9)
    assert plan.token_bytes == 0 and plan.num_requests == 16 and plan.cache_tokens == 16 * 8192
    weights = (plan.target_weights + plan.logits) / 0.9
    assert plan_on(weights + 1e6).num_requests == 0


@pytest.fixture
def runner() -> tuple[CliRunner, object]:
    return CliRunner(), command(script.main)


def test_a_quantised_head_is_planned(runner: tuple, tmp_path: Path) -> None:
    target = quantized.plain_checkpoint(tmp_path / "plain")
    head = quantized.eagle_head(tmp_path, "static")
    cli, app = runner
    flags = "--target", str(target), "--draft", str(head), "--method", "eagle", "--gpu", "1"
    done = cli.invoke(app, list(flags))
    assert done.exit_code == 0 and "fits:" in done.output, done.output


@pytest.mark.parametrize("lm_head", [False, True])
def test_the_plan_knows_weights_by_their_4_bit_codes(lm_head: bool, tmp_path: Path) -> None:
    target = models.config_from_hf(quantized.NARROW)
    head = str(quantized.four_bit_head(tmp_path, "int4", lm_head=lm_head))
    draft = script.read_draft(head, target, SpeculativeConfig(head))
    assert draft.method == "eagle" and draft.own_lm_head == lm_head


def test_a_head_may_be_quantised_in_the_plan(tmp_path: Path) -> None:
    target = models.config_from_hf(quantized.NARROW)
    head = str(quantized.eagle_head(tmp_path, "plain"))

    def draft(form: Quantize | None) -> Any:
        speculative = SpeculativeConfig(head, "eagle", draft_quantize=form)
        return script.read_draft(head, target, speculative)

    sizes = []
    forms: tuple[Quantize | None, ...] = (None, "fp8")
    for form in forms:
        plan = memory_plan(
            target,
            draft(form),
            EngineConfig(max_model_len=256),
            memory=1e9,
            dtype="bfloat16",
            num_speculative_tokens=3,
        )
        sizes.append(plan.draft_weights)
    assert 0.5 * sizes[0] < sizes[1] < 0.6 * sizes[0]


@pytest.mark.parametrize("form", [None, "fp8"])
def test_a_smaller_model_may_be_quantised_in_the_plan(form: Quantize | None) -> None:
    target = models.config_from_hf(script.config_of(NAMES[0]))
    given = SpeculativeConfig(NAMES[0], "draft_model", draft_quantize=form)
    draft = script.read_draft(NAMES[0], target, given)
    held = draft.model.quantization
    assert held is None if form is None else held.made_form == form


def test_the_plan_reads_the_dtype_of_a_drafts_caches_from_its_checkpoint(tmp_path: Path) -> None:
    target = models.config_from_hf(quantized.NARROW)
    head = quantized.eagle_head(tmp_path, "fp8")

    def draft_bytes(**changes: Any) -> int:
        draft = script.read_draft(str(head), target, SpeculativeConfig(str(head), "eagle"))
        config = EngineConfig(max_model_len=256)
        plan = memory_plan(
            target,
            draft,
            config,
            memory=1e9,
            dtype="bfloat16",
            num_speculative_tokens=3,
            **changes,
        )
        return plan.groups[-1].token_bytes

    plain = draft_bytes()
    quantized.with_kv_scales(head, "tensor", [1.0])
    assert (draft_bytes(), draft_bytes(draft_kv_cache_dtype="bfloat16")) == (plain / 2, plain)


def test_a_targets_own_method_may_be_named_and_quantises_nothing(
    runner: tuple, tmp_path: Path
) -> None:
    cli, app = runner

    def planned(config: dict[str, Any], *flags: str) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config))
        done = cli.invoke(app, ["--target", str(tmp_path), "--gpu", "1", *flags])
        assert done.exit_code == 0, done.output
        return done.output

    coded = quantized.NARROW | {"quantization_config": quantized.DEEPSEEK_FP8}
    assert planned(coded, "--quantize", "fp8") == planned(coded)
    assert planned(quantized.NARROW, "--quantize", "fp8") != planned(quantized.NARROW)


def test_a_targets_own_method_may_be_named_beside_its_module(tmp_path: Path) -> None:
    coded = CONFIGS["GLM-4.7-Flash"] | {"quantization_config": quantized.DEEPSEEK_FP8}
    (tmp_path / "config.json").write_text(json.dumps(coded))
    given = SpeculativeConfig(method="mtp", draft_quantize="fp8")
    draft = script.read_draft(str(tmp_path), models.config_from_hf(coded), given)
    assert draft.method == "mtp"


def test_the_script_needs_a_config_only_and_says_what_fits(runner: tuple, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["GLM-4.7-Flash"]))
    cli, app = runner
    done = cli.invoke(app, ["--target", str(tmp_path), "--method", "mtp", "--gpu", "h200"])
    assert done.exit_code == 0, done.output
    assert (
        "target: latent" in done.output
        and "draft: latent" in done.output
        and "fits:" in done.output
    )
    small = cli.invoke(app, ["--target", str(tmp_path / "config.json"), "--gpu", "24"])
    assert small.exit_code == 1 and "does not fit" in small.output
    (tmp_path / "short.json").write_text(
        json.dumps(CONFIGS["GLM-4.7-Flash"] | {"max_position_embeddings": 1000})
    )
    assert (
        "requests of 1000 tokens"
        in cli.invoke(app, ["--target", str(tmp_path / "short.json")]).output
    )
    tight = cli.invoke(
        app,
        [
            "--target",
            str(tmp_path),
            "--gpu",
            "h200",
            "--max-model-len",
            "100000",
            "--utilization",
            "0.46",
        ],
    )
    assert tight.exit_code == 1 and "are left, no request of 100000" in tight.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "tpu"], "--gpu: expected one of"),
        (["--gpu", "nan"], "--gpu: expected one of"),
        (["--gpu", "0"], "--gpu: expected one of"),
        (["--method", "medusa"], "method: expected one of"),
        (
            ["--max-model-len", "1000000"],
            "--max-model-len: expected at most the target's max_position_embeddings",
        ),
        (["--dequantised"], "--dequantised: expected a target with MXFP4 weights"),
        (["--dtype", "int8"], "dtype: expected bfloat16 or float32"),
        (["--utilization", "0"], "gpu_memory_utilization: expected a number in (0, 1], got 0.0"),
        (
            ["--method", "mtp", "--draft", "checkpoints/smollm2-135m-instruct-eagle3"],
            "method 'mtp': expected the target's own checkpoint",
        ),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], message: str, runner: tuple, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["GLM-4.7-Flash"]))
    cli, app = runner
    done = cli.invoke(app, ["--target", str(tmp_path), *arguments])
    assert done.exit_code == 2 and message in done.output


def test_each_of_two_gpus_holds_half_of_what_is_cut() -> None:
    one, two = (plan_of("Llama-3.1-8B", tensor_parallel_size=size) for size in (1, 2))
    norms = 2 * (2 * 32 + 1) * 4096  # whole on both
    assert two.target_weights == (one.target_weights - norms) // 2 + norms
    assert (two.token_bytes, two.logits) == (one.token_bytes // 2, one.logits // 2)


def test_more_gpus_than_kv_heads_hold_copies_of_them() -> None:
    eight, sixteen = (plan_of("Llama-3.1-8B", tensor_parallel_size=size) for size in (8, 16))
    assert eight.token_bytes == sixteen.token_bytes
    assert eight.target_weights < 2 * sixteen.target_weights


def test_whole_experts_take_the_bytes_of_their_pieces() -> None:
    pieces, whole = (
        plan_of("gpt-oss-20b", tensor_parallel_size=2, enable_expert_parallel=parallel)
        for parallel in (False, True)
    )
    biases = (
        2 * 24 * 32 * 2880
    )  # of down: a piece of each expert has it, whole experts have it once
    # Zeros widen 1,440 columns to 1,472: of gate, up and down in MXFP4 (68 words hold 512 weights),
    # and of two biases in bfloat16.
    zeros = 24 * 32 * 32 * (3 * 2880 * 272 // 512 + 2 * 2)
    assert pieces.target_weights - whole.target_weights == biases // 2 + zeros


def test_common_models_need_no_hub(runner: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their hub ids or without the owner, with the dimensions of their published config.json."""
    monkeypatch.setattr(script, "read_config", None)
    cli, app = runner
    for name in ("meta-llama/Llama-3.1-8B-Instruct", "qwen3-8b", "openai/gpt-oss-20b"):
        done = cli.invoke(app, ["--target", name])
        assert done.exit_code == 0 and "needs 1 GPU of h200" in done.output, done.output
    for name, config in CONFIGS.items():
        assert known_config(name) in (config, None)
    assert {name for name in CONFIGS if known_config(name)} >= {"Qwen3-8B", "gpt-oss-20b"}


@pytest.mark.parametrize(
    ("target", "gpu", "needs"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", "h100", "needs 2 GPUs (--tensor-parallel-size 2)"),
        ("meta-llama/Llama-3.3-70B-Instruct", "h200", "needs 2 GPUs (--tensor-parallel-size 2)"),
        ("meta-llama/Llama-3.3-70B-Instruct", "b200", "needs 1 GPU of b200"),
        (
            "openai/gpt-oss-120b",
            "24",
            "needs 4 GPUs (--tensor-parallel-size 4) of 24",
        ),
        (  # zeros make pieces larger than whole experts
            "openai/gpt-oss-120b",
            "19",
            "needs 4 GPUs (--tensor-parallel-size 4 --enable-expert-parallel)",
        ),
        ("deepseek-ai/DeepSeek-V3", "h100", "needs more than the 8 GPUs of one host, of h100"),
    ],
)
def test_the_plan_says_how_many_gpus_a_model_needs(
    target: str, gpu: str, needs: str, runner: tuple
) -> None:
    cli, app = runner
    done = cli.invoke(app, ["--target", target, "--gpu", gpu])
    assert needs in done.output, done.output


def test_without_a_network_it_fails_at_once(
    runner: tuple, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """huggingface_hub alone tries for half a minute."""
    for name in resolve_module.PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))

    def refuse(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(resolve_module.socket, "create_connection", refuse)
    cli, app = runner
    begin = time.perf_counter()
    done = cli.invoke(app, ["--target", "someone/some-model"])
    assert time.perf_counter() - begin < 5
    assert done.exit_code == 2 and "the hub's host does not answer" in done.output


@pytest.mark.parametrize("name", NAMES)
def test_the_default_target_is_planned_without_its_file(runner: tuple, name: str) -> None:
    cli, app = runner
    done = cli.invoke(
        app, ["--target", name, "--gpu", "h100", "--method", "draft_model", "--draft", name]
    )
    assert done.exit_code == 0, done.output
    assert re.search(r"target weights \W+ 0\.251 ", done.output), done.output  # GiB of 134.5 M
