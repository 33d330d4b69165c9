"""``txmq resolver``: settle transactions in doubt, for the databases named in a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from txmq.cli import output
from txmq.cli.connecting import connected_when_there
from txmq.errors import ConfigError, TxmqError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Set, Sized

    import txmq
    from txmq.xa import LastResource, MySQLResource
    from txmq.xa.reporter import Hanging
    from txmq.xa.resolver import Resolver

    Resource = LastResource | MySQLResource

REASONS_MAX = 20  # lines; txmq tx list has all of them
_TOP_KEYS = ("bootstrap", "resource", "outbox")  # of one file for both commands
_RESOURCE_KEYS = ("name", "kind", "driver", "connect")  # and what the class takes, by keyword
_KINDS = ("last-resource", "mysql-xa")
_FIXED = ("name", "connect", "clock", "random")  # of the class, and no options
_OPTION_TYPES: dict[type, tuple[type, str]] = {
    str: (str, "text"), bool: (bool, "true or false"), int: (int, "a number"), tuple: (list, "a list of names"),
}  # fmt: skip
_OTHERS = {
    "half": "the checker of its producer group does",
    "foreign": "its own transaction manager does",
    "spark": "its Spark query does, or txmq query delete",
}


app = typer.Typer(rich_markup_mode="rich", invoke_without_command=True)
Config = Annotated[Path, typer.Option(metavar="FILE", help="TOML file that names the databases.", show_default=False)]


@app.callback()
def resolver(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML file that names the databases.", show_default=False)
    ] = None,
    bootstrap: output.BootstrapBeforeFile = None,
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="Settle what is there, then end: 1 if something stays in doubt, or could not be reached."
        ),
    ] = False,
    as_json: output.Json = False,
) -> None:
    """Settle transactions whose client is gone, by what their database proves; runs until SIGTERM or Ctrl-C.

    Two resolvers at once are harmless. What cannot be proved now is tried again, never guessed.

    [bold]The file[/bold]

      bootstrap = "txmq://127.0.0.1:8123"  # or zk://... of a cluster

      [\\[resource]]
      name = "orders-db"              # as in LastResource("orders-db", ...)
      driver = "sqlite3"              # or any other DB-API module
      connect = { database = "/srv/orders.db" }
      # connect = { host = "db", user = "shop", passwd = { env = "PASS" } }

      [\\[resource]]
      name = "stock-db"               # as in MySQLResource("stock-db", ...)
      kind = "mysql-xa"
      connect = { host = "db2", user = "shop", passwd = { env = "PASS" } }
      # what the service gives its resource stands here, too: table,
      # dialect, marker, allow_weak_durability, ignore_tables
      table = "stock_marker"

    [bold]Examples[/bold]

      txmq resolver --config resolver.toml
      txmq resolver --config resolver.toml --once --json
    """
    import txmq
    from txmq.runtime import logging

    if context.invoked_subcommand is not None:
        return
    if config is None:
        raise ConfigError("--config FILE is missing: it names the databases")
    logging.configure("info")
    address, resources = read_config(config)
    broker = bootstrap or address or output.DEFAULT_BOOTSTRAP
    if once:
        with txmq.connect(broker) as client:
            _run_once(client, resources, as_json=as_json)
    _run(broker, resources)


@app.command()
def adopt(
    config: Config,
    bootstrap: output.BootstrapBeforeFile = None,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="RESOURCE", help="Of the file's; all.", show_default=False)
    ] = None,
    yes: output.Yes = False,
    as_json: output.Json = False,
) -> None:
    """Take what the file leads to for the databases that go on, whichever did that before.

    After a restore, or a fail-over that lost commits, when the old one is off for good: what a dead client left is
    rolled back if its marker is missing in the adopted one, and a decided XA branch that is missing there is lost.

    [bold]Examples[/bold]

      txmq resolver adopt --config resolver.toml orders-db
    """
    import txmq

    address, resources = read_config(config)
    chosen = [resource for resource in resources if not names or resource.name in names]
    unknown = set(names or ()) - {resource.name for resource in chosen}
    if unknown:
        raise ConfigError(f"{config} names no resource {sorted(unknown)[0]!r}")
    which = ", ".join(resource.name for resource in chosen)
    output.confirm(yes, f"Adopt {which}? If the old one still commits anywhere, rows and messages part company.")
    adopted: list[str] = []
    with txmq.connect(bootstrap or address or output.DEFAULT_BOOTSTRAP) as client:
        for resource in chosen:
            _adopt(resource, client, adopted)
    output.report({"adopted": adopted}, f"adopted: {', '.join(adopted)}", as_json=as_json)


def _adopt(resource: Resource, client: txmq.Client, adopted: list[str]) -> None:
    try:
        resource.install(client, adopt=True)
    except TxmqError:
        raise
    except Exception as error:  # noqa: BLE001 - of any driver: an address, a password
        before = f"; adopted before it: {', '.join(adopted)}" if adopted else ""
        output.fail(f"resource {resource.name}: not reached: {type(error).__name__}: {error}{before}")
    adopted.append(resource.name)


def read_config(path: Path) -> tuple[str | None, list[Resource]]:
    """The broker's address and the resources that a file names.

    Raises:
        ConfigError: names the file, the key and what is allowed.
    """
    address, tables = read_tables(path, "resource")
    return address, [_resource(table, where) for table, where in tables]


def read_tables(path: Path, word: str) -> tuple[str | None, list[tuple[dict[str, Any], str]]]:
    """The broker's address and the tables ``[[word]]`` of a file, each with what errors call it.

    Raises:
        ConfigError: as ``read_config``.
    """
    import tomllib

    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    check_keys(document, _TOP_KEYS, str(path))
    tables = document.get(word, [])
    if not (isinstance(tables, list) and tables and all(isinstance(table, dict) for table in tables)):
        raise ConfigError(f"{path}: name at least one database in a [[{word}]] table")
    named = [(table, f"{path}: {word} {table.get('name', '(without name)')}") for table in tables]
    return document.get("bootstrap"), named


def _resource(table: dict[str, Any], where: str) -> Resource:
    from txmq.xa import LastResource, MySQLResource

    kind = table.get("kind", _KINDS[0])
    if kind not in _KINDS:
        raise ConfigError(f"{where}: kind = {kind!r}: expected one of {', '.join(_KINDS)}")
    made: type[Resource] = MySQLResource if kind == "mysql-xa" else LastResource
    known = _options_of(made)
    check_keys(table, (*_RESOURCE_KEYS, *known), where)
    if kind == "mysql-xa":
        table = {"driver": "MySQLdb", **table}
    require_texts(table, ("name", "driver"), where)
    options = {key: value for key, value in table.items() if key in known}
    for key, value in options.items():
        expected, words = known[key]
        if not isinstance(value, expected):
            raise ConfigError(f"{where}: {key} = {value!r}: expected {words}")
    resource = made(table["name"], connect=connector(table, where), **options)
    resource.opens_aside = "sqlite" not in table["driver"]
    return resource


def _options_of(made: type[Resource]) -> dict[str, tuple[type, str]]:
    """The keys of a resource beside its name and its connections: type and words of each, by its default."""
    import inspect

    parameters = inspect.signature(made).parameters.values()
    return {
        one.name: _OPTION_TYPES[str if one.default is None else type(one.default)]
        for one in parameters
        if one.name not in _FIXED
    }


def connector(table: dict[str, Any], where: str) -> Callable[[], Any]:
    """A function that opens a connection, as the table says: ``driver.connect(**connect)``.

    SQLite files are opened without creating: a missing file must be an error, never an empty database.
    """
    import importlib
    import os

    from txmq.xa.database.refusals import naming

    driver = table["driver"]
    try:
        module = importlib.import_module(driver)
    except ImportError as error:
        raise ConfigError(f"{where}: cannot import the driver {driver!r}: {error}") from None
    fields = table.get("connect", {})
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: connect: give the arguments of {driver}.connect by name: {{ name = value, ... }}")
    arguments = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            variable = value.get("env")
            if set(value) != {"env"} or not isinstance(variable, str):
                raise ConfigError(f'{where}: connect.{name}: expected a value or {{ env = "VARIABLE" }}')
            if variable not in os.environ:
                raise ConfigError(f"{where}: connect.{name}: the environment has no variable {variable}: set it")
            value = os.environ[variable]
        arguments[name] = value
    if driver == "sqlite3":
        return _sqlite_connector(module, _existing_sqlite_file(arguments, where))
    return naming(lambda: module.connect(**arguments), arguments)


def _sqlite_connector(module: Any, arguments: dict[str, Any]) -> Callable[[], Any]:
    def connect() -> Any:
        try:
            return module.connect(**arguments)
        except module.OperationalError as error:  # which does not say which file
            raise module.OperationalError(f"{error}: {arguments.get('database')}") from None

    return connect


def _existing_sqlite_file(arguments: dict[str, Any], where: str) -> dict[str, Any]:
    path = Path(str(arguments.get("database", "")))
    if arguments.get("uri"):
        return arguments
    if not path.is_absolute():
        raise ConfigError(f"{where}: connect.database = {str(path)!r}: give SQLite files by their absolute path")
    return arguments | {"database": path.as_uri() + "?mode=rw", "uri": True}


def require_texts(table: dict[str, Any], keys: tuple[str, ...], where: str) -> None:
    """Refuse a table in which one of these is not text."""
    if not all(isinstance(table.get(key), str) for key in keys):
        raise ConfigError(f"{where}: {' and '.join(keys)} must be text")


def check_keys(table: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    """Refuse a table with another key, and name the nearest known one."""
    from txmq.config_sources import near_miss

    for key in table:
        if key not in known:
            hint = near_miss(key, known) or f"known: {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")


def _run_once(client: txmq.Client, resources: list[Resource], *, as_json: bool) -> None:
    from txmq.xa.resolver import Resolver

    resolver = Resolver(client, resources)
    known = _txids(client, "heuristic")
    resolved = _rounds(resolver)
    left = list(client.transactions.list(state="in-doubt"))
    alone = [txid for txid in _txids(client, "heuristic") if txid not in known]
    resolved -= {item["txid"] for item in left} | set(alone)
    problems = {name: f"{type(error).__name__}: {error}" for name, error in resolver.problems()}
    resolver.close()
    names = {resource.name for resource in resources}
    listed = {item["txid"] for item in left}
    hung = [(name, branch) for name, branch in resolver.hanging() if branch.txid not in listed]
    if as_json:
        counts: dict[str, Sized] = {"settled": resolved, "in_doubt": left, "in_database": hung, "heuristic": alone}
        output.print_json({**{name: len(found) for name, found in counts.items()}, "problems": problems})
    else:
        output.note(f"{len(resolved)} settled, {len(left)} in doubt")
        for line in [*_why_not_reached(problems), *_why_left(left, names), *_why_hung(hung), *_decided_alone(alone)]:
            output.note(line)
    raise SystemExit(output.STATUS_FAILED if left or hung or alone or problems else 0)


def _rounds(resolver: Resolver) -> set[str]:
    """Run a round, and a second one for findings that must be seen twice; the transactions they settled."""
    from txmq.runtime.clocks import OSClock
    from txmq.xa.resolver_ports import POLL_S

    resolved = resolver.round()
    if resolver.wants_another_look:
        OSClock().sleep(POLL_S)
        resolved |= resolver.round()
    return resolved


def _txids(client: txmq.Client, state: str) -> list[str]:
    return [item["txid"] for item in client.transactions.list(state=state)]


def _why_not_reached(problems: Mapping[str, str]) -> list[str]:
    return [f"resource {name}: not reached, or not all through: {error}" for name, error in problems.items()]


def _why_left(left: list[Any], names: Set[str]) -> list[str]:
    return [f"{item['txid']} stays in doubt: {why(item, names)}" for item in left[:REASONS_MAX]]


def _why_hung(hung: list[tuple[str, Hanging]]) -> list[str]:
    return [f"{branch.txid} stays prepared in {name}: {branch.why}" for name, branch in hung[:REASONS_MAX]]


def _decided_alone(txids: list[str]) -> list[str]:
    return [
        f"{txid} was decided alone by a database, against the broker: txmq tx show {txid}"
        for txid in txids[:REASONS_MAX]
    ]


def why(listed: Mapping[str, Any], names: Set[str]) -> str:
    """Why a transaction could not be settled in this round, and what helps."""
    from txmq.xa.last_resource.resource_resolver import is_due

    if listed["kind"] in _OTHERS:
        return f"a resolver settles no such transaction: {_OTHERS[listed['kind']]}"
    waits_for = [branch["resource"] for branch in listed.get("branches") or [listed] if not branch.get("complete")]
    if missing := [name for name in waits_for if name not in names]:
        return f"the file names no resource {', '.join(map(repr, missing))}"
    if not is_due(listed):
        return "its client is connected, or was a moment ago; run this again"
    return "its database could not prove the outcome; the warnings above say why"


def _run(broker: str, resources: list[Resource]) -> None:
    """Rounds until a signal; a broker that is away, also at the start, is waited for."""
    import threading

    from txmq.runtime.threads import until_terminated
    from txmq.xa.resolver import Resolver

    stop = threading.Event()
    with until_terminated(stop.set):  # by a thread: a signal may interrupt ``stop.wait`` with its lock in hand
        client = connected_when_there(broker, stop)
        if client is not None:
            with client:
                Resolver(client, resources).run(stop)
