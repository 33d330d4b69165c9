"""``tools/pythons.py``: which interpreters there are, and what is said of those that are not."""

from __future__ import annotations

import sys

import pytest

from tools import pythons

OURS = "cpython {}.{}".format(*sys.version_info[:2])


def test_each_version_of_python_is_found_once() -> None:
    assert pythons.pythons([sys.executable, "no-such-python", sys.executable]) == {OURS: sys.executable}


@pytest.mark.parametrize(("is_sound", "status"), [(True, 0), (False, 1)])
def test_others_are_run_and_missing_ones_are_named(
    is_sound: bool, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {OURS: sys.executable, "cpython 3.77": "/opt/python3.77"}
    monkeypatch.setattr(
        pythons, "pythons", lambda wanted: {name: found[name] for name in list(found)[: len([*wanted])]}
    )
    monkeypatch.setattr(pythons, "run", lambda name, python, _workers: (is_sound, f"ran {python}"))
    assert pythons.main([]) == status
    said = capsys.readouterr().out.splitlines()
    assert "cpython 3.77: ran /opt/python3.77" in said
    assert [line for line in said if line.startswith(OURS)] == []
    assert len([line for line in said if line.endswith("not run, it is not here")]) == 3
