"""What an application gives for its transaction, as SQLAlchemy has it: a session, its engine, the connection."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Engine, Table, insert
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from txmq.errors import ConfigError
from txmq.outbox import outbox
from txmq.xa.database.dialects import SQLITE

AnySession = Session | AsyncSession | scoped_session[Any] | async_scoped_session[Any]
Bind = Engine | Connection | AsyncEngine | AsyncConnection


def unscoped(given: Any) -> Any:
    """The session of a scoped one; anything else is itself."""
    return given() if isinstance(given, scoped_session | async_scoped_session) else given


def sync_session(given: Any) -> Session:
    """The ``Session`` of what is given.

    Raises:
        ConfigError: it is no session.
    """
    session = unscoped(given)
    if isinstance(session, AsyncSession):
        return session.sync_session
    if isinstance(session, Session):
        return session
    raise ConfigError(
        f"a Session or an AsyncSession is needed, not {type(session).__qualname__}; txmq.Outbox takes connections"
    )


def bind_of(session: Session, bind: Bind | None, table: Table, advice: str) -> Engine | Connection:
    """Where a session writes a row of a table.

    Args:
        bind: as it was told; None to ask the session.
        advice: what names it, for errors.

    Raises:
        ConfigError: the session has several, and none is named; or none at all.
    """
    if isinstance(bind, AsyncEngine):
        return bind.sync_engine
    if isinstance(bind, AsyncConnection):
        return bind.sync_connection  # type: ignore[return-value]
    if bind is not None:
        return bind
    if _has_binds(session):
        raise ConfigError(f"{table}: the session has binds: name the engine of the rows that belong to it, {advice}")
    try:
        return session.get_bind(clause=insert(table))
    except UnboundExecutionError as error:
        raise ConfigError(f"{table}: the session has no engine: {advice}") from error


def _has_binds(session: Session) -> bool:
    known = vars(session)  # SQLAlchemy 2.0 has no word for it
    return bool(known.get("binds") or known.get("_Session__binds"))


def would_autocommit(connection: Connection) -> bool:
    """Whether a statement on the connection would be committed by itself."""
    if connection.dialect.name == "sqlite":  # where an application may say BEGIN by itself, in a listener
        return outbox.would_autocommit(connection.connection.driver_connection, SQLITE)
    try:
        return connection.dialect.detect_autocommit_setting(connection.connection.dbapi_connection)  # type: ignore[arg-type]
    except NotImplementedError:
        return False
