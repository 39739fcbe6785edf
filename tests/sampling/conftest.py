from __future__ import annotations

from tests.core.conftest import toy_families

__all__ = ["toy_families"]
