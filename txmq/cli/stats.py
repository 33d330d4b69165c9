"""``txmq stats``: the broker's counters and listings."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from txmq.cli import output
from txmq.cli.connecting import partly, raise_missing

if TYPE_CHECKING:
    from txmq.client import Client

LISTINGS = ("topics", "offsets", "transactions", "resources")


def stats(
    item: Annotated[
        str | None, typer.Argument(metavar="ITEM", help="What to show; 'help' lists the items.", show_default=False)
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
            found, missing = partly(lambda: _by_home(client, item))
            output.print_json(found[0][1] if client.routes.is_lone else dict(found))
            raise_missing(missing)
            return
        if item == "help":
            sys.stdout.write(client.stats(item))
            return
        texts, missing = partly(lambda: _texts(client, item))
    for home, text in texts:
        rows = [line.partition(" ")[::2] for line in text.splitlines()]
        output.print_table("stats" if item is None else f"stats {item}", ("key", "value"), [*home, *rows])
    raise_missing(missing)


def _texts(client: Client, item: str | None) -> list[tuple[list[tuple[str, str]], str]]:
    """A broker's text, behind a row that names its home if there are several."""
    routes = client.routes
    links = routes.all_links()
    if routes.is_lone:
        return [([], client.stats(item))]
    return routes.ask_each(
        links, lambda link, timeout: [([("stats of", routes.name_of(link))], link.stats(item, timeout))]
    )


def _by_home(client: Client, item: str | None) -> list[tuple[str, object]]:
    routes = client.routes
    return routes.ask_each(routes.all_links(), lambda link, _: [(f"{link.home:016x}", _json(link.stats, item))])


def _json(stats: Callable[[str | None], str], item: str | None) -> object:
    """One item as JSON. Lines of a listing repeat their first word, so listings come from the broker's own JSON."""
    import json

    if item in ("config", "help"):
        lines = stats(item).splitlines()
        return lines if item == "help" else {name: _value(name, text) for name, _, text in map(_parted, lines)}
    everything = json.loads(stats("json"))
    if item in LISTINGS:
        return everything[item]
    for topic in everything["topics"]:
        if topic["name"] == item != "json":
            return topic | {"offsets": [held for held in everything["offsets"] if held["topic"] == item]}
    return everything if item in (None, "json") else stats(item)  # which says what is known


def _parted(line: str) -> tuple[str, str, str]:
    return line.partition(" ")


def _value(name: str, text: str) -> object:
    """A setting as the table of settings knows it; one of a newer broker stays text."""
    from txmq.config import SETTINGS

    setting = SETTINGS.get(name)
    if setting is None or setting.kind is str:
        return text
    if setting.kind is bool:
        return text == "true"
    return None if text == "none" else setting.kind(text)
