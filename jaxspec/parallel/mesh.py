"""The devices of one engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

Device = Any  # jax.Device

MODEL = "model"  # the mesh axis that the arrays of a model are cut over


def make_mesh(devices: Sequence[Device]) -> Mesh:
    """Return the mesh of an engine whose models are cut over these devices, in this order."""
    return Mesh(np.array(devices), (MODEL,))
