"""``txmq group``: list, describe, reset, skip, delete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from txmq.cli import output
from txmq.cli.connecting import connected, partly, raise_missing
from txmq.cli.consume import timestamp_ms
from txmq.errors import ConfigError

if TYPE_CHECKING:
    import txmq

app = output.command_group("Consumer groups: members, partitions, offsets and lag.")
_NOTHING_SAVED = (
    "offset -: nothing is saved in the broker. Consumers with an offset_store of their own (DatabaseOffsetStore, "
    "FileOffsetStore, ZooKeeperOffsetStore) keep it there: then the lag here counts from the start of the log, and "
    "says nothing."
)
Group = Annotated[str, typer.Argument(metavar="GROUP", help="Name of the consumer group.", show_default=False)]


@app.command("list")
def list_(bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP, as_json: output.Json = False) -> None:
    """List the groups that have members or saved offsets.

    [bold]Examples[/bold]

      txmq group list
      txmq group list --json | jq -r '.[].group'
    """
    with connected(bootstrap) as client:
        groups, missing = partly(client.groups.list)
    output.show_rows("groups", ("group", "members"), groups, as_json=as_json)
    raise_missing(missing)


@app.command()
def describe(
    group: Group, bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP, as_json: output.Json = False
) -> None:
    """Show a group's members, and owner, offset and lag of each partition.

    In a cluster each home hands out its own partitions, and counts their generations by itself. If a home is away, the
    others' partitions are shown, and the command fails.

    [bold]Examples[/bold]

      txmq group describe billing
      txmq group describe billing --json | jq '[.partitions[].lag] | add'
    """
    with connected(bootstrap, group=group) as client:
        found = client.groups.describe(group)
    if as_json:
        output.print_json(found)
        _raise_away(found)
        return
    columns = ("member", "client", "topics", "connected", "heard_ms_ago")
    rows = [[",".join(m[c]) if c == "topics" else m[c] for c in columns] for m in found["members"]]
    output.print_fields("", {"group": group, "strategy": found["strategy"], "members": len(rows)})
    output.print_table("members", columns, rows)
    fields = ("topic", "partition", "owner", "generation", "offset", "start", "end", "lag")
    output.print_table("partitions", fields, [[p[field] for field in fields] for p in found["partitions"]])
    if any(p["owner"] and p["offset"] is None for p in found["partitions"]):
        print(_NOTHING_SAVED)
    for held in (p for p in found["partitions"] if p["held_by"]):
        print(f"{held['topic']} {held['partition']} waits for a transaction: txmq tx show {held['held_by']}")
    _raise_away(found)


@app.command()
def reset(
    group: Group,
    topic: output.Topic,
    to: Annotated[
        str, typer.Option(help="earliest, latest, an offset, or a time: 2026-01-31T12:00:00Z, or @ and ms since 1970.")
    ],
    partition: Annotated[
        int | None, typer.Option("--partition", "-p", min=0, help="One partition; all of the topic without it.")
    ] = None,
    create: Annotated[bool, typer.Option("--create", help="The group is a new one, which begins there.")] = False,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    as_json: output.Json = False,
) -> None:
    """Set the offset at which a group continues; refused while it has members, and if the group is unknown.

    In a cluster all homes must be there, but for those that are given up (txmq cluster retire).

    [bold]Examples[/bold]

      txmq group reset billing --topic orders --to earliest
      txmq group reset billing --topic orders --partition 3 --to 1200
      txmq group reset billing --topic orders --to 2026-01-31T12:00:00Z
      txmq group reset reports --topic orders --to latest --create
    """
    with connected(bootstrap, topic, group=group) as client:
        rows = [[topic, held.partition, _offset(client, held, to)] for held in _held(client, topic, partition)]
        client.groups.reset(group, rows, create=create)
    _show(group, rows, as_json=as_json)


@app.command()
def skip(
    group: Group,
    topic: output.Topic,
    partition: Annotated[int, typer.Option("--partition", "-p", min=0, help="The partition.", show_default=False)],
    count: Annotated[int, typer.Option(min=1, help="How many messages to pass over.")] = 1,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    as_json: output.Json = False,
) -> None:
    """Skip messages that no consumer can process; refused while the group has members.

    The messages stay in the log: read them with txmq consume.

    [bold]Examples[/bold]

      txmq group skip billing --topic orders --partition 3
      txmq consume --topic orders --partition 3 --from 1200 --max 1
    """
    with connected(bootstrap, topic, group=group) as client:
        saved = {(p["topic"], p["partition"]): p["offset"] for p in client.groups.describe(group)["partitions"]}
        held = client.offsets(topic, partition)
        offset = saved.get((topic, partition))
        rows = [[topic, partition, min(max(held.start, offset or 0) + count, held.end)]]
        client.groups.reset(group, rows)
    _show(group, rows, as_json=as_json)


@app.command()
def delete(group: Group, bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP, as_json: output.Json = False) -> None:
    """Forget a group and its offsets; refused while it has members.

    In a cluster all homes must be there, but for those that are given up (txmq cluster retire).

    [bold]Examples[/bold]

      txmq group delete billing
    """
    with connected(bootstrap, group=group) as client:
        client.groups.delete(group)
    output.report({"group": group, "deleted": True}, f"group {group} is forgotten", as_json=as_json)


def _raise_away(found: dict[str, Any]) -> None:
    away = found.get("away", ())
    if away:
        output.fail(f"{', '.join(away)} did not answer: {'its' if len(away) == 1 else 'their'} partitions are missing")


def _held(client: txmq.Client, topic: str, partition: int | None) -> list[txmq.PartitionRange]:
    if partition is None:
        return client.ranges(topic)
    count = client.topics.describe(topic).partitions
    if partition >= count:
        raise ConfigError(f"--partition {partition}: topic {topic!r} has partitions 0 to {count - 1}")
    return [client.offsets(topic, partition)]


def _offset(client: txmq.Client, held: txmq.PartitionRange, to: str) -> int:
    if to in ("earliest", "latest"):
        return held.start if to == "earliest" else held.end
    if not (to.isascii() and to.isdecimal()):
        return client.offset_for(held.topic, held.partition, timestamp_ms(to.replace("time:", "@", 1), "--to"))
    if not held.start <= int(to) <= held.end:
        raise ConfigError(
            f"--to {to}: partition {held.partition} of {held.topic!r} has offsets {held.start} to {held.end}"
        )
    return int(to)


def _show(group: str, rows: list[list[Any]], *, as_json: bool) -> None:
    if as_json:
        fields = ("topic", "partition", "offset")
        output.print_json({"group": group, "offsets": [dict(zip(fields, row, strict=True)) for row in rows]})
        return
    output.print_table(f"{group} goes on at", ("topic", "partition", "offset"), rows)
