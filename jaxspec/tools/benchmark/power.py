"""The power of a GPU while something runs: nvidia-smi's readings between two moments."""

from __future__ import annotations

import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import jax

from jaxspec.config import ConfigError

QUERY = "timestamp,power.draw.instant,clocks.sm,clocks_event_reasons.active"
EVERY_MS = 20
# Seconds after which a reading is of what runs at the time, and after which it has arrived.
SETTLES, LATE = 0.1, 0.2
POWER_CAP = 0x4  # NVML's nvmlClocksEventReasonSwPowerCap


@dataclass(frozen=True)
class Draw:
    """The power of one load.

    seconds:   of a call
    watts, megahertz: means of power and SM clock over the readings
    capped:    share of the readings whose clock the power limit held down
    readings:  their number
    """

    seconds: float
    watts: float
    megahertz: float
    capped: float
    readings: int

    @property
    def joules(self) -> float:
        """A call."""
        return self.seconds * self.watts

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"joules": self.joules}


class PowerMeter:
    """A context manager that runs nvidia-smi for the GPU that JAX computes on.

    That is the first of CUDA_VISIBLE_DEVICES, counted in PCI order as nvidia-smi does. Raises
    ConfigError where it cannot be read.
    """

    def __init__(self) -> None:
        self.readings: list[
            tuple[float, float, float, int]
        ] = []  # moment by the clock of time.time, watts, MHz, reasons

    def __enter__(self) -> PowerMeter:
        device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        command = [
            "nvidia-smi",
            f"--query-gpu={QUERY}",
            "--format=csv,noheader,nounits",
            "-i",
            device,
            "-lms",
            str(EVERY_MS),
        ]
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        except OSError as e:
            raise ConfigError(f"power: expected nvidia-smi, which reads it, got {e}") from e
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._thread.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _collect(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if (reading := parse(line)) is not None:
                self.readings.append(reading)

    def measure(
        self, call: Callable[[], object], *, calls: int = 1, seconds: float = 2.0, warm: float = 1.0
    ) -> Draw:
        """Run call() for `warm` seconds that do not count, then for `seconds` that do.

        calls: calls of the load that each call() holds.
        """
        run_for(call, warm)
        began = time.time()
        count = run_for(call, seconds) * calls
        ended = time.time()
        time.sleep(LATE)
        found = [r for r in self.readings if began + SETTLES <= r[0] <= ended]
        if not found:
            raise ConfigError(
                f"power: expected readings of nvidia-smi within {seconds} s, got none"
            )
        watts, megahertz = (statistics.fmean(r[i] for r in found) for i in (1, 2))
        capped = statistics.fmean(bool(r[3] & POWER_CAP) for r in found)
        return Draw((ended - began) / count, watts, megahertz, capped, len(found))


def run_for(call: Callable[[], object], seconds: float) -> int:
    """Run call() until the seconds are over, at least once, and return how often it ran.

    Each result is waited for.
    """
    began, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - began < seconds:
        jax.block_until_ready(call())
        count += 1
    return count


def parse(line: str) -> tuple[float, float, float, int] | None:
    """(moment, watts, MHz, reasons) of a line of nvidia-smi; None of one that holds no reading."""
    try:
        moment, watts, megahertz, reasons = line.split(",")
        return (
            datetime.strptime(moment, "%Y/%m/%d %H:%M:%S.%f").timestamp(),
            float(watts),
            float(megahertz),
            int(reasons.strip(), 16),
        )
    except ValueError:
        return None
