"""``txmq binlog``: a database's changes as messages, into a second database, and how far both are."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from txmq.cli import output
from txmq.errors import ConfigError

if TYPE_CHECKING:
    from txmq.binlog.config import BinlogSettings
    from txmq.binlog.position import Position
    from txmq.binlog.status import ApplierStatus, ServerEnd


Config = Annotated[
    Path, typer.Option("--config", metavar="FILE", help="TOML file: docs/configuration-binlog.md.", show_default=False)
]
Snapshot = Annotated[
    str | None,
    typer.Option(
        "--snapshot", metavar="initial|never|only|TABLES",
        help="Goes before the file's snapshot.mode: which rows are read before their changes.",
    ),
]  # fmt: skip

Skip = Annotated[
    list[str] | None,
    typer.Option(
        "--skip", metavar="GTID",
        help="Pass over this transaction's changes without row events; --snapshot its tables.",
    ),
]  # fmt: skip
_APPLIED = ("topic", "partition", "offset", "start", "end", "lag")
app = output.command_group("""Publish the row changes of a MariaDB or MySQL database as messages, each once, in order.

    The database keeps a binlog for its replicas. txmq reads it as a replica does: no trigger, no change of the
    application. docs/how-to/binlog.md says how to begin, docs/configuration-binlog.md has all settings.""")


def settings_of(
    config: Path, bootstrap: str | None, snapshot: str | None = None, *, unused: str = ""
) -> BinlogSettings:
    """What the file says.

    Args:
        unused: a table of it that the command does not need.

    Raises:
        ConfigError: names the file and the key.
    """
    from txmq.binlog.config import read_settings

    try:
        settings = read_settings(config.read_text("utf-8"), os.environ, unused)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {config}: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{config}: {error}") from None
    if bootstrap is not None:
        settings = replace(settings, bootstrap=bootstrap)
    return settings if snapshot is None else replace(settings, snapshot=replace(settings.snapshot, mode=snapshot))


def status(config: Config, bootstrap: output.BootstrapBeforeFile = None, as_json: output.Json = False) -> None:
    """Show how far the reader is: position, lag in seconds and bytes, rate, and what is prepared. And the applier.

    Asks the broker, and the database for the end of its binlog. The reader itself need not run. If the database does
    not answer, the lag is not known. In ordered mode the spool is shown as well; if it is on this machine, the broker
    may be away.

    If the file names a target, the offsets there say how far it is behind the topics.

    [bold]Examples[/bold]

      txmq binlog status --config binlog.toml
      txmq binlog status --config binlog.toml --json | jq .lag_s
      txmq binlog status --config binlog.toml --json | jq .apply.lag_s
    """
    import txmq
    from txmq.binlog.status import ANSWERS, applier_status, binlog_status, newest_published

    settings = settings_of(config, bootstrap, unused="apply")
    with txmq.connect(settings.bootstrap, lazy=settings.publish.mode == "ordered") as client:
        newest = newest_published(client, settings)
        end, problem = _server_end(settings, newest.position)
        found = binlog_status(client, settings, newest, end, client.clock.now_ms())
        applied = applier_status(client, settings, client.clock.now_ms())
    fields = found.as_fields() | {"database": problem or ANSWERS}
    if as_json:
        output.print_json(fields | {"apply": None if applied is None else applied.as_fields()})
        return
    output.print_fields(settings.name, for_people(fields))
    if applied is not None:
        _print_applied(applied)


def for_people(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a sync as a terminal shows them."""
    shown = fields | {"published": output.moment(fields["published_ms"])}
    del shown["published_ms"]
    shown["parked"] = ", ".join(f"{xid}: {rows} changes" for xid, rows in fields["parked"].items()) or None
    if (snapshot := fields["snapshot"]) is not None:
        now = f", now {snapshot['table']}" if snapshot["table"] else ""
        shown["snapshot"] = (
            f"{snapshot['rows']} rows{now}; {snapshot['tables_left']} of {snapshot['tables']} tables left"
        )
    if (spool := fields["spool"]) is not None:
        shown["spool"] = (
            f"{spool['messages']} messages, {spool['size_bytes']} of {spool['size_bytes_max']} bytes: "
            f"{spool['path']} of {spool['host']}"
        )
    return shown


def _print_applied(applied: ApplierStatus) -> None:
    fields = applied.as_fields()
    partitions = fields.pop("partitions")
    output.print_fields("apply", fields)
    if partitions:
        output.print_table("applied", _APPLIED, [[one[column] for column in _APPLIED] for one in partitions])


def _server_end(settings: BinlogSettings, position: Position) -> tuple[ServerEnd | None, str]:
    from txmq.binlog.errors import BinlogError
    from txmq.binlog.status import server_end

    try:
        return server_end(settings, position), ""
    except BinlogError as error:
        return None, str(error)


