"""Joined arrays of a parameter table: their parts, one by one, on any number of devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import drafts, models
from jaxspec.layers.params import (
    JoinedSpec,
    ParamSpec,
    Weight,
    init_random,
    is_spec,
    join,
    joined,
    matrix,
    separate,
    separate_table,
    vector,
)
from jaxspec.parallel.mesh import DEFAULT_DEVICE, MESH_AXIS_OF, DeviceMesh
from tests.support.families import PAIRS, family_model

PARTS = (
    matrix("q", 3, 8, ("embed", "heads")),
    matrix("k", 3, 4, ("embed", "kv_heads")),
    matrix("v", 3, 4, ("embed", "kv_heads")),
)
SPEC = joined("qkv", PARTS)
Q, K, V = (np.arange(3 * n, dtype=np.float32).reshape(n, 3) + 100 * n for n in (8, 4, 4))


class _TwoDevices(DeviceMesh):
    """The number of pieces is all that joining reads of a mesh."""

    @property
    def size(self) -> int:
        return 2


def test_one_device_holds_the_parts_side_by_side() -> None:
    whole = SPEC.assemble([Q, K, V], DEFAULT_DEVICE)
    np.testing.assert_array_equal(whole, np.concatenate([Q.T, K.T, V.T], axis=1))
    assert SPEC.tensors == {"q": (8, 3), "k": (4, 3), "v": (4, 3)}
    assert (SPEC.shape, SPEC.axes) == ((3, 16), ("embed", "heads"))


def test_each_device_holds_its_pieces_of_all_parts() -> None:
    whole = SPEC.assemble([Q, K, V], _TwoDevices())
    for device, piece in enumerate(np.split(whole, 2, axis=1)):
        own = [np.split(part.T, 2, axis=1)[device] for part in (Q, K, V)]
        np.testing.assert_array_equal(piece, np.concatenate(own, axis=1))


def test_an_axis_that_all_devices_hold_is_not_cut() -> None:
    spec = joined("latents", (vector("q", 8), vector("k", 4)))
    made = spec.assemble([Q[:, 0], K[:, 0]], _TwoDevices())
    np.testing.assert_array_equal(made, np.concatenate([Q[:, 0], K[:, 0]]))


def test_joining_undoes_separating() -> None:
    table = {"layer": {"qkv": Weight(SPEC), "o": matrix("o", 8, 3, ("heads", "embed"))}}  # type: ignore[arg-type]
    params = init_random(table, jax.random.key(0), jnp.dtype(jnp.float32))
    apart = separate(table, params)
    assert [part.shape for part in apart["layer"]["qkv"].values] == [(3, 8), (3, 4), (3, 4)]
    assert separate_table(table)["layer"]["qkv"].values == PARTS
    jax.tree.map(np.testing.assert_array_equal, join(table, apart), params)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_every_axis_of_every_table_has_a_rule_and_joined_parts_agree(pair: tuple[str, str]) -> None:
    model = family_model(*pair)
    tables = (
        models.family(model.target).param_specs(model.target),
        drafts.family(model.draft).param_specs(model.draft),
    )
    specs: list[Any] = jax.tree.leaves(tables, is_leaf=is_spec)
    assert specs and all(isinstance(spec, ParamSpec) for spec in specs)
    for spec in specs:
        assert len(spec.axes) == len(spec.shape), spec.name
        assert {axis for axis in spec.axes if axis is not None} <= set(MESH_AXIS_OF), spec.name
        if isinstance(spec, JoinedSpec):
            cut = {part.axes[-1] and MESH_AXIS_OF[part.axes[-1]] for part in spec.parts}
            assert len(cut) == 1, f"{spec.name}: some parts are cut and some are not"
