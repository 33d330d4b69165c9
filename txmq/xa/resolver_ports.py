"""The broker and the client as a resolver needs them: ports, and the waits that both kinds of resolving share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from txmq.errors import FencedError, NeverIssuedError, TxmqError
from txmq.protocol.json_text import json_object
from txmq.runtime.ports import Buffer
from txmq.xid import TxId

POLL_S = 0.5
FAILED_POLL_S_MAX = 0.5  # with the second that an owner has, resolved within 2 s of both sides being there again
OWNER_GONE_MS = 1000
REQUEST_TIMEOUT_S = 5.0
REPORT_TIMEOUT_S = 2.0  # a commit may wait for an earlier one that is not due yet; it is reported again
FAILURES_PER_ROUND_MAX = 3  # each may wait a second for a lock
PAGE_SIZE = 1000  # transactions in one answer to ``recover``
DELETE_SIZE = 500  # rows in one DELETE
DELETE_EVERY_S = 1.0  # if they fill a DELETE
DELETE_FEW_EVERY_S = 10.0  # each is a sync, and takes SQLite's one write lock: one row a second would double both
SWEEP_EVERY_S = 60.0
SWEEP_AGE_MS = 600_000

Wanted = Mapping[str, str | int | bytes | None]  # extensions of ``recover``


class Answer(Protocol):
    """A request on its way."""

    @property
    def done(self) -> bool:
        """Whether ``result`` need not wait."""

    def look(self) -> None:
        """Read what has arrived, without waiting."""

    def result(self, timeout: float | None = None) -> bytes:
        """Wait for its answer, so many seconds or as long as the request was given."""


class Control(Protocol):
    """A connection to the broker."""

    def call(
        self, verb: str, *arguments: str | int, timeout: float,
        extensions: Mapping[str, str | int | bytes | None] | None = None, body: Sequence[Buffer] | None = None,
    ) -> bytes:  # fmt: skip
        """Send a request and wait for its answer."""

    def submit(
        self, verb: str, *arguments: str | int, timeout: float,
        extensions: Mapping[str, str | int | bytes | None] | None = None, body: Sequence[Buffer] | None = None,
    ) -> Answer:  # fmt: skip
        """Send a request."""


class Session(Protocol):
    """The client's session: the identity of its broker."""

    @property
    def cluster(self) -> int:
        """Id of the cluster."""

    @property
    def home(self) -> int:
        """Id of the broker's journal."""

    @property
    def fences_by_database(self) -> bool:
        """Whether the broker knows ``outcome <txid> fence uuid=``."""


class Stop(Protocol):
    """Ends ``Resolver.run`` (a ``threading.Event`` is one)."""

    def wait(self, timeout: float) -> bool:
        """Sleep so long at most; True when it is time to end."""


class Client(Protocol):
    """A client, as a resolver uses it."""

    @property
    def session(self) -> Session:
        """The broker's identity."""

    @property
    def control(self) -> Control:
        """A connection to the broker."""


class HomeClient(Client, Protocol):
    """One home of a client."""

    def look(self) -> None:
        """Make sure that it is there, if others wait for their turn meanwhile; one that is away costs them one wait.

        Raises BrokerAwayError.
        """


class Homes(Protocol):
    """The choice among a client's homes."""

    @property
    def is_single_home(self) -> bool:
        """Whether there is one broker, without a registry."""

    def link_of_home(self, home: int) -> HomeClient:
        """The home in a transaction's id; a lone broker answers for every home."""

    def links(self) -> Sequence[HomeClient]:
        """All that are known."""

    def all_links(self) -> Sequence[HomeClient]:
        """All that there are; raises TxmqError if that cannot be known now."""


class RoutedClient(Client, Protocol):
    """A client, as a resolver of all its homes uses it."""

    @property
    def routes(self) -> Homes:
        """Its homes."""


def home_of(homes: Homes, txid: str) -> HomeClient:
    """The home that answers for a transaction; any of them if that is no id of ours."""
    try:
        home = TxId.parse(txid).home
    except ValueError:
        home = 0
    return homes.link_of_home(home)


def is_of_another(client: Client, homes: Homes, txid: str) -> bool:
    """Whether another home of the same client answers for a transaction: that one's resolver has it."""
    home = home_of(homes, txid)
    return home is not client and is_of_this_broker(home.session, txid)


def cluster_of(client: Client) -> str:
    """The cluster id of a client's broker, 16 hex digits."""
    return f"{client.session.cluster:016x}"


def is_of_this_broker(session: Session, text: str) -> bool:
    """Whether a transaction id is one that this broker answers for."""
    try:
        txid = TxId.parse(text)
    except ValueError:
        return False
    return (txid.cluster, txid.home) == (session.cluster, session.home)


def was_settled(error: TxmqError) -> bool:
    """Whether the broker's refusal says that another process has settled the transaction, and that was long ago.

    Not if the broker was restored from an older copy, and knows nothing of the transaction's session.
    """
    return isinstance(error, FencedError) and not isinstance(error, NeverIssuedError)


def is_owner_gone(row: Mapping[str, Any]) -> bool:
    """Whether the owner of a transaction that ``recover`` lists has been gone long enough."""
    return not row["owner_connected"] and int(row["owner_gone_ms"]) >= OWNER_GONE_MS


def list_transactions(client: Client, uuid: str, state: str, page_size: int) -> list[dict[str, Any]]:
    """List one resource's transactions in a state (``recover``), oldest first, each once."""

    def ask(wanted: Wanted) -> bytes:
        return client.control.call("recover", extensions=wanted, timeout=REQUEST_TIMEOUT_S)

    return [*recover_rows(ask, {"uuid": uuid, "state": state, "limit": page_size})]


def recover_rows(ask: Callable[[Wanted], bytes], wanted: Wanted) -> Iterator[dict[str, Any]]:
    """The transactions that ``recover`` lists, page after page, each once.

    Args:
        ask: sends the request and returns the body of its answer.
        wanted: extensions of the request.
    """
    seen: set[str] = set()
    after: dict[str, str | int | bytes | None] = {}
    while True:
        page = json_object(ask({**wanted, **after}))
        for row in page["transactions"]:
            # A transaction that is decided meanwhile is listed again; after a restart of the broker all are.
            if row["txid"] not in seen:
                seen.add(row["txid"])
                yield row
        if page["next"] is None:
            return
        after["after"] = page["next"]
