"""What ``make test`` runs with compiled modules only (docs/compiled.md): that they are, and do what the source does.

The Makefile runs vectors, kills and databases with them, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from txmq.errors import LocalProtocolError
from txmq.protocol.requests import request
from txmq.runtime.build import is_compiled

ROOT = Path(__file__).resolve().parents[2]
SEEDS, SEEDS_AT_ONCE = 30, 10


def _run(path: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


def test_this_process_and_its_children_run_compiled_modules() -> None:
    assert is_compiled(), "run them with: make test-compiled"
    assert json.loads(_run(os.environ["PYTHONPATH"], "txmq.cli.main", "version", "--json"))["compiled"] is True


def test_errors_have_their_causes() -> None:
    """Of two modules; ``make check`` looks that all set them by hand."""
    with pytest.raises(LocalProtocolError) as refused:
        request("put", "\u00e9", opaque=b"1")
    assert isinstance(refused.value.__cause__, UnicodeEncodeError)


@pytest.mark.parametrize("first", range(1, SEEDS + 1, SEEDS_AT_ONCE))
def test_simulated_histories_are_those_of_the_source(first: int) -> None:
    """Event for event: a history's hash covers every byte on the simulated network and every answer."""
    words = ("tools.simulation", "--first", str(first), "--seeds", str(SEEDS_AT_ONCE), "--digest")
    compiled = _run(os.environ["PYTHONPATH"], *words)
    assert compiled.count("\n") == SEEDS_AT_ONCE
    assert compiled == _run(str(ROOT), *words)
