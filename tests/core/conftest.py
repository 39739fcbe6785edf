from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

from jaxspec import drafts, models
from tests.support import toys

OPTIMISED = (
    "test_distribution",
    "test_sampled_distribution",
    "test_sampling",
    "test_donation",
)  # run long, or look at the optimised program


@pytest.fixture(scope="module", autouse=True)
def quick_compilation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiny models spend their time in the compiler: without LLVM's optimisations it takes half as long, and small programs are kept."""
    settings = {
        "jax_disable_most_optimizations": request.module.__name__.rpartition(".")[2] not in OPTIMISED,
        "jax_persistent_cache_min_compile_time_secs": 0.3,
    }
    before = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def toy_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the toy families findable, as a new family's file would."""
    for name, family in toys.TARGET_FAMILIES.items():
        monkeypatch.setitem(models.FAMILIES, name, family)
    for name, family in toys.DRAFT_FAMILIES.items():
        monkeypatch.setitem(drafts.FAMILIES, name, family)
