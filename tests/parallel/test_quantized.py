"""Quantised checkpoints on several devices."""

from __future__ import annotations

from pathlib import Path

from jaxspec.loading.conversion import convert_checkpoint
from tests.support import quantized
from tests.support.devices import run_on_devices

# Both devices hold whole blocks of 128.
SHARED = quantized.WIDE | {"head_dim": 128}
EXPERTS = quantized.EXPERTS | {"head_dim": 128, "moe_intermediate_size": 256}


def test_two_devices_hold_pieces_of_codes_and_decode_alike(tmp_path: Path) -> None:
    plain = quantized.plain_checkpoint(tmp_path / "plain", SHARED)
    folders = [
        convert_checkpoint(plain, tmp_path / form, form)  # type: ignore[arg-type]
        for form in ("fp8", "fp8-block", "int4")
    ]
    experts = quantized.plain_checkpoint(tmp_path / "plain experts", EXPERTS)
    folders.append(convert_checkpoint(experts, tmp_path / "experts", "fp8-block"))
    quantized.with_kv_scales(folders[0], "attn_head", [[[0.25]], [[0.5]]])
    printed = run_on_devices(2, "tests.parallel.quantized_on_devices", *map(str, folders))
    assert printed.splitlines()[-1] == "equal"
