from __future__ import annotations

import pytest

from pallas_kernels.rejection_sampling import IMPLEMENTATIONS


@pytest.fixture(params=sorted(IMPLEMENTATIONS))
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param
