"""One transaction's branch in MySQL or MariaDB, on its owner's connection: from XA START to its end.

Theory of operation::

    begin       XA START                               on a connection in use one packet with the first statement
    body        the application's statements, through the guard
    prepare     INSERT marker; XA END; XA PREPARE      one packet
    commit      XA COMMIT              or    roll_back   XA END if needed; XA ROLLBACK; a small committed write

Three round trips (``PipelinedStart``), or four, where bare XA has five statements. If the body ended the branch by
hand, XA END says so, and the marker goes with the connection, which is closed: it stands in a transaction that nobody
commits. (A savepoint after XA START, released first, would say it before the marker, for 20 to 40 us of each
transaction's processor time.) The marker row makes every branch one that wrote: it cannot vanish as a read-only one
does, and it proves the outcome. Without marker, a branch that did not write (by the session's own counters) is ended in
``prepare``; there is nothing to decide.

Invariants:
    * a statement that failed dooms the branch: the server itself would prepare half of the work (1205, 1062);
    * the server does nothing of a packet after the statement that fails. So only its own refusal says "not prepared":
      of a statement before XA PREPARE, or by its number. Every other error is PrepareUnknownError;
    * where the server itself keeps a marker out (``MarkerTable.insert_committed_or_fail``), nothing is prepared. The
      marker is sent once more, with its conditions in the INSERT. If it does not get in there either (too late, another
      database), that is a PrepareUnknownError, since XA PREPARE stood after it;
    * no call waits longer than until the block's deadline (those that end a branch: ``END_S_MIN`` at least);
    * a rollback of a prepared branch is acknowledged before it is durable: it counts once a later commit is;
    * a connection goes back only when its branch has surely ended; in doubt it is closed, and the server lets go of the
      prepared branch, for the resolver.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn

from txmq.errors import HeuristicError, RolledBackError, TransactionTimeoutError, caused
from txmq.runtime.call_limits import CallLimit
from txmq.runtime.crashpoints import crash_point, is_armed
from txmq.runtime.logging import get_logger
from txmq.xa.database.dbapi import run
from txmq.xa.database.dialects import code_of, is_answer_of_server
from txmq.xa.database.guarded_connection import NO_ANSWER, Guard, guarded
from txmq.xa.database.mysql_server import (
    KEPT_OUT,
    NOTA,
    OUTSIDE,
    RMFAIL,
    ROLLED_BACK,
    discard_results,
    execute,
    send,
)
from txmq.xa.database.strand_connection import ThreadConnection, close_connection, of_driver, return_lent
from txmq.xa.two_phase.resource_ports import Bqual, PrepareUnknownError, encode_bqual
from txmq.xid import FORMAT_ID, Xid, xid_sql

if TYPE_CHECKING:
    from txmq.xa.mysql.resource import MySQLResource, MySQLSession

JOINED_SIZE_BYTES_MAX: Final = 64 << 10  # of what a packet of any server surely takes
# Refusals that say by their number that nothing was prepared; the branch is idle, doomed or gone.
_NOT_PREPARED = frozenset({NOTA, RMFAIL, OUTSIDE}) | ROLLED_BACK
END_S_MIN = 2.0  # for the end of a branch, even if the deadline is closer
_WRITES = "SHOW SESSION STATUS WHERE Variable_name IN ('Handler_write', 'Handler_update', 'Handler_delete')"


class PipelinedStart:
    """XA START in one packet with the statement after it: a round trip less.

    Used by one thread at a time, as the connection is. The driver's connection gets another ``query``, and another
    ``send_query``, until one of the two is called: for the first statement of the body, or for the end of a branch that
    has none. Cursors send all that they are given by ``query``. The server answers XA START first, which is read here;
    the caller reads the answer to what it sent. The server does nothing after a statement that fails.

    In ``txmq.aio``, where each round trip is a turn of the connection's thread, that is 6 to 15 % of the processor time
    of a transaction; with threads some 10 us (docs/benchmarks.md, "XA: what is left"). For connections that have
    answered a moment ago, because one that the server has ended dooms the block that finds it out.

    Invariants:
        * nothing is sent on the connection before XA START, and that is sent once;
        * a text that gives no answer after XA START, or that is long, is sent by itself: its own answer, or error, is
          what the caller gets in any case.

    Args:
        connection: the driver's own (mysqlclient), which takes several statements in one text.
        start: XA START with its xid.

    Attributes:
        is_sent: XA START was sent, whatever came of it.
        error: what was raised in place of its answer.
    """

    __slots__ = ("_connection", "_start", "error", "is_sent")

    def __init__(self, connection: Any, start: str) -> None:
        self._connection, self._start = connection, start
        self.is_sent = False
        self.error: Exception | None = None
        connection.query, connection.send_query = self.query, self.send_query

    def cancel(self) -> None:
        """Give the connection its own methods back."""
        added = vars(self._connection)
        added.pop("query", None)
        added.pop("send_query", None)

    def query(self, query: str | bytes | bytearray) -> None:
        """In place of the connection's."""
        if self.is_sent:  # a caller has kept this one, or an interrupt has left it
            self._send(query)
            return
        text = query.encode() if isinstance(query, str) else bytes(query)
        if is_armed() or len(text) > JOINED_SIZE_BYTES_MAX:
            self._begin(self._start)
            crash_point("client.xa.branch_started")
            self._send(query)
            return
        self._begin(b"%b; %b" % (self._start.encode("ascii"), text))
        if self._connection.next_result() != 0:
            self._send(query)

    def send_query(self, query: str | bytes) -> None:
        """In place of the connection's: its caller reads one answer."""
        if not self.is_sent:
            self._begin(self._start)
        type(self._connection).send_query(self._connection, query)

    def _begin(self, text: str | bytes) -> None:
        self.is_sent = True
        self.cancel()
        try:
            self._send(text)
        except Exception as error:
            self.error = error
            raise

    def _send(self, text: str | bytes | bytearray) -> None:
        type(self._connection).query(self._connection, text)


