"""Priorities: a partition is read in order, so what must overtake goes to a topic of its own.

Two consumers in one process: as long as there is something urgent, nothing else is taken. An urgent message waits for
what is in hand (``IN_HAND`` messages) and for one look at the other topic (``LOOK_S``), never for a backlog. After
``URGENT_IN_A_ROW`` of them the others get a turn, so that they are slow at worst, and not forgotten.

Start a broker with ``txmq broker``, then ``python examples/priority_by_two_topics.py``; Ctrl-C ends it. Send with
``txmq produce --topic urgent`` and ``txmq produce --topic normal``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import txmq

IN_HAND = 10
LOOK_S = 0.05
URGENT_IN_A_ROW = 1000


def by_priority(urgent: txmq.Consumer, normal: txmq.Consumer) -> Iterator[txmq.Message]:
    """Messages of both, the urgent ones first."""
    in_a_row = 0
    while True:
        messages = urgent.poll(IN_HAND, timeout=0) if in_a_row < URGENT_IN_A_ROW else []
        in_a_row = in_a_row + len(messages) if messages else 0
        yield from messages or normal.poll(IN_HAND, timeout=LOOK_S)


def main(bootstrap: str = "txmq://127.0.0.1:8123") -> None:
    """Work until Ctrl-C."""
    with txmq.connect(bootstrap) as client:
        for topic in ("urgent", "normal"):
            client.topics.ensure(topic, partitions=2)
        with client.consumer("desk", ["urgent"]) as urgent, client.consumer("desk-normal", ["normal"]) as normal:
            try:
                for message in by_priority(urgent, normal):
                    print(f"{message.topic}: {(message.value or b'').decode()}", flush=True)
                    message.ack()
            except KeyboardInterrupt:
                print("stopped; what was done is saved")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except txmq.BrokerAwayError as error:
        sys.exit(f"the broker is away: {error}")
