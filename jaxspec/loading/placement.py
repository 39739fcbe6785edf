"""The devices of an engine, and weights that go from one device to all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxspec import models
from jaxspec.config import ConfigError, DraftConfig, EngineConfig, SpeculativeConfig, TargetConfig
from jaxspec.drafts import families
from jaxspec.layers.params import Params, ParamSpec, Weight, is_spec, vector
from jaxspec.loading.weights import check_cuts
from jaxspec.parallel.layout import ONE_PLACE, Layout, Placement
from jaxspec.parallel.mesh import Device, make_mesh

# Arrays that a draft may share with its target, and their logical axes.
SHARED_AXES = {"embed_tokens": ("vocab", "embed"), "lm_head": ("embed", "vocab")}


def choose_placement(
    config: EngineConfig, speculative: SpeculativeConfig | None = None
) -> Placement:
    """Return the placement of the first replica; see choose_placements."""
    return choose_placements(config, speculative)[0]


def choose_placements(
    config: EngineConfig, speculative: SpeculativeConfig | None = None
) -> tuple[Placement, ...]:
    """Return the placement of each replica's models, on the first devices of this process.

    ConfigError if there are too few devices, or the draft's number of them does not fit.
    """
    size, replicas = config.tensor_parallel_size, config.data_parallel_size
    of_draft = speculative.draft_tensor_parallel_size if speculative else None
    if of_draft not in (None, 1, size):
        raise ConfigError(
            f"draft_tensor_parallel_size: expected 1 or tensor_parallel_size {size}, got {of_draft}"
        )
    if size == replicas == 1:
        return (ONE_PLACE,)
    processes = jax.process_count()
    if processes > 1:
        devices = _of_processes(size, replicas, processes)
        mesh = make_mesh(devices)
        experts = config.enable_expert_parallel
        return (Placement(mesh, experts, replicates_draft=of_draft == 1),)
    devices = jax.devices()
    if size > len(devices):
        raise ConfigError(
            f"tensor_parallel_size: expected at most the {len(devices)} devices of this machine, "
            f"got {size}"
        )
    if size * replicas > len(devices):
        raise ConfigError(
            f"data_parallel_size: expected at most {len(devices) // size} replicas of {size} on "
            f"the {len(devices)} devices of this machine, got {replicas}"
        )
    return tuple(
        Placement(
            make_mesh(devices[first : first + size]),
            config.enable_expert_parallel,
            replicates_draft=of_draft == 1,
        )
        for first in range(0, size * replicas, size)
    )


def _of_processes(size: int, replicas: int, processes: int) -> list[Device]:
    """Return the first devices of each process, in the order of the processes."""
    of_each = [[d for d in jax.devices() if d.process_index == i] for i in range(processes)]
    most = min(map(len, of_each))
    if replicas > 1:
        raise ConfigError(
            f"data_parallel_size: expected 1 with {processes} processes, got {replicas}"
        )
    if size % processes or size > most * processes:
        raise ConfigError(
            f"tensor_parallel_size: expected a multiple of the {processes} processes, at most "
            f"{most * processes}, as each has {most} devices or more, got {size}"
        )
    return [device for devices in of_each for device in devices[: size // processes]]


def copy_weights(params: Params, placement: Placement) -> Params:
    """Return a copy of weights, placed for one replica, on the devices of another one.

    Each piece goes from device to device. An array that occurs twice is copied once.
    """
    mesh, copies = placement.mesh, dict[int, jax.Array]()
    assert isinstance(mesh, Mesh)

    def copied(array: jax.Array) -> jax.Array:
        if id(array) not in copies:
            assert isinstance(array.sharding, NamedSharding)
            theirs: Mesh = array.sharding.mesh  # type: ignore[assignment]
            to = dict(zip(theirs.devices.flat, mesh.devices.flat, strict=True))
            pieces = [jax.device_put(p.data, to[p.device]) for p in array.addressable_shards]
            sharding = NamedSharding(mesh, array.sharding.spec)
            copies[id(array)] = jax.make_array_from_single_device_arrays(
                array.shape, sharding, pieces
            )
        return copies[id(array)]

    return jax.tree.map(copied, params)


def place_models(
    placement: Placement,
    target: tuple[TargetConfig, Params],
    draft: tuple[DraftConfig, Params] | None,
) -> tuple[Params, Params]:
    """Return the params of target and draft on the devices of a placement; {} without a draft.

    Params that are there already stay; others must be on one device.
    """
    target_config, target_params = target
    draft_config, draft_params = draft or (None, {})
    if placement.mesh is None:
        return target_params, draft_params
    specs = models.family(target_config).param_specs(target_config)
    layout = placement.target(target_config)
    placed = target_params
    if target_params and not _is_placed(specs, target_params, layout):
        placed = _place(specs, target_params, layout, "the target")
    if draft_config is None or not draft_params:
        return placed, draft_params
    layout = placement.draft(draft_config)
    layered: Any = draft_config
    own = families.family(layered).param_specs(layered)
    if placed is target_params and _is_placed(own, {n: draft_params[n] for n in own}, layout):
        return placed, draft_params
    bound: dict[str, Any] = {}
    for name, value in draft_params.items():
        if name in own:
            bound[name] = _place(own[name], value, layout, f"the {draft_config.method} draft")
        elif name in SHARED_AXES:
            bound[name] = _shared(name, value, target_params, placed, layout)
        else:  # a vocabulary map
            bound[name] = layout.place(value, vector(name, len(value)))
    return placed, bound


def as_on_one_device(
    placement: Placement, target: TargetConfig, draft: DraftConfig, params: Params
) -> Params:
    """Return the shapes that placed params have on one device, where no piece occurs twice.

    params: {"target": ..., "draft": ...}
    """
    if placement.mesh is None:
        return params

    def whole(specs: Params, placed: Params) -> Params:
        own = {name: placed[name] for name in specs}
        return placed | jax.tree.map(
            lambda spec, array: jax.ShapeDtypeStruct(spec.shape, array.dtype),
            specs,
            own,
            is_leaf=is_spec,
        )

    found = {"target": whole(models.family(target).param_specs(target), params["target"])}
    layered: Any = draft
    if not params["draft"]:
        return found | {"draft": {}}
    # Embedding, head and vocabulary maps are in no table, and no piece of them occurs twice.
    return found | {"draft": whole(families.family(layered).param_specs(layered), params["draft"])}


def shared_axes(name: str, value: Any) -> tuple[str, ...]:
    """Return the logical axes of an array of SHARED_AXES; a tied head is a transposed Weight."""
    axes = SHARED_AXES[name]
    return axes[::-1] if isinstance(value, Weight) and value.transposed else axes


def _shared(
    name: str, value: Any, target: Mapping[str, Any], placed: Mapping[str, Any], layout: Layout
) -> Any:
    """Return the target's placed array if the draft's is the target's, else a placed copy."""
    array = value.values if isinstance(value, Weight) else value
    for key in SHARED_AXES:
        theirs = target.get(key)
        if array is (theirs.values if isinstance(theirs, Weight) else theirs):
            other = placed[key]
            other = other.values if isinstance(other, Weight) else other
            return Weight(other, value.transposed) if isinstance(value, Weight) else other
    copied = _place(
        ParamSpec(name, array.shape, shared_axes(name, value)), array, layout, "the draft"
    )
    return Weight(copied, value.transposed) if isinstance(value, Weight) else copied


def _place(specs: Params, params: Params, layout: Layout, source: str) -> Params:
    check_cuts(specs, layout, source)
    return jax.tree.map(
        lambda spec, array: layout.place(array, spec), specs, params, is_leaf=is_spec
    )


def _is_placed(specs: Params, params: Params, layout: Layout) -> bool:
    """Return whether each array of a table lies on the devices as the layout has it."""

    def has_layout(spec: ParamSpec, array: Any) -> bool:
        sharding = getattr(array, "sharding", None)
        return (
            isinstance(sharding, NamedSharding)
            and sharding.mesh == layout.mesh
            and sharding.spec == layout.partition(spec.axes)
            and array.shape == layout.shape_of(spec)
        )

    return all(jax.tree.leaves(jax.tree.map(has_layout, specs, params, is_leaf=is_spec)))
