"""The verb ``user``, what no answer shows: one record for the first user, and keys that are told nobody."""

from __future__ import annotations

import json

from txmq.redo import entries, inspect

from ...support import node
from .access_support import add, keys, operator


def test_first_user_and_grant_share_one_record() -> None:
    made = node()
    add(operator(made), "ops")
    groups = [list(entries.split(record.payload)) for record in inspect.dump(made.kill()) if record.kind == "group"]
    assert [kind for kind, _, _ in groups[-1]] == [entries.USER, entries.GRANTED]


def test_neither_answers_nor_dumps_hold_keys_or_secret() -> None:
    made = node()
    client = operator(made)
    texts = [add(client, "ops").text, client.ask("user", "list", "*", body=b"").text, client.ask("stats", "json").text]
    secrets = [str(keys()["stored_key"]), str(keys()["server_key"]), made.state.principals.secret]
    assert len(secrets[2]) == 64
    texts += [json.dumps(record.describe()) for record in inspect.dump(made.kill())]
    assert [secret for secret in secrets for text in texts if secret in text] == []
