"""Addresses as text."""

from __future__ import annotations

from typing import Any

import pytest

from txmq.addresses import Credentials, Ensemble, parse_ensemble
from txmq.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("zk://h1", Ensemble("h1:2181", "")),
        ("zk://h1,h2:2182,h3/prod", Ensemble("h1:2181,h2:2182,h3:2181", "/prod")),
        ("zk://[::1],[::2]:5/a/b.c/", Ensemble("[::1]:2181,[::2]:5", "/a/b.c")),
        ("zk://me:s:e/c@r,t@a/prod", Ensemble("a:2181", "/prod", Credentials("me", "s:e/c@r,t"))),
    ],
)
def test_an_ensembles_address_has_hosts_and_a_path(text: str, expected: Ensemble) -> None:
    assert parse_ensemble(text) == expected
    assert "s:e" not in repr(parse_ensemble(text))


@pytest.mark.parametrize(
    "text",
    [
        None, "h1", "txmq://h1", "zk://", "zk:///prod", "zk://h1,", "zk://h1/../a", "zk://a,,b", "zk://a:x", "zk://a//b",
        "zk://a/.", "zk://a/ b", "zk://secret@a", "zk://:secret@a", "zk://secret:@a", "zk://me:secret@",
        "zk://me:secret@a:x",
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_ensembles_address_is_refused_by_name(text: Any) -> None:
    with pytest.raises(ConfigError, match=r"^registry = .*: expected zk://") as caught:
        parse_ensemble(text)
    assert "secret" not in str(caught.value)
