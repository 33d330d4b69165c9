"""Which failed tests may be run once more, and what the run is in the end.

A service test that fails, and passes alone in a fresh process, is *unsteady*: it leans on time, on load or on what ran
before it. The run is green and names it; it is mended before anything is built. Rare is not unsteady:

* what is deterministic is never repeated (``DETERMINISTIC``), nor a test whose worker died;
* nor a failure that says that a promise was broken (``promises``);
* nor anything if more than ``UNSTEADY_MAX`` tests failed: the run is red whatever a second run says.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

UNSTEADY_MAX = 3
DETERMINISTIC = ("tests/unit/", "tests/vectors/", "tests/simulation/", "tests/images/", "tests/compiled/")
PHASES = ("setup", "call", "teardown")


class Failure(NamedTuple):
    """A phase of a test that failed.

    Attributes:
        stage: the stage of the run that it belongs to.
        test: its id, as pytest takes it on the command line.
        phase: one of ``PHASES``; anything else if the process died that ran it.
        text: the error, as pytest shows it.
        promise: what the error says of a promise that was broken; empty if nothing.
    """

    stage: str
    test: str
    phase: str
    text: str
    promise: str = ""

    @property
    def is_final(self) -> str:
        """Why no second run can change what it means; empty if one can."""
        if self.test.startswith(DETERMINISTIC):
            return "deterministic: the same again"
        if self.phase not in PHASES:
            return "its process died"
        return self.promise


def to_repeat(failures: Sequence[Failure]) -> list[tuple[str, str]]:
    """Stage and id of each test that is run once more; empty if that cannot make the run green."""
    tests = _failed(failures)
    return [] if len(tests) > UNSTEADY_MAX or any(failure.is_final for failure in failures) else tests


def conclusion(failures: Sequence[Failure], passed_again: Collection[tuple[str, str]]) -> tuple[bool, list[str]]:
    """Whether the run is green, and the lines that say why."""
    if not failures:
        return True, ["every test passed at its first run"]
    tests = _failed(failures)
    lines = [f"final: {failure.test}: {failure.is_final}" for failure in failures if failure.is_final]
    if len(tests) > UNSTEADY_MAX:
        lines.append(f"{len(tests)} tests failed; more than {UNSTEADY_MAX} are not run again")
    elif not lines:
        lines = [f"failed twice: {test}" for stage, test in tests if (stage, test) not in passed_again]
    if lines:
        return False, lines
    return True, [line for test in passed_again for line in _unsteady(test, failures)]


def _failed(failures: Sequence[Failure]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((failure.stage, failure.test) for failure in failures))


def _unsteady(test: tuple[str, str], failures: Sequence[Failure]) -> list[str]:
    first = next(failure for failure in failures if (failure.stage, failure.test) == test)
    shown = [line for line in first.text.splitlines() if line.startswith("E  ")] or first.text.splitlines()[-5:]
    return [f"unsteady: {first.test}", *(f"    {line}" for line in shown[:10])]
