"""The bytes of weights that a pass reads, and which rounds are CUDA graphs by them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import pytest
from jax.sharding import AbstractMesh
from packaging.version import Version

from jaxspec import models
from jaxspec.config import EngineConfig, Ops
from jaxspec.engine import round_configs
from jaxspec.engine.pass_bytes import PassBytes
from jaxspec.engine.round_configs import GREEDY, RoundConfigs
from jaxspec.layers.moe import MoEConfig, moe_of
from jaxspec.layers.params import Params, init_random
from jaxspec.parallel.layout import ONE_PLACE, Placement, bytes_on_device
from tests.support.families import target_config

MIB = 1 << 20


def weights(cfg: Any) -> Params:
    return init_random(models.family(cfg).param_specs(cfg), jax.random.key(0), jnp.float32)


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_counts_where_it_is_the_head_too(tied: bool) -> None:
    cfg = target_config("llama", tie_word_embeddings=tied)
    params = weights(cfg)
    looked_up = 0 if tied else 4 * cfg.vocab_size * cfg.hidden_size
    found = PassBytes.of(cfg, params)
    assert found.total == bytes_on_device(params) - looked_up
    assert found.a_layer(1) == found.a_layer(64) == found.total / cfg.num_layers


@pytest.mark.parametrize("model_type", sorted(models.FAMILIES))
def test_experts_of_every_family_are_told_apart(model_type: str) -> None:
    cfg = target_config(model_type)
    found = PassBytes.of(cfg, weights(cfg))
    assert found.moe is moe_of(cfg)
    assert (found.experts > 0) == (found.moe is not None)
    assert found.always > 0


def test_a_pass_reads_the_experts_that_its_rows_choose() -> None:
    read = PassBytes(2 * MIB, 64 * MIB, MoEConfig(8, 2, 16), num_layers=2)
    assert read.a_layer(1) == MIB + 8 * MIB
    assert read.a_layer(2) == MIB + 32 * MIB * (1 - 0.75**2)
    assert read.a_layer(10_000) == read.total / 2


def configs(read: PassBytes, placement: Placement = ONE_PLACE) -> RoundConfigs:
    cfg = target_config("llama")
    return RoundConfigs(
        cfg, None, None, EngineConfig(), ops=Ops(), placement=placement, pass_bytes=read
    )


def graphs(read: PassBytes, *rows: int) -> list[bool]:
    return [configs(read).get(GREEDY, batch=n).cuda_graphs for n in rows]


def dense(mib_a_layer: int, num_layers: int = 32) -> PassBytes:
    return PassBytes(mib_a_layer * num_layers * MIB, 0, None, num_layers)


def test_all_rounds_are_graphs_where_graphs_launch_kernels_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(round_configs, "GRAPHS_LAUNCH_EARLY", True)
    assert graphs(dense(447), 1, 16, 64, 65) == [True] * 4


def test_graphs_launch_kernels_early_from_jaxlib_0_12() -> None:
    is_new = Version(jaxlib.__version__) >= Version("0.12")
    assert is_new == round_configs.GRAPHS_LAUNCH_EARLY


@pytest.mark.parametrize("early", [False, True])
def test_prefill_is_a_graph_unless_layers_are_large(
    early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_configs, "GRAPHS_LAUNCH_EARLY", early)
    two = Placement(AbstractMesh((2,), ("model",)))
    found = [configs(dense(size)).for_prefill(GREEDY) for size in (127, 239, 447)]
    found.append(configs(dense(447), two).for_prefill(GREEDY))
    assert [cfg.cuda_graphs for cfg in found] == [True, True, False, True]


def test_other_graphs_are_chosen_by_the_bytes_of_a_layer_and_by_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(round_configs, "GRAPHS_LAUNCH_EARLY", False)
    assert graphs(dense(447), 1, 16, 64, 65) == [False, False, False, True]  # 8B, bfloat16
    assert graphs(dense(239), 1, 16, 17, 64, 65) == [True, True, False, False, True]  # fp8
    assert graphs(dense(256), 1, 65) == [False, True]
    assert graphs(dense(127), 1, 17, 64, 65) == [True] * 4  # below 4 GiB
    # gpt-oss-20b in MXFP4: one row reads 147 MiB a layer, four read 264.
    experts = PassBytes(24 * 96 * MIB, 24 * 406 * MIB, MoEConfig(32, 4, 2880), num_layers=24)
    assert [round(experts.a_layer(n) / MIB) for n in (1, 4)] == [147, 264]
    assert graphs(experts, 1, 4, 64, 65) == [True, False, False, True]
