"""Users over a quota wait, in turn; transactions, groups and everybody else do not."""

from __future__ import annotations

from typing import Any

import pytest

from tools.simulated.stand_in import AnyClass
from txmq.broker.shell.throttle import BURST_S, READ_SIZE_BYTES_MIN, Throttle
from txmq.broker.state.principals import Permissions, Principals, User
from txmq.protocol.grants import ADMINISTRATOR, Grant
from txmq.protocol.requests import Request, Violation
from txmq.protocol.transaction_bodies import encode_part
from txmq.redo import entries

TURN_S = 0.05


def limit(principals: Principals, kind: str, name: str, **limits: int) -> None:
    principals.fold(entries.QUOTA_SET, {"kind": kind, "name": name, "limits": limits})


def throttle_of(**users: dict[str, int]) -> tuple[Throttle, Principals]:
    principals = Principals()
    for name, limits in users.items():
        limit(principals, "user", name, **limits)
    return Throttle(principals), principals


def put(size: int = 100, topic: bytes = b"a", **extensions: bytes) -> Request:
    stated = {name.encode(): text for name, text in extensions.items()} or None
    return b"put", [topic, b"0"], stated, bytearray(size), b"1"


def request(verb: bytes, size: int = 0, body: bytes | None = None, **extensions: bytes) -> Request:
    stated = {name.encode(): text for name, text in extensions.items()} or None
    return verb, [b"x"], stated, bytearray(body or bytes(size)), b"1"


class Peer(AnyClass):
    """A connection that has as many requests as it may send."""

    def __init__(
        self, throttle: Throttle, user: str, what: Request | None = None, grants: tuple[Grant, ...] = (ADMINISTRATOR,)
    ) -> None:
        self.throttle, self.what = throttle, what or put()
        self.known = Permissions(User(user, None, None, grants), 0)
        self.now_s, self.taken, self.is_gone = 0.0, 0, False
        self.unknown: set[bytes] = set()  # transactions

    def send(self, now_s: float, count: int = 1000) -> int:
        self.now_s = now_s
        admitted = self.throttle.admitted(self, self.known, [self.what] * count, 0, now_s)
        self.taken += admitted
        return admitted

    def begins(self, txid: bytes) -> bool:
        return txid in self.unknown

    def may_go_on(self) -> None:
        self.send(self.now_s)


def pass_time(throttle: Throttle, peers: list[Peer], seconds: float, begin_s: float = 0.0) -> None:
    for turn in range(1, round(seconds / TURN_S) + 1):
        now_s = begin_s + turn * TURN_S
        for peer in peers:
            peer.now_s = now_s
        throttle.turned(now_s)


def test_without_rates_nothing_is_counted() -> None:
    throttle, principals = throttle_of(ops={"connections_max": 3})
    assert not throttle.is_on
    limit(principals, "topic", "a", requests_per_s=5)
    throttle.look()
    assert throttle.is_on


@pytest.mark.parametrize("limits", [{"bytes_per_s": 10_000}, {"requests_per_s": 100}], ids=["bytes", "requests"])
def test_puts_over_a_rate_wait_and_go_on(limits: dict[str, int]) -> None:
    throttle, _ = throttle_of(shop=limits)
    peer, other = Peer(throttle, "shop"), Peer(throttle, "ops")
    assert peer.send(0.0) in (50, 51)
    assert (other.send(0.0), throttle.waiting, throttle.delayed) == (1000, 1, 1)
    pass_time(throttle, [peer], 10.0)
    assert 1000 <= peer.taken <= 1051
    assert throttle.waiting == 1
    assert 9.9 < throttle.delayed_s < 10.1


def test_two_that_wait_share_alike_and_nobody_overtakes() -> None:
    throttle, _ = throttle_of(shop={"bytes_per_s": 10_000})
    first, second = Peer(throttle, "shop"), Peer(throttle, "shop")
    first.send(0.0)
    assert second.send(0.0) == 0
    assert Peer(throttle, "shop").send(0.01) == 0
    late = Peer(throttle, "shop")
    pass_time(throttle, [first, second], 10.0)
    assert late.send(10.0) == 0
    assert abs((first.taken - 51) - second.taken) < 20
    assert 990 <= first.taken + second.taken <= 1051


