"""``txmq outbox``."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Messages that wait in an outbox.")
