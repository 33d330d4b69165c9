"""``make test``: every stage in turn, then what failed once more, then one verdict.

What may be run once more, and what is red whatever a second run says: ``verdict``. All that a run leaves is in
``build/suite``: ``result.json`` with times, failures and the tests that are unsteady; of each stage, when its tests
began and ended, and in which worker.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tools.suite.verdict import Failure, conclusion, to_repeat

ROOT = Path(__file__).resolve().parents[2]
LEFT = Path("build", "suite")
PYTEST = (sys.executable, "-m", "pytest")
PLUGIN = ("-p", "tools.suite.plugin")
TESTS_FAILED = 1  # pytest's exit status; what else is not 0 says nothing of tests
INTERRUPTED = 130
STOP_S = 60.0  # pytest ends servers, brokers and a JVM
# Compiled modules stand before the source: PYTHONSAFEPATH keeps the working directory out of the way.
COMPILED = ROOT / "build" / "compiled"
WITH_COMPILED = {"PYTHONSAFEPATH": "1", "PYTHONPATH": f"{COMPILED}{os.pathsep}{ROOT}"}
COMPILED_TESTS = (
    "tests/compiled", "tests/vectors", "tests/crash/test_campaign.py", "tests/crash/test_xa_campaign.py",
    "tests/services/xa/test_last_resource_mysql.py", "tests/services/xa/test_mysql_resource.py",
    "tests/services/consumer/test_acks_in_transactions.py", "tests/services/outbox/test_client_relay.py",
    "tests/unit/client/transaction/test_current.py", "tests/unit/spark/sink",
)  # fmt: skip
ELSEWHERE = ("tests/unit", "tests/vectors", "tests/compiled")  # in stages of their own


@dataclass(frozen=True, slots=True)
class Stage:
    """One command of the run.

    Attributes:
        name: in one word.
        what: what it does, for the one who waits.
        make: the targets of make that it is, at once; empty if it is tests.
        tests: what pytest runs; without them it is no stage of tests.
        options: of pytest, for a test that is run again, too.
        environment: added to ours.
    """

    name: str
    what: str
    make: Sequence[str] = ()
    tests: Sequence[str] = ()
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


STAGES = (
    Stage("check", "style, types, layers, unit tests, vectors; beside it, C extensions", make=("check", "compiled")),
    Stage(
        "services", "crash images, simulation, kill -9, services, examples, Spark",
        tests=("--durations", "15", "tests", *(word for folder in ELSEWHERE for word in ("--ignore", folder))),
    ),
    Stage("pythons", "other versions of Python", make=("pythons",)),
    Stage(
        "compiled", "vectors, simulation, kill -9 and databases with compiled modules",
        tests=("-q", *COMPILED_TESTS), options=("-o", "pythonpath=build/compiled ."), environment=WITH_COMPILED,
    ),
)  # fmt: skip


class Run:
    """One run of some stages.

    Args:
        workers: processes at once that run tests: more than cores, because these wait a lot.
        order: a seed for the order of the files of tests; None runs what takes longest first.
        root: the directory that commands run in.
    """

    def __init__(self, workers: int, order: int | None, root: Path = ROOT) -> None:
        self._workers, self._order, self._root = workers, order, root
        self._left = root / LEFT
        shutil.rmtree(self._left, ignore_errors=True)
        self._left.mkdir(parents=True)
        self.seconds: dict[str, float] = {}
        self.failures: list[Failure] = []
        self.passed_again: list[tuple[str, str]] = []
        self.broken = ""

    def play(self, stages: Sequence[Stage]) -> None:
        """Stages in turn, as long as those before are sound, then what may be repeated."""
        for number, stage in enumerate(stages, 1):
            print(f"txmq [{number}/{len(stages)}] {stage.name}: {stage.what} ...", flush=True)
            began = time.monotonic()
            self._make(stage) if stage.make else self._test(stage)
            self.seconds[stage.name] = time.monotonic() - began
            if self.broken:
                return
        self._repeat({stage.name: stage for stage in stages})

    @property
    def is_green(self) -> bool:
        """Whether every test passed, or passed alone where that is enough."""
        return not self.broken and conclusion(self.failures, self.passed_again)[0]

    def lines(self) -> list[str]:
        """How it went, for the end of the output."""
        why = [self.broken] if self.broken else conclusion(self.failures, self.passed_again)[1]
        times = ", ".join(f"{name} {_clock(seconds)}" for name, seconds in self.seconds.items())
        total = _clock(sum(self.seconds.values()))
        return [*why, f"txmq: {'green' if self.is_green else 'RED'} after {total} ({times}); see {LEFT}"]

    def write_result(self) -> None:
        """Times, failures and what is unsteady, for a program."""
        said = {
            "green": self.is_green, "order": self._order, "seconds": self.seconds,
            "unsteady": [test for _stage, test in self.passed_again] if self.is_green else [],
            "failures": [failure._asdict() for failure in self.failures],
        }  # fmt: skip
        (self._left / "result.json").write_text(json.dumps(said, indent=1) + "\n", "utf-8")

    def _make(self, stage: Stage) -> None:
        command = ["make", "--no-print-directory", f"-j{len(stage.make)}", *stage.make]
        status = self._call(command, stage.environment)
        if status:
            self.broken = f"{' '.join(command)} failed with status {status}"

    def _test(self, stage: Stage) -> None:
        order = () if self._order is None else ("--order", str(self._order))
        spread = ("-n", str(self._workers), "--dist", "loadfile")
        told = (*spread, *order, "--times", str(self._left / f"{stage.name}-times.jsonl"), *stage.tests)
        status, failures = self._pytest(stage, told, self._left / f"{stage.name}.jsonl")
        self.failures += failures
        if status not in (0, TESTS_FAILED) or (status == TESTS_FAILED and not failures):
            self.broken = f"pytest ended with status {status} in stage {stage.name}"

    def _repeat(self, stages: Mapping[str, Stage]) -> None:
        began = time.monotonic()
        for number, (stage, test) in enumerate(to_repeat(self.failures)):
            print(f"txmq once more, alone: {test} ...", flush=True)
            status, _failures = self._pytest(stages[stage], [test], self._left / f"again-{number}.jsonl")
            if status == 0:
                self.passed_again.append((stage, test))
        if self.failures:
            self.seconds["again"] = time.monotonic() - began

    def _pytest(self, stage: Stage, arguments: Sequence[str], record: Path) -> tuple[int, list[Failure]]:
        command = [*PYTEST, *PLUGIN, "--failures", str(record), *stage.options, *arguments]
        status = self._call(command, stage.environment)
        said = record.read_text("utf-8").splitlines() if record.exists() else []
        return status, [Failure(stage=stage.name, **json.loads(line)) for line in said]

    def _call(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """The command's exit status. Ctrl-C at the terminal is the command's, too: it may end its own processes."""
        process = subprocess.Popen(command, cwd=self._root, env={**os.environ, **environment})
        try:
            return process.wait()
        except KeyboardInterrupt:
            try:
                process.wait(STOP_S)
            finally:
                process.kill()
            raise


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that never wait, during the run; they end with us."""
    program = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    sum(range(1_000_000))"
    started = [subprocess.Popen([sys.executable, "-c", program, str(os.getpid())]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(
        prog="python -m tools.suite", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(names)}; all by default")
    parser.add_argument("--workers", type=int, default=5, help="processes that run tests (default %(default)s)")
    parser.add_argument(
        "--order", metavar="SEED", help="files of tests in an order drawn from SEED, a number, or 'random'"
    )
    parser.add_argument("--load", type=int, default=0, help="processes beside it that keep the machine busy")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.stages if name not in names]
    if unknown:
        parser.error(f"no stage {unknown[0]}: choose of {', '.join(names)}")
    if options.order == "random":
        options.order = random.SystemRandom().randrange(1_000_000)
    elif options.order is not None:
        if not options.order.isdecimal():
            parser.error("--order takes a number, or 'random'")
        options.order = int(options.order)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    options = _options(arguments)
    if options.order is not None or options.load:
        print(f"txmq: order of files {options.order}, {options.load} busy processes beside", flush=True)
    run = Run(options.workers, options.order)
    try:
        with busy(options.load):
            run.play([stage for stage in STAGES if not options.stages or stage.name in options.stages])
    except KeyboardInterrupt:
        print("txmq: interrupted", flush=True)
        return INTERRUPTED
    run.write_result()
    print("", *run.lines(), sep="\n", flush=True)
    return 0 if run.is_green else 1


if __name__ == "__main__":
    sys.exit(main())
