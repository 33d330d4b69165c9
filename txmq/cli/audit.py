"""``txmq audit``: rows against messages, one to one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from txmq.addresses import without_password
from txmq.cli import output
from txmq.errors import ConfigError

_PAIR = "'COLUMN = SOURCE'"
_DATABASE = (
    "sqlite:///FILE, mysql://USER@HOST/NAME, jdbc:URL, parquet:PATH, or binlog:FILE of txmq binlog run. The password "
    "is given as AUDIT_DATABASE_PASSWORD."
)


def _refuse_password(database: str) -> str:
    if without_password(database) != database:
        raise ConfigError(
            "an address with a password is for no command line, which others can list (ps): leave it out of "
            "--database, and set AUDIT_DATABASE_PASSWORD"
        )
    return database


Database = Annotated[str, typer.Option(help=_DATABASE, show_default=False, callback=_refuse_password)]
Table = Annotated[
    str | None, typer.Option(help="The table (not with parquet); with binlog DATABASE.TABLE.", show_default=False)
]
_MATCH = (
    "Which row belongs to which message; SOURCE is key, header:NAME, json:$.FIELD or txid. Repeat it where one is not "
    "enough. Without it: primary key = key."
)
Match = Annotated[list[str] | None, typer.Option(metavar=_PAIR, help=_MATCH, show_default=False)]
Compare = Annotated[list[str] | None, typer.Option(metavar=_PAIR, help="What else must be equal.", show_default=False)]
Order = Annotated[str | None, typer.Option(metavar="COLUMN", help="The messages of a key must come in its order.")]
_ROW_TIME = "When a row was committed, in UTC; for windows and latencies."
RowTime = Annotated[str | None, typer.Option(metavar="COLUMN[:s|ms|us]", help=_ROW_TIME)]
RowTxid = Annotated[str | None, typer.Option(metavar="COLUMN", help="The transaction that wrote the row (tx.txid).")]
_SIZE = "How many messages the message's transaction has in the topic."
TransactionSize = Annotated[str | None, typer.Option(metavar="SOURCE", help=_SIZE)]
_TOGETHER = "The topic's transactions have messages there too."
Together = Annotated[list[str] | None, typer.Option(metavar="TOPIC", help=_TOGETHER, show_default=False)]
_FROM = "2026-01-31T12:00Z, or how long ago: 90m, 2h, 1d."
Since = Annotated[str | None, typer.Option("--from", metavar="TIME", help=_FROM)]
Until = Annotated[str | None, typer.Option("--to", metavar="TIME", help="Where the window ends.")]
_OFFSETS = 'In place of times, such as {"0": 100, "1": 90}.'
FromOffsets = Annotated[str | None, typer.Option(metavar="JSON", help=_OFFSETS)]
ToOffsets = Annotated[str | None, typer.Option(metavar="JSON", help="The offsets behind the last ones.")]
_SETTLE = "How long a message may take before its row counts as missing."
Settle = Annotated[str, typer.Option(metavar="30s", help=_SETTLE)]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Keep auditing; needs --row-time.")]
Interval = Annotated[str, typer.Option(metavar="10s", help="With --follow: how often.")]
_LATE = "With --follow: how old rows are when they are looked at once more: longer than your transactions."
Late = Annotated[str, typer.Option(metavar="1h", help=_LATE)]
_LATEST = "Rows are updated: hold each against its newest message alone; one whose value is null says the row is gone."
Latest = Annotated[bool, typer.Option("--latest", help=_LATEST)]
_OUTPUT = "For findings, audit.json, audit.html; otherwise audit-TOPIC."
Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="DIR", help=_OUTPUT, show_default=False)]
Master = Annotated[str, typer.Option(help="Spark's master.")]
Memory = Annotated[str, typer.Option(help="Memory of Spark's Java machine.")]


def audit(
    topic: output.Topic,
    database: Database,
    table: Table = None,
    match: Match = None,
    compare: Compare = None,
    order: Order = None,
    row_time: RowTime = None,
    row_txid: RowTxid = None,
    transaction_size: TransactionSize = None,
    together: Together = None,
    since: Since = None,
    until: Until = None,
    from_offsets: FromOffsets = None,
    to_offsets: ToOffsets = None,
    settle: Settle = "30s",
    latest: Latest = False,
    follow: Follow = False,
    interval: Interval = "10s",
    late: Late = "1h",
    directory: Output = None,
    master: Master = "local[*]",
    memory: Memory = "2g",
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    as_json: output.Json = False,
) -> None:
    """Compare a topic with a database table: every row has its message, once, in order, and every message its row.

    Finds rows without message, messages without row, duplicates, disorder, holes in the offsets, transactions that are
    torn or in doubt; measures the latency from row to message. Leaves a dataset of the findings, audit.json, and
    audit.html to look at. Exit status: 0 clean, 1 findings, 2 it could not audit, or
    there was nothing to judge.

    Needs PySpark and Java 17 or later: docs/how-to/audit.md

    [bold]Examples[/bold]

      txmq audit --topic orders --database sqlite:///orders.db --table orders \\
          --match "id = json:$.id"
      txmq audit --topic orders --database mysql://app@db/shop --table orders \\
          --row-time created --from 1d
      txmq audit --topic orders --database mysql://app@db/shop --table orders \\
          --row-time created --follow
    """
    from txmq.cli.audit_run import Request, run

    raise SystemExit(
        run(
            Request(
                topic=topic, database=database, table=table, match=tuple(match or ()), compare=tuple(compare or ()),
                order=order, row_time=row_time, row_txid=row_txid, transaction_size=transaction_size,
                together=tuple(together or ()), since=since, until=until, from_offsets=from_offsets,
                to_offsets=to_offsets, settle=settle, interval=interval if follow else None,
                directory=directory or Path(f"audit-{topic}"), master=master, memory=memory, bootstrap=bootstrap,
                latest=latest, late=late,
            ),
            as_json=as_json,
        )
    )  # fmt: skip
