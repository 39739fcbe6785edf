"""Make the tables of docs/performance.md from the records in docs/measurements.

python scripts/measurements.py             # write them
python scripts/measurements.py --check     # exit with 1 where the page differs from its records
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxspec.tools import measurements
from jaxspec.tools.cli import option, run_program

PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"


def main(
    page: Annotated[Path, option("Page whose sections name their records.")] = PAGE,
    check: Annotated[bool, typer.Option("--check", help="Compare, and write nothing.")] = False,
) -> None:
    """Make the tables of a page from recorded measurements."""
    text = measurements.with_tables(page)
    differs = text != page.read_text(encoding="utf-8")
    if check and differs:
        print(f"{page}: differs from its records; run scripts/measurements.py")
        raise SystemExit(1)
    if not check:
        page.write_text(text, encoding="utf-8")
    print(f"{page}: {'written' if differs else 'up to date'}")


if __name__ == "__main__":
    run_program(main)