class MySQLBranch:
    """See ``resource_ports.XABranch``. Begun when made.

    Args:
        session: idle; the branch's until it gives it back.
        deadline_ms: of the transaction, on the database's clock.
        is_own: the connection is the resource's, not the caller's.
        limit: of the calls; it has begun.
        pipelines_start: XA START goes out with the first statement.
    """

    def __init__(
        self, resource: MySQLResource, session: MySQLSession, txid: str, deadline_ms: int, limit: CallLimit, *,
        is_own: bool, pipelines_start: bool = False,
    ) -> None:  # fmt: skip
        self.resource = resource
        self._is_own, self.deadline_ms, self._session, self._txid = is_own, deadline_ms, session, txid
        self._limit = limit
        self._guard = Guard(None, self._limit)
        self.connection = guarded(session.connection, self._guard)
        bqual = Bqual(resource.uuid or "", deadline_ms, session.server.connection_id)
        self.xid = Xid(FORMAT_ID, txid.encode("ascii"), encode_bqual(bqual))
        self._xid_sql = xid_sql(self.xid)
        self._wrote, self._has_ended, self._is_given_back = True, False, False
        self.ended_by_body, self._may_be_prepared = False, False
        self._writes_before = None if resource.has_marker else self._writes()
        self._late: PipelinedStart | None = None
        if pipelines_start:
            self._late = PipelinedStart(of_driver(session.connection), self._xa("START"))
        else:
            execute(session.connection, self._xa("START"))
            crash_point("client.xa.branch_started")

    def details(self) -> dict[str, Any]:
        """See ``XABranch``."""
        return {
            "bqual": self.xid.bqual.decode("ascii"),
            "connection": self._session.server.connection_id,
            "wrote": self._wrote,
            "marker": self.resource.has_marker,
            "table": self._session.table.given_name,
        }

    def end_body(self) -> None:
        """See ``XABranch``."""
        guard = self._guard
        guard.end()
        with self._limit:
            if guard.error is None:
                try:
                    discard_results(self._session.connection)
                except Exception as error:  # noqa: BLE001  the driver's: a statement the body did not wait for
                    guard.error = error
            if guard.error is not None:
                raise self._rolled_back(f"a statement failed: {guard.error}", guard.error)
            if self._writes_before is not None:
                self._wrote = self._writes() != self._writes_before

    def prepare(self) -> None:
        """See ``XABranch``."""
        with self._limit:
            self._prepare()

    def _prepare(self) -> None:
        end, table, uuid = self._xa("END"), self._session.table, self.resource.uuid or ""
        if not self._wrote:
            self._end_unwritten(end)
        elif not self.resource.has_marker:
            self._send_prepare(end)
        elif not (table.has_key and self._session.server.takes_packets) or not self._send_prepare_unless_kept_out(
            table.insert_committed_or_fail(self._txid, uuid, self.deadline_ms).text, end
        ):
            marker = table.insert_committed_statement(self._txid, uuid, self.deadline_ms)
            if self._send_prepare(marker, end)[0] != 1:
                text = f"{self.resource.name!r} is prepared without its marker"
                raise caused(PrepareUnknownError(text, self._txid), self._kept_out())

    def _kept_out(self) -> RolledBackError:
        """Why the marker did not get in. Nobody can ask the database: the branch is prepared."""
        if self.resource.installation.is_late(self._session, self.deadline_ms):
            return TransactionTimeoutError("the deadline has passed on the database's clock", self._txid)
        text = f"another database answers than {self.resource.name!r}, or its clock was set while the block ran"
        return RolledBackError(text, self._txid)

    def _send_prepare_unless_kept_out(self, marker: str, end: str) -> bool:
        """Whether the server has let the marker in; otherwise nothing of what stands after it was done."""
        try:
            self._send_prepare(marker, end)
        except RolledBackError as error:
            if self._may_be_prepared or error.__cause__ is None or code_of(error.__cause__) not in KEPT_OUT:
                raise
            return False
        return True

    def _send_prepare(self, *work: str) -> list[int]:
        """XA PREPARE, and what stands before it; how many rows each changed."""
        counts, error = self._send(*work, self._xa("PREPARE"))
        self._may_be_prepared = len(counts) > 0
        if error is not None:
            self._refused(len(counts), len(work), error)
        return counts

    def commit(self) -> bool:
        """See ``XABranch``."""
        if self._has_ended:
            return True
        self._limit.extend(END_S_MIN)
        try:
            with self._limit:
                execute(self._session.connection, self._xa("COMMIT"))
        except Exception as error:  # noqa: BLE001  of any driver's; the resolver finds out
            self._left_to_the_resolver("commit", error)
            return False
        self._has_ended = True
        self._session.committed_at = self.resource.clock.monotonic()
        self.finish()
        return True

    def roll_back(self, prepared: bool) -> bool:
        """See ``XABranch``."""
        self._guard.end()
        if self._has_ended:
            return True
        self._limit.extend(END_S_MIN)
        with self._limit:
            return self._roll_back(prepared)

    def _roll_back(self, prepared: bool) -> bool:
        if self._was_never_begun():
            return True
        # Refused if the branch is idle, doomed or prepared already: only the next statement matters.
        self._send(self._xa("END"))
        _, error = self._send(self._xa("ROLLBACK"))
        if error is not None and code_of(error) not in ROLLED_BACK:
            return self._not_rolled_back(prepared, error)
        return self._made_durable(prepared)

    def _was_never_begun(self) -> bool:
        """Whether XA START was not sent, or refused; then the connection is let go of."""
        late = self._late
        if late is None or (late.is_sent and (late.error is None or not self._is_answer(late.error))):
            return False
        self._has_ended, connection = True, self._session.connection
        if late.is_sent or (isinstance(connection, ThreadConnection) and connection.is_left):  # it may be sent yet
            self.abandon()
        else:
            late.cancel()
            self.finish()
        return True

    def _made_durable(self, prepared: bool) -> bool:
        try:
            if prepared:
                self._session.table.touch(self._session.connection)
        except Exception as failure:  # noqa: BLE001  rolled back, but it may come back with a crash
            self._left_to_the_resolver("rollback", failure)
            return False
        self._has_ended = True
        self.finish()
        return True

    def finish(self) -> None:
        """See ``XABranch``."""
        self._guard.end()
        if not self._is_given_back:
            self._is_given_back = True
            self._limit.end()
            if self._is_own and self._guard.is_changed:
                close_connection(self._session.connection)
            elif self._is_own:
                self.resource.give_back(self._session)
            else:
                return_lent(self._session.connection)

    def abandon(self) -> None:
        """See ``XABranch``."""
        self._guard.end()
        if not self._is_given_back:
            self._is_given_back = True
            self._limit.end()
            with suppress(Exception):
                self._session.connection.close()

    def _refused(self, done: int, before_prepare: int, error: Exception) -> NoReturn:
        name, session = self.resource.name, self._session
        is_answer = self._is_answer(error)
        if done < before_prepare and (is_answer or not session.server.takes_packets):
            self._not_ended(error, at_end=done == before_prepare - 1)
        if is_answer and code_of(error) in _NOT_PREPARED:
            raise self._rolled_back(f"{name!r} refused to prepare: {error}", error)
        cause = TransactionTimeoutError(NO_ANSWER, self._txid) if self._limit.has_passed else error
        raise caused(PrepareUnknownError(f"{name!r} may be prepared: {error}", self._txid), cause)

    def _is_answer(self, error: Exception) -> bool:
        session = self._session
        is_lost = session.table.dialect.is_lost(session.connection, error)  # also one that the server has killed
        return is_answer_of_server(error) and not is_lost

    def _not_ended(self, error: Exception, *, at_end: bool) -> NoReturn:
        if at_end and code_of(error) in (NOTA, RMFAIL) and not self._is_undone():
            self._may_be_prepared = False
            text = (
                f"the body ended the branch in {self.resource.name!r} by itself (XA END, XA COMMIT); its rows may be "
            )
            raise caused(HeuristicError(f"{text}there, no message was sent: {error}", self._txid), error)
        raise self._rolled_back(f"{self.resource.name!r}: the branch could not be ended: {error}", error)

    def _is_undone(self) -> bool:
        """Whether the body had only prepared the branch: MySQL detaches it then from its session. It is rolled back."""
        _, error = self._send("ROLLBACK", self._xa("ROLLBACK"))  # the marker was written outside of the branch
        if error is None:
            self._has_ended = True
            self.abandon()
        return error is None

    def _rolled_back(self, text: str, cause: BaseException) -> RolledBackError:
        if self._limit.has_passed:
            return caused(TransactionTimeoutError(NO_ANSWER, self._txid), cause)
        is_retriable = self._session.table.dialect.is_retriable(self._session.connection, cause)
        return caused(RolledBackError(text, self._txid, retriable=is_retriable), cause)

    def _end_unwritten(self, end: str) -> None:
        counts, error = self._send(end, self._xa("ROLLBACK"))
        if error is not None and not counts:
            self._not_ended(error, at_end=True)
        self._has_ended = True
        if error is None:
            self.finish()
        else:
            self.abandon()

    def _not_rolled_back(self, prepared: bool, error: Exception) -> bool:
        if not prepared:
            # If it is not there, the body has ended it. Otherwise it ends with its connection, which is not trusted.
            self.ended_by_body = not self._may_be_prepared and code_of(error) in (NOTA, OUTSIDE, RMFAIL)
            self._has_ended = True
            self.abandon()
            return True
        if code_of(error) == NOTA:
            # A resolver has rolled it back, perhaps a moment ago: it could still come back with a crash.
            return self._made_durable(prepared)
        self._left_to_the_resolver("rollback", error)
        return False

    def _left_to_the_resolver(self, what: str, error: Exception) -> None:
        get_logger(resource=self.resource.name, txid=self._txid).warning(
            "branch left to the resolver", what=what, error=repr(error)
        )
        self.abandon()

    def _xa(self, verb: str) -> str:
        return f"XA {verb} {self._xid_sql}"

    def _writes(self) -> list[Any]:
        return run(self._session.connection, _WRITES)[0]

    def _send(self, *statements: str) -> tuple[list[int], Exception | None]:
        return send(self._session.connection, statements, in_one_packet=self._session.server.takes_packets)
