"""``txmq query``: list, delete. Queries of parallel writers (Spark's sink), whose newest batch is kept for ever."""

from __future__ import annotations

from typing import Annotated

import typer

from txmq.cli import output
from txmq.cli.connecting import connected

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Queries that write from Spark: their newest batch, what is left.",
)
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
        queries = Queries(client).list()
    output.show_rows("queries", _COLUMNS, queries, as_json=as_json)


@app.command()
def delete(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="Name of the query.", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    as_json: output.Json = False,
) -> None:
    """Forget a query that never writes again, and roll back what its driver has left.

    A batch of it that is written again after that is written twice.

    [bold]Examples[/bold]

      txmq query delete write-17
    """
    from txmq.spark.sink.queries import Queries

    if not yes:
        typer.confirm(
            f"Delete {query}? If it runs again from its checkpoint, its newest batch may be written twice.",
            abort=True, err=True,
        )  # fmt: skip
    with connected(bootstrap, query=query) as client:
        Queries(client).delete(query)
    output.report({"query": query, "deleted": True}, f"query {query} is forgotten", as_json=as_json)
