"""Crash points: off by default, deadly at the named visit, declared in one place."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import txmq
from txmq.errors import ConfigError
from txmq.runtime import crashpoints
from txmq.runtime.crashpoints import EXIT_STATUS, POINTS, SimulatedCrash, crash_point, set_hook

POINT = "journal.sync.done"
PROGRAM = f"""
from txmq.runtime.crashpoints import crash_point
for n in range(1, 4):
    crash_point("journal.append.before")
    print(n, flush=True)
    crash_point({POINT!r})
"""


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    crashpoints.arm(None)
    set_hook(None)


def run(setting: str | None) -> tuple[int, str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "TXMQ_CRASH"}
    if setting is not None:
        environment["TXMQ_CRASH"] = setting
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_without_the_variable_nothing_happens() -> None:
    assert run(None) == (0, "1\n2\n3\n", "")


def test_the_process_is_killed_at_the_second_visit() -> None:
    assert run(f"{POINT}:2")[:2] == (-9, "1\n2\n")


def test_exit_mode_ends_with_its_own_status() -> None:
    assert run(f"{POINT}:1:exit")[:2] == (EXIT_STATUS, "1\n")


def test_a_path_acts_at_the_next_point_behind_the_visit() -> None:
    assert run(f"{POINT}:1")[:2] == (-9, "1\n")
    assert run(f"{POINT}>journal.append.before:1")[:2] == (-9, "1\n")
    assert run(f"journal.append.before>{POINT}:3")[:2] == (-9, "1\n2\n3\n")
    assert run(f"{POINT}>journal.append.before>{POINT}:2")[:2] == (-9, "1\n2\n3\n")
    assert run(f"{POINT}>journal.append.before:3")[:2] == (0, "1\n2\n3\n")


def test_unknown_point_stops_process_at_import_and_names_nearest() -> None:
    status, output, errors = run("journal.synced.done:1")
    assert (status, output) == (1, "")
    assert "the nearest is 'journal.sync.done'" in errors


@pytest.mark.parametrize("rest", ["", ":0", ">:1", ">nowhere:1", ":x", ":1:burn", ":1:race:", ":1:sleep:soon"])
def test_a_setting_that_cannot_be_read_is_an_error(rest: str) -> None:
    with pytest.raises(ConfigError, match="TXMQ_CRASH"):
        crashpoints.arm(POINT + rest)


def test_sleep_mode_opens_a_window_once(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    crashpoints.arm(f"{POINT}:1:sleep:2.5")
    crash_point(POINT)
    crash_point(POINT)
    assert slept == [2.5]


def test_of_processes_that_race_to_a_point_one_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(signal, "pthread_kill", lambda thread, number: sent.append((thread, number)))
    for _ in range(3):
        crashpoints.arm(f"{POINT}:1:race:{tmp_path / 'first'}")
        crash_point(POINT)
    assert sent == [(threading.get_ident(), signal.SIGSTOP)]


def test_a_process_that_has_acted_is_armed_no_more(tmp_path: Path) -> None:
    (tmp_path / "first").touch()
    crashpoints.arm(f"{POINT}:2:race:{tmp_path / 'first'}")
    crash_point(POINT)
    assert crashpoints.is_armed()
    crash_point(POINT)
    assert not crashpoints.is_armed()


def test_a_hook_sees_every_point_and_may_end_the_process() -> None:
    reached: list[str] = []
    set_hook(reached.append)
    crash_point(POINT)
    crash_point("broker.apply.done")
    assert reached == [POINT, "broker.apply.done"]

    def die(name: str) -> None:
        raise SimulatedCrash(name)

    set_hook(die)
    with pytest.raises(SimulatedCrash):
        crash_point(POINT)
    set_hook(None)
    crash_point(POINT)
    assert not isinstance(SimulatedCrash(), Exception)


def test_an_armed_process_refuses_a_point_that_is_not_declared() -> None:
    set_hook(lambda name: None)
    with pytest.raises(LookupError, match="not declared"):
        crash_point("nowhere")


def _used(source: str) -> list[object]:
    """The first argument of every call of crash_point; None where it is not a literal."""
    used: list[object] = []
    if "crash_point" not in source:  # most modules: parsing them all takes a second
        return used
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        if getattr(node.func, "id", getattr(node.func, "attr", None)) == "crash_point":
            used.append(node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None)
    return used


def test_the_search_for_points_finds_them() -> None:
    assert _used("crash_point('a')\ncrashpoints.crash_point('b')\ncrash_point(name)\nother('c')") == ["a", "b", None]


def test_every_point_in_the_source_is_declared_with_its_state() -> None:
    package = Path(next(iter(txmq.__path__)))
    used = {name for path in package.rglob("*.py") for name in _used(path.read_text(encoding="utf-8"))}
    assert used <= set(POINTS), used - set(POINTS)
    assert all(10 < len(text) < 120 and "\n" not in text for text in POINTS.values())
