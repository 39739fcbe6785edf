from __future__ import annotations

import pytest

from jaxspec import drafts, models
from tests.support import toys


@pytest.fixture
def toy_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the toy families findable, as a new family's file would."""
    for name, family in toys.TARGET_FAMILIES.items():
        monkeypatch.setitem(models.FAMILIES, name, family)
    for name, family in toys.DRAFT_FAMILIES.items():
        monkeypatch.setitem(drafts.FAMILIES, name, family)
