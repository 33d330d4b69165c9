"""``txmq cluster``: what a cluster of brokers has, who leads it, and what is unavailable."""

from __future__ import annotations

import typer

from txmq.cli import output
from txmq.cli.connecting import connected

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Several brokers: homes, leaders, topics.")
_HOMES = ("name", "home", "epoch", "leader", "registry")
_TOPICS = ("topic", "partitions", "unavailable")


@app.command()
def describe(
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    timeout: output.Timeout = 5.0,
    as_json: output.Json = False,
) -> None:
    """Show homes and their leaders, topics with partitions that no broker leads, branches that wait.

    A home is a data directory. Its partitions are unavailable while no broker leads it. The column registry is the
    state of its leader's session with ZooKeeper. A broker whose session is suspended or expired serves what it has.

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
    columns = _HOMES if registry is not None else tuple(column for column in _HOMES if column != "registry")
    output.show_rows("homes", columns, [_home(row) for row in found["homes"]], as_json=False)
    output.show_rows("topics", _TOPICS, [_topic(row) for row in found["topics"]], as_json=False)
    if found["branches"]:
        output.show_rows("branches that wait", tuple(found["branches"][0]), found["branches"], as_json=False)
    for refusal in [] if registry is None else registry["refused"]:
        output.note(refusal)


def _home(row: dict[str, object]) -> dict[str, object]:
    return {**row, "leader": row["leader"] or "none", "registry": row["registry"] or "-"}


def _topic(row: dict[str, list[int]]) -> dict[str, object]:
    return {**row, "unavailable": ", ".join(map(str, row["unavailable"])) or "-"}
