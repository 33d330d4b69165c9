"""``txmq outbox``: take messages that wait in databases to the broker, look at them, and settle what has stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from txmq.cli import output
from txmq.cli.connecting import connected, connected_when_there
from txmq.cli.resolver import Config, check_keys, connector, read_tables, require_texts
from txmq.errors import ConfigError, ConnectionLostError, RequestTimeoutError, TxmqError

if TYPE_CHECKING:
    from pathlib import Path

    from txmq.client import Client
    from txmq.client.relay.operator import Look, Operator
    from txmq.client.relay.relay import Relay
    from txmq.outbox.outbox import Outbox
    from txmq.outbox.tables import ListedRow

TOLD_S = 1.0
LOOKS_MAX = 3  # at a relay row that changes while the broker is asked
_KEYS = ("name", "driver", "connect", "table", "dialect", "durability")
_STATUS = ("outbox", "state", "waiting", "oldest_ms", "parked", "problem")
_LISTED = ("outbox", "unit", "state", "topic", "key", "size_bytes", "age_ms", "why")
_ENDS = ("outbox", "end", "page", "rows")

app = output.command_group("Messages that wait in databases: take them to the broker, look, settle what has stopped.")
Name = Annotated[
    str | None, typer.Option("--outbox", "-o", metavar="NAME", help="Which of the file's.", show_default=False)
]
UNITS = "As list shows them; a row without a unit has its id there."


class Place(NamedTuple):
    """An outbox of the file, and how its database is reached."""

    outbox: Outbox
    connect: Callable[[], Any]
    durability: Any


@app.command()
def run(
    config: Config,
    bootstrap: output.BootstrapBeforeFile = None,
    once: Annotated[
        bool, typer.Option("--once", help="Send what waits, then end: 1 if something waits still, or is parked.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that --once waits for each.", min=0.001, max=86400)] = 60.0,
    as_json: output.Json = False,
) -> None:
    """Take the messages of the file's outboxes to the broker, until SIGTERM or Ctrl-C.

    Each once, in the order of their keys. Several relays of one outbox are harmless: one sends, the others wait. A
    database or a broker that is away is waited for. A database that refuses (password, no such database or table,
    privileges) ends the command; one that has worked before is tried again, and the log says so. The page on its way
    is finished before the command ends.

    [bold]The file[/bold]

      bootstrap = "txmq://127.0.0.1:8123"  # or zk://... of a cluster

      [\\[outbox]]
      name = "orders-db"              # as in txmq.Outbox("orders-db")
      driver = "sqlite3"              # or any other DB-API module
      connect = { database = "/srv/orders.db" }
      # connect = { host = "db", user = "shop", passwd = { env = "PASS" } }
      # what the service gives its outbox stands here, too: table, dialect
      # durability = "weak"           # as in client.relay: see the page

    [bold]Examples[/bold]

      txmq outbox run --config outbox.toml
      txmq outbox run --config outbox.toml --once --json
    """
    import threading

    from txmq.runtime import logging
    from txmq.runtime.threads import until_terminated

    logging.configure("info")
    broker, places = _read(config, bootstrap)
    stop = threading.Event()
    with until_terminated(stop.set):  # by a thread: a signal may interrupt ``stop.wait`` with its lock in hand
        client = connected_when_there(broker, stop)
        if client is None:
            return
        with client, ExitStack() as opened:
            relays = [opened.enter_context(_relay(client, place)) for place in places]
            problems = _drained(relays, timeout) if once else _followed(relays, stop)
    if once:
        _report_once(places, relays, problems, as_json=as_json)


@app.command()
def status(config: Config, bootstrap: output.BootstrapBeforeFile = None, as_json: output.Json = False) -> None:
    """Show for each outbox what waits, since when, and whether its line has stopped.

    The state is running (a relay is at work), no-relay, or stopped: broker and database do not agree on the newest
    page, and txmq outbox adopt says which one is right. Exit status 1 if an outbox has stopped, or its database or
    the broker could not be asked.

    [bold]Examples[/bold]

      txmq outbox status --config outbox.toml
    """
    broker, places = _read(config, bootstrap)
    with _asking(broker) as (client, away):
        found = [_status(_look(place, client, away, 0)) for place in places]
    output.show_rows("outboxes", _STATUS, found, as_json=as_json)
    if any(one["problem"] for one in found):
        raise SystemExit(output.STATUS_FAILED)


@app.command("list")
def list_(
    config: Config,
    bootstrap: output.BootstrapBeforeFile = None,
    limit: Annotated[int, typer.Option(help="How many of each kind and outbox at most.", min=1)] = 100,
    as_json: output.Json = False,
) -> None:
    """List what waits and what is parked, oldest first, and both ends of the line.

    A parked row stays until release or drop. The ends: what the database knows (last), what is on its way (claim),
    what the broker has taken last (chain). The line runs while chain is one of the other two.

    [bold]Examples[/bold]

      txmq outbox list --config outbox.toml
      txmq outbox list --config outbox.toml --json | jq '.[].parked'
    """
    broker, places = _read(config, bootstrap)
    with _asking(broker) as (client, away):
        seen = [_look(place, client, away, limit) for place in places]
    if as_json:
        output.print_json([_status(one) | {"waiting_rows": one.waiting, "parked_rows": one.parked} for one in seen])
    else:
        rows = [[one.name, *(row[name] for name in _LISTED[1:])] for one in seen for row in (*one.parked, *one.waiting)]
        output.print_table("rows", _LISTED, rows)
        output.print_table("ends", _ENDS, [line for one in seen for line in one.ends()])
    for one in seen:
        if one.problem:
            output.note(f"{one.name}: {one.problem}")
    if any(one.problem and one.state != "stopped" for one in seen):  # what is listed is not all that there is
        raise SystemExit(output.STATUS_FAILED)


@app.command()
def release(
    config: Config,
    units: Annotated[list[int] | None, typer.Argument(metavar="UNIT", help=UNITS, show_default=False)] = None,
    name: Name = None,
    key: Annotated[
        tuple[str, str] | None, typer.Option("--key", metavar="TOPIC KEY", help="Units with a message of this key.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that is parked.")] = False,
    as_json: output.Json = False,
) -> None:
    """Let parked units be sent, at the place that their ids give them.

    A unit that stands after a parked one of its key is parked again by the relay, so that no key loses its order:
    release a key as a whole, or its lowest unit first.

    [bold]Examples[/bold]

      txmq outbox release --config outbox.toml --outbox orders-db 4711
      txmq outbox release --config outbox.toml --key orders customer-42
      txmq outbox release --config outbox.toml --all
    """
    if [bool(units), key is not None, everything].count(True) != 1:
        raise ConfigError("name what is released: UNIT..., or --key TOPIC KEY, or --all")
    with _operated(config, name) as operator:
        count = operator.release(units or None, None if key is None else (key[0], key[1].encode()))
        _require_some(operator, count)
    output.report({"released": count}, f"{count} messages wait again", as_json=as_json)


@app.command()
def drop(
    config: Config,
    units: Annotated[list[int], typer.Argument(metavar="UNIT", help=UNITS, show_default=False)],
    name: Name = None,
    yes: output.Yes = False,
    as_json: output.Json = False,
) -> None:
    """Delete parked units: their messages are never sent.

    [bold]Examples[/bold]

      txmq outbox drop --config outbox.toml --outbox orders-db 4711
    """
    with _operated(config, name) as operator:
        which = ", ".join(map(str, units))
        output.confirm(yes, f"Delete {which} of {operator.outbox.name}? Their messages are never sent.")
        count = operator.drop(units)
        _require_some(operator, count)
    output.report({"dropped": count}, f"{count} messages are deleted", as_json=as_json)


@app.command()
def adopt(
    config: Config,
    name: Name = None,
    original: Annotated[bool, typer.Option("--original", help="This database goes on as the outbox.")] = False,
    copy: Annotated[bool, typer.Option("--copy", help="It is a copy, and becomes an outbox of its own.")] = False,
    bootstrap: output.BootstrapBeforeFile = None,
    yes: output.Yes = False,
    as_json: output.Json = False,
) -> None:
    """Let a line that has stopped go on: after a restore, a fail-over that lost commits, or in a copy.

    All that waits is parked, because the broker may have some of it already. Look (txmq outbox list, txmq consume),
    drop what was sent, release the rest. New messages go on at once, those of parked keys after their key.

    --original says that no other database goes on as this outbox; --copy that the original does.

    [bold]Examples[/bold]

      txmq outbox adopt --config outbox.toml --outbox orders-db --original
      txmq outbox list --config outbox.toml
      txmq outbox release --config outbox.toml --outbox orders-db --all
    """
    if original == copy:
        raise ConfigError(
            "say which it is: --original (this database goes on as the outbox) or --copy (the original goes on, too)"
        )
    with _operated(config, name) as operator:
        begins = "begin an outbox of its own, as a copy" if copy else "go on, with no other database as its outbox"
        output.confirm(
            yes, f"Let {operator.outbox.name} {begins}? All that waits is parked until you release or drop it."
        )
        with connected(_read(config, bootstrap)[0]) as client:
            found = operator.adopt(client, is_copy=copy)
    if found is None:
        output.fail(
            f"outbox {operator.outbox.name}: database and broker agree, nothing is adopted: txmq outbox status; a copy "
            "that is to go on beside its original takes --copy"
        )
    fields = {"uuid": found.row.uuid, "home": found.row.home, "last": found.row.last, "parked": found.parked}
    text = f"{operator.outbox.name} goes on as {found.row.uuid}; {found.parked} messages are parked: txmq outbox list"
    output.report(fields, text, as_json=as_json)


@app.command()
def forget(
    uuid: Annotated[str, typer.Argument(metavar="UUID", help="As txmq stats chains shows it.", show_default=False)],
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    yes: output.Yes = False,
    as_json: output.Json = False,
) -> None:
    """Have the broker drop what it knows of an outbox whose database is no more. For administrators.

    An outbox that is still there stops with its next page.

    [bold]Examples[/bold]

      txmq stats chains
      txmq outbox forget 0123456789abcdef0123456789abcdef
    """
    from txmq.client.relay import operator

    output.confirm(yes, f"Forget {uuid}? If its database is still there, its line stops.")
    with connected(bootstrap) as client:
        operator.forget(client, uuid)
    output.report({"uuid": uuid, "forgotten": True}, f"outbox {uuid} is forgotten", as_json=as_json)


# --- the file ---------------------------------------------------------------------------------------------------------


def _read(path: Path, bootstrap: str | None) -> tuple[str, list[Place]]:
    """The broker's address and the outboxes that a file names.

    Raises:
        ConfigError: names the file, the key and what is allowed.
    """
    address, tables = read_tables(path, "outbox")
    places = [_place(table, where) for table, where in tables]
    names = [place.outbox.name for place in places]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{path}: outbox {twice!r} stands there twice: give each a name of its own")
    return bootstrap or address or output.DEFAULT_BOOTSTRAP, places


def _place(table: dict[str, Any], where: str) -> Place:
    from txmq.outbox.outbox import Outbox

    check_keys(table, _KEYS, where)
    require_texts(table, ("name", "driver"), where)
    options: dict[str, Any] = {key: table[key] for key in ("table", "dialect") if key in table}
    require_texts(options, tuple(options), where)
    try:
        outbox = Outbox(table["name"], **options)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return Place(outbox, connector(table, where), table.get("durability", "forced"))


def _named(places: Sequence[Place], name: str | None, config: Path) -> Place:
    found = [place for place in places if name in (None, place.outbox.name)]
    if len(found) != 1:
        known = ", ".join(place.outbox.name for place in places)
        raise ConfigError(
            f"{config} names no outbox {name!r}; it has {known}" if name else f"say which: --outbox {known}"
        )
    return found[0]


@contextmanager
def _operated(config: Path, name: str | None) -> Iterator[Operator]:
    """An operator of one outbox; what its driver raises is told by name."""
    from txmq.client.relay.operator import Operator

    place = _named(_read(config, None)[1], name, config)
    with Operator(place.outbox, place.connect) as operator:
        try:
            yield operator
        except (TxmqError, typer.Abort, OSError):
            raise
        except Exception as error:  # noqa: BLE001 - of any driver: an address, a password, a lock
            output.fail(f"outbox {place.outbox.name}: {_in_words(error)}")


def _in_words(error: Exception) -> str:
    """What a driver has raised."""
    from txmq.xa.database.refusals import described, refusal_of

    refusal = refusal_of(error)
    return f"not reached: {described(error)}" if refusal is None else f"{refusal.value}: {described(error)}"


def _require_some(operator: Operator, count: int) -> None:
    if count == 0:
        output.fail(f"outbox {operator.outbox.name}: nothing of that is parked: txmq outbox list")


# --- relays -----------------------------------------------------------------------------------------------------------


def _relay(client: Client, place: Place) -> Relay:
    return client.relay(place.outbox, connect=place.connect, durability=place.durability)


def _trouble(relay: Relay) -> str:
    return ", STOPPED" if relay.stopped else ", REFUSED" if relay.refusal else ""


def _followed(relays: Sequence[Relay], stop: Any) -> dict[str, str]:
    """Until a signal; what they have sent is shown on a terminal."""
    with output.progress_of_lines() as show:
        while not stop.wait(TOLD_S):
            show([f"{one.outbox.name}: {one.sent:,} sent{_trouble(one)}" for one in relays])
            for one in relays:
                one.require_begun()
    return {}


def _drained(relays: Sequence[Relay], timeout: float) -> dict[str, str]:
    """Until nothing waits; what was in the way, by outbox."""
    problems = {}
    for relay in relays:
        try:
            relay.drain(timeout)
        except TxmqError as error:
            problems[relay.outbox.name] = str(error)
    return problems


def _report_once(places: Sequence[Place], relays: Sequence[Relay], problems: dict[str, str], *, as_json: bool) -> None:
    sent = {relay.outbox.name: relay.sent for relay in relays}
    seen = [_look(place, None, "", 0) for place in places]
    found = [
        {
            "outbox": one.name, "sent": sent[one.name], "waiting": one.backlog.get("waiting"),
            "parked": one.backlog.get("parked"),
            "problem": problems.get(one.name) or one.problem,
        }
        for one in seen
    ]  # fmt: skip
    output.show_rows("sent", ("outbox", "sent", "waiting", "parked", "problem"), found, as_json=as_json)
    if any(one["problem"] or one["waiting"] or one["parked"] for one in found):
        raise SystemExit(output.STATUS_FAILED)


# --- what is shown ----------------------------------------------------------------------------------------------------


class _Seen(NamedTuple):
    """One outbox as it is shown.

    Attributes:
        chain: the newest page that the broker has; None also if it was not asked.
        state: running, no-relay, stopped, or unreachable.
    """

    name: str
    look: Look | None
    chain: str | None
    state: str
    problem: str | None

    @property
    def backlog(self) -> dict[str, Any]:
        """How much waits and is parked, if that could be read."""
        return {} if self.look is None else self.look.backlog._asdict()

    @property
    def parked(self) -> list[dict[str, Any]]:
        return [] if self.look is None else [_row(row, "parked") for row in self.look.parked]

    @property
    def waiting(self) -> list[dict[str, Any]]:
        if self.look is None:
            return []
        ids = self.look.row.ids
        return [
            _row(row, "claimed" if any(first <= row.id <= last for first, last in ids) else "waiting")
            for row in self.look.waiting
        ]

    def ends(self) -> list[list[object]]:
        """What database and broker know of the line."""
        if self.look is None:
            return []
        row = self.look.row
        claimed = sum(last - first + 1 for first, last in row.ids)
        return [
            [self.name, "last", row.last, None], [self.name, "claim", row.claim, claimed if row.claim else None],
            [self.name, "chain", self.chain, None],
        ]  # fmt: skip


def _row(row: ListedRow, state: str) -> dict[str, Any]:
    return {
        "id": row.id, "unit": row.id if row.unit is None else row.unit, "state": state, "topic": row.topic,
        "key": output.content(row.key), "size_bytes": row.size_bytes, "age_ms": row.ms, "why": row.why,
    }  # fmt: skip


def _status(seen: _Seen) -> dict[str, Any]:
    look = seen.look
    if look is None:
        return dict.fromkeys(_STATUS) | {"outbox": seen.name, "state": seen.state, "problem": seen.problem}
    row, backlog = look.row, look.backlog
    return {
        "outbox": seen.name, "state": seen.state, **backlog._asdict(), "uuid": row.uuid, "home": row.home or None,
        "last": row.last, "claim": row.claim, "chain": seen.chain, "holder": row.holder, "problem": seen.problem,
    }  # fmt: skip


@contextmanager
def _asking(broker: str) -> Iterator[tuple[Client | None, str]]:
    """A client; without a broker none, and why."""
    with ExitStack() as opened:
        try:
            client = opened.enter_context(connected(broker))
        except (ConnectionLostError, RequestTimeoutError) as error:
            yield None, str(error)
            return
        yield client, ""


def _look(place: Place, client: Client | None, away: str, rows_max: int) -> _Seen:
    """One outbox; the broker's end of it if there is a client."""
    from txmq.client.relay.operator import Operator

    name = place.outbox.name
    with Operator(place.outbox, place.connect) as operator:
        try:
            look = operator.look(rows_max)
            if client is None:
                return _Seen(name, look, None, _state(look), away or None)
            return _with_chain(operator, client, look, rows_max)
        except TxmqError as error:
            return _Seen(name, None, None, "unreachable", str(error))
        except Exception as error:  # noqa: BLE001 - of any driver: an address, a password, a lock
            return _Seen(name, None, None, "unreachable", _in_words(error))


def _state(look: Look) -> str:
    return "running" if look.is_led else "no-relay"


def _with_chain(operator: Operator, client: Client, look: Look, rows_max: int) -> _Seen:
    from txmq.client.relay.operator import agree

    name = operator.outbox.name
    for _ in range(LOOKS_MAX):
        state = _state(look)
        try:
            ends = operator.ends(client, look.row)
        except TxmqError as error:
            return _Seen(name, look, None, state, str(error))
        if agree(look.row, ends):
            break
        before, look = look, operator.look(rows_max)
        if look.row == before.row:
            problem = "database and broker do not agree on the newest page: find out which was restored or copied, "
            return _Seen(name, look, ends.last, "stopped", f"{problem}then: txmq outbox adopt")
    # A line that moves all the time while it is looked at has not stopped.
    return _Seen(name, look, ends.last, state, None)
