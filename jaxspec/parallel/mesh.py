"""The devices of one engine, or of one training run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

Device = Any  # jax.Device

MODEL = "model"  # the mesh axis that the arrays of a model are cut over
DATA = "data"  # the mesh axis that the rows of a training batch are cut over


def make_mesh(devices: Sequence[Device], axis: str = MODEL) -> Mesh:
    """Return the mesh of these devices, in this order, along one axis."""
    return Mesh(np.array(devices), (axis,))
