"""The demo's proof: rows against messages, one to one and in order. Pure, so that it can be tested to say no.

A row's ``reference`` is unique over the whole demo and never used again, also not after a rollback; its message
carries the same reference and has the customer as its key.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Row(NamedTuple):
    """One row of the order table, in the order of its commit."""

    reference: str
    customer: str


class Sent(NamedTuple):
    """One message, as a reader sees it."""

    partition: int
    offset: int
    customer: str
    reference: str


@dataclass(frozen=True, slots=True)
class Reported:
    """The acknowledgements that the service got before it was killed."""

    orders: frozenset[str]  # the block of these ended without an error
    payments: frozenset[str]
    declined: frozenset[str]  # the body of these raised: neither row nor message may be there
    shipments: frozenset[str] = frozenset()  # committed in the shop's database


@dataclass(frozen=True, slots=True)
class Comparison:
    """Counts; everything after ``acknowledged`` must be 0."""

    rows: int
    messages: int
    payments: int
    acknowledged: int
    missing: int  # rows without their message
    phantoms: int  # messages without their row, or of a declined order
    duplicates: int
    lost: int  # acknowledged, and not there
    torn: int  # payments of which one topic has the message and the other has not
    misordered: int  # customers whose messages are in another order than their rows

    @property
    def holds(self) -> bool:
        """Whether rows and messages are equal, one to one and in order, and nothing acknowledged is lost."""
        wrong = self.missing, self.phantoms, self.duplicates, self.lost, self.torn, self.misordered
        return self.rows > 0 and self.payments > 0 and not any(wrong)


def compare(
    rows: Sequence[Row], orders: Sequence[Sent], payments: Sequence[Sent], audit: Sequence[Sent], reported: Reported
) -> Comparison:
    """Compare what the database holds with what readers of the topics see."""
    row_references = {row.reference for row in rows}
    order_references = {sent.reference for sent in orders}
    payment_references = {sent.reference for sent in payments}
    audit_references = {sent.reference for sent in audit}
    return Comparison(
        rows=len(rows),
        messages=len(orders),
        payments=len(payment_references),
        acknowledged=len(reported.orders) + len(reported.payments),
        missing=len(row_references - order_references),
        phantoms=len((order_references - row_references) | (reported.declined & (row_references | order_references))),
        duplicates=_duplicates(orders) + _duplicates(payments) + _duplicates(audit),
        lost=len(reported.orders - (row_references & order_references)) + len(reported.payments - payment_references),
        torn=len(payment_references ^ audit_references),
        misordered=_misordered(rows, orders),
    )


@dataclass(frozen=True, slots=True)
class HandedOver:
    """What an outbox and its relay made of the rows; everything after ``handed_over`` must be 0."""

    shipments: int
    handed_over: int
    not_handed_over: int
    invented: int  # messages without their row
    twice: int
    shipments_lost: int  # said to be committed, and not there
    customers_misordered: int

    @property
    def holds(self) -> bool:
        """Whether rows and messages are equal, one to one and in order."""
        wrong = self.not_handed_over, self.invented, self.twice, self.shipments_lost, self.customers_misordered
        return self.shipments > 0 and not any(wrong)


def compare_handed_over(rows: Sequence[Row], messages: Sequence[Sent], committed: frozenset[str]) -> HandedOver:
    """Compare what the shop's database holds with what readers of its topic see."""
    of_rows, of_messages = {row.reference for row in rows}, {sent.reference for sent in messages}
    return HandedOver(
        shipments=len(rows),
        handed_over=len(messages),
        not_handed_over=len(of_rows - of_messages),
        invented=len(of_messages - of_rows),
        twice=_duplicates(messages),
        shipments_lost=len(committed - of_rows),
        customers_misordered=_misordered(rows, messages),
    )


def _duplicates(messages: Iterable[Sent]) -> int:
    return sum(count - 1 for count in Counter(sent.reference for sent in messages).values())


def _misordered(rows: Iterable[Row], orders: Iterable[Sent]) -> int:
    """Customers whose common references come in another order, or from more than one partition."""
    wanted: dict[str, list[str]] = defaultdict(list)
    found: dict[str, list[str]] = defaultdict(list)
    partitions: dict[str, set[int]] = defaultdict(set)
    for row in rows:
        wanted[row.customer].append(row.reference)
    for sent in sorted(orders):
        found[sent.customer].append(sent.reference)
        partitions[sent.customer].add(sent.partition)
    wrong = 0
    for customer in wanted.keys() | found.keys():
        common = set(wanted[customer]) & set(found[customer])
        in_rows = [reference for reference in wanted[customer] if reference in common]
        in_log = list(dict.fromkeys(reference for reference in found[customer] if reference in common))
        wrong += in_rows != in_log or len(partitions[customer]) > 1
    return wrong
