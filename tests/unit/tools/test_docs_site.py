"""``tools/docs_site.py``: what is public has a docstring; what the site is made of."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tools import docs_site

INDEX = """# Pages

## Begin

| page | |
|---|---|
| [quickstart](quickstart.md), [outbox](how-to/outbox.md) | beside [choose](how-to/choose.md) |
| [architecture](../ARCHITECTURE.md) | |

## Whole programs

| program | |
|---|---|
| [sqlite](../examples/order_service_sqlite.py) | |
"""


@pytest.mark.parametrize("name", docs_site.MODULES)
def test_every_public_name_of_a_module_has_a_docstring(name: str) -> None:
    assert docs_site.missing_docstrings([importlib.import_module(name)]) == []


def _module(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    for word, value in names.items():
        value.__module__ = module.__name__
        setattr(module, word, value)
    return module


class _Bare:
    def stop(self) -> None:
        raise NotImplementedError

    @property
    def size(self) -> int:
        raise NotImplementedError

    def start(self) -> None:
        """Begin."""

    def _private(self) -> None:
        raise NotImplementedError


def test_class_method_and_property_without_docstring_are_named() -> None:
    missing = docs_site.missing_docstrings([_module("txmq.made_up", Bare=_Bare)])
    assert missing == [f"txmq.made_up.Bare{rest}" for rest in ("", ".size", ".stop")]


def test_make_docs_writes_nothing_while_a_docstring_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(docs_site, "missing_docstrings", lambda modules: ["txmq.send"])
    monkeypatch.setattr(docs_site, "write_pages", pytest.fail)
    assert docs_site.main() == 1
    assert capsys.readouterr().err == "make docs: 1 names that are public have no docstring:\n  txmq.send\n"


def test_navigation_is_what_the_index_lists() -> None:
    lines = [line for line in docs_site.navigation(INDEX).splitlines() if line and line[0] not in "`:"]
    assert lines[:3] == [
        "quickstart <docs/quickstart>", "outbox <docs/how-to/outbox>", "architecture <ARCHITECTURE>"
    ]  # fmt: skip
    assert lines[3:] == [f"{name} <api/{name}>" for name in docs_site.MODULES]


def test_name_of_two_modules_stands_where_it_comes_first() -> None:
    first = _module("txmq.first", Bare=_Bare)
    second = ModuleType("txmq.second")
    second.__all__ = ["Bare", "failed"]  # type: ignore[attr-defined]
    second.Bare, second.failed = _Bare, KeyError  # type: ignore[attr-defined]
    pages = docs_site.api_pages([first, second])
    assert ".. autoclass:: txmq.first.Bare" in pages["txmq.first"]
    assert "Bare" not in pages["txmq.second"]
    assert ".. autoexception:: txmq.second.failed" in pages["txmq.second"]


def test_pages_stand_in_the_site_as_in_the_repository(tmp_path: Path) -> None:
    docs_site.write_pages([], tmp_path / "pages")
    for name in ("README.md", "docs/quickstart.md", "examples/order_service_sqlite.py"):
        assert (tmp_path / "pages" / name).read_bytes() == (docs_site.ROOT / name).read_bytes()
