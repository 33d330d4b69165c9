"""``make soak``, short: the program as it is started, with bounds that hold, with one that does not, interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.soak.broker import FILES, JOURNAL, MEMORY, STALL, THREADS

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 200.0


def start(directory: Path, *words: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "tools.soak",
        "--directory",
        str(directory),
        "--json",
        str(directory / "soak.json"),
    ]
    return subprocess.Popen(
        [*command, *words], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )  # fmt: skip


def finished(soak: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and what it printed."""
    try:
        told, errors = soak.communicate(timeout=TIMEOUT_S)
    finally:
        soak.kill()
    return soak.returncode, told + errors


def left(directory: Path) -> Sequence[Path]:
    return sorted(directory.glob("txmq-soak-*"))


def test_mixed_load_stays_within_every_bound(tmp_path: Path) -> None:
    # The machine is busy with other tests: how long the loop stalls is judged by `make soak`.
    code, told = finished(start(tmp_path, "--seconds", "20", "--stall-ms-max", "60000"))
    assert code == 0, told
    assert "every bound held" in told
    report = json.loads((tmp_path / "soak.json").read_text("utf-8"))
    assert [row["measure"] for row in report["table"]] == [JOURNAL, MEMORY, FILES, THREADS, STALL]
    assert all(rounds > 0 for rounds in report["rounds"].values())
    assert report["samples"][-1]["syncs"] > report["samples"][0]["syncs"]
    assert left(tmp_path) == []


def test_broken_bound_is_named_and_sets_the_exit_code(tmp_path: Path) -> None:
    code, told = finished(start(tmp_path, "--seconds", "2", "--memory-mib-max", "1"))
    assert code == 1
    assert "resident memory reached" in told
    assert "at most 1" in told
    assert len(left(tmp_path)) == 1


def test_ctrl_c_ends_it_cleanly_with_what_was_measured(tmp_path: Path) -> None:
    soak = start(tmp_path, "--minutes", "10")
    assert soak.stderr is not None
    assert "0 of 600 s" in soak.stderr.readline()
    soak.send_signal(signal.SIGINT)
    code, told = finished(soak)
    assert code == 130, told
    assert "interrupted" in told
    assert left(tmp_path) == []
