"""``txmq binlog run``: read a database's binlog and publish it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from txmq.cli import output
from txmq.cli.binlog.options import Address, Config, Skip, Snapshot, settings_of


def run(
    config: Config,
    bootstrap: Address = None,
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
