"""``txmq binlog``: a database's changes as messages."""

from __future__ import annotations

import typer

from txmq.cli.binlog.apply import apply
from txmq.cli.binlog.compare import compare
from txmq.cli.binlog.run import run
from txmq.cli.binlog.status import status

app = typer.Typer(
    rich_markup_mode="rich",
    no_args_is_help=True,
    help="""Publish the row changes of a MariaDB or MySQL database as messages, each once, in order.

    The database keeps a binlog for its replicas. txmq reads it as a replica does: no trigger, no change of the
    application. docs/how-to/binlog.md says how to begin, docs/configuration-binlog.md has all settings.""",
)
app.command("run")(run)
app.command("apply")(apply)
app.command("compare")(compare)
app.command("status")(status)
