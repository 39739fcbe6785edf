"""A program on several devices: jax.shard_map around a function of a round.

Each device runs the function with its pieces of weights, caches and rows of logits. Everything else
is the same on all devices, and so are the results.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec import models
from jaxspec.cache.arrays import (
    CompressedCache,
    FullCache,
    LatentCache,
    TokenCache,
    cache_specs,
)
from jaxspec.config import AttentionKind, RoundConfig
from jaxspec.drafts import families
from jaxspec.drafts.drafter import Proposal
from jaxspec.layers.params import Params, is_spec
from jaxspec.loading.placement import SHARED_AXES, shared_axes
from jaxspec.parallel.layout import Layout
from jaxspec.parallel.mesh import MODEL
from jaxspec.sampling.logits import state_axes
from jaxspec.sampling.processors.processor import is_axes
from jaxspec.sampling.state import SamplingState

Specs = Any  # a pytree of PartitionSpecs, or one for all arrays of a subtree
EVERYWHERE = PartitionSpec()
LAYER_CACHES = (FullCache, LatentCache, CompressedCache, TokenCache)
DRAFT_LOGITS = PartitionSpec(None, None, MODEL)


def spread(
    function: Callable[..., Any],
    static: int,
    results: Callable[[tuple[Specs, ...]], Specs] | None,
) -> Callable[..., Any]:
    """Return function(cfg, *args) as a function of arrays on the devices of cfg.placement.

    It also takes `addresses`, where the all-reduce kernel runs (see Group).

    static:  number of leading arguments that are no arrays, cfg included
    results: the partition of the results, given that of the array arguments; None reads it off the
             results' structure, which takes a second trace
    """

    @wraps(function)
    def run(cfg: RoundConfig, *args: Any, addresses: jax.Array | None = None) -> Any:
        if cfg.placement.mesh is None:
            return function(cfg, *args)
        fixed, arrays = args[: static - 1], args[static - 1 :]
        specs = tuple(partition(cfg, value) for value in arrays)

        def own(addresses: jax.Array | None, *arrays: Any) -> Any:
            return function(cfg.on_device(addresses), *fixed, *arrays)

        def mapped(out: Specs) -> Callable[..., Any]:
            return jax.shard_map(
                own,
                mesh=cfg.placement.mesh,
                in_specs=(EVERYWHERE, *specs),
                out_specs=out,
                check_vma=False,
            )

        if results is not None:
            out = results(specs)
        else:
            out = partition(cfg, jax.eval_shape(mapped(EVERYWHERE), addresses, *arrays))
        return mapped(out)(addresses, *arrays)

    return run


def partition(cfg: RoundConfig, tree: Any) -> Specs:
    """Return how the devices share each array of an argument or a result of a round's functions.

    tree: params (the only argument that is a dict: {"target": ..., "draft": ...}, or the draft's
        alone), or anything that holds caches, draft logits and sampling parameters. A field
        `target_caches` holds the target's caches, a field `caches` the draft's; `text` is whole.
    """
    if isinstance(tree, dict):
        both = "target" in tree
        return _of_params(cfg, tree) if both else _of_params(cfg, {"draft": tree})["draft"]
    target = _of_caches(cfg.placement.target(cfg.target), cfg.target, cfg)
    draft = ()
    if cfg.draft is not None:
        draft = _of_caches(cfg.placement.draft(cfg.draft), cfg.draft, cfg)

    def of_node(path: tuple[Any, ...], node: Any) -> Specs:
        if isinstance(node, LAYER_CACHES):
            names = [getattr(key, "name", getattr(key, "key", None)) for key in path]
            if "text" in names:
                return jax.tree.map(lambda _: EVERYWHERE, node)
            assert "target_caches" in names or "caches" in names, names
            return (target if "target_caches" in names else draft)[path[-1].idx]
        if isinstance(node, Proposal):
            return Proposal(EVERYWHERE, None if node.draft_logits is None else DRAFT_LOGITS)  # type: ignore[arg-type]
        if isinstance(node, SamplingState):
            layout = cfg.placement.target(cfg.target)
            return jax.tree.map(layout.partition, state_axes(node), is_leaf=is_axes)
        return EVERYWHERE

    return jax.tree_util.tree_map_with_path(of_node, tree, is_leaf=_is_node)


def shardings(cfg: RoundConfig, tree: Any) -> Any:
    """Return the placement of each array of a tree on the devices of cfg."""
    mesh = cfg.placement.mesh
    assert mesh is not None
    specs = partition(cfg, tree)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_partition)


def everywhere(cfg: RoundConfig) -> NamedSharding | None:
    """Return the placement of an array that each device of cfg holds whole; None without a mesh."""
    mesh = cfg.placement.mesh
    return None if mesh is None else NamedSharding(mesh, EVERYWHERE)


def _of_params(cfg: RoundConfig, params: Params) -> Params:
    found: dict[str, Any] = {}
    if "target" in params:
        layout = cfg.placement.target(cfg.target)
        found["target"] = _of_table(models.family(cfg.target).param_specs(cfg.target), layout)
    if "draft" not in params or not params["draft"] or cfg.draft is None:
        return {**dict.fromkeys(params, EVERYWHERE), **found}
    draft: Any = cfg.draft
    layout = cfg.placement.draft(draft)
    own = _of_table(families.family(draft).param_specs(draft), layout)

    def of(name: str, value: Any) -> Any:
        if name in own:
            return own[name]
        if name not in SHARED_AXES:
            return EVERYWHERE
        return jax.tree.map(lambda _: layout.partition(shared_axes(name, value)), value)

    found["draft"] = {name: of(name, value) for name, value in params["draft"].items()}
    return found


def _of_table(specs: Params, layout: Layout) -> Params:
    return jax.tree.map(lambda spec: layout.partition(spec.axes), specs, is_leaf=is_spec)


def _of_caches(layout: Layout, model: Any, cfg: RoundConfig) -> Specs:
    attention: AttentionKind = model.attention
    tables = cache_specs(attention, [1] * model.num_layers, cfg.block_size, "float32")
    return jax.tree.map(lambda array: layout.partition(array.axes), tables)


def _is_node(x: Any) -> bool:
    return isinstance(x, (*LAYER_CACHES, Proposal, SamplingState))


def _is_partition(x: Any) -> bool:
    return isinstance(x, PartitionSpec)
