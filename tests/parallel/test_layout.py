"""Which piece of an array a device holds, and the config that describes the pieces."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from jaxspec import models
from jaxspec.config import (
    REFERENCE_OPS,
    AttentionConfig,
    ConfigError,
    EngineConfig,
    RoundConfig,
    SpeculativeConfig,
)
from jaxspec.config.quantization import Fp8Form, Quantization
from jaxspec.layers.params import ParamSpec, is_spec, joined, matrix
from jaxspec.loading.placement import _is_placed, as_on_one_device, choose_placement
from jaxspec.loading.weights import check_cuts
from jaxspec.parallel.axes import ONCE
from jaxspec.parallel.group import Group
from jaxspec.parallel.layout import ONE_DEVICE_LAYOUT, Layout, Placement
from jaxspec.tools.benchmark.dimensions import MODELS
from jaxspec.tools.benchmark.floor import round_floor
from tests.support.families import family_model, target_config


def mesh(size: int) -> Any:
    """A mesh without devices: a layout reads its size alone."""
    return AbstractMesh((size,), ("model",))


def order(layout: Layout, array: np.ndarray, spec: ParamSpec) -> np.ndarray:
    """The array as the devices hold it, one piece after another."""
    for dim, axis in enumerate(spec.axes):
        if layout.is_cut(axis):
            array = layout.in_device_order(array, dim, spec.parts_along(dim))
    return array


def attention(heads: int, kv_heads: int) -> AttentionConfig:
    return AttentionConfig(num_heads=heads, num_kv_heads=kv_heads, head_dim=2)


def qkv(cfg: AttentionConfig) -> ParamSpec:
    sizes = [(n * cfg.head_dim, axis) for n, axis in (
        (cfg.num_heads, "heads"), (cfg.num_kv_heads, "kv_heads"), (cfg.num_kv_heads, "kv_heads"),
    )]  # fmt: skip
    return joined("qkv", [matrix(f"part{i}", 1, n, ("embed", a)) for i, (n, a) in enumerate(sizes)])


def test_the_default_device_leaves_arrays_uncommitted() -> None:
    """A committed argument would make jit compile each program twice."""
    spec = matrix("w", 2, 4, ("heads", None))
    array = ONE_DEVICE_LAYOUT.place(np.ones((4, 2), np.float32), spec)
    step = jax.jit(lambda w, x: w @ x)
    x = jax.jit(lambda: jax.numpy.ones((2, 2)))()
    for _ in range(3):
        x = step(array, x)[:2]
    assert step._cache_size() == 1  # type: ignore[attr-defined]
    assert (ONE_DEVICE_LAYOUT.size, ONE_DEVICE_LAYOUT.is_cut("heads")) == (1, False)


def test_each_device_holds_its_pieces_of_all_parts() -> None:
    cfg = attention(4, 2)
    layout = Layout.of(cfg, mesh(2))
    made = order(layout, np.arange(16)[None], qkv(cfg))
    # q is 0..7, k 8..11, v 12..15
    assert made[0].tolist() == [0, 1, 2, 3, 8, 9, 12, 13, 4, 5, 6, 7, 10, 11, 14, 15]
    assert layout.partition(("embed", "heads")) == PartitionSpec(None, "model")
    assert layout.on_device(cfg) == attention(2, 1)


def test_devices_beyond_the_kv_heads_hold_copies() -> None:
    cfg = attention(4, 2)
    layout = Layout.of(cfg, mesh(4))
    made = order(layout, np.arange(16)[None], qkv(cfg))
    assert made.reshape(4, 6).tolist() == [
        [0, 1, 8, 9, 12, 13],
        [2, 3, 8, 9, 12, 13],
        [4, 5, 10, 11, 14, 15],
        [6, 7, 10, 11, 14, 15],
    ]
    assert layout.on_device(cfg) == attention(1, 1)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 2), (6, 3, 2), (8, 8, 16)])
def test_heads_that_do_not_divide_stay_whole(heads: int, kv_heads: int, size: int) -> None:
    cfg = attention(heads, kv_heads)
    layout = Layout.of(cfg, mesh(size))
    assert not layout.is_cut("heads") and not layout.is_cut("kv_heads")
    assert layout.is_cut("head_out")
    assert layout.on_device(cfg) == cfg


@pytest.mark.parametrize(("heads", "size", "padded"), [(9, 2, 640), (9, 4, 768), (12, 2, None)])
def test_outputs_of_whole_heads_become_pieces_that_kernels_take(
    heads: int, size: int, padded: int | None
) -> None:
    cfg = AttentionConfig(heads, 3, 64)  # SmolLM2 has nine
    layout = Layout.of(cfg, mesh(size))
    width = heads * 64
    spec = matrix("o", width, 2, ("head_out", "embed"))
    made = order(layout, np.arange(width)[:, None] * np.ones((1, 2), int), spec)
    assert layout.piece_of(spec) == ((padded or width) // size, 2)
    assert layout.shape_of(spec) == made.shape == (padded or width, 2)
    np.testing.assert_array_equal(made[:width, 0], np.arange(width))
    assert not made[width:].any()


def test_outputs_of_cut_heads_have_no_zeros() -> None:
    """Six heads of 32 are cut into three a device, whose 96 outputs are its own."""
    layout = Layout.of(AttentionConfig(6, 2, 32), mesh(2))
    assert layout.is_cut("heads") and layout.padded == ()


def test_an_mlp_becomes_pieces_that_kernels_take() -> None:
    """11,008 columns, on eight devices 1,376 each: they become 1,408."""
    cfg = replace(MODELS["mimo-7b"].target, intermediate_size=11008)  # type: ignore[type-var]
    layout = Layout.of(cfg, mesh(8))
    assert layout.on_device(cfg).intermediate_size == 1408  # type: ignore[attr-defined]
    assert Layout.of(cfg, mesh(4)).padded == ()


@pytest.mark.parametrize(("width", "size"), [(6, 3), (6, 4), (5, 3), (3, 4)])
def test_a_device_takes_its_piece_of_whole_outputs(width: int, size: int) -> None:
    group, whole = Group("model", 2), jnp.arange(1.0, width + 1)
    # A mapped axis stands for the devices.
    own = jax.vmap(lambda _: group.own_piece(whole, size), axis_name="model")(jnp.zeros(2))
    found = np.asarray(own).ravel()
    np.testing.assert_array_equal(found[:width], np.arange(1, width + 1))
    assert found.shape == (2 * size,) and not found[width:].any()


def test_kv_heads_of_several_numbers_that_need_other_cuts_stay_whole() -> None:
    @dataclass(frozen=True)
    class Two:
        one: AttentionConfig
        other: AttentionConfig

    assert not Layout.of(Two(attention(8, 8), attention(8, 2)), mesh(4)).is_cut("heads")
    assert Layout.of(Two(attention(8, 8), attention(8, 4)), mesh(4)).is_cut("heads")


def test_arrays_of_another_layout_are_not_taken_for_placed() -> None:
    spec = matrix("w", 2, 4, ("embed", "mlp"))
    cut, whole = Layout(mesh(2), (("mlp", 2),)), Layout(mesh(2))
    array = jax.ShapeDtypeStruct((2, 4), np.float32, sharding=cut.sharding(spec.axes))
    assert _is_placed(spec, array, cut) and not _is_placed(spec, array, whole)
    assert not _is_placed(spec, jax.numpy.ones((2, 4)), cut)


def test_gate_and_up_are_cut_one_by_one() -> None:
    layout = Layout(mesh(2), (("expert_mlp", 2),))
    spec = ParamSpec("gate_up", (1, 1, 8), (None, None, "expert_mlp"), side_by_side=2)
    assert order(layout, np.arange(8)[None, None], spec).ravel().tolist() == [
        0,
        1,
        4,
        5,
        2,
        3,
        6,
        7,
    ]


def test_one_device_adds_a_bias() -> None:
    spec = ParamSpec("bias", (1, 2), ("experts", ONCE))
    made = order(Layout(mesh(2), ((ONCE, 2),)), np.array([[3, 4]]), spec)
    assert made.tolist() == [[3, 4, 0, 0]]


@pytest.mark.parametrize("whole_experts", [False, True])
def test_copies_of_pieces_count_once(whole_experts: bool) -> None:
    """Copies of KV heads and zeros of biases: drafts that adapt go by the bytes of one device."""
    model = family_model("gpt_oss", "eagle3")
    placement = Placement(mesh(4), expert_parallel=whole_experts)
    layout = placement.target(model.target)
    specs = models.family(model.target).param_specs(model.target)

    def placed(spec: ParamSpec) -> Any:
        return jax.ShapeDtypeStruct(layout.shape_of(spec), np.float32)

    target = jax.tree.map(placed, specs, is_leaf=is_spec)
    found = as_on_one_device(
        placement, model.target, model.draft, {"target": target, "draft": model.params["draft"]}
    )
    sizes, own, of_devices = (
        [x.shape for x in jax.tree.leaves(tree)]
        for tree in (found["target"], model.params["target"], target)
    )
    assert sizes == own != of_devices


def test_experts_are_cut_by_width_or_given_whole() -> None:
    cfg = target_config("gpt_oss")
    by_width, whole = (
        Layout.of(cfg, mesh(2), expert_parallel=parallel) for parallel in (False, True)
    )
    assert by_width.on_device(cfg).moe.intermediate_size == cfg.moe.intermediate_size // 2
    assert whole.on_device(cfg).moe == cfg.moe
    for layout, axis in ((by_width, "expert_mlp"), (whole, "experts")):
        specs = models.family(cfg).param_specs(cfg)["layers"][0]["experts"]
        assert layout.is_cut(axis) and axis in specs["gate_up"].values.axes


def gpt_oss_20b(**changes: Any) -> Any:
    cfg: Any = MODELS["gpt-oss-20b-mxfp4"].target
    return replace(cfg, moe=replace(cfg.moe, **changes))


@pytest.mark.parametrize(
    ("size", "devices", "piece"),
    [
        (2880, 2, 1472),
        (2880, 4, 768),
        (2880, 8, 384),
        (2880, 16, 192),
        (768, 8, 128),
        (768, 4, 192),  # 64 divides it
    ],
)
def test_pieces_of_experts_are_as_wide_as_the_kernel_takes(
    size: int, devices: int, piece: int
) -> None:
    cfg = gpt_oss_20b(intermediate_size=size)
    layout = Layout.of(cfg, mesh(devices))
    assert layout.on_device(cfg).moe == replace(cfg.moe, intermediate_size=piece)
    check_cuts(models.family(cfg).param_specs(cfg), layout, "here")
    whole = Layout.of(cfg, mesh(devices), expert_parallel=True)
    assert whole.on_device(cfg).moe.intermediate_size == size


def test_zeros_follow_the_width_of_experts() -> None:
    cfg = gpt_oss_20b(num_experts=1, intermediate_size=192)  # pieces of 128, of 96 without zeros
    layout = Layout.of(cfg, mesh(2))
    experts = models.family(cfg).param_specs(cfg)["layers"][0]["experts"]
    bias = order(layout, 1 + np.arange(384)[None], experts["gate_up_bias"])[0]
    gate, up, zeros = 1 + np.arange(192), 193 + np.arange(192), np.zeros(64)
    pieces = [gate[:128], up[:128], gate[128:], zeros, up[128:], zeros]
    assert bias.tolist() == np.concatenate(pieces).tolist()
    # Units of 16 columns, 32 depths deep.
    for spec, shape, unit in ((experts["gate_up"].units, (1, 24, 90, 68), 16),
                              (experts["down"].units, (1, 180, 6, 68), 32)):  # fmt: skip
        assert spec.shape == shape
        dim = spec.axes.index("expert_mlp")
        units = np.arange(1, 1 + shape[dim]).reshape([-1 if i == dim else 1 for i in range(4)])
        made = order(layout, units, spec).ravel()
        parts = pieces if dim == 1 else [gate[:128], gate[128:], zeros]
        assert made.tolist() == [-(-int(c) // unit) for part in parts for c in part[::unit]]
        assert layout.piece_of(spec)[dim] * 2 == made.size == layout.shape_of(spec)[dim]


def test_floors_count_no_zeros() -> None:
    """Pieces of experts have the bytes of half of the experts; zeros would be 1 % of all."""
    cfg = RoundConfig.for_models(
        gpt_oss_20b(), ops=REFERENCE_OPS, block_size=64, max_model_len=2048
    )
    pieces, whole = (
        round_floor(
            replace(cfg, placement=Placement(mesh(2), expert_parallel=whole)),
            256,
            400,
            dtype="bfloat16",
            cache_dtype="bfloat16",
        ).target_weights
        for whole in (False, True)
    )
    assert abs(pieces / whole - 1) < 0.001  # a bias is on each device


def test_experts_that_no_kernel_takes_have_no_zeros() -> None:
    assert Layout.of(gpt_oss_20b(intermediate_size=96), mesh(2)).padded == ()


def test_experts_in_fp8_have_no_zeros() -> None:
    """Nor those of a draft that holds such a target."""
    cfg: Any = target_config("qwen3_moe")
    wide = replace(cfg, moe=replace(cfg.moe, intermediate_size=192))
    fp8 = Quantization(((".*", Fp8Form("channel", "token", "floats")),))
    assert Layout.of(wide, mesh(2)).padded == (("expert_mlp", 192, 256),)
    coded = replace(wide, quantization=fp8)
    draft = replace(family_model("llama", "draft_model:qwen3_moe").draft, model=coded)
    for each in (coded, draft):
        assert Layout.of(each, mesh(2)).padded == ()


def test_a_replicated_draft_has_whole_layers() -> None:
    layout = Placement(mesh(2), replicates_draft=True).draft(attention(4, 2))
    assert layout.on_device(attention(4, 2)) == attention(4, 2)
    assert layout.partition(("vocab", "embed")) == PartitionSpec("model", None)


def test_a_width_that_does_not_divide_is_one_sentence() -> None:
    cfg = target_config("mimo")
    specs = models.family(cfg).param_specs(cfg)
    with pytest.raises(ConfigError, match="tensor_parallel_size: expected a divisor of 48, the "):
        check_cuts(specs, Layout.of(cfg, mesh(5)), "here")


def test_sizes_that_this_machine_lacks_are_one_sentence() -> None:
    with pytest.raises(ConfigError, match="at most the 1 devices of this machine, got 64"):
        choose_placement(EngineConfig(tensor_parallel_size=64))
    with pytest.raises(ConfigError, match="expected 1 or tensor_parallel_size 1, got 2"):
        choose_placement(EngineConfig(), SpeculativeConfig(draft_tensor_parallel_size=2))
    for bad in (0, True, "2", 1.5):
        with pytest.raises(ConfigError, match="tensor_parallel_size: expected an integer"):
            EngineConfig(tensor_parallel_size=bad)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="draft_tensor_parallel_size: expected an integer"):
            SpeculativeConfig(draft_tensor_parallel_size=bad)  # type: ignore[arg-type]
