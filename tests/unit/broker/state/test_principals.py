"""Users, grants and quotas are a fold: redone twice the same, and a checkpoint holds all of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from txmq.broker.state.principals import KINDS, Principals
from txmq.errors import UnknownUserError
from txmq.protocol.grants import ADMINISTRATOR
from txmq.redo import entries

KEYS = ["c2FsdA==", 4096, "c3RvcmVk", "c2VydmVy"]
HISTORY: list[tuple[int, dict[str, Any]]] = [
    (entries.USER, {"user": "ops", "keys": KEYS, "certificate": None, "secret": "5ec"}),
    (entries.GRANTED, {"user": "ops", "grants": [list(ADMINISTRATOR)]}),
    (entries.USER, {"user": "shop", "keys": None, "certificate": "CN=shop"}),
    (entries.GRANTED, {"user": "shop", "grants": [["read", "topic", "a*"]]}),
    (entries.USER, {"user": "shop", "keys": KEYS, "certificate": "CN=shop"}),
    (entries.QUOTA_SET, {"kind": "user", "name": "shop", "limits": {"requests_per_s": 7}}),
    (entries.QUOTA_SET, {"kind": "topic", "name": "a", "limits": {"bytes_per_s": 9}}),
    (entries.MADE, {"kind": "topic", "name": "a", "user": "shop", "size": 3}),
    (entries.MADE, {"kind": "topic", "name": "a", "user": "shop", "size": 5}),
    (entries.ACCESS, {"version": 3, "secret": "5ec", "between_brokers": "b07"}),
]  # fmt: skip


def _after(times: int = 1) -> Principals:
    principals = Principals()
    for kind, fields in HISTORY:
        for _ in range(times):
            principals.fold(kind, fields)
    return principals


def test_fold_twice_is_fold_once() -> None:
    assert {kind for kind, _ in HISTORY} == KINDS - {entries.USER_REMOVED}
    assert _after(2).freeze() == _after().freeze()


def test_another_password_keeps_grants_and_secret() -> None:
    principals = _after()
    assert [tuple(grant) for grant in principals.known("shop").grants] == [("read", "topic", "a*")]
    assert principals.known("shop").keys == tuple(KEYS)
    assert principals.secret == "5ec"


def test_a_checkpoint_holds_everything() -> None:
    taken = json.loads(json.dumps(_after().freeze()))
    restored = Principals()
    restored.restore(taken)
    assert json.loads(json.dumps(restored.freeze())) == taken
    assert restored.known("ops").is_administrator
    assert restored.quotas["topic", "a"] == {"bytes_per_s": 9}
    assert (restored.registry_version, restored.between_brokers) == (3, "b07")
    assert restored.made_sizes == {("topic", "shop"): 5}
    assert Principals().freeze() is None


def test_a_removed_user_leaves_no_quota() -> None:
    principals = _after()
    before = principals.version
    principals.fold(entries.USER_REMOVED, {"user": "shop"})
    assert principals.version > before
    assert ("user", "shop") not in principals.quotas
    with pytest.raises(UnknownUserError, match="shop"):
        principals.known("shop")


def test_the_last_administrator_is_known() -> None:
    principals = _after()
    assert principals.is_last_administrator(principals.known("ops"))
    assert not principals.is_last_administrator(principals.known("shop"))
    principals.fold(entries.GRANTED, {"user": "shop", "grants": [list(ADMINISTRATOR)]})
    assert not principals.is_last_administrator(principals.known("ops"))
