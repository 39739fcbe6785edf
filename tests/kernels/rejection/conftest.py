from __future__ import annotations

import pytest


@pytest.fixture(params=["reference"])  # kernels: tests/kernels, at vocabularies that they take
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param
