"""``txmq produce``: lines become messages.

Lines are sent as they arrive: what one read brought is one batch, so that a pipe that trickles is not held back and a
file goes out in large pieces. Ctrl-C ends the reading, never a batch in work: the count that is printed is true.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Protocol

import typer

from txmq.cli import output
from txmq.cli.connecting import connected
from txmq.errors import ConfigError, TxmqError

if TYPE_CHECKING:
    from txmq.client import Producer

READ_SIZE_BYTES = 1 << 20
LINE_SIZE_BYTES_MAX = 16 << 20
PIPE_SIZE_BYTES = 64 << 10
Pair = tuple[bytes | None, bytes]


class BadLineError(TxmqError):
    """A line cannot be sent; the text names it."""


class Source(Protocol):
    """Bytes as they arrive: a file, or standard input."""

    def read1(self, size: int, /) -> bytes:
        """At most ``size`` bytes, at least one, waiting for the first; empty at the end."""


def produce(
    topic: Annotated[str, typer.Option("--topic", "-t", help="Topic to send to.", show_default=False)],
    file: Annotated[
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

    Interrupted by Ctrl-C, it finishes the lines in work and says how many messages were acknowledged.

    [bold]Examples[/bold]

      echo hello | txmq produce --topic orders
      txmq produce --topic orders --key , orders.csv
    """
    mark = _mark(key)
    count = 0
    with ExitStack() as stack:
        client = stack.enter_context(connected(bootstrap, topic))
        client.topics.describe(topic)  # an unknown topic is said before a line is read
        producer = stack.enter_context(client.producer())
        stream: BinaryIO = sys.stdin.buffer if file is None else stack.enter_context(file.open("rb"))
        advance = stack.enter_context(output.progress(None if file is None else file.stat().st_size))
        interrupted = stack.enter_context(_interruptible(stream.fileno()))
        batches = split(interrupted, mark)
        try:
            while (batch := interrupted.reading(batches)) is not None:
                _send(producer, topic, partition, batch)
                count += len(batch)
                advance(sum(len(value) + 1 for _, value in batch))
        except TxmqError as error:
            output.note(f"{_acknowledged(count)} before this:")
            raise error from None
    _say(topic, count, interrupted.seen, as_json=as_json)


def _mark(separator: str | None) -> bytes | None:
    if separator == "":
        raise ConfigError("--key needs a separator, such as --key , ; leave it out to send whole lines")
    try:
        return None if separator is None else separator.encode()
    except UnicodeEncodeError:  # a byte of the command line that is no text
        raise ConfigError(f"--key {separator}: not UTF-8") from None


def split(stream: Source, mark: bytes | None) -> Iterator[list[Pair]]:
    """Keys and values of the lines that each read completed.

    Raises:
        BadLineError: a line is too long, or has no key although one is wanted; the lines before it have been yielded.
    """
    number, rest = 0, b""
    while chunk := stream.read1(READ_SIZE_BYTES):
        *lines, rest = (rest + chunk).split(b"\n") if b"\n" in chunk else (rest + chunk,)
        if lines:
            yield from _checked(lines, mark, number)
            number += len(lines)
        if len(rest) > LINE_SIZE_BYTES_MAX:
            raise BadLineError(f"line {number + 1} is longer than {LINE_SIZE_BYTES_MAX} bytes")
    if rest:
        yield from _checked([rest], mark, number)


def _checked(lines: list[bytes], mark: bytes | None, number: int) -> Iterator[list[Pair]]:
    pairs: list[Pair] = []
    complaint = None
    for line in lines:
        number += 1
        key, found, value = (None, True, line) if mark is None else line.partition(mark)
        if not found:
            complaint = f"line {number} has no key: there is no '{(mark or b'').decode()}' in it"
        elif len(line) > LINE_SIZE_BYTES_MAX:
            complaint = f"line {number} is longer than {LINE_SIZE_BYTES_MAX} bytes"
        if complaint:
            break
        pairs.append((key, value.removesuffix(b"\r")))
    if pairs:
        yield pairs
    if complaint:
        raise BadLineError(complaint)


def _send(producer: Producer, topic: str, partition: int | None, batch: list[Pair]) -> None:
    """Returns when all are acknowledged."""
    if partition is None:
        producer.send_many(topic, batch)
        return
    futures = [producer.send_async(topic, value, key=key, partition=partition) for key, value in batch]
    producer.flush()
    for future in futures:
        future.result()


def _say(topic: str, count: int, interrupted: bool, *, as_json: bool) -> None:
    if as_json:
        output.print_json({"topic": topic, "acknowledged": count, "interrupted": interrupted})
    else:
        output.note(_acknowledged(count) + (", interrupted" if interrupted else ""))
    if interrupted:
        raise SystemExit(output.STATUS_INTERRUPTED)


def _acknowledged(count: int) -> str:
    return f"{count} message{'s' * (count != 1)} acknowledged"


class _Interruption:
    """Ctrl-C: breaks a read at once, and is only noted while a batch is in work.

    A signal that strikes just before a thread sleeps in a read does not wake it, and Python runs no handler until
    something arrives. So what is slept in is a wait for the input or for the byte that a signal writes.
    """

    def __init__(self, descriptor: int, signals: int) -> None:
        self.seen = False
        self._is_reading = False
        self._descriptor, self._signals = descriptor, signals

    def read1(self, size: int, /) -> bytes:
        """See ``Source``."""
        while True:
            ready, _, _ = select.select([self._descriptor, self._signals], [], [])
            if self._descriptor in ready:
                return os.read(self._descriptor, size)
            os.read(self._signals, PIPE_SIZE_BYTES)  # its handler has run

    def strike(self, *_: object) -> None:
        self.seen = True
        if self._is_reading:
            raise KeyboardInterrupt

    def reading(self, batches: Iterator[list[Pair]]) -> list[Pair] | None:
        """The next batch; None at the end, or once Ctrl-C was seen."""
        try:
            self._is_reading = True
            return None if self.seen else next(batches, None)
        except KeyboardInterrupt:
            return None
        finally:
            self._is_reading = False


@contextmanager
def _interruptible(descriptor: int) -> Iterator[_Interruption]:
    signals, writes = os.pipe()
    os.set_blocking(writes, False)
    interruption = _Interruption(descriptor, signals)
    woken = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    before = signal.signal(signal.SIGINT, interruption.strike)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(woken)
        os.close(signals)
        os.close(writes)
