"""``python -m tools.soak``: endless mixed load against a real broker, whose resources must stay within bounds.

Small messages, batches of 100 KB and 1 MiB, transactions, group members, prepared branches that are listed meanwhile,
over loopback, into a directory of its own. Exit 0: every bound held; 1: the table says which did not; 130: interrupted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import txmq
from tools.soak.bounds import Judged, Sample, judge
from tools.soak.broker import SETTINGS, measures, sample
from tools.soak.load import Load
from txmq.testing.processes.broker import BrokerFailedError, BrokerProcess

SECONDS_MAX = 24 * 3600.0
SAMPLE_S = 1.0
END_TIMEOUT_S = 60.0
INTERRUPTED = 130


@dataclass(slots=True)
class Outcome:
    """What a soak found."""

    samples: list[Sample] = field(default_factory=list)
    rows: list[Judged] = field(default_factory=list)
    rounds: dict[str, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    is_interrupted: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    options = _parser().parse_args(arguments)
    seconds = options.minutes * 60 if options.seconds is None else options.seconds
    if not 0 < seconds <= SECONDS_MAX:
        print(f"{seconds:g} s: more than 0, at most {SECONDS_MAX:g}", file=sys.stderr)
        return 2
    directory = Path(tempfile.mkdtemp(prefix="txmq-soak-", dir=options.directory))
    outcome = soak(directory, seconds, options)
    _print(outcome)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(_as_json(outcome, seconds), indent=1) + "\n", "utf-8")
    if outcome.broken:
        print("\nBROKEN", *outcome.broken, f"kept: {directory}", sep="\n")
        return 1
    shutil.rmtree(directory)
    print("interrupted; every bound held until then" if outcome.is_interrupted else "every bound held")
    return INTERRUPTED if outcome.is_interrupted else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (10)")
    parser.add_argument("--seconds", type=float, default=None, help="the same in seconds")
    parser.add_argument("--seed", type=int, default=1, help="of what the load draws (1)")
    parser.add_argument("--directory", type=Path, default=None, help="where data may lie: a disk, not memory")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="every sample and the table as JSON")
    parser.add_argument("--memory-mib-max", type=float, default=512.0, help="bound of the resident memory (512)")
    parser.add_argument(
        "--stall-ms-max", type=float, default=250.0,
        help="bound of the loop's longest stall, without waits for a processor (250)",
    )  # fmt: skip
    return parser


def soak(directory: Path, seconds: float, options: argparse.Namespace) -> Outcome:
    """Run broker and load, and judge what was measured."""
    outcome = Outcome()
    try:
        with BrokerProcess(directory / "broker", settings=SETTINGS) as broker:
            load = Load(broker.address, directory, options.seed)
            load.prepare()
            previous = signal.signal(signal.SIGINT, lambda *_: _interrupt(outcome, load))
            try:
                with txmq.connect(broker.address) as client:
                    _measure(outcome, broker, client, load, seconds)
            finally:
                outcome.broken += load.end(END_TIMEOUT_S)
                outcome.rounds = {worker.name: worker.rounds for worker in load.workers}
                signal.signal(signal.SIGINT, previous)
            broker.stop()
    except (BrokerFailedError, txmq.TxmqError, OSError) as error:
        outcome.broken.append(f"the broker: {error!r}")
    outcome.rows = judge(measures(options.memory_mib_max, options.stall_ms_max), outcome.samples)
    outcome.broken += [row.broken for row in outcome.rows if row.broken]
    idle = [name for name, rounds in outcome.rounds.items() if not rounds]
    if idle and not outcome.is_interrupted:
        outcome.broken.append(f"did nothing: {', '.join(idle)}")
    return outcome


def _interrupt(outcome: Outcome, load: Load) -> None:
    outcome.is_interrupted = True
    load.stop.set()


def _measure(outcome: Outcome, broker: BrokerProcess, client: txmq.Client, load: Load, seconds: float) -> None:
    """Let the load run, and take a sample each second."""
    load.start()
    began = time.monotonic()
    while not load.stop.is_set() and (second := time.monotonic() - began) < seconds:
        outcome.samples.append(sample(broker, client, second))
        _progress(outcome.samples[-1], seconds)
        load.stop.wait(SAMPLE_S)
    if sys.stderr.isatty():
        print(file=sys.stderr)


def _progress(taken: Sample, seconds: float) -> None:
    """One line that is written over; a line each 30 s where nobody watches."""
    figures = ", ".join(f"{name} {value:g}" for name, value in taken.items() if name != "second")
    if sys.stderr.isatty():
        print(f"\r{taken['second']:.0f} of {seconds:.0f} s: {figures}\x1b[K", end="", file=sys.stderr, flush=True)
    elif int(taken["second"]) % 30 == 0:
        print(f"{taken['second']:.0f} of {seconds:.0f} s: {figures}", file=sys.stderr, flush=True)


def _print(outcome: Outcome) -> None:
    print("rounds: " + ", ".join(f"{name} {count}" for name, count in outcome.rounds.items()))
    print(f"{'':34}{'highest':>10}{'bound':>10}{'first third':>13}{'last third':>12}{'allowed':>10}")
    for row in outcome.rows:
        name = f"{row.measure.name} {row.measure.unit and f'({row.measure.unit})'}"
        compared = [_figure(row.first), _figure(row.last), _figure(row.allowed)]
        print(
            f"{name:34}{row.highest:>10g}{row.measure.highest:>10g}{compared[0]:>13}{compared[1]:>12}{compared[2]:>10}"
            f"{'  BROKEN' if row.broken else ''}"
        )


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _as_json(outcome: Outcome, seconds: float) -> dict[str, object]:
    rows = [
        {
            "measure": row.measure.name, "unit": row.measure.unit, "highest": row.highest, "bound": row.measure.highest,
            "first_third": row.first, "last_third": row.last, "allowed": row.allowed, "broken": row.broken or None,
        }
        for row in outcome.rows
    ]  # fmt: skip
    return {
        "seconds": seconds, "is_interrupted": outcome.is_interrupted, "broken": outcome.broken, "table": rows,
        "rounds": outcome.rounds, "samples": outcome.samples,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
