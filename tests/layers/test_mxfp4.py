"""MXFP4 experts of a checkpoint: what their codes stand for, and bytes that stand for nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxspec.config import ConfigError
from jaxspec.layers.mxfp4 import NAN, check_bytes, dequantise
from tests.kernels.test_mxfp4 import codes_and_scales, same_bits


def test_every_code_at_every_scale_is_dequantised_to_its_value() -> None:
    """Subnormal, infinite and NaN among them."""
    blocks, scales, values = codes_and_scales(0, (2, 96, 48), np.arange(256))
    with np.errstate(over="ignore"):
        expected = values.astype(np.float32)
    assert same_bits(np.ascontiguousarray(dequantise((blocks, scales))), expected)


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        (np.uint8, np.uint8, rf"_scales: expected scales that are numbers, got NaN \({NAN}\)"),
        (np.int32, np.uint8, ": expected uint8 blocks and scales, got int32 and uint8"),
        (np.uint8, np.float32, ": expected uint8 blocks and scales, got uint8 and float32"),
    ],
)
def test_bytes_that_stand_for_no_weights_are_refused(
    blocks: Any, scales: Any, message: str
) -> None:
    whole = np.zeros((1, 16, 2, 16), blocks), np.zeros((1, 16, 2), scales)
    whole[1][0, 3, 1] = NAN
    with pytest.raises(ConfigError, match=rf"^down_proj{message}$"):
        check_bytes("down_proj", whole)
    whole[1][0, 3, 1] = NAN - 1  # the largest power
    if blocks == scales:
        check_bytes("down_proj", whole)
