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
    cut,
    init_random,
    is_spec,
    join,
    joined,
    matrix,
    separate,
    separate_table,
)
from jaxspec.parallel.axes import CUT, WHOLE
from tests.support.families import PAIRS, family_model

PARTS = (
    matrix("q", 3, 8, ("embed", "heads")),
    matrix("k", 3, 4, ("embed", "kv_heads")),
    matrix("v", 3, 4, ("embed", "kv_heads")),
)
SPEC = joined("qkv", PARTS)
Q, K, V = (np.arange(3 * n, dtype=np.float32).reshape(n, 3) + 100 * n for n in (8, 4, 4))


def test_one_device_holds_the_parts_side_by_side() -> None:
    whole = SPEC.assemble([Q, K, V])
    np.testing.assert_array_equal(whole, np.concatenate([Q.T, K.T, V.T], axis=1))
    assert SPEC.tensors == {"q": (8, 3), "k": (4, 3), "v": (4, 3)}
    assert (SPEC.shape, SPEC.axes) == ((3, 16), ("embed", "heads"))


def test_a_mesh_cuts_each_part_by_itself() -> None:
    assert SPEC.parts_along(1) == [(8, "heads"), (4, "kv_heads"), (4, "kv_heads")]
    gate_up = ParamSpec("gate_up", (2, 3, 8), ("experts", "embed", "mlp"), side_by_side=2)
    assert gate_up.parts_along(2) == [(4, "mlp"), (4, "mlp")]
    assert gate_up.parts_along(0) == [(2, "experts")]


def test_a_cut_matrix_is_that_of_its_own_size_but_for_the_tensor_in_the_file() -> None:
    whole, own = (
        ParamSpec("head", (3, out), ("embed", "mlp"), True, "float32", side_by_side=2)
        for out in (10, 8)
    )
    found = cut(whole, own)
    assert (found.checkpoint_shape, found.tensors) == ((10, 3), {"head": (10, 3)})
    assert (found.shape, found.dtype, found.parts_along(1)) == (
        own.shape,
        own.dtype,
        own.parts_along(1),
    )
    drawn = (spec.draw(jax.random.key(0), jnp.float32, None) for spec in (found, own))
    np.testing.assert_array_equal(*drawn)
    assert cut(own, own) is own


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
        assert {axis for axis in spec.axes if axis is not None} <= {*CUT, *WHOLE}, spec.name
        if isinstance(spec, JoinedSpec):
            cut = {part.axes[-1] in CUT for part in spec.parts}
            assert len(cut) == 1, f"{spec.name}: some parts are cut and some are not"
