"""``txmq binlog status``: how far reader and applier are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from txmq.cli import output
from txmq.cli.binlog.options import Address, Config, settings_of

if TYPE_CHECKING:
    from txmq.binlog.config import BinlogSettings
    from txmq.binlog.position import Position
    from txmq.binlog.status import ApplierStatus, ServerEnd

_APPLIED = ("topic", "partition", "offset", "start", "end", "lag")


def status(config: Config, bootstrap: Address = None, as_json: output.Json = False) -> None:
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
