"""Child processes that have several CPU devices: XLA makes them of one CPU when it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping


def run_on_devices(
    count: int,
    module: str,
    *arguments: str,
    timeout: float = 900,
    settings: Mapping[str, str] | None = None,
) -> str:
    """Run a module with arguments in a process of `count` CPU devices; return its output.

    settings: further environment variables of the process.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    result = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip(), **(settings or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert result.returncode == 0, result.stderr[-5000:]
    return result.stdout
