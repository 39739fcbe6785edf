from __future__ import annotations

from tests.core.conftest import quick_compilation, toy_families

__all__ = ["quick_compilation", "toy_families"]
