"""The record codec is aiokafka's: the golden vectors pass on the lowest version that pyproject.toml allows, too.

The newest is what the set-up installs, and what all other tests run on. ``.ci/setup dev`` adds the lowest next to it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LOWEST = ROOT / ".venv" / "lowest"
VECTORS = """
import sys, aiokafka, pytest
assert (aiokafka.__version__, aiokafka.__file__.startswith(sys.argv[2])) == (sys.argv[1], True), aiokafka
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/unit/log/test_records_vectors.py"]))
"""


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def test_vectors_pass_on_lowest_version_and_newest_is_installed() -> None:
    found = re.search(r'"aiokafka>=([\d.]+),<([\d.]+)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    assert found is not None
    lowest, beyond = found.groups()
    assert numbers(lowest) < numbers(version("aiokafka")) < numbers(beyond)
    place = LOWEST / f"aiokafka-{lowest}"
    assert place.is_dir(), "run .ci/setup dev: it installs the lowest version there"
    command = [sys.executable, "-c", VECTORS, f"{lowest}.0", str(place)]
    env = os.environ | {"PYTHONPATH": str(place)}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"\d\d passed", ended.stdout)
