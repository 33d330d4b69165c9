"""Addresses as text."""

from __future__ import annotations

from typing import Any

import pytest

from txmq.addresses import (
    DEFAULT_PORT,
    Credentials,
    Ensemble,
    TlsFiles,
    parse_bootstrap,
    parse_ensemble,
    parse_password_file,
    parse_tls,
    parse_user,
)
from txmq.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("zk://h1", Ensemble("h1:2181", "")),
        ("zk://h1,h2:2182,h3/prod", Ensemble("h1:2181,h2:2182,h3:2181", "/prod")),
        ("zk://[::1],[::2]:5/a/b.c/", Ensemble("[::1]:2181,[::2]:5", "/a/b.c")),
        ("zk://me:s:e/c@r,t@a/prod", Ensemble("a:2181", "/prod", Credentials("me", "s:e/c@r,t"))),
        ("zk://me:s:e?x@a?tls=brokers", Ensemble("a:2181", "", Credentials("me", "s:e?x"), None, TlsFiles())),
        ("zks://h1/prod", Ensemble("h1:2181", "/prod", None, TlsFiles(), TlsFiles())),
        ("zks://h1?ca=/a%40b", Ensemble("h1:2181", "", None, TlsFiles("/a@b"), TlsFiles("/a@b"))),
        ("zk://h1/p?tls=brokers&ca=c", Ensemble("h1:2181", "/p", None, None, TlsFiles("c"))),
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


@pytest.mark.parametrize(
    ("text", "addresses", "files"),
    [
        ("txmq://a", [("a", 8123)], None),
        ("txmqs://a,b:1", [("a", 8123), ("b", 1)], TlsFiles()),
        ("txmqs://[::1]:5/?ca=/etc/ca.pem", [("::1", 5)], TlsFiles("/etc/ca.pem")),
        ("txmqs://a?key=k&cert=c%20d", [("a", 8123)], TlsFiles("", "c d", "k")),
    ],
)
def test_address_says_whether_and_with_what_tls_is_spoken(
    text: str, addresses: list[tuple[str, int]], files: TlsFiles | None
) -> None:
    assert parse_bootstrap(text) == addresses
    assert parse_tls(text) == files


@pytest.mark.parametrize(
    ("text", "user"),
    [("txmq://a", ""), ("txmq://shop@a,b:9", "shop"), ("txmqs://shop@a?ca=x@y", "shop"), ("txmqs://a?ca=x@y", "")],
)
def test_address_names_a_user_or_none(text: str, user: str) -> None:
    assert parse_user(text) == user
    assert parse_bootstrap(text)[0] == ("a", DEFAULT_PORT)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("txmq://shop@a", ""), ("txmq://shop@a?password_file=/run/secrets/shop", "/run/secrets/shop"),
        ("txmqs://shop@a?ca=x&password_file=y", "y"),
    ],
)  # fmt: skip
def test_address_names_the_file_of_a_password(text: str, path: str) -> None:
    assert parse_password_file(text) == path
    assert parse_bootstrap(text) == [("a", DEFAULT_PORT)]


def test_address_that_is_none_is_refused_without_its_password() -> None:
    with pytest.raises(ConfigError, match="expected txmq://HOST") as caught:
        parse_bootstrap("txmq://me:hidden@no host")
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("text", ["txmq://@a", "txmq://me:hidden@a", "txmqs://a@b@c"])
def test_address_with_a_password_is_refused_without_telling_it(text: str) -> None:
    with pytest.raises(ConfigError, match="TXMQ_PASSWORD") as caught:
        parse_user(text)
    assert "hidden" not in str(caught.value)


def test_credentials_shown_hold_no_password() -> None:
    assert "hidden" not in repr(Credentials("me", "hidden"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("txmq://a?ca=x", "begin the address with txmqs://"),
        ("txmqs://", "expected txmq://HOST"),
        ("http://a", "expected txmq://HOST"),
    ],
)
def test_address_that_names_no_broker_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_bootstrap(text)


@pytest.mark.parametrize("query", ["ca", "ca=", "=x", "ca=1&ca=2", "host=x", "ca=a&&cert=b", "ca=a;b&x=1"])
def test_files_of_tls_are_named_once_each(query: str) -> None:
    for text in (f"txmqs://a?{query}", f"zks://me:secret@a?{query}"):
        with pytest.raises(ConfigError, match=r"expected .*ca, cert, key.* behind") as caught:
            parse_tls(text) if text.startswith("txmqs") else parse_ensemble(text)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("text", ["zk://a?ca=x", "zk://a?tls=zookeeper", "zks://a?tls=brokers"])
def test_ensemble_says_which_side_speaks_tls(text: str) -> None:
    with pytest.raises(ConfigError, match=r"zks://|encrypts both"):
        parse_ensemble(text)
