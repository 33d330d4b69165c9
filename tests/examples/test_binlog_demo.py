"""The demo of the binlog sync: everything is killed once, and both databases are the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from examples.binlog_sync import demo
from txmq.binlog.config import read_settings


def test_demo_ends_with_equal_databases(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["demo.py", "--seconds", "0.3"])
    assert demo.main() == 0
    said = capsys.readouterr().out
    for event in ("the reader is killed", "the applier is killed", "the target is killed", "the source is killed"):
        assert event in said
    assert "both databases are the same" in said


def test_settings_of_the_example_are_valid() -> None:
    text = (Path(demo.__file__).parent / "binlog.toml").read_text("utf-8")
    settings = read_settings(text, {"BINLOG_PASSWORD": "a", "REPLICA_PASSWORD": "b"})
    assert (settings.source.password, settings.apply.password) == ("a", "b")
