"""``txmq produce``: lines become messages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from txmq.cli import output

if TYPE_CHECKING:
    from txmq.client import Producer

LINES_PER_SEND = 1000
LINE_SIZE_BYTES_MAX = 16 << 20
Pair = tuple[bytes | None, bytes]


def produce(
    topic: Annotated[str, typer.Option("--topic", "-t", help="Topic to send to.", show_default=False)],
    source: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="File of lines; standard input without it.", show_default=False),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option("--key", "-k", metavar="SEPARATOR", help="What stands before the first SEPARATOR is the key."),
    ] = None,
    partition: Annotated[int | None, typer.Option("--partition", "-p", min=0, help="Send all lines there.")] = None,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    as_json: output.Json = False,
) -> None:
    """Send each line as one message; ends when all are acknowledged, that is, on the broker's disk.

    Interrupted by Ctrl-C, it finishes what it has read and says how many messages were acknowledged.

    [bold]Examples[/bold]

      echo hello | txmq produce --topic orders
      txmq produce --topic orders --key , orders.csv
    """
    import txmq

    with ExitStack() as stack:
        client = stack.enter_context(txmq.connect(bootstrap))
        client.topics.describe(topic)  # an unknown topic is said before a line is read
        producer = stack.enter_context(client.producer())
        stream = sys.stdin.buffer if source is None else stack.enter_context(source.open("rb"))
        size = None if source is None else source.stat().st_size
        count, interrupted = _send_all(producer, topic, partition, _pairs(stream, key), size)
    if as_json:
        output.print_json({"topic": topic, "acknowledged": count, "interrupted": interrupted})
    else:
        output.note(f"{count} messages acknowledged" + (", interrupted" if interrupted else ""))
    if interrupted:
        raise SystemExit(output.STATUS_INTERRUPTED)


def _send_all(
    producer: Producer, topic: str, partition: int | None, pairs: Iterator[Pair], size: int | None
) -> tuple[int, bool]:
    """Send in batches; returns how many are acknowledged, and whether Ctrl-C ended it early."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TransferSpeedColumn

    count = 0
    shown = sys.stderr.isatty() and (size is None or size > 1 << 20)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TransferSpeedColumn())
    from rich.console import Console

    with Progress(*columns, console=Console(stderr=True), disable=not shown, transient=True) as progress:
        task = progress.add_task("bytes", total=size)
        try:
            while batch := list(islice(pairs, LINES_PER_SEND)):
                count += _send(producer, topic, partition, batch)
                progress.advance(task, sum(len(value) + 1 for _, value in batch))
        except KeyboardInterrupt:
            return count, True
    return count, False


def _send(producer: Producer, topic: str, partition: int | None, batch: list[Pair]) -> int:
    if partition is None:
        return len(producer.send_many(topic, batch))
    futures = [producer.send_async(topic, value, key=key, partition=partition) for key, value in batch]
    producer.flush()
    return sum(future.result().is_success for future in futures)


def _pairs(stream: BinaryIO, separator: str | None) -> Iterator[Pair]:
    mark = None if separator is None else separator.encode()
    number = 0
    while line := stream.readline(LINE_SIZE_BYTES_MAX + 1):
        number += 1
        if len(line) > LINE_SIZE_BYTES_MAX:
            output.fail(f"line {number} is longer than {LINE_SIZE_BYTES_MAX} bytes; nothing of it was sent")
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        if mark is None:
            yield None, line
            continue
        key, found, value = line.partition(mark)
        if not found:
            output.fail(f"line {number} has no key: {separator!r} does not stand in it; the lines before it were sent")
        yield key, value
