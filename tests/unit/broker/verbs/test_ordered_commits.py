"""The order of transactions of one key in a cluster, for every pair of kinds: the log has it as they were prepared.

``EARLIER`` are transactions that may be acknowledged and not placed yet, or whose outcome is open. ``LATER`` are all
that may begin after one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tools.images.homes import Cluster
from tools.images.node import Answer, Client
from tools.images.requests import UUID, batch, part
from txmq.protocol.group_rows import GroupOffsets, OffsetRow, encode_offsets
from txmq.protocol.transaction_bodies import encode_branch

from ..group_support import GROUP, Consumer
from ..homes_support import commit, listed, live_and_redone, open_query, prepare_branch, two_homes
from ..support import put, stated, values

OTHER_UUID = "f" * 32
DETAILS = {"bqual": "b", "connection": 7, "wrote": True, "marker": True, "table": "t"}
FIRST, LAST = b"first", b"last"


class Home:
    """The home in whose log the order is looked at; ``other`` decides about its branches.

    Attributes:
        waiting: requests for a commit that are not answered, by the number of the transaction.
    """

    def __init__(self) -> None:
        self.other, self.node = two_homes()
        self.client: Client = self.node.session()
        self.decider = self.other.session()
        self.waiting: dict[int, bytes] = {}

    def txid(self, number: int) -> str:
        return self.node.txid(1, number)

    def restart(self, *, checkpoint: bool) -> None:
        """The home dies; clients tell again what was not answered."""
        self.node = self.node.again(checkpoint=checkpoint)
        self.client = self.node.session("1.0")
        for number in self.waiting:
            self.tell(number)

    def tell(self, number: int) -> None:
        """Commit what is prepared, and do not wait for the answer."""
        self.waiting[number] = self.client.send("commit", self.txid(number), body=b"")
        self.node.pump()

    @property
    def in_log(self) -> list[bytes]:
        return values(self.node)

    def last_resource(self, number: int, value: bytes, uuid: str = UUID) -> Answer:
        words: dict[str, str | int] = {"resource": "db", "uuid": uuid, "table": "t", "deadline": 0}
        return self.client.ask("prepare", self.txid(number), "last-resource", extensions=words, body=parts(value))


def parts(value: bytes, key: int = 7) -> bytes:
    """One message."""
    return part("a", 0, batch(value), str(key))


# --- what may wait for its place -------------------------------------------------------------------------------------


def open_branch(home: Home) -> Callable[[], None]:
    """Another home has decided, and its client was told; nobody has told this home."""
    of = home.other.txid(1, 1)
    assert prepare_branch(home.client, home.txid(1), of, ("a", 0, FIRST)).code == 200
    assert commit(home.decider, of, homes=home.txid(1)).code == 200
    return lambda: home.tell(1)


def open_last_resource(home: Home) -> Callable[[], None]:
    """The database has committed; its client was told, and dies before it tells this home."""
    assert home.last_resource(1, FIRST).code == 200
    return lambda: home.tell(1)


EARLIER = {"branch": open_branch, "last resource": open_last_resource}


def placing(home: Home) -> Callable[[], None]:
    """A local transaction was told committed, and waits for a branch."""
    of = home.other.txid(1, 1)
    assert prepare_branch(home.client, home.txid(1), of, ("a", 0, b"before")).code == 200
    assert commit(home.client, home.txid(2), ("a", 0, FIRST)).text == "a 0 - 1\n"
    return lambda: home.tell(1)


# --- what may begin after it -----------------------------------------------------------------------------------------

N = 10  # the number of the later transaction


def local(home: Home, key: int) -> None:
    assert home.client.ask("commit", home.txid(N), body=parts(LAST, key)).code == 200


def streamed(home: Home, _key: int) -> None:
    content = batch(LAST)
    home.client.ask("put", "a", 0, extensions={"tx": home.txid(N)}, body=content)
    assert home.client.ask("commit", home.txid(N), extensions=stated([content]), body=b"").code == 200


def local_over_homes(home: Home, key: int) -> None:
    words = {"homes": home.other.txid(1, N)}
    assert home.client.ask("commit", home.txid(N), extensions=words, body=parts(LAST, key)).code == 200


def xa(home: Home, key: int) -> None:
    body = encode_branch("db", UUID, DETAILS) + parts(LAST, key)
    assert home.client.ask("decide", home.txid(N), extensions={"branches": 1}, body=body).code == 200
    home.client.ask("complete", home.txid(N), extensions={"uuid": UUID})


def branch(home: Home, key: int) -> None:
    of = home.other.txid(1, N)
    assert prepare_branch(home.client, home.txid(N), of, ("a", 0, LAST), keys=key).code == 200
    home.tell(N)


def _last_resource(home: Home, key: int, uuid: str) -> None:
    words: dict[str, str | int] = {"resource": "db", "uuid": uuid, "table": "t", "deadline": 0}
    body = parts(LAST, key)
    assert home.client.ask("prepare", home.txid(N), "last-resource", extensions=words, body=body).code == 200
    home.tell(N)


def last_resource(home: Home, key: int) -> None:
    _last_resource(home, key, UUID)


def last_resource_of_another_database(home: Home, key: int) -> None:
    _last_resource(home, key, OTHER_UUID)


def half(home: Home, key: int) -> None:
    words: dict[str, str | int] = {"group": "g", "deadline": 0}
    assert home.client.ask("prepare", home.txid(N), "half", extensions=words, body=parts(LAST, key)).code == 200
    assert commit(home.client, home.txid(N)).code == 200


def half_over_homes(home: Home, key: int) -> None:
    words: dict[str, str | int] = {"group": "g", "deadline": 0, "homes": home.other.txid(1, N)}
    assert home.client.ask("prepare", home.txid(N), "half", extensions=words, body=parts(LAST, key)).code == 200
    assert commit(home.client, home.txid(N)).code == 200


def foreign(home: Home, key: int) -> None:
    words: dict[str, str | int] = {"xid": "1.aa.bb", "deadline": 0}
    assert home.client.ask("prepare", home.txid(N), "foreign", extensions=words, body=parts(LAST, key)).code == 200
    assert commit(home.client, home.txid(N)).code == 200


LATER: dict[str, Callable[[Home, int], None]] = {
    "local": local, "local over homes": local_over_homes, "XA": xa, "branch": branch, "last resource": last_resource,
    "last resource of another database": last_resource_of_another_database, "half": half,
    "half over homes": half_over_homes, "foreign": foreign,
}  # fmt: skip
every_later = pytest.mark.parametrize("later", LATER.values(), ids=LATER)
every_earlier = pytest.mark.parametrize("earlier", EARLIER.values(), ids=EARLIER)


@every_later
@every_earlier
@pytest.mark.parametrize("restart", ["none", "journal", "checkpoint"])
def test_earlier_one_stands_first(
    earlier: Callable[[Home], Callable[[], None]], later: Callable[[Home, int], None], restart: str
) -> None:
    home = Home()
    tell = earlier(home)
    later(home, 7)
    assert home.in_log == []
    if restart != "none":
        home.restart(checkpoint=restart == "checkpoint")
        assert home.in_log == []
    tell()
    assert home.in_log == [FIRST, LAST]
    home.node = home.node.again()
    assert home.in_log == [FIRST, LAST]


@every_later
def test_one_that_waits_for_place_stands_first(later: Callable[[Home, int], None]) -> None:
    home = Home()
    tell = placing(home)
    later(home, 7)
    tell()
    assert home.in_log == [b"before", FIRST, LAST]


@every_later
@every_earlier
def test_earlier_one_rolled_back_lets_later_one_go(
    earlier: Callable[[Home], Callable[[], None]], later: Callable[[Home, int], None]
) -> None:
    home = Home()
    earlier(home)
    later(home, 7)
    assert home.client.ask("rollback", home.txid(1)).code == 200
    assert home.in_log == [LAST]


@every_later
@every_earlier
def test_other_keys_do_not_wait(
    earlier: Callable[[Home], Callable[[], None]], later: Callable[[Home, int], None]
) -> None:
    home = Home()
    tell = earlier(home)
    later(home, 8)
    assert home.in_log == [LAST]
    tell()
    assert home.in_log == [LAST, FIRST]


@every_earlier
def test_what_was_streamed_waits_for_every_key(earlier: Callable[[Home], Callable[[], None]]) -> None:
    home = Home()
    tell = earlier(home)
    streamed(home, 7)
    assert home.in_log == []
    tell()
    assert home.in_log == [FIRST, LAST]


# --- what is decided late, and what never waits ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["half", "foreign"])
def test_undecided_one_of_this_home_holds_nobody_up(kind: str) -> None:
    home = Home()
    words: dict[str, str | int] = {"deadline": 0} | ({"group": "g"} if kind == "half" else {"xid": "1.aa.bb"})
    home.client.ask("prepare", home.txid(1), kind, extensions=words, body=parts(FIRST))
    local(home, 7)
    assert home.in_log == [LAST]
    assert commit(home.client, home.txid(1)).text == "a 0 1 1\n"


def test_half_that_waits_is_committed_without_check_back() -> None:
    home = Home()
    tell = open_branch(home)
    half(home, 7)
    assert home.client.ask("outcome", home.txid(N)).text == "committed\na 0 - 1\n"
    assert home.client.ask("rollback", home.txid(N)).error == "transaction-conflict"
    home.restart(checkpoint=False)
    home.client.disconnect()
    home.node.clock.advance(10)
    home.node.core.tick(home.node.clock.now_ms())
    assert home.node.connect().ask("checks", "g").body == b""
    home.client = home.node.session("1.0")
    tell()
    assert home.client.ask("outcome", home.txid(N)).text == "committed\na 0 1 1\n"
    assert home.node.state.sessions[1].owed == 0


def test_xid_of_one_that_waits_is_free() -> None:
    home = Home()
    tell = open_branch(home)
    foreign(home, 7)
    assert [row["state"] for row in listed(home.client) if "xid" in row] == []
    words: dict[str, str | int] = {"xid": "1.aa.bb", "deadline": 0}
    answer = home.client.ask("prepare", home.txid(N + 1), "foreign", extensions=words, body=parts(b"again"))
    assert answer.code == 200
    home.restart(checkpoint=True)
    tell()
    assert home.in_log == [FIRST, LAST]
    assert [row["xid"] for row in listed(home.client) if "xid" in row] == ["1.aa.bb"]


def test_offset_of_one_that_waits_is_saved_with_its_place() -> None:
    home = Home()
    tell = open_branch(home)
    Consumer(home.node, "one").join()
    stated_offsets = encode_offsets([GroupOffsets(GROUP, 0, (OffsetRow("a", 0, 1, 5, "text"),))])
    words: dict[str, str | int] = {"xid": "1.aa.bb", "deadline": 0, "offsets": len(stated_offsets)}
    body = stated_offsets + parts(LAST)
    assert home.client.ask("prepare", home.txid(N), "foreign", extensions=words, body=body).code == 200
    before = home.node.state.saved.size_bytes
    commit(home.client, home.txid(N))
    saved = home.node.state.saved
    assert (list(saved.held), saved.size_bytes) == ([(GROUP, 1, 0)], before)
    assert not saved.named[GROUP].offsets
    tell()
    assert (saved.held, saved.named[GROUP].offsets[1, 0].offset) == ({}, 5)
    live, redone = live_and_redone(home.node)
    assert live == redone


def test_plain_message_does_not_wait_here_its_client_does() -> None:
    home = Home()
    tell = open_branch(home)
    assert put(home.client, b"plain", producer=1).code == 200
    tell()
    assert home.in_log == [b"plain", FIRST]


def test_batches_of_query_keep_order_of_its_decisions_alone() -> None:
    home = Home()
    open_query(home.node, home.client)
    tell = open_branch(home)
    words: dict[str, str | int] = {"query": "q", "epoch": 1, "batch": 0, "task": 0, "attempt": 0}
    assert home.client.ask("prepare", home.txid(N), "spark", extensions=words, body=parts(LAST)).code == 200
    body = f"{home.txid(N)}\n".encode()
    assert home.client.ask("query", "commit", "q", extensions={"epoch": 1, "batch": 0}, body=body).code == 200
    tell()
    assert home.in_log == [LAST, FIRST]


@every_later
def test_home_that_decided_is_asked_when_one_waits(later: Callable[[Home, int], None]) -> None:
    home = Home()
    open_branch(home)
    cluster = Cluster(home.other, home.node)
    later(home, 7)
    cluster.pump()  # no time passes
    assert home.in_log == [FIRST, LAST]
