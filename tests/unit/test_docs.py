"""The pages: links lead somewhere, and comments cite files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.house import House

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


def _anchors(page: Path) -> set[str]:
    """Of each heading what GitHub makes of it."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    broken = []
    for link in LINK.finditer(page.read_text("utf-8")):
        target = (page.parent / link[1]).resolve() if link[1] else page
        if not target.exists() or (link[2] and link[2] not in _anchors(target)):
            broken.append(link[0])
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A: `b` c\n[x](#a-b-c) [y](#d) [z](none.md) [w](page.md#e) [v](https://e.org/none)", "utf-8")
    assert broken_links(page) == ["](#d)", "](none.md)", "](page.md#e)"]


def test_comments_cite_files_that_are_there() -> None:
    assert list(House(ROOT).missing_citations()) == []
