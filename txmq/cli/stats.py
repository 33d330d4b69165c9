"""``txmq stats``: the broker's counters and listings."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from txmq.cli import output
from txmq.cli.connecting import connected, partly, raise_missing

if TYPE_CHECKING:
    from txmq.client import Client

SYNCS = "binlog"
_HELP = "stats binlog        one line a binlog sync: what is published, which reader does it\n"
_SYNC = ("reader", "gtids", "rows", "rows_per_s", "delay_s", "published", "snapshot", "parked", "spool")
LISTINGS = ("topics", "offsets", "transactions", "resources", "chains")


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
      txmq stats binlog
      txmq stats --json
    """
    with connected(bootstrap, meets_replicas=True) as client:
        if item == SYNCS:
            _show_syncs(client, as_json=as_json)
            return
        if as_json or item == "json":
            found, missing = partly(lambda: _by_home(client, item))
            output.print_json(found[0][1] if client.routes.is_single_home else dict(found))
            raise_missing(missing)
            return
        if item == "help":
            sys.stdout.write(client.stats(item) + _HELP)
            return
        texts, missing = partly(lambda: _texts(client, item))
    for home, text in texts:
        rows = [line.partition(" ")[::2] for line in text.splitlines()]
        output.print_table("stats" if item is None else f"stats {item}", ("key", "value"), [*home, *rows])
    raise_missing(missing)


def _show_syncs(client: Client, *, as_json: bool) -> None:
    """What the broker knows of each sync: the databases are not asked."""
    from txmq.binlog.publish.syncs import SyncStatus, syncs
    from txmq.cli.binlog import for_people

    found = syncs(client, client.clock.now_ms())
    known = {name: asdict(one) for name, one in found.items() if isinstance(one, SyncStatus)}
    problems = {name: str(error) for name, error in found.items() if name not in known}
    if as_json:
        output.print_json([*known.values(), *({"name": name, "problem": text} for name, text in problems.items())])
    else:
        rows = [[name, *map(for_people(fields).get, _SYNC)] for name, fields in known.items()]
        output.print_table("stats binlog", ("sync", *_SYNC), rows)
    if problems:
        output.fail("; ".join(f"{name}: {text}" for name, text in problems.items()))


def _texts(client: Client, item: str | None) -> list[tuple[list[tuple[str, str]], str]]:
    """A broker's text, after a row that names its home if there are several."""
    routes = client.routes
    links = routes.all_links()
    if routes.is_single_home:
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
