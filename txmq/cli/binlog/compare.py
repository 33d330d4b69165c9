"""``txmq binlog compare``: whether source and target have the same rows."""

from __future__ import annotations

from typing import Annotated

import typer

from txmq.cli import output
from txmq.cli.binlog.options import Config, settings_of


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
    from txmq.runtime.os_clock import OSClock

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
