"""Consume, process, produce as one step: each text of one topic becomes one summary in another, exactly once.

The summaries and "this text is dealt with" are one transaction of the broker: both happen or neither does. Start a
broker with ``txmq broker``, then::

    python examples/consume_process_produce.py
    echo to be or not to be | txmq produce --topic texts
    txmq consume --topic summaries

Kill it or the broker at any moment, run several of it, and start them again: each text has one summary.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

import txmq


def summary(text: str) -> bytes:
    """How many words, and the most frequent one."""
    words = Counter(text.split())
    return json.dumps({"words": words.total(), "most": words.most_common(1)}).encode()


def main(source: str = "texts", target: str = "summaries", bootstrap: str = "txmq://127.0.0.1:8123") -> None:
    """Summarise until SIGTERM or Ctrl-C."""
    with txmq.connect(bootstrap) as client, client.producer() as producer:
        client.topics.ensure(source, partitions=4)
        client.topics.ensure(target, partitions=4)

        def summarise(message: txmq.Message) -> None:
            with producer.transaction() as tx:
                tx.send(target, summary((message.value or b"").decode()), key=message.key)
                tx.ack(message)

        # A message whose listener raises is delivered again; after OutcomeUnknownError only if nothing happened.
        client.consumer("summaries", [source]).run(summarise, threads=4)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except txmq.BrokerAwayError as error:
        sys.exit(f"the broker is away: {error}")
