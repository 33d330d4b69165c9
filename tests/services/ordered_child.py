"""A process that sends numbered messages of some keys in order, and says what became of each; it may be killed."""

from __future__ import annotations

import sys

import txmq


def main(address: str, spool: str, life: str, keys: int) -> None:
    """Send ``<life>:<number>`` under each key in turn, until the end of the process.

    A line ``<life>:<number> <key>`` on standard output says that the message is acknowledged or spooled.
    """
    with txmq.connect(address) as client:
        options = txmq.OrderedOptions(timeout=1.0)
        with client.ordered_producer(txmq.KeyHashSelector(), spool, options=options) as producer:
            number = 0
            while True:
                for key in range(keys):
                    result = producer.send("t", f"{life}:{number}".encode(), b"%d" % key)
                    print(f"{life}:{number} {key} {result.status.value}", flush=True)
                number += 1


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
