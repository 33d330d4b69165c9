"""``txmq consume``: messages become lines. Reads without a group and saves no offsets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from txmq.cli import output
from txmq.cli.connecting import connected, partly, raise_missing
from txmq.errors import ConfigError

if TYPE_CHECKING:
    from txmq.client import Client
    from txmq.model import Message, PartitionRange

FETCH_SIZE_BYTES = 1 << 20
FOLLOW_WAIT_S = 1.0
MOVED_SHOWN_MAX = 3  # partitions that one line tells of


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
    An OFFSET that a partition does not hold becomes its start or end; a line on standard error says so.
    If a home of a cluster is away, the partitions of the others are printed, and the command fails.

    [bold]Examples[/bold]

      txmq consume --topic orders
      txmq consume --topic orders --from latest --follow
      txmq consume --topic orders --from 2026-01-31T12:00:00Z --max 10 --json
    """
    line = _json_line if as_json else _text_line if sys.stdout.isatty() else _raw_line
    write = sys.stdout.buffer.write
    with connected(bootstrap, topic) as client:
        try:
            held, missing = partly(lambda: _held(client, topic, partition))
            if follow and missing is not None:
                output.note(str(missing))
            starts = _starts(client, held, start, as_json=as_json)
            for number, message in enumerate(_messages(client, topic, starts, follow=follow), 1):
                write(line(message))
                if follow:
                    sys.stdout.flush()
                if number == count_max:
                    break
        except KeyboardInterrupt:
            sys.stdout.flush()
            raise SystemExit(output.STATUS_INTERRUPTED if not follow else 0) from None
        sys.stdout.flush()
        raise_missing(missing)


def _held(client: Client, topic: str, partition: int | None) -> list[PartitionRange]:
    return client.ranges(topic) if partition is None else [client.offsets(topic, partition)]


def _messages(client: Client, topic: str, next_offsets: dict[int, int], *, follow: bool) -> Iterator[Message]:
    """Each partition up to what it held at the start; then, following, whatever appears, partition by partition."""
    numbers = list(next_offsets)
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


def _starts(client: Client, held: list[PartitionRange], start: str, *, as_json: bool) -> dict[int, int]:
    """The first offset of each partition; prints a note if it is not the requested one."""
    if start not in ("earliest", "latest") and not (start.isascii() and start.isdigit()):
        time_ms = timestamp_ms(start)
        return {item.partition: client.offset_for(item.topic, item.partition, time_ms) for item in held}
    if start in ("earliest", "latest"):
        return {item.partition: item.start if start == "earliest" else item.end for item in held}
    wanted = int(start)
    moved = [item for item in held if not item.start <= wanted <= item.end]
    if moved and as_json:
        output.note_json({"from": wanted, "moved": [_moved(item, wanted) for item in moved]})
    elif moved:
        output.note(
            f"--from {wanted}: {'; '.join(_moved_text(item, wanted) for item in moved[:MOVED_SHOWN_MAX])}"
            + (f"; and {len(moved) - MOVED_SHOWN_MAX} more" if len(moved) > MOVED_SHOWN_MAX else "")
        )
    return {item.partition: min(max(wanted, item.start), item.end) for item in held}


def _moved(item: PartitionRange, wanted: int) -> dict[str, int]:
    begins = item.start if wanted < item.start else item.end
    return {"partition": item.partition, "start": item.start, "end": item.end, "begins": begins}


def _moved_text(item: PartitionRange, wanted: int) -> str:
    if wanted > item.end:
        return f"partition {item.partition} ends at {item.end}, so nothing that is there now is that new"
    return f"partition {item.partition} begins at {item.start}, older messages are gone (retention)"


def timestamp_ms(text: str, option: str = "--from") -> int:
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
            f"{option} {text}: expected earliest, latest, an offset, a time such as 2026-01-31T12:00:00Z, or @ and ms"
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
