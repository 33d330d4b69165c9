"""What ``txmq bench`` does and shows: bare limits, then each load for about the same time, against one broker.

Theory of operation. How fast a machine is, is not known beforehand: a disk may take 0.05 ms or 20 ms a sync. So each
load is run three times: with a count that is bearable everywhere, with a tenth of what its rate promises for the time
asked for, and with all of it; only the last one is shown, so that files, caches and connections are warm.

Invariants:
* A running broker gets only topics of the benchmark's own, under unused names; they are deleted at the end.
* A load that fails is shown as failed and does not take the others' figures with it; an interruption ends the run,
  keeps what was measured, and still deletes the topic.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import txmq
from txmq.addresses import is_loopback, parse_bootstrap
from txmq.cli import output
from txmq.errors import TxmqError
from txmq.testing.bench.limits import LOOPBACK_BYTES, LOOPBACK_MESSAGES, SECONDS_MAX, bare_limits, busy, facts
from txmq.testing.bench.model import PERCENTILES, Figures, Load, Run, Target, amount
from txmq.testing.bench.raw import RawConnection, percentile
from txmq.testing.processes.broker import BrokerFailedError, BrokerProcess

WARM_UP_SHARE = 0.1
COUNT_MAX = 5_000_000
SIZE_BYTES_MAX = 512 << 20  # of what one load sends: it is held in memory, and on the disk twice
FIRST_BYTES = 4 << 20  # bearable on any disk
_OVERHEAD_BYTES = 100  # a message's share of request, batch header and list
_PINGS = 300
_LOG_TAIL = 1000
NOT_A_DISK = frozenset({"tmpfs", "ramfs"})
BARE_RATES = frozenset({LOOPBACK_BYTES})
HIDDEN = frozenset({LOOPBACK_MESSAGES})  # the other one, for the budget's messages


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a run.

    Attributes:
        server: a broker's address; None starts one of our own under ``directory``.
        settings: of our own broker.
        seconds: about how long each load is measured.
        messages: a fixed count instead.
    """

    server: str | None
    loads: tuple[Load, ...]
    directory: Path
    settings: Mapping[str, object]
    seconds: float
    messages: int | None
    size_bytes: int
    outstanding: int
    threads: int


@dataclass(slots=True)
class Measured:
    """The result of a load."""

    load: Load
    count: int = 0
    figures: Figures = field(default_factory=dict)
    failure: str | None = None


@dataclass(slots=True)
class Report:
    """The result of a run."""

    server: str
    is_own: bool
    broker: dict[str, str]
    machine: dict[str, str]
    bare: dict[str, float]
    rows: list[Measured] = field(default_factory=list)
    interrupted: bool = False

    @property
    def is_remote(self) -> bool:
        """Whether the bare limits are those of another machine than the broker's, as far as its address says."""
        [(host, _port)] = parse_bootstrap(self.server)
        return not is_loopback(host)


def run(plan: Plan, say: Callable[[str], None]) -> Report:
    """Measure everything the plan names; ``say`` is told what is going on, one text per step.

    Raises:
        TxmqError: the broker cannot be reached, or did not start.
    """
    with _broker(plan) as address:
        say("this machine")
        machine = facts(plan.directory)
        bare = bare_limits(plan.directory, min(SECONDS_MAX, plan.seconds))
        report = Report(address, plan.server is None, _of_broker(address), machine, bare)
        bare["ping of this broker p50 ms"] = _ping_ms(address)
        try:
            for load in plan.loads:
                say(load.name)
                report.rows.append(measured(load, plan, address))
        except KeyboardInterrupt:
            report.interrupted = True
    return report


def steps(plan: Plan) -> int:
    """How often ``say`` will be called."""
    return 1 + len(plan.loads)


@contextmanager
def _broker(plan: Plan) -> Iterator[str]:
    if plan.server is not None:
        yield plan.server
        return
    with BrokerProcess(plan.directory / "broker", settings=plan.settings) as process:
        try:
            yield process.address
        except TxmqError as error:
            if process.is_running:
                raise
            raise BrokerFailedError(f"its own broker ended: {process.logs()[-_LOG_TAIL:]}") from error


def _of_broker(address: str) -> dict[str, str]:
    """The settings that decide a broker's figures."""
    with txmq.connect(address, name="bench") as client:
        settings = dict(line.partition(" ")[::2] for line in client.stats("config").splitlines())
        return {"sync": settings.get("sync", "unknown")}


