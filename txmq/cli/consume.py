"""``txmq consume``: messages become lines. Reads without a group and saves no offsets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from txmq.cli import output
from txmq.errors import ConfigError

if TYPE_CHECKING:
    from txmq.client import Client
    from txmq.model import Message

FETCH_SIZE_BYTES = 1 << 20
FOLLOW_WAIT_S = 1.0


def consume(
    topic: Annotated[str, typer.Option("--topic", "-t", help="Topic to read.", show_default=False)],
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="earliest|latest|OFFSET|TIMESTAMP",
            help="Where to begin; TIMESTAMP as 2026-01-31T12:00:00Z, or @ and milliseconds since 1970.",
        ),
    ] = "earliest",
    partition: Annotated[int | None, typer.Option("--partition", "-p", min=0, help="Only this one.")] = None,
    count_max: Annotated[int | None, typer.Option("--max", "-n", min=1, help="End after so many messages.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for new messages until Ctrl-C.")] = False,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    as_json: output.Json = False,
) -> None:
    """Print messages: the value as text, or with --json one JSON object a line with key, offset, headers and txid.

    On a terminal control characters are escaped; into a file or a pipe values go as they are.
    With --json, a value that is not UTF-8 comes as "value_base64".

    [bold]Examples[/bold]

      txmq consume --topic orders
      txmq consume --topic orders --from latest --follow
      txmq consume --topic orders --from 2026-01-31T12:00:00Z --max 10 --json
    """
    import txmq

    line = _json_line if as_json else _text_line if sys.stdout.isatty() else _raw_line
    write = sys.stdout.buffer.write
    with txmq.connect(bootstrap) as client:
        try:
            for number, message in enumerate(_messages(client, topic, start, partition, follow=follow), 1):
                write(line(message))
                if follow:
                    sys.stdout.flush()
                if number == count_max:
                    break
        except KeyboardInterrupt:
            sys.stdout.flush()
            raise SystemExit(output.STATUS_INTERRUPTED if not follow else 0) from None
    sys.stdout.flush()


def _messages(client: Client, topic: str, start: str, partition: int | None, *, follow: bool) -> Iterator[Message]:
    """Each partition up to what it held at the start; then, following, whatever appears, partition by partition."""
    numbers = [partition] if partition is not None else list(range(client.topics.describe(topic).partitions))
    next_offsets = {number: _start(client, topic, number, start) for number in numbers}
    for number in numbers:
        end = client.offsets(topic, number).end
        while next_offsets[number] < end:
            messages = client.fetch(topic, number, next_offsets[number], FETCH_SIZE_BYTES, timeout=FOLLOW_WAIT_S)
            wanted = [message for message in messages if message.offset < end]
            yield from wanted
            if not wanted:
                break
            next_offsets[number] = wanted[-1].offset + 1
    while follow:
        # One long poll on one partition, a short look at the others: what waits elsewhere is seen after the poll.
        for number in numbers:
            wait = FOLLOW_WAIT_S if len(numbers) == 1 else 0.1 / len(numbers)
            for message in client.fetch(topic, number, next_offsets[number], FETCH_SIZE_BYTES, timeout=wait):
                yield message
                next_offsets[number] = message.offset + 1


def _start(client: Client, topic: str, partition: int, start: str) -> int:
    if start.isascii() and start.isdigit():
        held = client.offsets(topic, partition)
        return min(max(int(start), held.start), held.end)
    if start in ("earliest", "latest"):
        held = client.offsets(topic, partition)
        return held.start if start == "earliest" else held.end
    return client.offset_for(topic, partition, timestamp_ms(start))


def timestamp_ms(text: str) -> int:
    """Read ``@<ms>`` or an ISO 8601 time; a time without a zone is UTC.

    Raises:
        ConfigError: neither of them.
    """
    from datetime import UTC, datetime

    if text.startswith("@") and text[1:].isascii() and text[1:].isdigit():
        return int(text[1:])
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"--from {text}: expected earliest, latest, an offset, a time such as 2026-01-31T12:00:00Z, or @ and ms"
        ) from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def _text_line(message: Message) -> bytes:
    return output.cell(message.value or b"").encode("utf-8", "backslashreplace") + b"\n"


def _raw_line(message: Message) -> bytes:
    return (message.value or b"") + b"\n"


def _json_line(message: Message) -> bytes:
    import json

    fields: dict[str, object] = {
        "topic": message.topic, "partition": message.partition, "offset": message.offset,
        "timestamp_ms": message.timestamp_ms, "tag": message.tag, "txid": message.txid,
    }  # fmt: skip
    fields |= _field("key", message.key) | _field("value", message.value)
    headers = [_field("value", value) | {"name": name} for name, value in message.headers.items()]
    return json.dumps(fields | {"headers": headers}).encode() + b"\n"


def _field(name: str, value: bytes | None) -> dict[str, object]:
    import base64

    if value is None:
        return {name: None}
    try:
        return {name: value.decode("utf-8")}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode()}
