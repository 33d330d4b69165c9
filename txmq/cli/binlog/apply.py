"""``txmq binlog apply``: write a sync's changes into a second database."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from txmq.cli import output
from txmq.cli.binlog.options import Address, Config, settings_of


def apply(
    config: Config,
    bootstrap: Address = None,
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
