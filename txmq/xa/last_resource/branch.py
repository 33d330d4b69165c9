"""One transaction's side in the database of a last resource: from BEGIN to its end.

Through mysqlclient, statements that stand together go out at once (``mysql_server``, ``commit_behind``), two round
trips with that of the body instead of six: the savepoint's release, the marker row, and COMMIT AND CHAIN, which begins
the next transaction, with that one's savepoint, so that a block that follows at once on the same connection of ours
begins without asking (later, the server may have ended it: BEGIN is what notices). That block reads the savepoint's
answer, if it has one of its own. An empty transaction holds no locks and no snapshot. The server does nothing after a
statement that fails, so COMMIT needs a marker that fails if it does not get in
(``MarkerTable.insert_committed_or_fail``). Where there is none, release and marker are a packet of their own, sent
while the broker prepares.

Invariants:
    * rows and marker are in one transaction, opened here, ended here;
    * a connection goes back once, and only when its transaction has surely ended; in doubt it is closed, and so is one
      of ours whose session the body has changed, or in which a statement failed that would fail again;
    * no call waits longer than until the block's deadline (or ``WAIT_S_MIN``, ``END_S_MIN``): the connection is lost
      then. Between the calls it is left alone: a healthy one tells what the body has done;
    * a branch that has let go of its connection does not touch it any more: a caller that was interrupted right after
      that asks again for the same end.
"""

from __future__ import annotations

from contextlib import suppress
from enum import Enum
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from txmq.errors import RolledBackError, TransactionError, TransactionTimeoutError, caused
from txmq.runtime.call_limits import CallLimit
from txmq.xa.database.dbapi import is_error, is_integrity_error, run, text
from txmq.xa.database.dialects import Dialect, code_of, waiting_shortly
from txmq.xa.database.guarded_connection import NO_ANSWER, WAIT_S_MIN, Guard, guarded
from txmq.xa.database.installation import DatabaseSession
from txmq.xa.database.marker_table import COMMITTED, MarkerTable
from txmq.xa.database.mysql_server import KEPT_OUT, Statement, commit, discard_results, send
from txmq.xa.database.sqlite_file import QueuePlace, WriterLease
from txmq.xa.database.strand_connection import LeftConnectionError, close_connection, return_lent

if TYPE_CHECKING:
    from txmq.xa.last_resource.resource import LastResource

SAVEPOINT: Final = "txmq_body"
_AHEAD: Final = 2  # statements before COMMIT
_NAME_BYTES: Final = 16
_RELEASE: Final = f"RELEASE SAVEPOINT {SAVEPOINT}"
_NOT_PREPARED: Final = frozenset({1210, 1243})  # EXECUTE of what the connection does not know (any more)
_NO_SAVEPOINT: Final = 1305
_AT_COMMIT: Final = "@txmq_at_commit"
_NEVER = float("-inf")
ABSENT = ""  # no marker
END_S_MIN = 2.0  # for COMMIT or ROLLBACK
BEGUN_FRESH_S = 0.1  # a connection that answered so lately is taken to be alive; one that is not dooms one block


class Found(Enum):
    """What became of the transaction."""

    COMMITTED = "committed"
    NO_SAVEPOINT = "the body had ended the transaction: nothing was done, as far as is known"
    KEPT_OUT = "the marker was kept out: the transaction is open"
    REFUSED = "it is not committed: a statement failed"
    UNKNOWN = "COMMIT failed, or gave no answer"


