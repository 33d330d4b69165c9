"""The table in docs/configuration.md, made from the table of settings; ``python -m`` rewrites it in place."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from txmq.config import SETTINGS
from txmq.setting import Setting

BEGIN = "<!-- settings: begin -->"
END = "<!-- settings: end -->"


def page_table() -> str:
    """One Markdown table per section, in the order of the settings."""
    parts = []
    for section, settings in groupby(SETTINGS.values(), key=lambda setting: setting.section):
        parts.append(f"### {section}\n\n| setting | default | allowed | what it does |\n|---|---|---|---|")
        parts[-1] += "".join("\n" + _row(setting) for setting in settings)
    return "\n\n".join(parts)


def _row(setting: Setting) -> str:
    return f"| `{setting.name}` | {_default(setting)} | {setting.allowed} | {setting.help} |"


def _default(setting: Setting) -> str:
    value = setting.default
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"`{value}`" if value else "empty"
    return f"{value:_}"


def main() -> None:
    """Rewrite the page."""
    page = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
    text = page.read_text("utf-8")
    head, tail = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    page.write_text(f"{head}\n\n{page_table()}\n\n{tail}")


if __name__ == "__main__":
    main()
