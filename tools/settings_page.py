"""The tables of settings in docs/, made from those in the code; ``python -m`` rewrites them in place."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from txmq.binlog.config import BINLOG_SETTINGS
from txmq.config import SETTINGS
from txmq.setting import Setting

BEGIN = "<!-- settings: begin -->"
END = "<!-- settings: end -->"
DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = {"configuration.md": tuple(SETTINGS.values()), "configuration-binlog.md": BINLOG_SETTINGS}


def page_table(settings: Iterable[Setting]) -> str:
    """One Markdown table per section, in the order of the settings."""
    parts = []
    for section, members in groupby(settings, key=lambda setting: setting.section):
        parts.append(f"### {section}\n\n| setting | default | allowed | what it does |\n|---|---|---|---|")
        parts[-1] += "".join("\n" + _row(setting) for setting in members)
    return "\n\n".join(parts)


def _row(setting: Setting) -> str:
    return f"| `{setting.name}` | {_default(setting)} | {setting.allowed} | {setting.help} |"


def _default(setting: Setting) -> str:
    value = setting.default
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return f"`{[*value]}`".replace("'", '"')
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"`{value}`" if value else "empty"
    return f"{value:_}"


def main(docs: Path = DOCS) -> None:
    """Rewrite the pages in the folder ``docs``."""
    for name, settings in PAGES.items():
        page = docs / name
        text = page.read_text("utf-8")
        head, tail = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
        page.write_text(f"{head}\n\n{page_table(settings)}\n\n{tail}")


if __name__ == "__main__":
    main()
