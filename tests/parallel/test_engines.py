"""Engines on several devices generate the tokens and the counts of one device, in float32."""

from __future__ import annotations

import pytest

from tests.support.devices import run_on_devices
from tests.support.slow import slow

# (cases of tests.parallel.engines_on_devices that one process runs)
PROCESSES = [
    # A mapped vocabulary, fewer KV heads than devices, every sampling parameter, prefill in halves;
    # a verify pass of few rows, drafts that adapt, fall back and end early, and fp8 keys.
    # test_quantized.py has gpt-oss as the target.
    (
        "tiny eagle3 4 mapped everything halves",
        "tiny dspark 4 words adaptive fallback=suffix verify=4 confidence=0.3 fp8",
    ),
    # Experts with biases, sinks and two cache groups.
    ("llama draft_model:gpt_oss 2",),
    (
        "tiny eagle3 4 mapped everything",
        "gpt_oss eagle3 2",
        "tiny eagle3 2 halves everything",
    ),
    ("gpt_oss draft_model 2,4 again", "glm4_moe_lite draft_model 2 rule=block everything"),
    ("llama draft_model:qwen3_moe 2 replicated rounds=2", "llama draft_model:llama4_text 2 expert"),
    ("gpt_oss eagle3 2,4 expert", "gpt_oss eagle 2 everything", "gpt_oss none 2"),
    ("qwen3_moe eagle 2", "qwen3_moe eagle 2,4 expert"),
    ("glm4_moe_lite mtp 2,4", "glm4_moe_lite mtp 2 expert"),
    ("deepseek_v3 mtp 2,4", "deepseek_v3 mtp 4 expert rule=block"),
    ("mimo mtp 2,4", "mimo mtp 2 replicated"),
    ("deepseek_v4 mtp 2,4", "deepseek_v4 mtp 2 expert"),
    ("llama4_text eagle_llama4 2,4", "llama4_text eagle_llama4 2 expert"),
    tuple(f"tiny eagle3 2 mapped rule={rule}" for rule in ("strict", "block", "synthetic")),
    tuple(f"tiny eagle3 2 everything rule={rule}" for rule in ("strict", "block")),
    tuple(f"tiny eagle3 2 mapped K={K}" for K in (1, 2, 4, 5)),
    ("tiny eagle3 2,4 compilation=step", "tiny eagle3 2 compilation=eager few tokens=3"),
    ("tiny eagle3 2 rounds=3", "tiny eagle3 2 replicated mapped", "tiny eagle 2"),
    ("tiny eagle3 2 blocks=20", "tiny eagle3 2 again streams", "tiny eagle3 8"),
    ("qwen2 eagle3 2,4", "qwen3 eagle3 2,4", "tiny ngram 2", "tiny none 4 everything"),
    ("qwen3_moe eagle3 8", "gpt_oss eagle3 8"),
    ("deepseek_v3 mtp 8", "deepseek_v4 mtp 8", "llama4_text eagle_llama4 8", "mimo mtp 8"),
    ("tiny eagle3 4 mapped words", "tiny eagle3 2 words rule=block", "tiny ngram 2 words"),
    tuple(f"tiny eagle3 4 mapped rule={rule}" for rule in ("strict", "block", "synthetic")),
    ("tiny eagle3 4 blocks=20", "tiny eagle3 4 again streams", "tiny eagle3 8 K=5 everything"),
    ("qwen2 eagle3 8", "qwen3 eagle3 8", "glm4_moe_lite mtp 8"),
    ("tiny dflash 2,4", "tiny dspark 2,4", "tiny dspark 2 mapped rule=block words"),
    (
        "tiny eagle3 2 mapped adaptive fallback K=2",
        "tiny eagle3 2 adaptive fallback rule=block blocks=20",
        "tiny eagle3 2 words verify=6",
    ),
    ("tiny ngram 2 adaptive", "llama draft_model 2 adaptive", "tiny eagle3 2 adaptive verify=4"),
    (
        "agreeing dspark 2 replicated adaptive verify=4 confidence=0.4 rule=block",
        "agreeing dspark 4 confidence=0.4",
        "agreeing dflash 4 replicated",
    ),
    ("tiny eagle3 4 adaptive fallback", "tiny eagle3 4 fp8 fallback=suffix"),
    ("gpt_oss eagle3 4 fp8 expert verify=6", "llama draft_model:gpt_oss 2 fp8 verify=6"),
    ("glm4_moe_lite mtp 4 verify=4 K=1", "qwen3_moe eagle 4 adaptive expert K=5"),
    ("mimo mtp 4 adaptive fallback", "tiny dspark 2 compilation=step adaptive fallback verify=4"),
    ("tiny eagle3 2 adaptive fallback replicas=2 again", "tiny suffix 2,4"),
    (
        "agreeing eagle3 2,4 adaptive K=5 rule=block everything",
        "agreeing eagle 4 adaptive rounds=2",
    ),
    ("tiny eagle3 8 blocks=20 again streams", "agreeing dflash 2 K=1", "agreeing dspark 2 K=5"),
    ("qwen3 eagle3 2,4 halves again", "mimo mtp 2 halves blocks=20", "tiny dspark 4 halves words"),
    ("tiny eagle3 2 mapped replicas=2", "tiny eagle3 2 replicas=4 again streams"),
]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(PROCESSES[0], marks=pytest.mark.once),
        pytest.param(PROCESSES[1]),
        *(slow(cases) for cases in PROCESSES[2:]),
    ],
    ids=lambda cases: cases[0].replace(" ", "-"),
)
def test_tokens_and_counts_are_those_of_one_device(cases: tuple[str, ...]) -> None:
    module = "tests.parallel.engines_on_devices"
    lines = run_on_devices(8, module, *cases, timeout=3000).splitlines()  # eager is slow
    expected = [f"{case} {size} equal" for case in cases for size in case.split()[2].split(",")]
    assert lines == expected
