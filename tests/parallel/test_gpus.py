"""What the driver says of this machine's GPUs, and nothing where there is no driver."""

from __future__ import annotations

import pynvml
import pytest

from jaxspec.parallel import gpus

pytestmark = pytest.mark.once
NAMES = ["NVIDIA H100 80GB HBM3", "NVIDIA A10"]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs; the second has no power limit to tell."""

    def limit(handle: int) -> int:
        if handle == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 700_000

    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(NAMES),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: NAMES[handle],
        "nvmlSystemGetDriverVersion": lambda: "580.65.06",
        "nvmlDeviceGetMaxClockInfo": lambda handle, kind: 1980 if kind == 1 else 2619,
        "nvmlDeviceGetEnforcedPowerLimit": limit,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)


@pytest.mark.usefixtures("driver")
def test_the_driver_names_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus.gpu_names() == NAMES
    assert gpus.first_gpu() == f"{NAMES[0]}, 580.65.06, 1980 MHz, 2619 MHz, 700.00 W"
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: 1)
    assert gpus.first_gpu() == f"{NAMES[1]}, 580.65.06, 1980 MHz, 2619 MHz"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.gpu_names() == []


def test_without_a_driver_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert gpus.gpu_names() == [] and gpus.first_gpu() is None
