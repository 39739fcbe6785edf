"""Logical axes: names of an array's dimensions that say how a mesh may cut it.

vocab       tokens of the vocabulary, in the embedding and the head
heads       query heads
kv_heads    heads of keys and values
head_out    the outputs of all query heads, which the projection after attention reads
mlp         the width of an MLP, or of shared experts
experts     whole experts
expert_mlp  the width of one expert
once        a bias that one device of a sum adds; the others hold zeros

WHOLE names axes that each device holds whole, as it holds those without a name (None).

A model's config names the axis of each of its sizes that a mesh may cut, in a class variable AXES.
A size is a field, or a property that follows from fields. The fields of a device's own config hold
the sizes of its pieces (jaxspec.parallel.layout). Zeros after whole heads' outputs are not in it.
"""

from __future__ import annotations

from collections.abc import Mapping

ONCE = "once"
# A table may name these axes and no others (tests/layers/test_params.py).
WHOLE = ("embed",)  # named axes that each device holds whole
CUT = ("vocab", "heads", "kv_heads", "head_out", "mlp", "experts", "expert_mlp", ONCE)
Axes = Mapping[str, str]  # field or property of a config -> its logical axis


def axes_of(config: object) -> Axes:
    """Return the logical axes of a config's sizes."""
    return getattr(type(config), "AXES", {})
