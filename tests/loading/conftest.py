"""The real default target (through the cache), and tiny GGUF files."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from jaxspec.loading.default_target import default_target
from jaxspec.loading.gguf_file import convert_gguf
from tests.support import gguf_files
from tests.support.smollm2 import gguf_file


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The converted default target; the first use on a machine fetches it."""
    return default_target()


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The default target's GGUF as it is in the wheel, for transformers' own loader."""
    return gguf_file()


@pytest.fixture(scope="session")
def smollm2_fresh(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The default target converted by the code under test: what the cache holds may be older than a
    mistake in it."""
    folder = tmp_path_factory.mktemp("smollm2") / "converted"
    yield convert_gguf(smollm2_gguf, folder)
    shutil.rmtree(folder)


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """write_gguf(arch, pre=..., tied=..., kv={...}, extra={...}) -> path of a tiny GGUF with random
    weights."""
    return partial(gguf_files.write_gguf, tmp_path)
