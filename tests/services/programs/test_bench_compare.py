"""``python -m bench.compare``: a checkout compared with itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import compare


def test_checkout_beside_itself_has_a_line_for_each_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = str(Path(compare.__file__).parents[1])
    assert compare.main([here, here, "--rounds", "1", "--works", "send_many", "--directory", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        f"send_many, {side}" for side in ("client", "broker", "both")
    ]
    assert list(tmp_path.iterdir()) == []
