"""Fencing tokens: each is the successor of the one before, through restarts."""

from __future__ import annotations

import pytest

from tools.images.node import Client
from tools.images.requests import UUID
from txmq.broker.state import fencing_tokens

from ..support import node, restarted

A, B, C, D = (letter * 32 for letter in "abcd")


def drawn(client: Client, token: str, after: str = "", uuid: str = UUID) -> tuple[int, str]:
    """A resolver has drawn a token in a database that had ``after``."""
    answer = client.ask("token", uuid, token, extensions={"after": after} if after else {})
    return answer.code, answer.error


ACCEPTED, OTHER = (200, ""), (409, "other-token")


def test_token_is_accepted_after_the_newest_one_only() -> None:
    client = node().session()
    assert drawn(client, A) == ACCEPTED
    assert drawn(client, B) == OTHER, "a copy from before the first one"
    assert drawn(client, B, A) == ACCEPTED
    assert drawn(client, C, A) == OTHER
    assert drawn(client, C, B) == ACCEPTED


def test_token_whose_answer_was_lost_is_told_again() -> None:
    client = node().session()
    assert [drawn(client, A), drawn(client, A)] == [ACCEPTED, ACCEPTED]
    assert [drawn(client, B, A), drawn(client, B, A)] == [ACCEPTED, ACCEPTED]
    assert drawn(client, A) == OTHER, "it was followed"


def test_tokens_of_an_unknown_database_begin_without_one_before() -> None:
    client = node().session()
    assert drawn(client, B, A) == OTHER, "a broker that was restored does not know it"
    assert drawn(client, A) == ACCEPTED
    assert drawn(client, A, uuid="f" * 32) == ACCEPTED


@pytest.mark.parametrize("checkpoint", [False, True])
def test_newest_token_outlives_the_broker(*, checkpoint: bool) -> None:
    broker = node()
    client = broker.session()
    assert [drawn(client, A), drawn(client, B, A)] == [ACCEPTED, ACCEPTED]
    if checkpoint:
        broker.checkpoint()
    client = restarted(broker).session("new")
    assert drawn(client, C, A) == OTHER
    assert drawn(client, C, B) == ACCEPTED


def test_operator_says_which_database_goes_on() -> None:
    client = node().session()
    assert drawn(client, A) == ACCEPTED
    assert client.ask("token", UUID, C, extensions={"adopted": None}).code == 200
    assert drawn(client, B, A) == OTHER
    assert drawn(client, D, C) == ACCEPTED
    assert client.ask("token", UUID, A, extensions={"adopted": None, "after": D}).error == "bad-request"


@pytest.mark.parametrize("words", [("x", A), (UUID, "x"), (UUID, A[:-1])])
def test_token_and_uuid_are_32_hex(words: tuple[str, str]) -> None:
    assert node().session().ask("token", *words).error == "bad-request"


def test_no_more_databases_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fencing_tokens, "TOKENS_MAX", 1)
    client = node().session()
    assert drawn(client, A) == ACCEPTED
    assert drawn(client, A, uuid="f" * 32) == (429, "overloaded")
    assert drawn(client, B, A) == ACCEPTED
