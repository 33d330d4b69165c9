"""The demo of a cluster: every server dies once, and no acknowledged message is lost."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from examples.cluster import demo
from txmq.config_sources import load_settings

EXAMPLE = Path(demo.__file__).parent


def test_demo_ends_with_nothing_lost(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["demo.py", "--seconds", "0.5", "--servers", "1"])
    assert demo.main() == 0
    said = capsys.readouterr().out
    assert "0 lost, 0 stored twice" in said
    assert "0 not acknowledged; 0 not read by the group" in said
    for event in ("broker-2 is killed", "broker-2 is paused", "the leading ZooKeeper server is killed", "is back"):
        assert event in said


def test_settings_of_the_example_are_valid() -> None:
    settings = load_settings((EXAMPLE / "broker.toml").read_text("utf-8"), {}, {})
    assert settings.advertised_address == "broker1:8123"
    assert tomllib.loads((EXAMPLE / "broker.toml").read_text("utf-8"))["broker_name"] == settings.broker_name
