"""``txmq query``: list, delete. Queries of parallel writers (Spark's sink), whose batches are kept for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from txmq.cli import output
from txmq.cli.connecting import connected, partly, raise_missing
from txmq.errors import UnknownQueryError

if TYPE_CHECKING:
    from txmq.client import Client

app = output.command_group("Queries that write from Spark: their newest batch, what is left.")
_COLUMNS = ("query", "epoch", "batch", "prepared", "prepared_bytes")


@app.command("list")
def list_(bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP, as_json: output.Json = False) -> None:
    """List the queries: epoch of the driver that writes now, newest committed batch, parts that are prepared.

    [bold]Examples[/bold]

      txmq query list
      txmq query list --json | jq '.[] | select(.prepared > 0)'
    """
    from txmq.spark.sink.queries import Queries

    with connected(bootstrap) as client:
        routes = client.routes
        queries, missing = partly(lambda: routes.ask_each(routes.all_links(), lambda link, _: Queries(link).list()))
    output.show_rows("queries", _COLUMNS, queries, as_json=as_json)
    raise_missing(missing)


@app.command()
def delete(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="Name of the query.", show_default=False)],
    yes: output.Yes = False,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    as_json: output.Json = False,
) -> None:
    """Forget a query that never writes again, and roll back what its driver has left.

    A batch of it that is written again after that is written twice.

    [bold]Examples[/bold]

      txmq query delete write-17
    """
    output.confirm(yes, f"Delete {query}? If it runs again from its checkpoint, its newest batch may be written twice.")
    with connected(bootstrap, query=query) as client:
        _delete(client, query)
    output.report({"query": query, "deleted": True}, f"query {query} is forgotten", as_json=as_json)


def _delete(client: Client, query: str) -> None:
    """Delete it at every home that has it: it wrote at another one if its topic was made anew."""
    from txmq.spark.sink.queries import Queries

    unknown: UnknownQueryError | None = None
    is_deleted = False
    for link in client.routes.all_links():
        try:
            Queries(link).delete(query)
            is_deleted = True
        except UnknownQueryError as error:
            unknown = error
    if unknown is not None and not is_deleted:
        raise unknown
