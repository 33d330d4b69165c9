"""``tools/wheels.py``: what a wheel is built from."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tools import wheels


def test_wheel_is_built_from_all_that_it_needs(tmp_path: Path) -> None:
    made = wheels.copy(tmp_path / "txmq")
    settings = tomllib.loads((made / "pyproject.toml").read_text("utf-8"))
    named = [*settings["tool"]["txmq"]["compiled"], *settings["tool"]["txmq"]["pages"], "setup.py", "build_backend"]
    assert [name for name in named if not (made / name).exists()] == []
    modules = {path.relative_to(wheels.ROOT) for path in (wheels.ROOT / "txmq").rglob("*.py")}
    assert {path.relative_to(made) for path in (made / "txmq").rglob("*.py")} == modules
    assert not {"build", "dist", "tests", ".venv", ".git"} & {path.name for path in made.iterdir()}
