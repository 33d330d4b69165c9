"""The first administrator, from a file: so a broker never serves a stranger, not even before somebody adds a user.

Theory of operation. ``txmq broker init --admin`` writes the file: a name and the SCRAM keys of a password, not the
password. A broker that has no users journals the user before it listens. Once it has users it does not look at the file
any more, which may be deleted.

Invariants:
    * a broker with ``first_administrator`` and no users does not start unless the file is whole and its owner's alone;
    * a broker that dies before the record is durable has answered nobody but this user, and begins with the file again.
"""

from __future__ import annotations

import json

from txmq.broker.context import Context
from txmq.broker.verbs.access.users import add_first
from txmq.errors import BrokerError, ConfigError
from txmq.protocol.scram import ScramKeys
from txmq.runtime.os_disk import read_private


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
    try:
        stated = json.loads(read_private(path))
        name = stated.pop("user")
        add_first(context, name, json.dumps(stated).encode())
    except (ValueError, AttributeError, KeyError, TypeError, BrokerError) as error:
        raise ConfigError(
            f"first_administrator = {path!r}: expected a file as txmq broker init --admin NAME writes it "
            f"({type(error).__name__}); make another one with --data DIR elsewhere, and copy administrator.json"
        ) from None
    return str(name)
