"""A file is replaced whole or stays as it was, and what cannot be written is one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxspec.config import ConfigError
from jaxspec.loading.new_file import replaced, write_text


def test_an_error_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    write_text(path, "old\r\n")
    assert path.read_bytes() == b"old\r\n"
    with pytest.raises(ValueError, match="cut"), replaced(path) as f:
        f.write(b"new")
        raise ValueError("cut")
    with pytest.raises(ConfigError, match=r"page\.md: expected Unicode, got half a character"):
        write_text(path, "new \ud800")
    assert path.read_bytes() == b"old\r\n"
    assert [p.name for p in tmp_path.iterdir()] == ["page.md"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    write_text(tmp_path / "page.md", "old")
    (tmp_path / "link").symlink_to("page.md")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "page.md").read_text() == "new"


@pytest.mark.parametrize("name", ["", "folder", "missing/page.md", "loop"])
def test_no_place_for_a_file_is_one_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    path = tmp_path / name if name else Path()
    with pytest.raises(ConfigError, match=r"^.*: expected a place to write a file, got .*$") as e:
        write_text(path, "new")
    assert ".new" not in str(e.value)
