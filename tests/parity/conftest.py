from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> Iterator[None]:
    """Tiny torch models wait for their threads longer than they compute."""
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)
    yield