@pytest.mark.parametrize(
    "never",
    [
        request(b"commit", 100_000), request(b"prepare", 1), request(b"decide", 1), request(b"group"),
        request(b"ping"), put(100_000, tx=b"1"), Violation(400, "bad-request", "", b"-"),
    ],
    ids=["commit", "prepare", "decide", "group", "ping", "part of a transaction", "violation"],
)  # fmt: skip
def test_what_others_wait_behind_is_never_delayed(never: Any) -> None:
    throttle, _ = throttle_of(shop={"bytes_per_s": 1000, "requests_per_s": 1})
    Peer(throttle, "shop").send(0.0)
    assert Peer(throttle, "shop", never).send(0.0) == 1000


def test_transaction_is_paid_for_by_the_next_put() -> None:
    throttle, _ = throttle_of(shop={"bytes_per_s": 1000})
    assert Peer(throttle, "shop", request(b"commit", 3000)).send(0.0, 1) == 1
    peer = Peer(throttle, "shop")
    assert peer.send(0.0) == 0
    pass_time(throttle, [peer], 2.4)
    assert peer.taken == 0
    pass_time(throttle, [peer], 0.2, begin_s=2.4)
    assert peer.taken > 0


PARTS = b"".join(bytes(piece) for piece in encode_part("a", 0, bytes(100)))


@pytest.mark.parametrize("kind", ["user", "topic"])
@pytest.mark.parametrize(
    "begins",
    [request(b"commit", body=PARTS), request(b"prepare", body=PARTS), put(100, tx=b"x")],
    ids=["commit", "prepare", "part"],
)
def test_transaction_that_would_begin_is_refused_and_takes_nothing(begins: Request, kind: str) -> None:
    throttle, principals = throttle_of()
    limit(principals, kind, "shop" if kind == "user" else "a", bytes_per_s=1000)
    throttle.look()
    peer = Peer(throttle, "shop")
    peer.unknown = {b"x"}
    sent: list[Request | Violation] = [put(2000), begins, begins]
    for _ in range(2):
        assert throttle.admitted(peer, peer.known, sent, 1 if throttle.refused else 0, 0.0) == 3
        assert [isinstance(one, Violation) for one in sent] == [False, True, True]
    assert isinstance(refused := sent[1], Violation)
    assert (refused.code, refused.error_name, refused.opaque, refused.closes) == (429, "overloaded", b"1", False)
    assert throttle.refused == 2
    again: list[Request | Violation] = [begins]
    assert throttle.admitted(peer, peer.known, again, 0, 1.6) == 1  # the put is paid for
    assert again == [begins]
    assert throttle.waiting == 0


def test_transaction_that_has_begun_goes_on_to_its_end() -> None:
    """Also one begun by an earlier request that is not taken in yet."""
    throttle, _ = throttle_of(shop={"bytes_per_s": 1000})
    peer = Peer(throttle, "shop")
    peer.unknown = {b"x", b"y"}
    other: Request = (b"commit", [b"y"], None, bytearray(PARTS), b"2")
    sent: list[Request | Violation] = [
        put(5000, tx=b"x"), put(5000, tx=b"x"), other, request(b"commit", body=PARTS), request(b"decide", 100),
        (b"commit", [b"y"], None, bytearray(), b"3"),
    ]  # fmt: skip
    assert throttle.admitted(peer, peer.known, sent, 0, 0.0) == 6
    assert [isinstance(one, Violation) for one in sent] == [False, False, True, False, False, False]


def test_topic_is_limited_over_all_users() -> None:
    throttle, principals = throttle_of()
    limit(principals, "topic", "a", bytes_per_s=1000)
    throttle.look()
    assert Peer(throttle, "shop").send(0.0) == 6
    assert Peer(throttle, "ops").send(0.0) == 0
    assert Peer(throttle, "ops", put(topic=b"b")).send(0.0) == 1000


def test_parts_of_a_transaction_count_for_their_topics() -> None:
    throttle, principals = throttle_of()
    limit(principals, "topic", "a", bytes_per_s=1000)
    throttle.look()
    body = b"".join(bytes(piece) for topic in ("b", "a") for piece in encode_part(topic, 0, bytes(3000)))
    Peer(throttle, "ops", request(b"prepare", body=body)).send(0.0, 1)
    assert Peer(throttle, "ops").send(0.0) == 0
    malformed = Peer(throttle, "ops", request(b"commit", body=b"what is this"))
    assert malformed.send(0.0, 1) == 1


