"""A process that sends numbered messages of some keys in order, and says what became of each; it may be killed."""

from __future__ import annotations

import sys

import txmq

SELECTOR = txmq.KeyHashSelector()
OPTIONS = txmq.OrderedOptions(timeout=1.0)


def main(address: str, spool: str, life: str, keys: int, kind: str) -> None:
    """Send ``<life>:<number>`` under each key in turn, until the end of the process.

    A line ``<life>:<number> <key>`` on standard output says that the message is acknowledged or spooled.
    """
    with (
        txmq.connect(address) as client,
        (
            client.ordered_producer(SELECTOR, spool, options=OPTIONS)
            if kind == "ordered"
            else client.producer(retry_store=spool, timeout=1.0)
        ) as producer,
    ):
        number = 0
        while True:
            for key in range(keys):
                result = producer.send("t", f"{life}:{number}".encode(), b"%d" % key)
                print(f"{life}:{number} {key} {result.status.value}", flush=True)
            number += 1


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
