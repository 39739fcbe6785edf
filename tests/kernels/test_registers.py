"""Warpgroups of a kernel share the registers that exist: waiting for more would never end."""

from __future__ import annotations

import pytest

from tests.kernels.interpreter import needs_mosaic

pytestmark = needs_mosaic


@pytest.mark.parametrize(("warpgroups", "computing", "copying"), [(2, 240, 24), (3, 160, 32)])
def test_shares_up_to_all_registers_are_taken(
    warpgroups: int, computing: int, copying: int
) -> None:
    from pallas_kernels.mosaic import RegisterShares

    RegisterShares(warpgroups, computing, copying)
    with pytest.raises(ValueError, match="registers: expected at most 5"):
        RegisterShares(warpgroups, computing, copying + 8)


def test_three_warpgroups_do_not_start_with_all_registers_of_an_sm() -> None:
    """168 for each thread: 170 is no multiple of 8."""
    from pallas_kernels.mosaic import RegisterShares

    message = "expected at most 504 for threads of 3 warpgroups, one of each, got 512"
    with pytest.raises(ValueError, match=message):
        RegisterShares(2, 208, 96)
