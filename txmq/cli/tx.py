"""``txmq tx``: transactions that are prepared and not settled, and what became of one."""

from __future__ import annotations

from typing import Annotated

import typer

from txmq.cli import output

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Look at transactions.")


@app.command("list")
def list_(bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP, as_json: output.Json = False) -> None:
    """List the transactions in doubt: prepared, and their outcome not known to the broker.

    They are settled by the client that owns them, or by a resolver (txmq resolver); none is ever guessed.
    """
    import txmq

    with txmq.connect(bootstrap) as client:
        transactions = list(client.transactions.list(state="in-doubt"))
    if as_json:
        output.print_json(transactions)
        return
    columns = ("txid", "kind", "resource", "age_ms", "owner_connected", "client")
    rows = [[item.get(column) for column in columns] for item in transactions]
    output.print_table(f"{len(rows)} in doubt", columns, rows)


@app.command()
def show(
    txid: Annotated[str, typer.Argument(help="Transaction id, as in errors, logs and the list.", show_default=False)],
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    as_json: output.Json = False,
) -> None:
    """Show what is known of one transaction: its outcome, or where it hangs."""
    import txmq

    with txmq.connect(bootstrap) as client:
        fields = client.transactions.show(txid)
    if as_json:
        output.print_json(fields)
        return
    lists = {name: value for name, value in fields.items() if isinstance(value, list)}
    output.print_fields(f"transaction {txid}", {name: value for name, value in fields.items() if name not in lists})
    for name, rows in lists.items():
        columns = list(rows[0]) if rows else []
        output.print_table(name, columns, [[row.get(column) for column in columns] for row in rows])