def commit_behind(
    session: DatabaseSession, txid: str, marker: Statement, *, is_own: bool
) -> tuple[Found, Exception | None]:
    """Release the savepoint, insert the marker, and commit, on MySQL and MariaDB: all sent to the server at once.

    As one packet the server parses each of the four statements, and sends four answers, each of which wakes this
    process. MariaDB prepares all of them as one compound statement, for as long as the connection lives: it parses one
    EXECUTE, and sends one answer. With 8 threads that is 125 us of processor time in place of 162, client and server
    together (bare statements, 28 November 2026). A server that does not prepare compound statements (MySQL; MariaDB
    before 10.6.2), that has too many prepared ones, or has forgotten this one, is sent the packet.

    A packet says how far it came. Of a compound statement a variable of the session does: it has the transaction's id
    when COMMIT is next. After an error of what stands before COMMIT nothing is committed, whatever the error is. After
    one of COMMIT itself the decision is not known: it is looked up (``Branch.outcome_after``).

    Args:
        is_own: a connection of the resource's: the next transaction is begun on it.

    Sources: MariaDB 10.11, "PREPARE Statement" (10.6.2: all statements), "BEGIN END", error codes.
    """
    chain = f"COMMIT AND CHAIN; SAVEPOINT {SAVEPOINT}" if is_own else "COMMIT"
    name = _prepared(session, marker, chain)
    if name is not None:
        literals = ", ".join([*marker.literals, f"'{txid}'"])
        _, error = commit(session.connection, (f"EXECUTE {name} USING {literals}",))
        if error is None or code_of(error) not in _NOT_PREPARED:
            session.is_answer_owed = False
            return _judged(session, txid, error)
        session.compound.is_refused = True
    done, error = commit(session.connection, (_RELEASE, marker.text, chain), ahead=_AHEAD)
    session.is_answer_owed = True
    if error is None:
        return Found.COMMITTED, None
    if done == _AHEAD or not _is_answer(session, error):
        return Found.UNKNOWN, error
    if done == 0:
        return Found.NO_SAVEPOINT, error
    return Found.KEPT_OUT if code_of(error) in KEPT_OUT else Found.REFUSED, error


def _judged(session: DatabaseSession, txid: str, error: Exception | None) -> tuple[Found, Exception | None]:
    """The same of a compound statement."""
    if error is None:
        return Found.COMMITTED, None
    if not _is_answer(session, error) or _was_at_commit(session, txid):
        return Found.UNKNOWN, error
    code = code_of(error)
    if code == _NO_SAVEPOINT:
        return Found.NO_SAVEPOINT, error
    return Found.KEPT_OUT if code in KEPT_OUT else Found.REFUSED, error


def _was_at_commit(session: DatabaseSession, txid: str) -> bool:
    """Whether all before COMMIT was done, as far as is known."""
    try:
        ((found,),) = run(session.connection, f"SELECT {_AT_COMMIT}")[0]
    except Exception:  # noqa: BLE001  the session is lost meanwhile
        return True
    return found is not None and text(found) == txid


def _is_answer(session: DatabaseSession, error: Exception) -> bool:
    dialect = session.table.dialect
    return dialect.is_answer(error) and not dialect.is_lost(session.connection, error)


def _prepared(session: DatabaseSession, marker: Statement, chain: str) -> str | None:
    """The name of the compound statement on the connection, prepared now if need be; None if there is none."""
    compound = session.compound
    if compound.is_refused or compound.name is not None:
        return None if compound.is_refused else compound.name
    body = "; ".join((_RELEASE, marker.template.replace("%s", "?"), f"SET {_AT_COMMIT} = ?", chain))
    # Behind a proxy another client's connection may be the same: of one name there is one statement.
    name = f"txmq_{blake2b(body.encode(), digest_size=_NAME_BYTES).hexdigest()}"
    quoted = body.replace("'", "''")
    prepare = f"PREPARE {name} FROM 'BEGIN NOT ATOMIC {quoted}; END'"
    _, error = send(session.connection, (prepare,), in_one_packet=True)
    if error is None:
        compound.name = name
        return name
    if not _is_answer(session, error):
        raise error
    compound.is_refused = True
    return None


