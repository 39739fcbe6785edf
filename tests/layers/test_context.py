"""Pass: what it needs, whose rotation it takes, and which layer may return one row."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import drafts, models
from jaxspec.cache.metadata import AttentionMetadata, build_metadata
from jaxspec.config import REFERENCE_OPS, AttentionConfig, CacheGroup, Ops, RopeConfig
from jaxspec.layers.context import Pass
from jaxspec.layers.rope import rope_tables

ATTENTION = AttentionConfig(4, 2, 8, rope=RopeConfig(theta=100.0))
GROUPS = (CacheGroup(4, 40), CacheGroup(4, 40, window=5))


def metadata_of(start: list[int], rows: int) -> tuple[AttentionMetadata, ...]:
    first = jnp.asarray(start, jnp.int32)
    tables = (jnp.zeros((len(start), 10), jnp.int32),) * len(GROUPS)
    num_rows = jnp.full(len(start), rows, jnp.int32)
    return build_metadata(
        GROUPS, tables, first, num_rows, rows, attention=ATTENTION, ops=REFERENCE_OPS
    )


def test_a_pass_without_ops_is_an_error() -> None:
    with pytest.raises(TypeError, match="ops"):
        Pass(metadata_of([3], 2))  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "family", [*models.FAMILIES.values(), *drafts.FAMILIES.values()], ids=lambda m: m.__name__
)
def test_no_model_has_a_default_for_ops(family: Any) -> None:
    """A default would run an implementation that the engine did not choose."""
    functions = [getattr(family, name) for name in ("logits", "fuse") if hasattr(family, name)]
    assert functions
    for function in functions:
        ops = inspect.signature(function).parameters["ops"]
        assert ops.default is inspect.Parameter.empty
    assert "pass_" in inspect.signature(family.forward).parameters


def test_ops_are_static_and_the_rest_of_a_pass_is_traced() -> None:
    pass_ = Pass(metadata_of([3, 7], 2), REFERENCE_OPS, last_row=jnp.asarray([0, 1], jnp.int32))
    leaves, structure = jax.tree.flatten(pass_)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert jax.tree.unflatten(structure, leaves).ops == REFERENCE_OPS
    other = replace(pass_, ops=Ops(matmul="mosaic_gpu"))
    assert jax.tree.structure(other) != structure
    assert pass_.positions.tolist() == [[3, 4], [7, 8]]


def test_rotation_tables_are_the_metadatas_where_it_has_some() -> None:
    plain = Pass(metadata_of([3, 7], 2), REFERENCE_OPS)
    expected = rope_tables(ATTENTION.rope, 8, plain.positions)
    jax.tree.map(np.testing.assert_array_equal, plain.with_rope(ATTENTION).rope, expected)
    made = (expected[0] + 1, expected[1] + 1)
    first, *others = plain.metadata
    given = Pass((replace(first, rope=made), *others), REFERENCE_OPS)
    assert given.with_rope(ATTENTION).rope is made


def test_only_the_last_layer_may_return_one_row() -> None:
    last_row = jnp.asarray([1], jnp.int32)
    pass_ = Pass(metadata_of([3], 2), REFERENCE_OPS, last_row=last_row)
    rows = [pass_.for_layer(i, 3).last_row for i in range(3)]
    assert rows[:2] == [None, None] and rows[2] is last_row
    assert pass_.for_layer(0, 3).metadata is pass_.metadata