def run(
    config: Config,
    bootstrap: output.BootstrapBeforeFile = None,
    snapshot: Snapshot = None,
    skip: Skip = None,
    show_settings: Annotated[
        bool, typer.Option("--show-settings", help="Print the settings that would be used, and end.")
    ] = False,
) -> None:
    """Read the binlog and publish its changes, until SIGTERM or Ctrl-C.

    A database or broker that is away is waited for. Everything else that stops the reader is one line, and nothing
    after it was published. The next run goes on there. A second reader of the same name stands by.

    The first run begins with a snapshot: the rows that the tables have already. It may be ended at any time, too.

    [bold]The file[/bold]

      name = "shop"                     # topics are shop.<database>.<table>
      bootstrap = "txmq://127.0.0.1:8123"

      \\[source]
      host = "db"
      user = "txmq"
      password = { env = "BINLOG_PASSWORD" }
      tables = ["shop.*"]

    [bold]What the database needs[/bold]

      log-bin, binlog_format=ROW, binlog_row_metadata=FULL
      CREATE USER txmq IDENTIFIED BY '...';
      GRANT REPLICATION SLAVE, BINLOG MONITOR ON *.* TO txmq;
      GRANT SELECT ON shop.* TO txmq;

    [bold]Examples[/bold]

      txmq binlog run --config binlog.toml
      txmq binlog run --config binlog.toml --snapshot only
      txmq binlog run --config binlog.toml --snapshot 'shop.items, shop.price*'
      txmq binlog run --config binlog.toml --skip 0-1-4711 --snapshot shop.items
      txmq consume --topic shop.shop.orders --from earliest
    """
    from txmq.binlog.config import shown

    settings = settings_of(config, bootstrap, snapshot, unused="apply")
    if show_settings:
        output.print_json(shown(settings))
        return
    from txmq.binlog.reader import read_binlog
    from txmq.runtime import logging

    logging.configure("info")
    bar = output.progress_of_rows if sys.stderr.isatty() else None
    published = read_binlog(settings, bar, skipped=skip or ())
    if published is None:
        output.note("stopped before this reader had published anything")
    else:
        output.note(f"stopped; published up to {published.position.gtids}")


def apply(
    config: Config,
    bootstrap: output.BootstrapBeforeFile = None,
    on_conflict: Annotated[
        str | None, typer.Option(metavar="stop|overwrite", help="Goes before the file's.", show_default=False)
    ] = None,
    skip_ddl: Annotated[
        list[str] | None,
        typer.Option(metavar="GTID", help="Do not run the statement of this transaction: the target has its effect."),
    ] = None,
    until_end: Annotated[
        bool, typer.Option("--until-end", help="End when all is applied that the topics hold now.")
    ] = False,
) -> None:
    """Write the changes into the tables of a second database, until SIGTERM or Ctrl-C.

    Each change is written once, in order per key; several partitions at a time. The offsets are in the target, in the
    same transactions as the rows. A second process of the same group stands by.

    The target begins with the tables of the source: their definitions, and the rows of the time at which the topics
    begin (none, if the source had none).

    [bold]The file[/bold]

      name = "shop"
      bootstrap = "txmq://127.0.0.1:8123"

      \\[apply]
      host = "replica"
      user = "txmq"
      password = { env = "REPLICA_PASSWORD" }

    [bold]Examples[/bold]

      txmq binlog apply --config binlog.toml
      txmq binlog apply --config binlog.toml --skip-ddl 0-1-4711
    """
    import txmq
    from txmq.binlog.apply.applier import apply_binlog
    from txmq.runtime import logging

    settings = settings_of(config, bootstrap, unused="source")
    if on_conflict is not None:
        settings = replace(settings, apply=replace(settings.apply, on_conflict=on_conflict))
    logging.configure("info")
    with txmq.connect(settings.bootstrap, lazy=True) as client:
        applied = apply_binlog(settings, client, skipped=skip_ddl or (), until_end=until_end)
    output.note(f"stopped; {applied.rows} changes and {applied.statements} statements applied")


def compare(
    config: Config,
    tables: Annotated[
        list[str] | None,
        typer.Option("--table", metavar="DATABASE.TABLE", help="Only these; by default all of source.tables."),
    ] = None,
    settle: Annotated[
        float, typer.Option(help="For how many seconds rows that differ are looked at again.", min=0.0, max=86400.0)
    ] = 5.0,
    as_json: output.Json = False,
) -> None:
    """Compare the tables of source and target: checksums by chunks of the key, then the rows that differ.

    Reads both databases, and neither the broker nor the binlog. Changes may be on their way: a row counts as different
    if it is so for the whole of --settle. Ends with status 1 if anything differs.

    [bold]Examples[/bold]

      txmq binlog compare --config binlog.toml
      txmq binlog compare --config binlog.toml --table shop.orders --json
    """
    from txmq.binlog.apply.compare import Comparer
    from txmq.binlog.decoded_changes import TableName
    from txmq.binlog.source.options import captures
    from txmq.errors import ConfigError
    from txmq.runtime.clocks import OSClock

    settings = settings_of(config, None)
    is_captured = captures(settings.source.tables, settings.source.exclude)
    wanted = None if not tables else set(tables)

    def is_wanted(name: TableName) -> bool:
        return is_captured(name) and (wanted is None or str(name) in wanted)

    with Comparer(settings, is_wanted, OSClock(), settle_s=settle) as comparer:
        named = comparer.tables()
        missing = sorted((wanted or set()) - {str(name) for name, _ in named})
        if missing:
            raise ConfigError(f"--table {missing[0]}: the source has no such table, or source.tables does not name it")
        with output.progress_of_rows(sum(rows for _, rows in named)) as advance:
            found = [comparer.compare(name, advance) for name, _ in named]
    if as_json:
        output.print_json(
            {"is_equal": all(one.is_equal for one in found), "tables": [one.as_fields() for one in found]}
        )
    else:
        rows = [(one.table, one.rows, one.differing, one.problem) for one in found]
        output.print_table("tables", ("table", "rows", "differing", "problem"), rows)
        differing = [
            (one.table, ", ".join(row.key), row.kind, ", ".join(row.columns))
            for one in found
            for row in one.differences
        ]
        if differing:
            output.print_table("rows that differ", ("table", "key", "kind", "columns"), differing)
    raise SystemExit(0 if all(one.is_equal for one in found) else output.STATUS_FAILED)


app.command("run")(run)
app.command("apply")(apply)
app.command("compare")(compare)
app.command("status")(status)
