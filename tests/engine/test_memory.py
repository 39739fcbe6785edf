"""Sizes that exceed the whole memory are refused before anything is allocated."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec import LLM, ConfigError, EngineConfig
from jaxspec.config import SamplingFeatures
from jaxspec.decode.slots import without_caches
from jaxspec.engine import memory
from jaxspec.engine.runner import ModelRunner
from jaxspec.sampling.processors import PROCESSORS
from jaxspec.sampling.processors.processor import Vocabulary
from jaxspec.sampling.rows import StateLayout, most_slot_bytes, sampling_rows
from tests.support.tiny import tiny_model
from tests.support.toys import ToyTarget

V = 24
pytestmark = pytest.mark.usefixtures("toy_families")


def engine(**config: Any) -> LLM:
    settings: dict[str, Any] = {"max_model_len": 64, "block_size": 16} | config
    target = ToyTarget(V), {"table": jnp.zeros((V, V), jnp.float32)}
    return LLM(target, eos_token_ids=(), config=EngineConfig(**settings))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_gpu_blocks_override": 2 * 10**9}, r"GB for 2000000000 KV-cache blocks and "),
        ({"batch_buckets": (10**9,)}, r"GB for a batch of 1000000000; lower num_gpu_blocks"),
        ({"max_num_seqs": 10**9}, r"GB for a batch of 1073741824; lower num_gpu_blocks_override"),
    ],
)
def test_absurd_sizes_are_refused_at_once(
    config: Mapping[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "whole_memory", lambda: (8 << 30, "the host"))
    llm = engine(**config)
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    for generates in (lambda: llm.generate([[1]]), llm.warmup):
        with pytest.raises(ConfigError, match="memory: expected at most the 8.6 GB of the host"):
            generates()
        with pytest.raises(ConfigError, match=message):
            generates()
    assert time.perf_counter() - begin < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


def test_the_check_counts_what_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots, block tables, logits and the host's books, to the byte: one byte less is refused."""
    llm = engine(num_gpu_blocks_override=6, batch_buckets=(8,))
    runner: ModelRunner = llm.runner
    rows = sum(a.nbytes for a in jax.tree.leaves(without_caches(runner.resident.state)))
    needed = rows + 8 * 4 * (64 // 16) + 8 * 4 * V + 6 * memory.BOOK_BYTES
    monkeypatch.setattr(memory, "whole_memory", lambda: (needed, "the host"))
    runner.resident.check_room()
    monkeypatch.setattr(memory, "whole_memory", lambda: (needed - 1, "the host"))
    with pytest.raises(ConfigError, match="lower num_gpu_blocks_override \\(6\\), batch_buckets"):
        runner.resident.check_room()


def test_room_is_kept_for_slots_with_every_sampling_parameter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = engine(batch_buckets=(8,), max_num_seqs=8)
    features = SamplingFeatures(processors=frozenset(p.name for p in PROCESSORS))
    layout = StateLayout(Vocabulary(V)).full(features)
    held = sum(x.nbytes for x in jax.tree.leaves(sampling_rows(layout, [], batch=8)))
    working = llm.runner.memory._working_bytes()
    monkeypatch.setattr(memory, "most_slot_bytes", lambda *_: 0)
    assert working - llm.runner.memory._working_bytes() == held
    # Of each token a bias, a count and whether the prompt has it.
    whole, half = (most_slot_bytes(Vocabulary(V), pieces) for pieces in (1, 2))
    assert whole - half == V // 2 * (4 + 4 + 1)


def test_replicas_have_the_pools_of_the_one_with_the_least_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("eagle3")
    config = EngineConfig(max_model_len=64, block_size=16, max_num_seqs=8)
    target = model.target, model.params["target"]
    sizes = [LLM(target, eos_token_ids=(), config=config).runner.memory for _ in range(3)]
    for each, blocks in zip(sizes, (9, 7, 8), strict=True):
        free = blocks * sum(each.block_bytes)
        monkeypatch.setattr(each, "_free_bytes", lambda free=free: (free, "a test"))
    memory.CacheMemory.size_alike(sizes)
    assert sizes[2].decide() == (7,)
    assert [each.num_blocks for each in sizes] == [(7,)] * 3


def test_the_whole_memory_is_that_of_the_container(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "CGROUP_LIMIT", limit)
    of_host = memory.whole_memory()
    assert of_host[1] == "the host" and of_host[0] > 1 << 28
    limit.write_text("max\n")
    assert memory.whole_memory() == of_host
    limit.write_text("1000\n")
    assert memory.whole_memory() == (1000, "the host")


def test_the_batch_is_looked_at_before_pools_are_sized_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Windows are sized for fewer and fewer of its requests, one after the other."""
    llm = engine(max_num_seqs=10**9)
    monkeypatch.setattr(memory.CacheMemory, "decide", lambda self: pytest.fail("sized"))
    with pytest.raises(ConfigError, match="GB for a batch of 1073741824; lower num_gpu"):
        llm.runner.resident.check_room()
