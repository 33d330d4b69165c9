"""Look into a topic: what each partition holds, and every message that is there now; then it ends.

Nothing is saved and no group is joined: browsing disturbs no consumer. Start a broker with ``txmq broker``, then
``python examples/topic_browser.py orders``, or with a key: ``python examples/topic_browser.py orders ada``.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime

import txmq


def show_partitions(client: txmq.Client, topic: str) -> None:
    """Where each partition begins and ends; ``end`` is the offset that the next message gets."""
    for partition in range(client.topics.describe(topic).partitions):
        held = client.offsets(topic, partition)
        print(f"partition {partition}: {held.end - held.start} messages, offsets {held.start} to {held.end - 1}")


def show_messages(client: txmq.Client, topic: str, key: bytes | None) -> int:
    """Every message, or those of one key; partition by partition, each in order. Returns how many."""
    count = 0
    for message in client.browse(topic):
        if key is not None and message.key != key:
            continue
        count += 1
        when = datetime.fromtimestamp(message.timestamp_ms / 1000, UTC).isoformat(timespec="milliseconds")
        origin = f" in transaction {message.txid}" if message.txid else ""
        print(f"{message.partition}/{message.offset} {when} {message.key!r} {message.value!r}{origin}")
    return count


def main(topic: str, key: str | None = None, bootstrap: str = "txmq://127.0.0.1:8123") -> None:
    """Browse."""
    with txmq.connect(bootstrap) as client:
        try:
            show_partitions(client, topic)
        except txmq.UnknownTopicError as error:
            sys.exit(str(error))
        print(f"{show_messages(client, topic, key.encode() if key else None)} messages shown")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print(f"usage: {sys.argv[0]} TOPIC [KEY [BOOTSTRAP]]", file=sys.stderr)
        sys.exit(2)
    try:
        main(*sys.argv[1:])
    except txmq.BrokerAwayError as error:
        sys.exit(f"the broker is away: {error}")