def _ping_ms(address: str) -> float:
    with RawConnection.to(address) as connection:
        return percentile(connection.one_by_one(b"ping 1\r\n", _PINGS), 50) * 1000


def measured(load: Load, plan: Plan, address: str) -> Measured:
    """Open a load, find its count, run it."""
    result = Measured(load)
    topic = f"txmq-bench-{secrets.token_hex(6)}"
    target = Target(address, topic, size_bytes=plan.size_bytes, outstanding=plan.outstanding, threads=plan.threads)
    try:
        with load.open(target) as measure:
            result.count = _count(load, plan, measure)
            result.figures = measure(result.count)
    except (TxmqError, OSError) as error:
        result.failure = str(error) or type(error).__name__
    return result


def _count(load: Load, plan: Plan, measure: Run) -> int:
    if plan.messages is not None:
        return plan.messages
    count_max = min(COUNT_MAX, SIZE_BYTES_MAX // (plan.size_bytes + _OVERHEAD_BYTES))
    first = count = min(load.first_count, max(1, FIRST_BYTES // plan.size_bytes))
    for share in (WARM_UP_SHARE, 1.0):
        rate = measure(count)["rate"]
        count = min(count_max, max(first, int(rate * plan.seconds * share)))
    return count


# --- the report -------------------------------------------------------------------------------------------------------


def as_fields(report: Report) -> dict[str, Any]:
    """Everything measured, for programs."""
    return {
        "server": report.server, "own_broker": report.is_own, "interrupted": report.interrupted,
        "broker": report.broker, "machine": report.machine, "bare": report.bare,
        "rows": [
            {
                "name": row.load.name, "title": row.load.title, "count": row.count, "failure": row.failure,
                "figures": {
                    name: {"value": value, "unit": row.load.units[name]} for name, value in row.figures.items()
                },
            }
            for row in report.rows
        ],
    }  # fmt: skip


def show(report: Report) -> None:
    """Facts, the table, what to know about it."""
    output.print_fields("", _facts(report))
    # Narrow enough for 80 columns: the names are explained by --help.
    output.print_table("", ("row", "rate", *(f"{name} ms" for name in PERCENTILES)), _rows(report))
    for row in report.rows:
        if row.failure is not None:
            output.print_paragraph(f"{row.load.name} failed: {row.failure}")
    for line in _notes(report):
        output.print_paragraph(line)


def _facts(report: Report) -> dict[str, str]:
    machine = report.machine
    return {
        "broker": f"{report.server} ({'its own' if report.is_own else 'yours'}), sync {report.broker['sync']}",
        "machine": f"{machine['processor']}, {machine['cores']} cores, {machine['memory']}, "
        f"load {machine['load before']} before",
        "system": f"{machine['system']}, file system {machine['file system']}, Python {machine['python']}, "
        f"hot modules: {machine.get('hot modules', 'source')}",
    }


def _rows(report: Report) -> list[list[str]]:
    rows = [cells for row in report.rows for cells in _lines(row)]
    for name, value in report.bare.items():
        is_rate = name in BARE_RATES
        rate = f"{amount(value / 1e9)} GB/s" if is_rate else ""
        if name not in HIDDEN:
            rows.append([name.removesuffix(" p50 ms").removesuffix(" bytes/s"), rate, "" if is_rate else amount(value)])
    return [cells + [""] * (2 + len(PERCENTILES) - len(cells)) for cells in rows]


def _lines(row: Measured) -> list[list[str]]:
    if row.failure is not None:
        return [[row.load.name, "failed"]]
    units = row.load.units
    latencies = [amount(row.figures[name]) if name in row.figures else "" for name in PERCENTILES]
    others = {name: value for name, value in row.figures.items() if name != "rate" and name not in PERCENTILES}
    first = [row.load.name, f"{amount(row.figures['rate'])} {units['rate']}", *latencies]
    return [first, *([f"  {name}", f"{amount(value)} {units[name]}"] for name, value in others.items())]


def _notes(report: Report) -> list[str]:
    notes = []
    if report.interrupted:
        notes.append("Interrupted: what is missing was not measured.")
    if (others := busy(report.machine)) is not None:
        notes.append(others)
    if report.machine["file system"] in NOT_A_DISK:
        notes.append("This file system is memory: no disk was measured. Name a directory on one with --directory.")
    if report.is_remote:
        notes.append("The broker is elsewhere: the bare limits are of this machine, its ping includes the network.")
    return notes
