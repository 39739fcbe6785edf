"""The weights of a draft that training moves."""

from __future__ import annotations

from jaxspec import drafts
from jaxspec.layers.params import Params
from jaxspec.training.config import TrainableDraft

# Copies of the layers' k_proj and v_proj, which loading makes (drafts.dflash.param_specs).
REPEATED = ("context_kv", "context_kv_bias")


def trained_specs(draft: TrainableDraft) -> Params:
    """Return the draft's parameter table without the arrays that repeat others of it.

    Each tensor of the draft's checkpoint is in the table once, so it is drawn, moved and saved
    once.
    """
    specs = drafts.family(draft).param_specs(draft)
    return {name: spec for name, spec in specs.items() if name not in REPEATED}
