"""``txmq cluster``: what a cluster of brokers has, who leads it, what is unavailable, and what is lost for ever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from txmq.cli import output
from txmq.cli.connecting import connected
from txmq.cli.data_directory import DEFAULT_DATA, Data
from txmq.errors import ConfigError

app = output.command_group("Several brokers: homes, leaders, topics.")
_HOMES = ("name", "home", "epoch", "leader", "replicas", "registry")
_TOPICS = ("topic", "partitions", "unavailable")


@app.command()
def describe(
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    timeout: output.Timeout = 5.0,
    as_json: output.Json = False,
) -> None:
    """Show homes and their leaders, topics with partitions that no broker leads, branches that wait.

    A home is a data directory; replicas copy it. Its partitions are unavailable while no broker leads it. The column
    registry is the state of its leader's session with ZooKeeper. A broker whose session is suspended or expired serves
    what it has.

    [bold]Examples[/bold]

      txmq cluster describe
      txmq cluster describe --json | jq '.topics[] | select(.unavailable != [])'
    """
    from txmq.client.admin.cluster import describe_cluster

    with connected(bootstrap) as client:
        found = describe_cluster(client.routes, timeout)
    if as_json:
        output.print_json(found)
        return
    registry = found["registry"]
    fields = {"cluster": found["cluster"], "registry": "none: this broker is alone"}
    if registry is not None:
        fields |= {"registry": registry["address"], "map": found["map_version"]}
    output.print_fields("cluster", fields)
    absent = {column for column in ("registry", "replicas") if not any(row.get(column) for row in found["homes"])}
    columns = tuple(column for column in _HOMES if column not in absent)
    output.show_rows("homes", columns, [_home(row) for row in found["homes"]], as_json=False)
    output.show_rows("topics", _TOPICS, [_topic(row) for row in found["topics"]], as_json=False)
    if found["branches"]:
        output.show_rows("branches that wait", tuple(found["branches"][0]), found["branches"], as_json=False)
    for refusal in [] if registry is None else registry["refused"]:
        output.note(refusal)


@app.command()
def retire(
    home: Annotated[
        str,
        typer.Argument(
            metavar="HOME", help="Its id, or the name of its broker: txmq cluster describe.", show_default=False
        ),
    ],
    reason: Annotated[str, typer.Option(help="Why, and who says so; kept in every journal.", show_default=False)],
    lost: Annotated[bool, typer.Option("--lost", help="Its directory is lost for ever, with no copy.")] = False,
    yes: output.Yes = False,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    timeout: output.Timeout = 5.0,
    as_json: output.Json = False,
) -> None:
    """Give a home up whose directory is lost for ever: nothing waits for it any more.

    Groups can be reset and deleted without it, names of deleted topics that it has are free, and reads leave its
    partitions out. Its messages are lost. Transactions that wait for it are settled one by one: txmq tx give-up.
    It is refused while a broker leads the home; should its directory turn up after this, it is refused.

    [bold]Examples[/bold]

      txmq cluster describe
      txmq cluster retire broker-3 --lost --reason 'ada: both disks burnt'
    """
    from txmq.client.admin.cluster import retire_home

    if not lost:
        raise ConfigError(
            "cluster retire gives up the messages of a home: say --lost if its directory is lost, with no copy (one "
            "that is away, or can be restored, comes back by itself)"
        )
    output.confirm(yes, f"Give home {home} up for ever? Its messages are lost.")
    with connected(bootstrap) as client:
        retired = retire_home(client.routes, home, reason, timeout)
    output.report({"home": retired, "retired": reason}, f"home {retired} is given up", as_json=as_json)


@app.command()
def facts(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="To be written; it must not exist.", show_default=False)],
    data: Data = DEFAULT_DATA,
) -> None:
    """Write what the journal of a stopped broker knows of its cluster, for txmq cluster rebuild.

    The file has the keys of users in it, and only its owner may read it.

    [bold]Examples[/bold]

      txmq cluster facts broker-1.json --data /var/lib/txmq
    """
    from txmq.broker.shell.joining import read_facts
    from txmq.config import BrokerSettings
    from txmq.runtime.clocks import OSClock, OSRandom
    from txmq.runtime.os_disk import OSDisk
    from txmq.runtime.private_files import open_private

    if not (data / "journal").is_dir():
        output.fail(f"{data} is not a data directory of a broker; name it with --data DIR", output.STATUS_USAGE)
    disk = OSDisk(data)
    try:
        found = read_facts(disk, OSClock(), OSRandom(), BrokerSettings(data=str(data)))
    finally:
        disk.close()
    with open_private(file, "x") as written:
        json.dump(found.to_json(), written)
    output.note(f"home {found.home:016x} of cluster {found.cluster:016x}: {len(found.topics)} topics, in {file}")


@app.command()
def rebuild(
    registry: Annotated[str, typer.Argument(metavar="zk://...", help="As the brokers have it.", show_default=False)],
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="The facts of each home: txmq cluster facts.", show_default=False),
    ],
    lost: Annotated[
        list[str] | None, typer.Option("--lost", metavar="HOME", help="A home that is lost for ever, by its id.")
    ] = None,
    reason: Annotated[str, typer.Option(help="With --lost: why, and who says so.")] = "",
    timeout: output.Timeout = 5.0,
    as_json: output.Json = False,
) -> None:
    """Make the registry of a cluster from its brokers' journals: the ensemble lost its data, or was restored.

    All brokers are stopped meanwhile. What is newer counts, the ensemble's or the journals': topics, users, homes that
    are given up. Nothing is deleted: a topic that was deleted while a broker was away may be back, and is named.

    [bold]Examples[/bold]

      txmq cluster rebuild zk://zoo1,zoo2/prod broker-*.json
    """
    from txmq.addresses import parse_ensemble
    from txmq.client.bootstrap import open_session
    from txmq.registry.cluster_metadata import parse_home
    from txmq.registry.zookeeper.rebuild_from_journals import Facts, Rebuilding, rebuilt
    from txmq.runtime.private_files import read_private

    if lost and not reason.strip():
        raise ConfigError("--lost gives up the messages of a home: say --reason, why it is lost and who says so")
    try:
        given_up = {parse_home(home): reason for home in lost or ()}
        read = [Facts.from_json(json.loads(read_private(file))) for file in files]
    except ValueError as error:
        raise ConfigError(f"not the id of a home, or not a file of facts: {error}") from None
    made = rebuilt(read, given_up)
    ensemble = parse_ensemble(registry)
    session = open_session(ensemble, timeout)
    try:
        Rebuilding(session, ensemble.chroot).rebuild(made)
    finally:
        session.close()
    for text in made.notes:
        output.note(text)
    fields = {"cluster": f"{made.cluster:016x}", "homes": len(made.homes), "topics": len(made.topics)}
    output.report(
        {**fields, "notes": list(made.notes)},
        f"cluster {made.cluster:016x}: {len(made.topics)} topics of {len(made.homes)} homes; start the brokers",
        as_json=as_json,
    )


def _home(row: dict[str, Any]) -> dict[str, object]:
    leader = f"given up: {row['retired']}" if row.get("retired") else row["leader"] or "none"
    replicas = ", ".join(row.get("replicas") or ("-",))
    return {**row, "leader": leader, "replicas": replicas, "registry": row["registry"] or "-"}


def _topic(row: dict[str, list[int]]) -> dict[str, object]:
    return {**row, "unavailable": ", ".join(map(str, row["unavailable"])) or "-"}
