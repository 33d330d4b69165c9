"""Each interleaving over homes has its scenarios (``interleavings.toml``), and they are there."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INTERLEAVINGS = tomllib.loads(Path(__file__).with_name("interleavings.toml").read_text("utf-8"))


def test_there_are_twelve() -> None:
    assert len(INTERLEAVINGS) == 12


@pytest.mark.parametrize("name", INTERLEAVINGS)
def test_scenarios_of_an_interleaving_are_there(name: str) -> None:
    assert INTERLEAVINGS[name]
    for file, scenarios in INTERLEAVINGS[name].items():
        text = (ROOT / file).read_text("utf-8")
        begins = "## {}\n" if file.endswith(".txt") else "def {}("
        missing = [scenario for scenario in scenarios if begins.format(scenario) not in text]
        assert scenarios
        assert not missing, f"{file}: {missing}"
