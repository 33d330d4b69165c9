"""A reader that looks when it is connected anew: ``python -m tests.crash.looking_reader ARGUMENTS QUERY``.

It says ``connected``, waits until its server is killed, and says what the query gives as soon as the server is there.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import MySQLdb

from txmq.runtime.threads import Signal

PAUSE_S = 0.002


def main(text: str, query: str) -> None:
    """Look once."""
    arguments = json.loads(text)
    connection = MySQLdb.connect(**arguments)
    print("connected", flush=True)
    while _asked(connection, "SELECT 1") is not None:
        Signal().wait(PAUSE_S)
    while (found := _asked_anew(arguments, query)) is None:
        Signal().wait(PAUSE_S)
    print(found[0][0], flush=True)


def _asked_anew(arguments: dict[str, Any], query: str) -> Any:
    try:
        return _asked(MySQLdb.connect(**arguments), query)
    except MySQLdb.OperationalError:
        return None


def _asked(connection: Any, query: str) -> Any:
    """The rows; None if the server is away."""
    cursor = connection.cursor()
    try:
        cursor.execute(query)
    except MySQLdb.OperationalError:
        return None
    return cursor.fetchall()


if __name__ == "__main__":
    main(*sys.argv[1:])
