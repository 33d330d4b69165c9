"""``txmq binlog status``: how far a reader is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.cli import output
from txmq.cli.binlog.options import Address, Config, settings_of

if TYPE_CHECKING:
    from txmq.binlog.config import BinlogSettings
    from txmq.binlog.position import Position
    from txmq.binlog.status import ServerEnd


def status(config: Config, bootstrap: Address = None, as_json: output.Json = False) -> None:
    """Show how far the reader is: position, lag in seconds and bytes, rate, and what is prepared.

    Asks the broker, and the database for the end of its binlog. The reader itself need not run. If the database does
    not answer, the lag is not known. In ordered mode the spool is shown as well; if it is on this machine, the broker
    may be away.

    [bold]Examples[/bold]

      txmq binlog status --config binlog.toml
      txmq binlog status --config binlog.toml --json | jq .lag_s
    """
    import txmq
    from txmq.binlog.status import binlog_status, newest_published

    settings = settings_of(config, bootstrap)
    with txmq.connect(settings.bootstrap, lazy=settings.publish.mode == "ordered") as client:
        newest = newest_published(client, settings)
        end, problem = _server_end(settings, newest.position)
        found = binlog_status(client, settings, newest, end, client.clock.now_ms())
    fields = found.as_fields() | {"database": problem or "answers"}
    if as_json:
        output.print_json(fields)
        return
    fields["published"] = output.moment(fields.pop("published_ms"))
    fields["parked"] = ", ".join(f"{xid}: {rows} changes" for xid, rows in found.parked.items()) or None
    if (spool := fields["spool"]) is not None:
        fields["spool"] = (
            f"{spool['messages']} messages, {spool['size_bytes']} of {spool['size_bytes_max']} bytes: "
            f"{spool['path']} of {spool['host']}"
        )
    output.print_fields(settings.name, fields)


def _server_end(settings: BinlogSettings, position: Position) -> tuple[ServerEnd | None, str]:
    from txmq.binlog.errors import BinlogError
    from txmq.binlog.status import server_end

    try:
        return server_end(settings, position), ""
    except BinlogError as error:
        return None, str(error)
