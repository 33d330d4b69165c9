"""``python -m bench``, which is ``make bench``: rows are measured, kept and drawn; Ctrl-C keeps what there is."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from txmq.testing.eventually import eventually

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 120


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "bench", *words]


def test_a_run_leaves_its_figures_and_one_page(tmp_path: Path) -> None:
    words = command("--quick", "--json", "--rows", "put-single-sync-on", "idle-rss", "--directory", str(tmp_path))
    result = subprocess.run(words, cwd=ROOT, capture_output=True, timeout=TIMEOUT_S, check=False)
    assert result.returncode in (0, 1), result.stderr.decode()  # 1: beyond its bound, on a machine that runs tests
    said = json.loads(result.stdout)
    assert [(row["name"], row["failure"]) for row in said["rows"]] == [("put-single-sync-on", None), ("idle-rss", None)]
    assert [len(figure["samples"]) for row in said["rows"] for figure in row["figures"].values()] == [1] * 5
    kept = {path.suffix: path for path in tmp_path.iterdir()}
    assert sorted(kept) == [".html", ".json"]
    assert json.loads(kept[".json"].read_text()) == said
    assert "<svg" in kept[".html"].read_text()


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    words = command("--rows", "idle-rss", "peer-outbox", "--directory", str(tmp_path))
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        try:
            eventually(
                lambda: any(tmp_path.glob("bench-*/peer-outbox/*")) or running.poll() is not None,
                "the second row begins",
                TIMEOUT_S,
            )
            assert running.poll() is None
            running.send_signal(signal.SIGINT)
            said, errors = running.communicate(timeout=TIMEOUT_S)
            assert errors.decode() == ""
            assert running.returncode == 130
        finally:
            running.kill()
    assert b"interrupted" in said
    kept = {path.suffix: path for path in tmp_path.iterdir()}
    assert sorted(kept) == [".html", ".json"]
    assert [row["name"] for row in json.loads(kept[".json"].read_text())["rows"]] == ["idle-rss"]
