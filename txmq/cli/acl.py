"""``txmq acl``: add, remove, list what users may do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from txmq.cli import output
from txmq.cli.connecting import UserName, administering
from txmq.errors import ConfigError

app = output.command_group(
    "What users may do. A user who was just added may do nothing: what no grant allows is denied."
)
May = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WORD,...",
        show_default=False,
        help="Of a topic: read, write, create, alter, delete, describe; of a group: read, settle, alter, "
        "delete; of a resource: settle, install; of the broker: describe. May be repeated.",
    ),
]
Topic = Annotated[
    str | None, typer.Option("--topic", metavar="NAME", help="Name of a topic; orders* for all that begin so.")
]
Group = Annotated[
    str | None,
    typer.Option("--group", metavar="NAME", help="Of a consumer or producer group, or a query; may end with *."),
]
Resource = Annotated[str | None, typer.Option("--resource", metavar="UUID", help="Of a database (txmq tx list); or *.")]
Broker = Annotated[
    str | None,
    typer.Option("--broker", metavar="all", help="For monitoring: figures and lists of everything, and no message."),
]
Administrator = Annotated[bool, typer.Option("--administrator", help="Everything: users, grants, quotas, all topics.")]
_COLUMNS = ("user", "kind", "name", "may")
_ACTIONS = {"add": "grant", "remove": "revoke"}
ADD = """Allow a user something, from the next request on.

A producer needs write on its topics, a consumer read on its topics and on its group, a service with transactions
over its database settle and install on that resource, too.

[bold]Examples[/bold]

  txmq acl add shop --may write --topic orders
  txmq acl add billing --may read --topic 'orders*'
  txmq acl add billing --may read --group billing
  txmq acl add support --may alter,delete --group 'billing*'
  txmq acl add shop --may settle,install --resource '*'
  txmq acl add grafana --may describe --broker all
  txmq acl add ops2 --administrator
"""
REMOVE = """Take back what was granted, in the words that txmq acl list shows, from the next request on.

Removing orders takes nothing away that orders* allows.

[bold]Examples[/bold]

  txmq acl remove shop --may write --topic orders
"""


@app.command("remove", help=REMOVE)
@app.command("add", help=ADD)
def change(
    context: typer.Context,
    name: UserName,
    may: May = None,
    topic: Topic = None,
    group: Group = None,
    resource: Resource = None,
    broker: Broker = None,
    administrator: Administrator = False,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    as_json: output.Json = False,
) -> None:
    """``txmq acl add`` and ``remove``; ``ADD`` and ``REMOVE`` are their texts."""
    things = {"topic": topic, "group": group, "resource": resource, "broker": broker}
    words = _words(may, things, administrator)
    with administering(bootstrap, name) as users:
        _show(users.acl(_ACTIONS[str(context.info_name)], name, words), as_json=as_json)


@app.command("list")
def list_(
    name: Annotated[
        str | None, typer.Argument(metavar="USER", help="Name of one user; all.", show_default=False)
    ] = None,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    as_json: output.Json = False,
) -> None:
    """List what users may do.

    [bold]Examples[/bold]

      txmq acl list
      txmq acl list shop --json
    """
    with administering(bootstrap, name) as users:
        _show(users.acl("list", name or "*"), as_json=as_json)


def _words(may: Sequence[str] | None, things: dict[str, str | None], administrator: bool) -> dict[str, str | None]:
    """The grant as the verb takes it."""
    named: dict[str, str | None] = {kind: thing for kind, thing in things.items() if thing is not None}
    if administrator:
        if named or may:
            raise ConfigError("--administrator is everything: give it alone")
        return {"cluster": None}
    if len(named) != 1 or not may:
        raise ConfigError(
            "say what is allowed and of what: --may WORD,... and one of --topic NAME, --group NAME, --resource UUID, "
            "--broker all; or --administrator"
        )
    return {"may": ",".join(may), **named}


def _show(found: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        output.print_json(found)
    else:
        output.print_table("grants", _COLUMNS, [row for one in found for row in _rows(one)])


def _rows(one: dict[str, Any]) -> list[tuple[str, ...]]:
    """A line for each thing; one without grants has a line, too."""
    things: dict[tuple[str, str], list[str]] = {}
    for grant in one["grants"]:
        things.setdefault((grant["kind"], grant["name"]), []).append(grant["may"])
    return [(one["user"], *thing, ",".join(may)) for thing, may in things.items()] or [(one["user"], "", "", "")]
