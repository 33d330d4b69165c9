"""The table of two checkouts, from figures that are made up; and a run of this checkout beside itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import compare


def test_verdict_is_the_median_of_the_ratios_of_pairs() -> None:
    before = [{"put": {"client": client, "broker": 50.0}} for client in (50.0, 100.0, 200.0)]
    after = [{"put": {"client": client, "broker": 50.0}} for client in (50.0, 110.0, 240.0)]
    lines = compare._table(before, after, ["put"]).splitlines()
    assert lines[2:] == [
        "| put, client | 100 | 110 | 1.100 | [1.000, 1.200] |",
        "| put, broker | 50 | 50 | 1.000 | [1.000, 1.000] |",
        "| put, both | 150 | 160 | 1.067 | [1.000, 1.160] |",
    ]


def test_each_checkout_is_measured_by_its_own_code(tmp_path: Path) -> None:
    package = tmp_path / "txmq"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the other checkout')")
    with pytest.raises(SystemExit, match="the other checkout"):
        compare._of(tmp_path, ["put"], tmp_path)
