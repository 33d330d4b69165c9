"""``txmq stats``: what the broker counts."""

from __future__ import annotations

from typing import Annotated

import typer

from txmq.cli import output


def stats(
    item: Annotated[
        str | None, typer.Argument(help="What to show; 'help' lists the items.", show_default=False)
    ] = None,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    as_json: output.Json = False,
) -> None:
    """Show what the broker counts: messages, syncs, transactions, what is in doubt.

    [bold]Examples[/bold]

      txmq stats
      txmq stats help
      txmq stats --json
    """
    import json

    import txmq

    with txmq.connect(bootstrap) as client:
        text = client.stats("json" if as_json and item is None else item)
    if not as_json:
        rows = [line.partition(" ")[::2] for line in text.splitlines()]
        output.print_table("stats" if item is None else f"stats {item}", ("key", "value"), rows)
    elif item is None or item == "json":
        output.print_json(json.loads(text))
    else:
        output.print_json(dict(line.partition(" ")[::2] for line in text.splitlines()))
