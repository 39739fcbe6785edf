"""States of different drafts are different pytrees."""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import Any

import jax
import pytest

from jaxspec.drafts.autoregressive import AutoregressiveState
from jaxspec.drafts.block import BlockState
from jaxspec.drafts.independent import IndependentState
from jaxspec.drafts.ngram import NgramState

STATES = AutoregressiveState, BlockState, IndependentState, NgramState


@pytest.mark.parametrize(("one", "other"), itertools.combinations(STATES, 2))
def test_jit_takes_no_draft_state_for_another(one: type, other: type) -> None:
    """jaxlib compares the children of nodes and no classes. Without caches some have none."""

    def structure(state: Any) -> Any:
        names = [f.name for f in fields(state) if f.metadata.get("pytree_node", True)]
        return jax.tree.structure(state(**{name: () for name in names}))

    assert structure(one) != structure(other)
