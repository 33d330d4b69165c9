"""``txmq quota``: set, remove, list the limits of users and topics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from txmq.cli import output
from txmq.cli.connecting import administering
from txmq.errors import ConfigError

app = output.command_group("How much a user, or a topic, may take of the broker. Without a quota there is no limit.")
User = Annotated[str | None, typer.Option("--user", metavar="NAME", help="The user that is limited.")]
Topic = Annotated[str | None, typer.Option("--topic", metavar="NAME", help="The topic that is limited, for all users.")]
_LIMITS = ("bytes_per_s", "requests_per_s", "connections_max", "unsettled_max")


@app.command("set")
def set_(
    user: User = None,
    topic: Topic = None,
    bytes_per_s: Annotated[int | None, typer.Option(min=1, help="Bytes of puts and gets, a second.")] = None,
    requests_per_s: Annotated[int | None, typer.Option(min=1, help="Requests a second.")] = None,
    connections_max: Annotated[int | None, typer.Option(min=1, help="Connections of a user at a time.")] = None,
    unsettled_max: Annotated[
        int | None, typer.Option(min=1, help="Transactions of a user that are prepared and not settled.")
    ] = None,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    as_json: output.Json = False,
) -> None:
    """Limit a user or a topic; a limit that is not named goes, if there was one.

    [bold]Examples[/bold]

      txmq quota set --user shop --requests-per-s 100 --bytes-per-s 1000000
      txmq quota set --topic orders --bytes-per-s 10000000
      txmq quota set --user shop --connections-max 20 --unsettled-max 100
    """
    stated = dict(zip(_LIMITS, (bytes_per_s, requests_per_s, connections_max, unsettled_max), strict=True))
    limits = {limit: value for limit, value in stated.items() if value is not None}
    if not limits:
        raise ConfigError(
            "no limit is named: say --bytes-per-s, --requests-per-s, --connections-max or --unsettled-max"
        )
    _carried_out("set", _meant(user, topic), limits, bootstrap, as_json=as_json)


@app.command()
def remove(
    user: User = None,
    topic: Topic = None,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    as_json: output.Json = False,
) -> None:
    """Take all limits of a user or a topic away.

    [bold]Examples[/bold]

      txmq quota remove --user shop
    """
    _carried_out("remove", _meant(user, topic), {}, bootstrap, as_json=as_json)


@app.command("list")
def list_(
    user: User = None,
    topic: Topic = None,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    as_json: output.Json = False,
) -> None:
    """List the limits of all, or of one.

    [bold]Examples[/bold]

      txmq quota list
      txmq quota list --user shop --json
    """
    meant = ("*", "*") if user is None and topic is None else _meant(user, topic)
    _carried_out("list", meant, {}, bootstrap, as_json=as_json)


def _meant(user: str | None, topic: str | None) -> tuple[str, str]:
    """Kind and name."""
    if user is not None and topic is None:
        return "user", user
    if topic is not None and user is None:
        return "topic", topic
    raise ConfigError("say whom it limits: --user NAME or --topic NAME, one of them")


def _carried_out(action: str, meant: tuple[str, str], limits: dict[str, int], bootstrap: str, *, as_json: bool) -> None:
    kind, name = meant
    with administering(bootstrap, name if kind == "user" else None) as users:
        _show(users.quota(action, kind, name, limits), as_json=as_json)


def _show(found: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        output.print_json(found)
        return
    rows = [(one["kind"], one["name"], *(one["limits"].get(limit) for limit in _LIMITS)) for one in found]
    output.print_table("quotas", ("kind", "name", *_LIMITS), rows)
