"""A consumer whose messages fail: retried, deferred in the order of their key, a dead letter in the end, and sent
again.

Payments are booked by calling a bank that is down for some accounts. Those payments wait, and later payments of the
same account wait for them, while everybody else's go on. A payment that no bank will take becomes a dead letter.

Run it against a broker (``txmq broker``): ``python examples/retrying_consumer.py``. It sends a few payments and ends
when all are dealt with. Real services leave out what is marked "for the demonstration".
"""

from __future__ import annotations

import argparse
import sys
import threading

import txmq

TOPIC, GROUP = "payments", "bank"


class Bank:
    """It is down for Ann twice, and knows nobody called Nobody."""

    def __init__(self) -> None:
        self.booked: list[str] = []
        self.failures = 0

    def book(self, account: str, amount: str) -> None:
        """Book a payment, or raise."""
        if account == "nobody":
            raise LookupError("no such account")
        if account == "ann" and self.failures < 2:
            self.failures += 1
            raise ConnectionError("the bank is down")
        self.booked.append(f"{account} {amount}")


def consume(client: txmq.Client, bank: Bank, retry_store: str, *, payments: int) -> None:
    """Book payments until all are dealt with."""
    options = txmq.ConsumerOptions(retry_delay=0.1, deferred_delay=0.2, deferred_retries=3, keep_key_order=True)
    consumer = client.consumer(GROUP, [TOPIC], max_retries=1, retry_store=retry_store, options=options)

    def handle(message: txmq.Message) -> None:
        account, _, amount = (message.value or b"").decode().partition(" ")
        bank.book(account, amount)  # raises: the message is retried, deferred, a dead letter
        print(f"booked {account} {amount}")

    def end_when_all_is_dealt_with() -> None:  # for the demonstration
        while len(bank.booked) + len(dead_letters(client)) < payments:
            ended.wait(0.1)
        consumer.close()

    ended = threading.Event()
    watcher = threading.Thread(target=end_when_all_is_dealt_with)
    watcher.start()
    consumer.run(handle, threads=4)
    ended.set()
    watcher.join()


def dead_letters(client: txmq.Client) -> list[txmq.Message]:
    """The messages that were given up, and why."""
    try:
        return list(client.browse(f"{GROUP}.dead-letter"))
    except txmq.UnknownTopicError:
        return []


def main() -> None:
    """Send payments, book them, show what is left."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--bootstrap", default="txmq://127.0.0.1:8123")
    parser.add_argument("--retry-store", default="topic", help='a file on local disk, or "topic"')
    arguments = parser.parse_args()
    with txmq.connect(arguments.bootstrap) as client:
        client.topics.ensure(TOPIC, partitions=2)
        payments = ["ann 1", "bob 1", "nobody 1", "ann 2", "bob 2", "ann 3"]
        with client.producer() as producer:
            for payment in payments:
                producer.send(TOPIC, payment.encode(), key=payment.split()[0].encode())
        bank = Bank()
        consume(client, bank, arguments.retry_store, payments=len(payments))
        for dead_letter in dead_letters(client):
            reason, attempts = dead_letter.headers["txmq.dead.reason"], dead_letter.headers["txmq.dead.attempts"]
            print(f"given up {(dead_letter.value or b'').decode()} after {attempts.decode()} times: {reason.decode()}")
        print(f"look at them with: txmq dead-letter list {GROUP}")


if __name__ == "__main__":
    try:
        main()
    except txmq.BrokerAwayError as error:
        sys.exit(f"the broker is away: {error}")
