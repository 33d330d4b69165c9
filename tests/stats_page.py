"""The fields that docs/reference/stats.md explains."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "stats.md"
# Only of a broker in a cluster, besides all of ``registry``.
OF_CLUSTERS = {"registry", "in_doubt_branch", "branches_unreported", "branches_held", "decisions_with_homes", "placing"}


def fields(title: str) -> set[str]:
    """The names in the first column of a chapter's table."""
    [chapter] = [text for text in PAGE.read_text("utf-8").split("\n## ") if text.startswith(title)]
    rows = re.findall(r"^\| (`.*?) \|", chapter, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}
