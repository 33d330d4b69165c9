"""The steps of a transaction with a database without txmq: the bare limit of those rows.

Theory of operation. ARCHITECTURE.md says which waits such a transaction has: for its statements, for a forced write
at the broker, for the database's commit, for the broker again. Here the statements that it cannot do without (row,
marker, commit) go to the same database, and blocks of the same size to a server that writes one block and syncs for all
that came together, and then sends them back: no checks, no savepoint, no log, no recovery, one socket a thread.
"""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Lock

from bench.rows.databases import ORDER, VALUE, Database

_SERVER = """
import os, select, socket, sys
from txmq.runtime.os_disk import OSFile
journal = OSFile(os.open(sys.argv[1], os.O_RDWR), sys.argv[1])
position, block, peers = 0, b"x" * 4096, {}
listener = socket.create_server(("127.0.0.1", 0), backlog=64)
print(listener.getsockname()[1], flush=True)
waiting = select.poll()
waiting.register(listener.fileno(), select.POLLIN)
while True:
    asked = []
    for number, _ in waiting.poll():
        if number == listener.fileno():
            peer, _ = listener.accept()
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peers[peer.fileno()] = peer
            waiting.register(peer.fileno(), select.POLLIN)
        elif data := peers[number].recv(1 << 16):
            asked.append((peers[number], data))
        else:
            waiting.unregister(number)
            peers.pop(number).close()
    if asked:
        journal.pwrite(block, position)
        journal.fdatasync()
        position = (position + 4096) % (16 << 20)
        for peer, data in asked:
            peer.sendall(data)
"""
_JOURNAL_SIZE_BYTES = 16 << 20
_PREPARE, _COMMIT = b"p" * 350, b"c" * 70  # as long as the requests of a transaction of one message of 100 B
_MARKERS = "CREATE TABLE steps (txid VARCHAR(100) PRIMARY KEY, outcome VARCHAR(20), deadline_ms BIGINT)"
_MARKER = "INSERT INTO steps VALUES (?, 'committed', 0)"
_numbers = itertools.count(1)

Work = Callable[[], object]
Make = Callable[[], Work]


class Steps:
    """Makes the bare transactions over one database and one server."""

    def __init__(self, database: Database, port: int) -> None:
        self._database, self._port = database, port
        self._writers = Lock()  # SQLite has one at a time
        self._sockets: list[socket.socket] = []

    def last_resource(self) -> Work:
        """The row, ``prepare`` beside the marker's INSERT, the database's COMMIT, ``commit``. Of the calling thread."""
        database, ask = self._database, self._connected()
        connection = database.connect()
        cursor = connection.cursor()
        insert, mark = database.sql(ORDER), database.sql(_MARKER)

        def in_database() -> None:
            if database.begin:
                cursor.execute(database.begin)
            cursor.execute(insert, (VALUE,))
            ask.sendall(_PREPARE)
            cursor.execute(mark, (_name(),))
            _answered(ask, _PREPARE)
            connection.commit()

        def work() -> None:
            if database.begin:
                with self._writers:
                    in_database()
            else:
                in_database()
            ask.sendall(_COMMIT)
            _answered(ask, _COMMIT)

        return work

    def xa(self) -> Work:
        """XA START, the row and its marker, XA END and PREPARE, ``decide``, XA COMMIT. Of the calling thread."""
        ask, connection = self._connected(), self._database.connect()
        connection.autocommit(True)
        cursor = connection.cursor()
        insert, mark = self._database.sql(ORDER), self._database.sql(_MARKER)

        def work() -> None:
            name = _name()
            cursor.execute(f"XA START '{name}'")
            cursor.execute(insert, (VALUE,))
            cursor.execute(mark, (name,))
            cursor.execute(f"XA END '{name}'")
            cursor.execute(f"XA PREPARE '{name}'")
            ask.sendall(_PREPARE)
            _answered(ask, _PREPARE)
            cursor.execute(f"XA COMMIT '{name}'")

        return work

    def _connected(self) -> socket.socket:
        connected = socket.create_connection(("127.0.0.1", self._port))
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets.append(connected)
        return connected

    def close(self) -> None:
        """Close what the threads left open."""
        for connected in self._sockets:
            connected.close()


@contextmanager
def bare_steps(database: Database, directory: Path) -> Iterator[Steps]:
    """A server, and a table for markers in the database."""
    journal = directory / "steps"
    journal.write_bytes(bytes(_JOURNAL_SIZE_BYTES))
    with journal.open("rb+") as file:
        os.fsync(file.fileno())
    with closing(database.connect()) as connection:
        connection.cursor().execute(_MARKERS)
        connection.commit()
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(journal)], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        with closing(Steps(database, int(process.stdout.readline()))) as steps:
            yield steps
    finally:
        process.kill()
        process.communicate()


def _name() -> str:
    return f"steps-{next(_numbers)}"


def _answered(ask: socket.socket, asked: bytes) -> None:
    missing = len(asked)
    while missing:
        missing -= len(ask.recv(missing))