class Branch:
    """One transaction's side in its database: begun when made, ended by exactly one of ``commit`` and ``roll_back``.

    Attributes:
        uuid: identity of the database.
    """

    def __init__(
        self, resource: LastResource, session: DatabaseSession, *, is_own: bool, timeout_s: float
    ) -> None:  # fmt: skip
        self.resource, self._session, self._is_own = resource, session, is_own
        limit = self._limit = CallLimit(session.descriptor)
        self.uuid = resource.installation.uuid or ""
        connection = session.connection
        knows_state = session.table.dialect.name == "sqlite" and hasattr(connection, "in_transaction")
        self._guard = Guard(connection if knows_state else None, limit)
        self._has_savepoint, self._releasing = True, ""  # txmq has not released it; a txid: with this one's marker
        self._marker: tuple[str, int] | None = None  # that goes with COMMIT: of this txid, with this deadline
        self._was_intact: bool | None = None  # found once: rolling back takes the savepoint away
        self._has_let_go = False  # of the connection, which may be another block's by now
        self.connection = guarded(session.connection, self._guard)
        self._lease: WriterLease | None = None
        limit.begin(max(timeout_s, WAIT_S_MIN))
        try:
            with limit:
                self._begin(session, timeout_s)
        except BaseException as error:
            limit.end()
            self._end_turn()
            if limit.has_passed and isinstance(error, Exception):
                raise caused(TransactionTimeoutError(NO_ANSWER), error) from error
            raise

    def _begin(self, session: DatabaseSession, timeout_s: float) -> None:
        is_begun = session.begun_at != _NEVER and self._is_begun(session)
        checked, dialect = session.checked, session.table.dialect
        if self._is_own and dialect.name == "mysql" and session.idle_limit.set(session.connection, timeout_s):
            is_begun = False
        # Before BEGIN: measuring takes a transaction of its own.
        self._deadline_base_ms = self.resource.installation.deadline_ms(session, 0.0)
        if not is_begun or session.checked != checked:
            self._begin_now(session.connection, dialect, session.table.place, timeout_s)

    def _begin_now(self, connection: Any, dialect: Dialect, place: QueuePlace | None, timeout_s: float) -> None:
        if self._session.takes_packets:
            _, error = send(connection, (dialect.begin, f"SAVEPOINT {SAVEPOINT}"), in_one_packet=True)
            if error is not None:
                raise error
            return
        if place is not None:
            self._lease = place.begin(connection, dialect.begin)
        elif dialect.begin:
            run(connection, dialect.begin)
        for statement in dialect.settings:
            run(connection, statement)
        limit = self._session.idle_limit.in_transaction(connection, timeout_s) if dialect.ends_idle else ""
        run(connection, f"{limit}{'; ' if limit else ''}SAVEPOINT {SAVEPOINT}")

    def _is_begun(self, session: DatabaseSession) -> bool:
        """Whether this transaction, which the COMMIT of the one before has begun, is surely open; once."""
        begun_at, session.begun_at = session.begun_at, _NEVER
        if session.is_answer_owed:
            session.connection.next_result()  # not asked for one more: each asking gives the interpreter's lock away
        return self.resource.clock.monotonic() < begun_at + BEGUN_FRESH_S

    def _end_turn(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def end_body(self) -> None:
        """Take the connection from the body, and make sure that it left the transaction as it was.

        If the release of the savepoint goes with the marker row, ``insert_marker`` makes sure of the latter.

        Raises:
            RolledBackError: a statement failed, or the connection is lost.
            HeuristicError: the body ended the transaction by itself: its earlier work may be committed.
        """
        guard, connection = self._guard, self._session.connection
        with self._limit:
            guard.end()
            if guard.error is not None:
                raise self._failed(f"a statement failed: {guard.error}", guard.error)
            try:
                if self._session.takes_packets:
                    discard_results(connection)  # of a statement that the body did not wait for
                else:
                    run(connection, f"RELEASE SAVEPOINT {SAVEPOINT}")
                    self._has_savepoint = False
            except Exception as error:
                raise caused(self._not_released(error), error) from error

    def _failed(self, text: str, cause: BaseException, txid: str | None = None) -> RolledBackError:
        if self._limit.has_passed:
            error: RolledBackError = TransactionTimeoutError(NO_ANSWER, txid)
        else:
            error = RolledBackError(text, txid, retriable=self.is_retriable(cause))
        error.__cause__ = cause
        return error

    def is_retriable(self, error: BaseException) -> bool:
        """Whether a transaction that ended with this error of the database may succeed when it is run again."""
        return self._session.table.dialect.is_retriable(self._session.connection, error)

    def _not_released(self, error: Exception) -> TransactionError:
        if self._session.table.dialect.is_lost(self._session.connection, error):
            return self._failed(f"the connection to {self.resource.name!r} was lost: {error}", error)
        return self._failed(f"a statement failed: {error}", error)  # or the body ended it: ``roll_back`` finds that

    @property
    def ended_by_body(self) -> str:
        """The error's text if ``roll_back`` finds that."""
        return (
            f"the body ended the transaction in {self.resource.name!r} by itself (COMMIT, ROLLBACK, or a statement "
            "that commits); its rows may be there, no message was sent"
        )

    def note(self, error: BaseException) -> None:
        """Note an exception of the body: its causes may be errors that the guard did not see."""
        self._guard.note(error)

    def leave_marker_to_commit(self, txid: str, timeout_s: float) -> bool:
        """Whether ``commit`` puts the marker in, before COMMIT; otherwise ``insert_marker`` does.

        Args: as of ``insert_marker``.
        """
        session = self._session
        if not (session.takes_packets and session.table.has_key):
            return False
        self._marker = txid, self._deadline_ms(timeout_s)
        return True

    def insert_marker(self, txid: str, timeout_s: float) -> None:
        """Put the committed marker into the open transaction.

        Args:
            timeout_s: from the beginning of the transaction, by the database's clock.

        Raises:
            TransactionTimeoutError: the deadline has passed on the database's clock.
            RolledBackError: a resolver was faster, another database answers, or the statement failed.
            HeuristicError: as ``end_body``.
        """
        session, deadline_ms = self._session, self._deadline_ms(timeout_s)
        with self._limit:
            try:
                if session.takes_packets:
                    is_in = self._insert_with_release(txid, deadline_ms)
                else:
                    is_in = session.table.insert_committed(session.connection, txid, self.uuid, deadline_ms)
                if not is_in:
                    raise self._why_kept_out(txid, deadline_ms)
            except TransactionError:
                raise
            except Exception as error:
                raise caused(self._not_marked(txid, error), error) from error

    def _deadline_ms(self, timeout_s: float) -> int:
        return self._deadline_base_ms + int(timeout_s * 1000)

    def _why_kept_out(self, txid: str, deadline_ms: int) -> RolledBackError:
        session, resource = self._session, self.resource
        if not session.table.is_expected(session.connection, self.uuid):
            text = f"another database answers than {resource.name!r}: its identity is not {self.uuid}"
            return RolledBackError(text, txid)
        if not resource.installation.is_late(session, deadline_ms):
            return RolledBackError(f"the clock of {resource.name!r} was set while the block ran", txid, retriable=True)
        return TransactionTimeoutError("the deadline has passed on the database's clock", txid)

    def _not_marked(self, txid: str, error: Exception) -> TransactionError:
        """The caller's error if the marker could not be put in; the driver's is noted."""
        self._guard.errors.append(error)
        if is_integrity_error(error):
            return RolledBackError("a resolver has rolled it back: the owner was taken for gone", txid)
        return self._failed(f"the marker row was refused: {error}", error, txid)

    def _insert_with_release(self, txid: str, deadline_ms: int) -> bool:
        """In one packet, of which the server does nothing after a failure: no marker if the savepoint is gone."""
        insert = self._session.table.insert_committed_statement(txid, self.uuid, deadline_ms)
        self._releasing = txid
        released, error = send(self._session.connection, (f"RELEASE SAVEPOINT {SAVEPOINT}", insert), in_one_packet=True)
        self._has_savepoint, self._releasing = not released, ""
        if error is not None:
            raise error if released else caused(self._not_released(error), error)
        return released[1] == 1

    def commit(self) -> None:
        """Commit rows and marker.

        Raises:
            TransactionError: of a marker that was left to it, as ``insert_marker``: the transaction is still open.
            Exception: see ``is_still_open``: only then is it surely not committed.
        """
        self._limit.extend(END_S_MIN)
        with self._limit:
            self._commit()

    def _commit(self) -> None:
        session, marker = self._session, self._marker
        if not (session.takes_packets and (self._is_own or marker is not None)):
            session.connection.commit()
            return
        if marker is not None:
            self._commit_behind_marker(*marker)
        else:
            # The savepoint's answer is read by the block that needs it: the decision is reported first.
            _, error = commit(session.connection, ("COMMIT AND CHAIN", f"SAVEPOINT {SAVEPOINT}"))
            session.is_answer_owed = True
            if error is not None:
                raise error
        if self._is_own:
            session.begun_at = self.resource.clock.monotonic()

    def _commit_behind_marker(self, txid: str, deadline_ms: int) -> None:
        session, uuid = self._session, self.uuid
        marker = session.table.insert_committed_or_fail(txid, uuid, deadline_ms)
        found, error = commit_behind(session, txid, marker, is_own=self._is_own)
        self._has_savepoint = found is Found.NO_SAVEPOINT
        if error is None:
            return
        if found is Found.UNKNOWN:
            raise error
        self._marker = None
        if found is Found.NO_SAVEPOINT:
            raise caused(self._not_released(error), error) from error
        if found is not Found.KEPT_OUT:
            raise caused(self._not_marked(txid, error), error) from error
        try:
            if not session.table.insert_committed(session.connection, txid, uuid, deadline_ms):
                raise self._why_kept_out(txid, deadline_ms)
        except TransactionError:
            raise
        except Exception as failure:
            raise caused(self._not_marked(txid, failure), failure) from failure
        self._commit()

    @property
    def is_still_open(self) -> bool:
        """Whether the driver knows that the transaction has not ended. False if it cannot tell."""
        if self._session.table.dialect.name == "sqlite":
            with suppress(Exception):  # it is closed, or a wrapper hides it
                return bool(self._session.connection.in_transaction)
        return False

    def outcome_after(self, error: Exception, txid: str) -> str | None:
        """What became of a COMMIT that failed, by the session that answered so: no COMMIT of it is under way any more.

        The transaction is ended, whatever was left of it, and the marker table is asked. The connection is as good as
        ever then.

        Returns:
            The word that stands in the marker, durably; ABSENT; None: nothing is known, another session must ask.
        """
        session, table = self._session, self._session.table
        connection, dialect = session.connection, table.dialect
        if not dialect.is_answer(error) or dialect.is_lost(connection, error):
            return None
        session.is_answer_owed = False
        self._limit.extend(END_S_MIN)
        with self._limit:
            return self._outcome_in(connection, table, txid)

    def _outcome_in(self, connection: Any, table: MarkerTable, txid: str) -> str | None:
        dialect = table.dialect
        try:
            connection.rollback()
            self._end_turn()  # a transaction of txmq's own takes one
            with waiting_shortly(connection, dialect), table.beginning_with(dialect.resolving):
                if table.outcome_of(connection, txid) is None:
                    return ABSENT
                return table.read_durably(connection, txid)
        except Exception:  # noqa: BLE001  the driver's: lost, locked, ...
            return None

    def roll_back(self) -> bool:
        """Undo everything, or close the connection, which undoes it.

        Returns:
            False if the body had ended the transaction by itself: its earlier work may be committed.
        """
        self._limit.extend(END_S_MIN)
        with self._limit:
            return self._roll_back()

    def _roll_back(self) -> bool:
        self._guard.end()
        if self._was_intact is None:
            self._was_intact = not self._has_savepoint or self._is_intact()
        if self._has_let_go:
            return self._was_intact
        # LOCK TABLES, autocommit, ...: for no other block
        is_strange = self._is_own and (not self._was_intact or any(map(self._would_fail_again, self._guard.errors)))
        try:
            self._session.connection.rollback()
        except Exception:  # noqa: BLE001  whatever it was, a closed connection has no transaction
            is_strange = True
        self.abandon() if is_strange else self.finish()
        return self._was_intact

    def _would_fail_again(self, error: BaseException) -> bool:
        """Whether the session may be to blame: another schema, read only, without a privilege."""
        return is_error(error) and not is_integrity_error(error) and not self.is_retriable(error)

    def _is_intact(self) -> bool:
        """Whether the transaction was open to the end, or the database itself had rolled it back.

        A savepoint that cannot be gone back to, with no error that explains it, says that the body ended the
        transaction (whatever the driver's error is: drivers differ), unless txmq has released it and was interrupted
        before it heard so. If the connection is lost, nothing speaks for that.
        """
        guard, connection, dialect = self._guard, self._session.connection, self._session.table.dialect
        if guard.was_ended or guard.was_rolled_back:
            return not guard.was_ended
        try:
            if self._session.takes_packets:
                self._discard_results()
            run(connection, f"ROLLBACK TO SAVEPOINT {SAVEPOINT}")
        except Exception as error:  # noqa: BLE001  the driver's; judged by what it says
            if isinstance(error, LeftConnectionError) or dialect.is_of_driver(error):
                return True  # nobody looked whether the savepoint is there
            if dialect.is_lost(connection, error):
                return True
            with suppress(Exception):  # lost meanwhile
                if self._releasing and self._session.table.outcome_of(connection, self._releasing) == COMMITTED:
                    return True  # nothing but the release lets that marker in
                return any(dialect.rolls_back(connection, known) for known in guard.errors)
        return True

    def _discard_results(self) -> None:
        try:
            discard_results(self._session.connection)
        except Exception as error:  # noqa: BLE001  of a statement that the body did not wait for
            self._guard.note(error)

    def finish(self) -> None:
        """The transaction has ended: the connection may be used again."""
        if not self._guard.is_over:
            self._guard.end()
        self._limit.end()
        if self._lease is not None:
            self._end_turn()
        if not self._has_let_go:
            self._has_let_go = True
            if self._is_own and self._guard.is_changed:
                close_connection(self._session.connection)
            elif self._is_own:
                self.resource.give_back(self._session)
            else:
                return_lent(self._session.connection)

    def abandon(self) -> None:
        """Close the connection of a transaction whose state is not known, unless it has ended."""
        self._guard.end()
        self._limit.end()
        if not self._has_let_go:
            self._has_let_go = True
            close_connection(self._session.connection, self._end_turn)
        else:
            self._end_turn()
