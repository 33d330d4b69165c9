"""``tools/api_docs.py``: what is public has a docstring, and what has none is named."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest

from tools import api_docs


@pytest.mark.parametrize("name", api_docs.MODULES)
def test_every_public_name_of_a_module_has_a_docstring(name: str) -> None:
    assert api_docs.missing_docstrings([importlib.import_module(name)]) == []


def _module(**names: Any) -> ModuleType:
    module = ModuleType("txmq.made_up")
    for name, value in names.items():
        value.__module__ = module.__name__
        setattr(module, name, value)
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
    missing = api_docs.missing_docstrings([_module(Bare=_Bare)])
    assert missing == [f"txmq.made_up.Bare{rest}" for rest in ("", ".size", ".stop")]


def test_make_docs_writes_nothing_while_a_docstring_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(api_docs, "missing_docstrings", lambda modules: ["txmq.send"])
    monkeypatch.setattr(api_docs, "write", pytest.fail)
    assert api_docs.main() == 1
    assert capsys.readouterr().err == "make docs: 1 names that are public have no docstring:\n  txmq.send\n"
