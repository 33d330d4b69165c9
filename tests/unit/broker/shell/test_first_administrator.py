"""The first administrator, from a file: before anybody is served, and never again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from txmq.broker.shell.first_administrator import content_of, introduce
from txmq.errors import ConfigError
from txmq.protocol.scram import SALT_SIZE, keys_of
from txmq.runtime.private_files import write_private

from ..support import node, restarted

CONTENT = content_of("ops", keys_of("pencil", bytes(SALT_SIZE)))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_private(tmp_path / "administrator.json", CONTENT)
    return tmp_path / "administrator.json"


def test_broker_without_users_takes_the_one_of_the_file(file: Path) -> None:
    made = node()
    client = made.connect()
    assert introduce(made.context, str(file)) == "ops"
    assert made.state.principals.users["ops"].is_administrator
    assert client.ask("meta", "*").error == "unauthenticated"
    assert made.connect().ask("user", "list", "*", body=b"").error == "unauthenticated"
    again = restarted(made)
    assert [*again.state.principals.users] == ["ops"]
    assert again.state.principals.secret == made.state.principals.secret


def test_broker_that_dies_before_the_record_takes_it_again(file: Path) -> None:
    made = node()
    introduce(made.context, str(file))
    assert made.core.next_group() is not None  # to be written, and lost with this process
    assert introduce(node().context, str(file)) == "ops"


def test_broker_with_users_does_not_look_at_the_file(file: Path) -> None:
    made = node()
    introduce(made.context, str(file))
    file.unlink()
    version = made.state.principals.version
    assert introduce(made.context, str(file)) is None
    assert made.state.principals.version == version


def test_broker_without_users_needs_the_file(tmp_path: Path) -> None:
    made = node()
    with pytest.raises(ConfigError, match="No such file"):
        introduce(made.context, str(tmp_path / "administrator.json"))


def test_file_that_others_may_read_is_refused(file: Path) -> None:
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        introduce(node().context, str(file))


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", CONTENT[:-10], CONTENT.replace('"ops"', '"o ps"'), CONTENT.replace('"ops"', "7"),
     CONTENT.replace("4096", "1"), json.dumps({"user": "ops", "keys": None, "certificate": None})],
)  # fmt: skip
def test_file_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    write_private(tmp_path / "x", content)
    made = node()
    with pytest.raises(ConfigError, match="txmq broker init --admin NAME writes it"):
        introduce(made.context, str(tmp_path / "x"))
    assert not made.state.principals.users
