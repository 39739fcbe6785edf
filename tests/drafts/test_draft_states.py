"""States of different drafts are different pytrees, and keep their static fields."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from dataclasses import fields
from typing import Any

import jax
import pytest

from jaxspec import drafts
from jaxspec.decode.slots import without_rows
from jaxspec.decode.state import DecodeState
from jaxspec.drafts.block import BlockState


def states() -> list[type]:
    """The classes of jaxspec.drafts that are drafters' states."""
    names = [f"{drafts.__name__}.{module.name}" for module in pkgutil.iter_modules(drafts.__path__)]
    members = [x for name in names for x in vars(importlib.import_module(name)).values()]
    return sorted({x for x in members if hasattr(x, "LARGE")}, key=lambda x: x.__name__)


def test_the_states_are_found() -> None:
    assert len(states()) >= 4


@pytest.mark.parametrize(("one", "other"), itertools.combinations(states(), 2))
def test_jit_takes_no_draft_state_for_another(one: type, other: type) -> None:
    """jaxlib compares the children of nodes and no classes. Without caches some have none."""

    def structure(state: Any) -> Any:
        names = [f.name for f in fields(state) if f.metadata.get("pytree_node", True)]
        return jax.tree.structure(state(**{name: () for name in names}))

    assert structure(one) != structure(other)


def test_a_state_without_rows_keeps_what_is_static() -> None:
    """Prefill returns the state; on several devices both have one partition."""
    state = DecodeState(**{f.name: None for f in fields(DecodeState)} | {"draft": BlockState(())})
    assert without_rows(state, {}).draft == state.draft
