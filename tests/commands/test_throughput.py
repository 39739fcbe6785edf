"""scripts/bench_throughput.py on a CPU with tiny dimensions: every row of vLLM's table, for every
rule. No time is asserted."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM
from jaxspec.commands import throughput as bench_throughput
from jaxspec.tools.benchmark import throughput
from jaxspec.tools.benchmark.machine import print_table
from jaxspec.tools.benchmark.workload import Weights
from tests.commands.conftest import runner

run_bench = runner(bench_throughput.main)
# PR #37639's rows.
ROWS = (
    *(
        "successful requests",
        "failed requests",
        "maximum request concurrency",
        "benchmark duration (s)",
        "total input tokens",
    ),
    *(
        "total generated tokens",
        "request throughput (req/s)",
        "output token throughput (tok/s)",
        "peak output token throughput (tok/s)",
    ),
    *("peak concurrent requests", "total token throughput (tok/s)"),
    *(f"{of} {name} (ms)" for name in ("TTFT", "TPOT", "ITL") for of in ("mean", "median", "P99")),
)
DRAFT_ROWS = (
    "acceptance rate (%)",
    "acceptance length",
    "drafts",
    "draft tokens",
    "accepted tokens",
)


def test_a_run_has_every_row_and_counts_every_token(tmp_path):
    path = tmp_path / "throughput.json"
    flags = [
        "--model",
        "tiny",
        "--methods",
        "plain,strict",
        "--concurrency",
        2,
        "--num-prompts",
        5,
        "--input-len",
        20,
        "--output-len",
        "9,1",
    ]
    result = run_bench(*flags, "--request-rate", 500, "--rounds-per-step", 2, "--output-json", path)
    assert result.exit_code == 0, result.output
    record = json.loads(path.read_text())
    settings = record["settings"]
    assert (settings["method"], settings["num_speculative_tokens"]) == ("eagle3", 3)
    assert [(r["method"], r["output_len"]) for r in record["runs"]] == [
        ("plain", 9),
        ("plain", 1),
        ("strict", 9),
        ("strict", 1),
    ]
    for run in record["runs"]:
        found = run["results"]
        assert set(ROWS) <= set(found)
        assert (found["successful requests"], found["failed requests"]) == (5, 0)
        assert (found["total input tokens"], found["total generated tokens"]) == (
            100,
            5 * run["output_len"],
        )
        assert found["peak concurrent requests"] <= 2
        if run["method"] == "strict":
            assert set(DRAFT_ROWS) <= set(found) and "acceptance at position 2 (%)" in found
            assert run["output_len"] == 1 or found["draft tokens"] == 3 * found["drafts"] > 0
    assert all(f"| {row} " in result.stdout for row in ROWS)
    wide = [
        line for line in result.stdout.splitlines() if line.startswith("| peak concurrent requests")
    ]
    assert len(wide) == 2 and all(line.count("|") == 4 for line in wide), (
        "a table for each output length, with a column for each rule"
    )


def test_method_and_number_of_drafts_are_the_heads_unless_flags_name_them(monkeypatch):
    made = []
    monkeypatch.setattr(
        LLM, "from_pretrained", lambda *args, **engine: made.append(engine["speculative"])
    )
    real = bench_throughput.PairOptions(target="target", draft="head")
    real.load("strict", Weights(np.float32), {})
    assert (made[0].method, made[0].num_speculative_tokens) == (None, None)
    named = dataclasses.replace(real, method="eagle", num_speculative_tokens=4)
    named.load("strict", Weights(np.float32), {})
    assert (made[1].method, made[1].num_speculative_tokens) == ("eagle", 4)
    random = bench_throughput.PairOptions(model="tiny").speculative("strict")
    assert random is not None and random.method == "eagle3"


def test_a_wide_table_is_markdown_with_every_figure_whole(capsys):
    runs = [
        {
            "method": "probabilistic",
            "concurrency": 64,
            "output_len": 1024,
            "results": {"output token throughput (tok/s)": 12345.678},
        }
    ]
    print_table(bench_throughput.table(runs * 24))
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "throughput (tok/s)" in line)
    assert row.count("12,345.68") == 24


def test_no_run_finds_the_prompts_of_another_in_the_prefix_cache(tmp_path):
    path = tmp_path / "throughput.json"
    flags = [
        "--model",
        "tiny",
        "--methods",
        "plain",
        "--concurrency",
        "1,6",
        "--num-prompts",
        2,
        "--input-len",
        70,
        "--output-len",
        "2,1",
    ]
    assert run_bench(*flags, "--output-json", path).exit_code == 0
    runs = json.loads(path.read_text())["runs"]
    assert [run["results"]["prefix queries"] for run in runs] == [140] * 4
    assert [run["results"]["prefix hits"] for run in runs] == [0] * 4


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--model", "gpt-5"), "--model: expected smollm2 or one of"),
        (("--methods", "lossy"), "--methods: expected among plain, strict"),
        (("--concurrency", "0"), "--concurrency: expected integers of at least 1"),
        (("--request-rate", "nan"), "--request-rate: expected requests a second, or inf, got nan"),
        (("--request-rate", "0"), "--request-rate: expected requests a second, or inf, got 0"),
        (("--draft-quantize", "fp8"), "--draft-quantize: expected a real head, got random weights"),
        (("--draft-quantize", "fp4"), "--draft-quantize: expected None, one of fp8, fp8-block"),
        (("--draft-kv-cache-dtype", "fp4"), "--draft-kv-cache-dtype: expected one of auto, bf"),
        (("--seed", "-1"), "Invalid value for '--seed'"),
        (("--dataset", "x.jsonl"), "--dataset: expected a real target"),
        (("--target", "somewhere"), "--draft: expected a draft head for somewhere"),
    ],
)
def test_bad_flags_are_one_sentence(flags, sentence):
    result = run_bench(*flags)
    assert result.exit_code == 2 and sentence in result.stderr


def test_the_drafts_caches_have_a_dtype_of_their_own() -> None:
    pair = bench_throughput.PairOptions(model="tiny", draft_kv_cache_dtype="bfloat16")
    engine = {"max_model_len": 64, "max_num_seqs": 1, "num_gpu_blocks_override": 4}
    llm = pair.load("strict", Weights(jnp.dtype("float32")), engine)
    assert (llm.cache_dtype, llm.draft_cache_dtype) == (jnp.float32, jnp.bfloat16)


def test_poisson_arrivals_have_the_rate_and_the_seed():
    load = throughput.Load(50.0, 4, seed=3)
    gaps = np.diff(load.arrivals(4000), prepend=0)
    assert (
        gaps.min() >= 0
        and gaps.mean() == pytest.approx(1 / 50, rel=0.05)
        and gaps.std() == pytest.approx(1 / 50, rel=0.1)
    )
    np.testing.assert_array_equal(load.arrivals(10), throughput.Load(50.0, 1, seed=3).arrivals(10))
    assert not throughput.Load(float("inf"), 4).arrivals(3).any()
