"""One ``txmq audit``: the options become a spec, Spark is started, the result is told.

Theory of operation. Everything that can be wrong without Spark is found before it is started (options, Java, broker,
database), because starting it takes seconds. Java's and the workers' own words go to ``spark.log`` in the output
directory: what matters of them comes back as an error. Ctrl-C cancels what Spark does, stops it, and ends with 130.

With ``--database binlog:FILE`` the rows are a binlog's row changes, or with ``--table`` a table's rows.

With ``--follow`` there is round after round, and each finding is told as soon as it is made. A round that fails (the
broker or the database is away) is said and repeated; nothing is left out. Ctrl-C and SIGTERM end it: status 1 if this
run found something, 2 if there was nothing to judge, else 0.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from txmq.addresses import without_password, without_secret
from txmq.cli import output
from txmq.cli.binlog import settings_of
from txmq.cli.connecting import connected
from txmq.cli.tx_explain import duration_ms
from txmq.errors import ConfigError, TxmqError
from txmq.runtime.threads import Signal

if TYPE_CHECKING:
    import txmq
    from txmq.binlog.config import BinlogSettings
    from txmq.binlog.decoded_changes import TableName
    from txmq.spark.audit.audit import AuditResult
    from txmq.spark.audit.follow import Follower
    from txmq.spark.audit.rows import Rows
    from txmq.spark.audit.spec import AuditSpec
    from txmq.spark.audit.topic import TopicAudit, Wanted
SCHEME = "binlog:"
_UNUSED_BY_BINLOG = (
    "match", "compare", "order", "row_time", "row_txid", "transaction_size", "together", "since", "until",
    "from_offsets", "to_offsets", "interval", "latest",
)  # fmt: skip
_OPTION_NAMES = {"since": "from", "until": "to", "interval": "follow"}
Say = Callable[[str], None]
STATUS_CLEAN, STATUS_FINDINGS, STATUS_COULD_NOT = 0, 1, 2
PASSWORD_VARIABLE = "AUDIT_DATABASE_PASSWORD"  # noqa: S105 - the name of one
PROGRESS_S = 5.0
FINDINGS_SHOWN = 10
_DURATION = re.compile(r"\d+(ms|s|m|h|d)\Z")
_CAUSE = re.compile(r"^\s*(?:[\w.]*\.)?\w*(?:Error|Exception)(?:: | )(.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Request:
    """The options, as they were typed. ``interval``: keep auditing."""

    topic: str
    database: str
    table: str | None
    match: tuple[str, ...]
    compare: tuple[str, ...]
    order: str | None
    row_time: str | None
    row_txid: str | None
    transaction_size: str | None
    together: tuple[str, ...]
    since: str | None
    until: str | None
    from_offsets: str | None
    to_offsets: str | None
    settle: str
    interval: str | None
    directory: Path
    master: str
    memory: str
    bootstrap: str
    latest: bool = False
    late: str = "1h"


def binlog_of(request: Request) -> BinlogSettings | None:
    """The settings of the sync whose binlog is audited; None if it is a table.

    Raises:
        ConfigError: names the option that does not fit, or the file and the key.
    """
    if not request.database.startswith(SCHEME):
        return None
    for name in _UNUSED_BY_BINLOG:
        if getattr(request, name):
            option = _OPTION_NAMES.get(name, name).replace("_", "-")
            raise ConfigError(f"--{option}: a binlog says by itself what belongs together: leave it out")
    return settings_of(Path(request.database.removeprefix(SCHEME)), None, unused="apply")


def table_of(request: Request) -> TableName | None:
    """The table whose rows are audited; None: the row changes are.

    Raises:
        ConfigError: it is not named with its database.
    """
    from txmq.binlog.decoded_changes import TableName

    if request.table is None:
        return None
    database, dot, name = request.table.partition(".")
    if not (database and dot and name):
        raise ConfigError(f"--table {request.table[:80]!r}: expected DATABASE.TABLE, as the topic's events name it")
    return TableName(database, name)


# --- round after round ------------------------------------------------------------------------------------------------


class Rounds:
    """Runs a follower every ``interval_ms`` until it is told to stop."""

    def __init__(self, follower: Follower, interval_ms: int, say: Say, cause: Callable[[Exception], str]) -> None:
        self.follower, self.interval_s, self.say, self.cause = follower, interval_ms / 1000, say, cause
        self.found, self.has_judged = 0, False

    def run(self) -> None:
        """Go on until Ctrl-C or SIGTERM; then ``found`` says how many findings there were."""
        # No Event: its ``set`` in a handler may meet the lock of the very ``wait`` that the signal interrupted.
        stop, is_stopped = Signal(), False
        previous = signal.signal(signal.SIGTERM, lambda *_: stop.set())
        with suppress(KeyboardInterrupt):
            self.say(f"auditing every {self.interval_s:g} s; findings are told as they are made; Ctrl-C ends it")
            while not is_stopped:
                began = time.monotonic()
                self._round()
                is_stopped = stop.wait(max(0.0, self.interval_s - (time.monotonic() - began)))
        signal.signal(signal.SIGTERM, previous)
        judged = "" if self.has_judged else "; there was nothing to judge"
        self.say(f"ended; {self.found} findings{judged}")

    def _round(self) -> None:
        try:
            self._judged(self.follower.round())
            late = self.follower.look_again()
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it was, the round is repeated
            self.say(f"this round did not happen and is repeated: {self.cause(error)}")
            return
        if late is not None:
            self.found += late
            self.say(f"rows looked at once more: {late} findings that are new")

    def _judged(self, result: AuditResult | None) -> None:
        if result is None:
            return
        found = sum(result.counts.values())
        self.found += found
        self.has_judged = self.has_judged or not result.blind
        self.say(f"{result.totals.rows} rows, {result.totals.messages} messages: {found} findings")


def line_of(finding: Mapping[str, Any]) -> str:
    """A finding in a line."""
    names = {"identity": "", "partition": "partition ", "offset": "offset ", "txid": "transaction "}
    places = [f"{word}{finding[name]}" for name, word in names.items() if name in finding]
    return f"{', '.join(places)}: {finding.get('detail', '')}"


def tell(finding: dict[str, Any], *, as_json: bool) -> None:
    """One finding on standard output, at once."""
    if as_json:
        output.print_json(finding)
    else:
        sys.stdout.write(output.escaped(f"{finding['kind']}: {line_of(finding)}") + "\n")
    sys.stdout.flush()


# --- the command ------------------------------------------------------------------------------------------------------


def run(request: Request, *, as_json: bool) -> int:
    """Audit, tell, and return the exit status."""
    try:
        return AuditCommand(request, as_json).run()
    except KeyboardInterrupt:
        output.note("interrupted: the audit was not finished")
        return output.STATUS_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - Spark's, Java's and the database drivers' errors have no common base
        output.fail(_cause(error, request.directory), STATUS_COULD_NOT)


@dataclass(slots=True)
class AuditCommand:
    """One run of the command."""

    request: Request
    as_json: bool
    started: float = field(default_factory=time.monotonic)

    def run(self) -> int:
        """Check, start Spark, audit; the exit status."""
        from txmq.testing.processes.spark import environment, open_session

        environment(is_quick_start=False)  # says in one line what is missing, before anything is started
        with connected(self.request.bootstrap, self.request.topic) as client:
            client.topics.describe(self.request.topic)
            binlog = binlog_of(self.request)
            prepared = None if binlog is not None else self.prepare()
            with open_session(self.request.directory, self.request.master, self.request.memory) as spark:
                if binlog is not None:
                    return self.audited_binlog(spark, client, binlog)
                assert prepared is not None
                return self.audited(spark, client, *prepared)

    def prepare(self) -> tuple[Rows, AuditSpec, Wanted]:
        """Everything that can be known to be wrong before Spark is started."""
        from txmq.spark.audit.rows import open_rows

        wanted = _window(self.request)
        rows = open_rows(None, self.request.database, self.request.table, os.environ.get(PASSWORD_VARIABLE))
        spec = _spec(self.request, rows.primary_key())
        rows.require(spec)
        has_times = wanted.from_ms is not None or wanted.to_ms is not None
        if spec.row_time is None and (has_times or self.request.interval is not None):
            raise ConfigError("--from, --to and --follow need the column with the rows' times: --row-time COLUMN")
        if self.request.interval is not None and spec.latest:
            raise ConfigError("--follow judges each message once: leave --latest out")
        if self.request.interval is not None and (wanted.is_by_offsets or wanted.to_ms is not None):
            raise ConfigError("--follow takes --from, and none of --to, --from-offsets and --to-offsets")
        return rows, spec, wanted

    def audited(self, spark: Any, client: txmq.Client, rows: Rows, spec: AuditSpec, wanted: Wanted) -> int:
        """Audit with a session that was started; the exit status."""
        from txmq.spark.audit.topic import TopicAudit

        job = TopicAudit(spark, client, self.request.bootstrap, replace(rows, spark=spark), spec, self.say)
        if self.request.interval is not None:
            times = _duration("--interval", self.request.interval), _duration("--late", self.request.late)
            return self._follow(job, wanted.from_ms, *times)
        with _progress(spark, self.say):
            return self._tell(job.run(wanted))

    def audited_binlog(self, spark: Any, client: txmq.Client, settings: BinlogSettings) -> int:
        """Audit the topic of a binlog sync; the exit status."""
        from txmq.spark.audit.binlog import BinlogAudit, BinlogTableAudit

        request, table = self.request, table_of(self.request)
        sides = spark, client, request.bootstrap, settings, request.topic
        settle_ms = _duration("--settle", request.settle)
        job: BinlogAudit | BinlogTableAudit = BinlogAudit(*sides, settle_ms=settle_ms, say=self.say)
        if table is not None:
            job = BinlogTableAudit(*sides, table, settle_ms=settle_ms, say=self.say)
        with _progress(spark, self.say):
            return self._tell(job.run())

    def _tell(self, result: AuditResult) -> int:
        from txmq.spark.audit.report import PAGE, save, summary_of

        summary = save(result, summary_of(result, self._facts()), self.request.directory)
        if self.as_json:
            output.print_json(summary)
        else:
            show(summary)
            output.note("")
            output.note(f"look at {self.request.directory / PAGE}")
        return _status(result.is_clean, result.has_findings)

    def _follow(self, job: TopicAudit, from_ms: int | None, interval_ms: int, late_ms: int) -> int:
        from txmq.spark.audit.follow import Follower

        follower = Follower(
            replace(job, say=lambda text: None), self.request.directory, from_ms, partial(tell, as_json=self.as_json),
            late_ms,
        )  # fmt: skip
        rounds = Rounds(follower, interval_ms, self.say, lambda error: _cause(error, self.request.directory))
        rounds.run()
        return _status(rounds.has_judged and not rounds.found, rounds.found > 0)

    def _facts(self) -> dict[str, object]:

        seconds = time.monotonic() - self.started
        began = datetime.now(UTC).timestamp() - seconds
        return {
            "table": self.request.table or without_password(self.request.database),
            "database": without_password(self.request.database),
            "bootstrap": without_secret(self.request.bootstrap),
            "started": datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            "seconds": round(seconds, 1),
        }

    def say(self, text: str) -> None:
        """A line of progress, for people; on standard error, so that ``--json`` stays whole."""
        output.note(f"{time.monotonic() - self.started:6.1f} s  {text}")


def _status(is_clean: bool, has_findings: bool) -> int:
    """What was not judged is not clean."""
    if has_findings:
        return STATUS_FINDINGS
    return STATUS_CLEAN if is_clean else STATUS_COULD_NOT


def show(summary: dict[str, Any]) -> None:
    """The result in a terminal: the verdict, a line for each check, the first findings."""
    from txmq.spark.audit.report import MEANING, rounded, verdict
    from txmq.spark.audit.spec import Kind

    lines: list[tuple[str, str, str]] = []
    for kind in Kind:
        why = summary["unchecked"].get(kind.value)
        count = summary["counts"].get(kind.value, 0)
        lines.append((kind.value, "-" if why else f"{count:,}", f"not checked: {why}" if why else MEANING[kind]))
    totals = summary["totals"]
    if totals["latency_ms_p50"] is not None:
        p50, p99 = rounded(totals["latency_ms_p50"]), rounded(totals["latency_ms_p99"])
        lines.append(("latency", p50, f"from the row's time to the message's; p99 {p99}"))
    lines += [("not judged", f"{count:,}", what) for what, count in summary["unjudged"].items()]
    output.print_paragraph(verdict(summary))
    output.print_table("", ("check", "found", ""), lines)
    for kind, found in summary["findings"].items():
        for line in found[:FINDINGS_SHOWN]:
            output.note(f"  {kind}: {line_of(line)}")
        if summary["counts"][kind] > FINDINGS_SHOWN:
            output.note(f"  {kind}: and {summary['counts'][kind] - FINDINGS_SHOWN:,} more")


def _spec(request: Request, primary_key: list[str]) -> AuditSpec:
    from txmq.spark.audit.spec import AuditSpec, checked_column, parse_row_time, parse_source, parse_terms

    if not request.match and len(primary_key) != 1:
        have = f"its primary key is {', '.join(primary_key)}" if primary_key else "no primary key is known"
        raise ConfigError(f"which row belongs to which message? {have}; expected --match 'COLUMN = SOURCE'")
    return AuditSpec(
        request.topic,
        parse_terms(request.match or [f"{primary_key[0]} = key"]),
        parse_terms(request.compare),
        order=None if request.order is None else checked_column(request.order),
        row_time=None if request.row_time is None else parse_row_time(request.row_time),
        row_txid=None if request.row_txid is None else checked_column(request.row_txid),
        transaction_size=None if request.transaction_size is None else parse_source(request.transaction_size),
        together=request.together,
        settle_ms=_duration("--settle", request.settle),
        latest=request.latest,
    )


def _window(request: Request) -> Wanted:
    from txmq.spark.audit.topic import Wanted

    return Wanted(
        _moment(request.since), _moment(request.until), _offsets(request.from_offsets), _offsets(request.to_offsets)
    )


def _moment(text: str | None) -> int | None:
    if text is None:
        return None
    if _DURATION.match(text):
        return time.time_ns() // 1_000_000 - duration_ms(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ConfigError(f"{text!r}: expected a time with its zone, such as 2026-01-31T12:00Z, or how long ago: 2h")
    return int(moment.timestamp() * 1000)


def _duration(option: str, text: str) -> int:
    if not _DURATION.match(text):
        raise ConfigError(f"{option} {text[:40]!r}: expected a number with ms, s, m, h or d, such as 30s")
    return duration_ms(text)


def _offsets(text: str | None) -> dict[int, int] | None:
    if text is None:
        return None
    try:
        return {int(partition): int(offset) for partition, offset in json.loads(text).items()}
    except (ValueError, AttributeError, TypeError):
        raise ConfigError(f'{text[:200]!r}: expected offsets by partition, such as {{"0": 100, "1": 90}}') from None


@contextmanager
def _progress(spark: Any, say: Callable[[str], None]) -> Iterator[None]:
    """Tell every few seconds how far Spark is."""
    done = threading.Event()

    def tell() -> None:
        while not done.wait(PROGRESS_S):
            with suppress(Exception):  # a session that is being stopped has nothing to tell
                if text := _stages(spark):
                    say(text)

    thread = threading.Thread(target=tell, name="txmq-audit-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _stages(spark: Any) -> str:
    status = spark.sparkContext.statusTracker()
    stages = [status.getStageInfo(number) for number in status.getActiveStageIds()]
    return ", ".join(f"{stage.numCompletedTasks} of {stage.numTasks} tasks" for stage in stages if stage is not None)


def _cause(error: Exception, directory: Path) -> str:
    """The failure in a line: the last error in Spark's text, which is the first that happened."""
    if isinstance(error, TxmqError):
        return str(error)
    text = str(error)
    causes = _CAUSE.findall(text)
    first = causes[-1].strip() if causes else text.strip().partition("\n")[0]
    log = directory / "spark.log"
    return f"{type(error).__name__}: {first[:500]}" + (f" (more in {log})" if log.exists() else "")
