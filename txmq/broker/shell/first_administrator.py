"""The first administrator, from a file: so a broker never serves a stranger, not even before somebody adds a user.

Theory of operation. ``txmq broker init --admin`` writes the file: a name and the SCRAM keys of a password, not the
password. A broker that has no users journals the user before it listens; with a registry it gives the user to the
cluster before it serves (``joining``), if that has none. Once there are users nobody looks at the file any more,
which may be deleted.

Invariants:
    * a broker with ``first_administrator`` and no users does not start unless the file is whole and its owner's alone;
    * a broker that dies before the record is durable has answered nobody but this user, and begins with the file again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

from txmq.broker.context import Context
from txmq.broker.verbs.access.users import add_first, first_record
from txmq.errors import BrokerError, ConfigError
from txmq.protocol.scram import ScramKeys
from txmq.registry.cluster_metadata import Record
from txmq.runtime.private_files import read_private

_T = TypeVar("_T")


def content_of(user: str, keys: ScramKeys) -> str:
    """What the file holds."""
    return json.dumps({"user": user, "keys": keys.to_json(), "certificate": None}) + "\n"


def introduce(context: Context, path: str) -> str | None:
    """Make the user that the file names, if there are no users; the name.

    Raises:
        ConfigError: there are no users, and the file is not there, not whole, or not its owner's alone.
    """
    if context.state.principals.users:
        return None

    def add(name: str, body: bytes) -> None:
        add_first(context, name, body)

    return _read(path, add)[0]


def read(path: str) -> tuple[str, Record]:
    """The user that the file names, as a registry has it.

    Raises:
        ConfigError: the file is not there, not whole, or not its owner's alone.
    """
    return _read(path, first_record)


def _read(path: str, take: Callable[[str, bytes], _T]) -> tuple[str, _T]:
    try:
        stated = json.loads(read_private(path))
        name = stated.pop("user")
        return name, take(name, json.dumps(stated).encode())
    except (ValueError, AttributeError, KeyError, TypeError, BrokerError) as error:
        raise ConfigError(
            f"first_administrator = {path!r}: expected a file as txmq broker init --admin NAME writes it "
            f"({type(error).__name__}); make another one with --data DIR elsewhere, and copy administrator.json"
        ) from None
