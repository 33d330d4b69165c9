"""``txmq outbox``: list, drain and park messages that wait in databases while the broker is away."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from txmq.cli import output
from txmq.cli.connecting import connected
from txmq.cli.resolver import Config, read_config
from txmq.errors import ConfigError, ConnectionLostError

if TYPE_CHECKING:
    from pathlib import Path

    from txmq.xa import LastResource
    from txmq.xa.database.outbox_tables import OutboxTables
    from txmq.xa.last_resource.resolving import ResolvingConnection

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="What waits in databases for the broker: look, send, keep back.",
)
Resource = Annotated[str, typer.Argument(metavar="RESOURCE", help="Its name in the file.", show_default=False)]
Row = Annotated[str, typer.Argument(metavar="TXID", help="The transaction, as list shows it.", show_default=False)]

Bootstrap = Annotated[
    str | None,
    typer.Option(
        "--bootstrap", "-b", envvar="TXMQ_BOOTSTRAP", metavar="txmq://HOST:PORT", help="Goes before the file's."
    ),
]


@app.command("list")
def list_(
    config: Config,
    limit: Annotated[int, typer.Option(help="How many of each database at most.", min=1)] = 100,
    as_json: output.Json = False,
) -> None:
    """List what waits, oldest first, and why a row is parked. The broker is not asked.

    The file is that of txmq resolver; a resource with outbox = true is looked at.

    [bold]Examples[/bold]

      txmq outbox list --config resolver.toml
    """
    columns = ("resource", "txid", "state", "number", "size_bytes", "age_ms", "reason", "home")
    rows = []
    for resource in _with_outbox(config):
        with closing(resource.open_for_operator()) as database:
            listed = _tables(database).listed(database.connection, limit)
        rows += [dict(zip(columns, (resource.name, *row), strict=True)) for row in listed]
    output.show_rows("outbox", columns, rows, as_json=as_json)


@app.command()
def drain(
    config: Config,
    bootstrap: Bootstrap = None,
    as_json: output.Json = False,
) -> None:
    """Send what waits now, and end when nothing of it is left that can be sent. A service's own drainers may run.

    What comes meanwhile may be sent with it, and is not waited for. Exit status 1 if anything of it is left: parked
    (txmq outbox list says why), behind a parked row, or for a broker that is away.

    [bold]Examples[/bold]

      txmq outbox drain --config resolver.toml
    """
    from txmq.xa.resolver import Resolver

    address, _ = read_config(config)
    resources = _with_outbox(config)
    begun_ms = {resource.name: _now_ms(resource) for resource in resources}
    with connected(bootstrap or address or output.DEFAULT_BOOTSTRAP) as client:
        resolver = Resolver(client, resources)
        resolver.round()
        while resolver.has_older(begun_ms):
            resolver.round()
        problems = [f"{name}: {error}" for name, error in resolver.problems()]
        resolver.close()
    left = {resource.name: _left(resource, begun_ms[resource.name]) for resource in resources}
    text = ", ".join(f"{name}: {count} left" for name, count in left.items())
    output.report({"left": left, "problems": problems}, "; ".join([text, *problems]), as_json=as_json)
    if problems or any(left.values()):
        raise SystemExit(output.STATUS_FAILED)


@app.command()
def park(config: Config, resource: Resource, txid: Row, as_json: output.Json = False) -> None:
    """Keep a row back, and later ones of its keys with it, until it is released.

    A row that the broker has taken meanwhile is not kept back.

    [bold]Examples[/bold]

      txmq outbox park --config resolver.toml orders-db TXID
    """
    with closing(_named(config, resource).open_for_operator()) as database:
        if not _tables(database).park_waiting(database.connection, txid, "by an operator"):
            output.fail(f"{resource} has no row {txid} that waits: txmq outbox list")
    output.report({"parked": txid}, f"parked: {txid}", as_json=as_json)


@app.command()
def release(config: Config, resource: Resource, txid: Row, as_json: output.Json = False) -> None:
    """Let a parked row be sent, with what waits behind it.

    [bold]Examples[/bold]

      txmq outbox release --config resolver.toml orders-db TXID
    """
    with closing(_named(config, resource).open_for_operator()) as database:
        if not _tables(database).release(database.connection, txid):
            output.fail(f"{resource} has no parked row {txid} whose number was given up: txmq outbox list")
    output.report({"released": txid}, f"released: {txid}", as_json=as_json)


@app.command()
def renumber(
    config: Config,
    resource: Resource,
    bootstrap: Bootstrap = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: output.Json = False,
) -> None:
    """Send what waits under new numbers, when broker and database do not agree about the old ones.

    After a restore of one of them from a backup, when it is clear which rows the broker lacks. Refused if they agree:
    what a client is sending at that moment would be sent twice.

    [bold]Examples[/bold]

      txmq outbox renumber --config resolver.toml orders-db
    """
    from txmq.runtime.os_clock import OSRandom

    found = _named(config, resource)
    wrong = _disagreements(found, bootstrap or read_config(config)[0] or output.DEFAULT_BOOTSTRAP)
    problem = "; ".join(one.problem for one in wrong)
    if not yes:
        question = "Everything that waits is sent, also what the broker may have taken before it was restored. Go on?"
        typer.confirm(f"{problem}. {question}", abort=True, err=True)
    begun = list[str]()
    with closing(found.open_for_operator()) as database:
        for one in wrong:
            series = f"{OSRandom().bits(128):032x}"
            if not _tables(database).at(one.home).begin_series(database.connection, series, one.series):
                output.fail(f"{resource} was numbered anew by somebody else meanwhile; look again: txmq outbox drain")
            begun.append(series)
    output.report({"series": begun, "problem": problem}, f"new series: {', '.join(begun)} ({problem})", as_json=as_json)


class _Disagreement(NamedTuple):
    """A home whose broker and the database do not agree about the rows that are drained."""

    home: str
    series: str
    problem: str


def _disagreements(resource: LastResource, bootstrap: str) -> list[_Disagreement]:
    """What brokers and database do not agree about; fails if they agree."""
    from txmq.runtime.os_clock import OSClock
    from txmq.xa.database.outbox_homes import LONE
    from txmq.xa.last_resource.drainer import Drainer, DrainError

    state, found, agreed = resource.outbox, list[_Disagreement](), list[str]()
    assert state is not None  # ``_with_outbox``
    with connected(bootstrap) as client, closing(resource.open_for_operator()) as database:
        for link in client.routes.all_links():
            home = LONE if client.routes.is_lone else f"{link.home:016x}"
            drainer = Drainer(link, state, database.uuid, resource.name, OSClock(), home)
            try:
                numbers = drainer.compare(database)
            except DrainError as error:
                found.append(_Disagreement(home, drainer.series, str(error)))
            except ConnectionLostError as error:
                agreed.append(f"home {home} is away: {error}")
            else:
                agreed.append(
                    f"the broker took the rows up to {numbers.taken}, "
                    f"the database gave the numbers up to {numbers.given}"
                )
    if not found:
        text = "; ".join(agreed)
        output.fail(f"broker and database agree: {text}; nothing is numbered anew: txmq outbox drain")
    return found


def _now_ms(resource: LastResource) -> int:
    with closing(resource.open_for_operator()) as database:
        return database.table.now_ms(database.connection)


def _left(resource: LastResource, until_ms: int) -> int:
    with closing(resource.open_for_operator()) as database:
        return _tables(database).older(database.connection, until_ms)


def _with_outbox(config: Path) -> list[LastResource]:
    from txmq.xa import LastResource

    found = [one for one in read_config(config)[1] if isinstance(one, LastResource) and one.outbox is not None]
    if not found:
        raise ConfigError(f"{config} names no last resource with outbox = true")
    return found


def _named(config: Path, name: str) -> LastResource:
    for resource in _with_outbox(config):
        if resource.name == name:
            return resource
    raise ConfigError(f"{config} names no last resource {name!r} with outbox = true")


def _tables(database: ResolvingConnection) -> OutboxTables:
    assert database.outbox is not None  # ``_with_outbox``
    return database.outbox
