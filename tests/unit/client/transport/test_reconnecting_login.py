"""A client logs in: what it sends, what it is bound to, and that no text of it shows the password."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tools.images.node import Answer, Node
from txmq.client.bootstrap import bootstrap_of
from txmq.client.transport.connection import Connection
from txmq.client.transport.reconnecting import Login, log_in
from txmq.errors import BadRequestError, OverloadedError, UnauthenticatedError, UnavailableError
from txmq.protocol.certificates import end_point
from txmq.protocol.scram import SALT_SIZE, keys_of

from ...broker.support import node

CERTIFICATE = b"shown by the broker"
_ERRORS = {"unauthenticated": UnauthenticatedError, "bad-request": BadRequestError, "overloaded": OverloadedError}


class Dialled:
    """A connection to a broker in memory.

    Attributes:
        sent: messages of the login.
    """

    def __init__(self, broker: Node, shown: bytes | None, *certificates: str) -> None:
        self._peer = broker.connect()
        self._peer.client.binding = None if shown is None else end_point(shown)
        self._peer.client.certificates = frozenset(certificates)
        self.stream = SimpleNamespace(server_certificate=shown)
        self.sent: list[bytes] = []

    @property
    def user(self) -> str:
        return self._peer.client.user

    def request(self, deadline: float, verb: str, *arguments: str, body: list[bytes]) -> Any:
        self.sent += body
        answer = self._peer.ask(verb, *arguments, body=b"".join(body))
        if answer.code != 200:
            raise _ERRORS[answer.error](answer.body)
        return SimpleNamespace(result=lambda: answer.body)

    @property
    def ask(self) -> Callable[..., Answer]:
        return self._peer.ask

    def log_in(self, login: Login | None) -> None:
        log_in(cast(Connection, self), login, 0.0)


@pytest.fixture
def broker() -> Node:
    made = node()
    keys = {"keys": keys_of("pencil", bytes(SALT_SIZE)).to_json(), "certificate": "CN=ops"}
    assert made.connect().ask("user", "add", "ops", body=json.dumps(keys).encode()).code == 200
    return made


@pytest.mark.parametrize("shown", [None, CERTIFICATE])
def test_password_proves_itself_and_is_not_sent(broker: Node, shown: bytes | None) -> None:
    connection = Dialled(broker, shown)
    connection.log_in(Login("ops", lambda: "pencil"))
    assert connection.user == "ops"
    assert len(connection.sent) == 2
    assert b"pencil" not in b"".join(connection.sent)
    assert connection.sent[0].startswith(b"n,," if shown is None else b"p=tls-server-end-point,,")


def test_certificate_takes_the_place_of_a_password(broker: Node) -> None:
    connection = Dialled(broker, CERTIFICATE, "CN=ops")
    connection.log_in(Login("ops", None))
    assert connection.user == "ops"
    assert connection.sent == [b"ops"]
    with pytest.raises(UnauthenticatedError, match=r"this client's certificate is not ops's .*user add --certificate"):
        Dialled(broker, CERTIFICATE, "CN=shop").log_in(Login("ops", None))


def test_without_a_user_nothing_is_sent(broker: Node) -> None:
    connection = Dialled(broker, None)
    connection.log_in(None)
    assert connection.sent == []


def test_password_is_asked_for_at_each_login(broker: Node) -> None:
    kept = ["pencil"]
    login = Login("ops", lambda: kept[0])
    Dialled(broker, None).log_in(login)
    kept[0] = "crayon"
    with pytest.raises(UnauthenticatedError):
        Dialled(broker, None).log_in(login)


def test_login_beyond_the_quota_is_tried_again_later(broker: Node) -> None:
    ops = Dialled(broker, None)
    ops.log_in(Login("ops", lambda: "pencil"))
    ops.ask("quota", "set", "user", "ops", extensions={"connections_max": 1})
    with pytest.raises(UnavailableError, match="connections_max 1 of user ops is reached"):
        Dialled(broker, None).log_in(Login("ops", lambda: "pencil"))


def test_no_text_shows_the_password(broker: Node) -> None:
    bootstrap = bootstrap_of("txmq://ops@a", password="swordfish")
    assert bootstrap.login is not None
    with pytest.raises(UnauthenticatedError) as caught:
        Dialled(broker, None).log_in(bootstrap.login)
    told = "".join(traceback.format_exception(caught.value))
    for text in (repr(bootstrap), repr(bootstrap.login), str(caught.value), told):
        assert "swordfish" not in text
