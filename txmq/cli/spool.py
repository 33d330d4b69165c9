"""``txmq spool``: list, show and drain messages that an ordered producer has on local disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from txmq.cli import output
from txmq.cli.connecting import connected
from txmq.errors import ConfigError

if TYPE_CHECKING:
    from txmq.client.spooling.spool import Entry, Spool

app = output.command_group("What an ordered producer has on local disk: look, send, try again.")


def _holding_a_spool(directory: Path) -> Path:
    from txmq.client.spooling.spool import FILE_NAME

    if not (directory / FILE_NAME).is_file():
        raise ConfigError(f"{directory} holds no spool")
    return directory


Directory = Annotated[
    Path,
    typer.Argument(metavar="DIRECTORY", help="The producer's spool.", show_default=False, callback=_holding_a_spool),
]


@app.command("list")
def list_(directory: Directory, as_json: output.Json = False) -> None:
    """List what waits and what is parked, by partition. The producer may be running.

    [bold]Examples[/bold]

      txmq spool list var/spool
      txmq spool list var/spool --json | jq '[.[].waiting] | add'
    """
    from txmq.client.spooling.spool import Spool

    columns = ("topic", "partition", "waiting", "parked", "size_bytes", "oldest")
    with Spool(directory, read_only=True) as spool:
        rows = [[*row, output.moment(oldest_ms)] for *row, oldest_ms in spool.summary()]
    output.show_rows("spool", columns, [dict(zip(columns, row, strict=True)) for row in rows], as_json=as_json)


@app.command()
def show(
    directory: Directory,
    parked: Annotated[bool, typer.Option("--parked", help="Only what is parked.")] = False,
    limit: Annotated[int, typer.Option(help="How many at most.", min=1)] = 100,
    as_json: output.Json = False,
) -> None:
    """Show messages, in the order in which they came: content, attempts, why they are parked.

    [bold]Examples[/bold]

      txmq spool show var/spool --parked
    """
    from txmq.client.spooling.spool import Spool

    with Spool(directory, read_only=True) as spool:
        rows = [_shown(entry) for entry in (spool.parked(limit) if parked else spool.entries(limit))]
    columns = ("number", "topic", "partition", "created", "key", "value", "state", "attempts", "reason")
    output.show_rows("messages", columns, rows, as_json=as_json)


@app.command()
def drain(
    directory: Directory,
    parked: Annotated[
        bool, typer.Option("--parked", help="Try what is parked again, before the rest of its partition.")
    ] = False,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    timeout: output.Timeout = 60.0,
    as_json: output.Json = False,
) -> None:
    """Send what waits, in order, and wait until it is sent; refused while the producer runs.

    A parked message that may be stored already can be stored twice by --parked; its reason says so.

    [bold]Examples[/bold]

      txmq spool drain var/spool --bootstrap txmq://broker1:8123
    """
    from txmq.client.partitioner import RoundRobinSelector
    from txmq.client.spooling.ordered_producer import OrderedMessageProducer
    from txmq.client.spooling.spool import Spool

    with connected(bootstrap) as client:
        with Spool(directory) as spool:
            if parked:
                spool.unpark()
            kept, _ = _counted(spool)  # before a producer begins to send
        producer: OrderedMessageProducer = client.ordered_producer(RoundRobinSelector(), str(directory))
        with producer:
            producer.flush(timeout)
    with Spool(directory, read_only=True) as spool:
        still_kept, left = _counted(spool)
    text = f"{directory}: nothing waits any more; {left} parked"
    output.report({"sent": kept - still_kept, "parked": left}, text, as_json=as_json)


def _counted(spool: Spool) -> tuple[int, int]:
    """Messages that are kept in all, and those of them that are parked."""
    rows = spool.summary()
    return sum(waiting + parked for _, _, waiting, parked, *_ in rows), sum(parked for _, _, _, parked, *_ in rows)


def _shown(entry: Entry) -> dict[str, Any]:
    from txmq.errors import TxmqError
    from txmq.log import records

    row = {
        "number": entry.number, "topic": entry.topic, "partition": entry.partition,
        "created": output.moment(entry.created_ms),
        "state": "parked" if entry.is_parked else "waiting" if entry.assigned is None else "sent, no answer",
        "attempts": entry.attempts, "reason": entry.reason, "size_bytes": len(entry.content),
    }  # fmt: skip
    try:
        message = records.decode(bytearray(entry.content), entry.topic, entry.partition)[0]
    except TxmqError as error:
        return row | {"key": None, "value": f"damaged: {error}"}
    return row | {"key": output.content(message.key), "value": output.content(message.value)}
