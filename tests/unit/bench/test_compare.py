"""The table of two checkouts, from figures that are made up; and a checkout that cannot be imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.compare import Times, Worker, table


def test_verdict_is_the_median_of_the_ratios_of_rounds() -> None:
    rounds: list[tuple[Times, Times]] = [
        ({"client": before, "broker": 50.0}, {"client": after, "broker": 50.0})
        for before, after in ((50.0, 50.0), (100.0, 110.0), (200.0, 240.0))
    ]
    assert table({"put": rounds}).splitlines()[2:] == [
        "| put, client | 100 | 110 | 1.100 | [1.000, 1.200] |",
        "| put, broker | 50 | 50 | 1.000 | [1.000, 1.000] |",
        "| put, both | 150 | 160 | 1.067 | [1.000, 1.160] |",
    ]


def test_each_checkout_is_measured_by_its_own_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    package = tmp_path / "txmq"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the other checkout')")
    worker = Worker(tmp_path, tmp_path)
    with pytest.raises(SystemExit, match="has ended"):
        worker.work("put")
    worker.close()
    assert "the other checkout" in capfd.readouterr().err