@pytest.mark.parametrize("verb", [b"put", b"get", b"prepare", b"commit"])
def test_who_is_refused_uses_up_nothing_of_a_topic(verb: bytes) -> None:
    throttle, principals = throttle_of()
    limit(principals, "topic", "a", bytes_per_s=1000, requests_per_s=10)
    throttle.look()
    body = b"".join(bytes(piece) for piece in encode_part("a", 0, bytes(3000)))
    refused: dict[bytes, Request] = {
        b"put": put(3000), b"get": (b"get", [b"a", b"0", b"0", b"1000"], None, None, b"1"),
    }  # fmt: skip
    grants = (Grant("write", "topic", "b"), Grant("write" if verb == b"get" else "read", "topic", "a"))
    stranger = Peer(throttle, "mallory", refused.get(verb, request(verb, body=body)), grants)
    assert (stranger.send(0.0), throttle.waiting) == (1000, 0)
    assert Peer(throttle, "shop", grants=(Grant("write", "topic", "a"),)).send(0.0) == 6
    assert stranger.send(0.0) == 1000


def test_before_there_are_users_topics_are_limited_for_all() -> None:
    throttle, principals = throttle_of()
    limit(principals, "topic", "a", bytes_per_s=1000)
    throttle.look()
    assert throttle.admitted(Peer(throttle, "-"), None, [put()] * 10, 0, 0.0) == 6


def test_get_waits_for_requests_and_its_answer_for_bytes() -> None:
    throttle, _ = throttle_of(shop={"bytes_per_s": 100_000, "requests_per_s": 10})
    get: Request = b"get", [b"a", b"0", b"0", b"1000"], None, None, b"1"
    assert Peer(throttle, "shop", get).send(0.0) == 6
    reader = Peer(throttle, "nobody")
    assert throttle.readable_bytes(reader, "ops", b"a", 1 << 20, 0.0) == 1 << 20
    assert throttle.readable_bytes(reader, "shop", b"a", 1 << 20, 0.0) == 10_000
    throttle.took("shop", b"a", 1_000_000, 0.0)
    assert throttle.readable_bytes(reader, "shop", b"a", 1 << 20, 9.0) == 0
    pass_time(throttle, [], TURN_S, begin_s=9.0)
    assert reader.taken == 0
    throttle.took("shop", b"a", -900_000, 9.05)
    pass_time(throttle, [], TURN_S, begin_s=9.05)
    assert reader.taken == 1000  # it had its turn


def test_slow_quota_still_reads_a_little() -> None:
    throttle, _ = throttle_of(shop={"bytes_per_s": 1})
    assert throttle.readable_bytes(Peer(throttle, "shop"), "shop", b"a", 1 << 20, 0.0) == READ_SIZE_BYTES_MIN


def test_quota_that_is_raised_or_removed_counts_at_once() -> None:
    throttle, principals = throttle_of(shop={"bytes_per_s": 1})
    peer = Peer(throttle, "shop")
    assert peer.send(0.0) == 1
    assert peer.send(0.0) == 0
    pass_time(throttle, [peer], 10.0)
    assert peer.taken == 1
    limit(principals, "user", "shop", bytes_per_s=100_000)
    throttle.look()
    pass_time(throttle, [peer], TURN_S, begin_s=10.0)
    assert peer.taken == 502
    limit(principals, "user", "shop")
    throttle.look()
    pass_time(throttle, [peer], TURN_S, begin_s=10.1)
    assert peer.taken == 1502
    assert not throttle.is_on


def test_bucket_outlives_changes_of_other_quotas() -> None:
    throttle, principals = throttle_of(shop={"bytes_per_s": 1000})
    Peer(throttle, "shop").send(0.0)
    limit(principals, "topic", "a", requests_per_s=1_000_000)
    throttle.look()
    assert Peer(throttle, "shop").send(0.0) == 0


def test_who_is_gone_holds_nobody_up() -> None:
    throttle, _ = throttle_of(shop={"bytes_per_s": 1000})
    gone, peer = Peer(throttle, "shop"), Peer(throttle, "shop")
    gone.send(0.0)
    gone.is_gone = True
    pass_time(throttle, [gone], TURN_S)
    assert throttle.waiting == 0
    assert peer.send(BURST_S) > 0


def test_what_was_admitted_is_not_paid_twice() -> None:
    throttle, _ = throttle_of(shop={"bytes_per_s": 1000})
    peer = Peer(throttle, "shop")
    assert throttle.admitted(peer, peer.known, [put()] * 3, 0, 0.0) == 3
    assert throttle.admitted(peer, peer.known, [put()] * 3, 3, 0.0) == 3
    assert throttle.admitted(peer, peer.known, [put()] * 10, 3, 0.0) == 6
    assert throttle.admitted(peer, peer.known, [put()] * 10, 6, 0.0) == 6
