"""The steps of a transaction with a database without txmq: the bare limit of those rows.

Theory of operation. ARCHITECTURE.md says which waits such a transaction has: for its statements, for a forced write
at the broker, for the database's commit. Here the statements that it cannot do without (row, marker, commit) go to the
same database in as few packets, and blocks of the same size to a server that writes one block and syncs for all that
came together, and then sends them back: no checks, no savepoint, no log, no recovery, one socket a thread. As at the
broker, the ``commit`` of a last resource is not awaited, and waits 1 ms for company.
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
position, block, peers, asked, is_urgent = 0, b"x" * 4096, {}, [], False
listener = socket.create_server(("127.0.0.1", 0), backlog=64)
print(listener.getsockname()[1], flush=True)
waiting = select.poll()
waiting.register(listener.fileno(), select.POLLIN)
while True:
    came = waiting.poll(1 if asked else None)
    for number, _ in came:
        if number == listener.fileno():
            peer, _ = listener.accept()
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peers[peer.fileno()] = peer
            waiting.register(peer.fileno(), select.POLLIN)
        elif data := peers[number].recv(1 << 16):
            asked.append((peers[number], data))
            is_urgent |= b"p" in data
        else:
            waiting.unregister(number)
            peers.pop(number).close()
    if asked and (is_urgent or not came):
        journal.pwrite(block, position)
        journal.fdatasync()
        position = (position + 4096) % (16 << 20)
        for peer, data in asked:
            peer.sendall(data)
        asked, is_urgent = [], False
"""
_JOURNAL_SIZE_BYTES = 16 << 20
_PREPARE, _COMMIT = b"p" * 350, b"c" * 70  # as long as the requests of a transaction of one message of 100 B
_MARKERS = "CREATE TABLE steps (txid VARCHAR(100) PRIMARY KEY, outcome VARCHAR(20), deadline_ms BIGINT)"
_MARKER = "INSERT INTO steps VALUES (?, 'committed', 0)"
_numbers = itertools.count(1)

Work = Callable[[], object]
Make = Callable[[], Work]


class Steps:
    """Makes the bare transactions over one database and one server.

    Attributes:
        pid: of the server.
    """

    def __init__(self, database: Database, port: int, pid: int) -> None:
        self._database, self._port, self.pid = database, port, pid
        self._writers = Lock()  # SQLite has one at a time
        self._sockets: list[socket.socket] = []

    def last_resource(self) -> Work:
        """The row, ``prepare``, marker and COMMIT in one packet, ``commit``. Of the calling thread."""
        return self._in_steps() if self._database.begin else self._in_packets()

    def _in_packets(self) -> Work:
        ask, connection = self._connected(), self._database.connect()
        cursor = connection.cursor()
        insert, owed = self._database.sql(ORDER), 0

        def work() -> None:
            nonlocal owed
            cursor.execute(insert, (VALUE,))
            ask.sendall(_PREPARE)
            _answered(ask, owed + len(_PREPARE))
            connection.query(f"{_MARKER.replace('?', repr(_name()))}; COMMIT")
            connection.next_result()
            ask.sendall(_COMMIT)
            owed = len(_COMMIT)

        return work

    def _in_steps(self) -> Work:
        """One writer at a time: SQLite. The marker goes in while ``prepare`` is under way."""
        database, ask = self._database, self._connected()
        connection = database.connect()
        cursor = connection.cursor()
        insert, mark, owed = database.sql(ORDER), database.sql(_MARKER), 0

        def work() -> None:
            nonlocal owed
            with self._writers:
                cursor.execute(database.begin)
                cursor.execute(insert, (VALUE,))
                ask.sendall(_PREPARE)
                cursor.execute(mark, (_name(),))
                _answered(ask, owed + len(_PREPARE))
                connection.commit()
            ask.sendall(_COMMIT)
            owed = len(_COMMIT)

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
            _answered(ask, len(_PREPARE))
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
        with closing(Steps(database, int(process.stdout.readline()), process.pid)) as steps:
            yield steps
    finally:
        process.kill()
        process.communicate()


def _name() -> str:
    return f"steps-{next(_numbers)}"


def _answered(ask: socket.socket, missing: int) -> None:
    while missing:
        missing -= len(ask.recv(missing))
