"""``txmq stats``: what the broker counts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from txmq.cli import output

if TYPE_CHECKING:
    from txmq.client import Client

LISTINGS = ("topics", "offsets", "transactions")


def stats(
    item: Annotated[
        str | None, typer.Argument(help="What to show; 'help' lists the items.", show_default=False)
    ] = None,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    as_json: output.Json = False,
) -> None:
    """Show what the broker counts: messages, syncs, transactions, what is in doubt.

    Counts begin with the start of the broker.

    [bold]Examples[/bold]

      txmq stats
      txmq stats help
      txmq stats --json
    """
    import txmq

    with txmq.connect(bootstrap) as client:
        if as_json or item == "json":
            output.print_json(_json(client, item))
            return
        text = client.stats(item)
    if item == "help":
        sys.stdout.write(text)
        return
    rows = [line.partition(" ")[::2] for line in text.splitlines()]
    output.print_table("stats" if item is None else f"stats {item}", ("key", "value"), rows)


def _json(client: Client, item: str | None) -> object:
    """One item as JSON. Lines of a listing repeat their first word, so listings come from the broker's own JSON."""
    import json

    if item in (None, "json", *LISTINGS):
        everything = json.loads(client.stats("json"))
        return everything[item] if item in LISTINGS else everything
    lines = client.stats(item).splitlines()
    if item == "help":
        return lines
    fields = dict(line.partition(" ")[::2] for line in lines)
    if item != "config":
        offsets = json.loads(client.stats("json"))["offsets"]
        fields = {key: value for key, value in fields.items() if key != item}
        return fields | {"offsets": [held for held in offsets if held["topic"] == item]}
    return fields
