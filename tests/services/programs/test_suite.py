"""``tools/suite`` with real processes of pytest: what fails once, twice, by a broken promise, or with its process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.suite.__main__ import ROOT, Run, Stage

FAILS_ONCE = """
    flag = pathlib.Path(__file__).with_suffix(".ran")
    if not flag.exists():
        flag.touch()
        {how}
"""


def _play(tmp_path: Path, *bodies: str) -> Run:
    for number, body in enumerate(bodies):
        text = f"import os, pathlib\ndef test_{number}():\n    print('test {number} runs')\n{body}"
        (tmp_path / f"test_{number}.py").write_text(text, "utf-8")
    run = Run(1, None, tmp_path)
    run.play([Stage("services", "a test", tests=["."], environment={"PYTHONPATH": str(ROOT)})])
    run.write_result()
    return run


def test_test_that_fails_once_is_named_unsteady(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = _play(tmp_path, FAILS_ONCE.format(how="raise TimeoutError('too slow')"), "    pass")
    assert run.is_green, run.lines()
    assert [failure.phase for failure in run.failures] == ["call"]
    assert run.lines()[0].startswith("unsteady: ")
    assert "too slow" in run.lines()[1]
    assert "1 passed" in capfd.readouterr().out.splitlines()[-1]
    assert json.loads((tmp_path / "build/suite/result.json").read_text("utf-8"))["unsteady"] == ["test_0.py::test_0"]
    times = (tmp_path / "build/suite/services-times.jsonl").read_text("utf-8").splitlines()
    ran = {line["test"]: (line["worker"], line["began"] < line["ended"]) for line in map(json.loads, times)}
    assert ran == {f"test_{number}.py::test_{number}": ("gw0", True) for number in range(2)}


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("assert [b'a', b'b'] == [b'a']", "final: {test}: messages differ"),
        ("assert not 'a message is lost'", "final: {test}: says 'lost'"),
        ("os._exit(1)", "final: {test}: its process died"),
    ],
)
def test_what_no_second_run_can_excuse_is_not_run_again(tmp_path: Path, how: str, why: str) -> None:
    run = _play(tmp_path, FAILS_ONCE.format(how=how))
    assert not run.is_green
    assert run.passed_again == []
    assert run.lines()[0].startswith(why.format(test=run.failures[0].test)), run.lines()


def test_test_that_fails_twice_is_red(tmp_path: Path) -> None:
    run = _play(tmp_path, "    raise TimeoutError('too slow')")
    assert not run.is_green
    assert run.lines()[0] == f"failed twice: {run.failures[0].test}"


def test_file_that_cannot_be_imported_is_red(tmp_path: Path) -> None:
    run = _play(tmp_path, "    pass\nraise TimeoutError('too slow')")
    assert not run.is_green
    assert run.lines()[0].startswith("pytest ended with status ")


def test_order_of_files_is_drawn_from_a_seed(tmp_path: Path) -> None:
    orders = set()
    for number in range(5):
        (tmp_path / f"test_{number}.py").write_text(f"def test_{number}():\n    pass\n", "utf-8")
    for seed in ("1", "1", "2", "3"):
        command = [sys.executable, "-m", "pytest", "-p", "tools.suite.plugin", "--order", seed, "--collect-only", "-q"]
        listed = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        orders.add(listed.partition("\n\n")[0])
    assert 1 < len(orders) <= 3


def _collected(*words: str) -> set[str]:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *words]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {line for line in said.splitlines() if line.startswith("tests/services/consumer/")}


def test_id_of_a_test_is_the_same_everywhere() -> None:
    """Found: one that had failed in a run of everything was "not found" when it was run once more."""
    alone = _collected("tests/services/consumer")
    assert len(alone) > 100
    assert alone == _collected("tests", *(f"--ignore=tests/{folder}" for folder in ("unit", "spark", "examples")))
