"""Which topics are applied, and which of their events: only what a topic's own tables can be told, whoever writes it.

Theory of operation. A topic says of a table what its writers say, and other topics have other writers. So a change is
applied to the tables of its own topic alone, as ``publish.topic`` names it, and a statement is run only if every table
that it names has a topic that has the statement: the barrier sees to it that all of these say the same
(``partition_queues``). The text of a statement is taken apart as at the source (``statements.py``), and has to do what
the event says, to the tables that the event names. It is one statement; what may touch more than the named tables
(SELECT, a second TABLE, an engine that reads elsewhere, a comment that only some servers run) is refused (``oddity``).

With ``statement_key`` reader and applier share a secret, and each statement has a code made of it (HMAC-SHA256). Then
it is the source's own, may name tables without topics, and is run as it is; without a right code none is.

Invariants:
    * what is refused stops the applier before anything of it is run;
    * what this module does not know is refused.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final

from txmq.binlog.config import BinlogSettings, topic_of, topics_named
from txmq.binlog.decoded_changes import Ddl, DdlKind, TableName
from txmq.binlog.errors import BinlogError, TargetError
from txmq.binlog.event_json import DDL, STATEMENT_FIELDS, TRUNCATE, ChangeEvent, read_statement, statement_code
from txmq.binlog.statements import What, oddity, recognise
from txmq.client import Client

_WITH_KEY: Final = "(with statement_key, what the source has run is run)"
_TABLES_MAX: Final = 10_000


def applied_topics(client: Client, settings: BinlogSettings) -> list[str]:
    """Those that ``apply.topics`` names, or else those of the sync that there are.

    Raises:
        TxmqError: the broker is away.
    """
    if settings.apply.topics:
        return sorted(settings.apply.topics)
    named = topics_named(settings.publish.topic, name=settings.name)
    internal = {settings.position_topic, settings.parked_topic}
    return sorted(
        topic.name for topic in client.topics.list() if named.match(topic.name) and topic.name not in internal
    )


class Accepted:
    """See the module's docstring. Thread safety: any thread.

    Args:
        skipped: ids of transactions whose statements are not run, whatever they say.
    """

    def __init__(self, settings: BinlogSettings, skipped: Collection[str]) -> None:
        self._skipped = skipped
        self._pattern, self._name, self._key = settings.publish.topic, settings.name, settings.statement_key
        self._topics: dict[TableName, str] = {}

    def require_change(self, topic: str, table: TableName) -> None:
        """Refuse a change of a table that is another topic's.

        Raises:
            TargetError: says which topic is the table's.
        """
        if self._topic_of(table) != topic:
            raise TargetError(
                f"topic {topic} has a change of {table}, whose topic is {self._topic_of(table)}: somebody else has "
                "written it, or name and publish.topic are not those of the reader"
            )

    def require_statement(self, topic: str, event: ChangeEvent) -> str:
        """Refuse a statement that must not run; returns what all its messages have to say.

        Raises:
            TargetError: says why.
        """
        try:
            ddl = _well_formed(event, topic)
        except ValueError as error:
            raise TargetError(
                f"topic {topic} has a malformed statement: {error}: {event.fields!s:.300}: leave it out (apply.topics)"
            ) from None
        gtid = event.source["gtid"]
        if gtid in self._skipped:
            return ""
        why = self._refusal(event, ddl)
        if why:
            raise TargetError(
                f"the statement of transaction {gtid} in topic {topic} is not run: {why}: {ddl.statement[:200]}. If "
                "the source has run it, give the target's tables the form that the source's have. Start again with "
                f"--skip-ddl {gtid}"
            )
        return json.dumps([event.fields[name] for name in STATEMENT_FIELDS], sort_keys=True)

    def _refusal(self, event: ChangeEvent, said: Ddl) -> str:
        fields = event.fields
        if self._key:
            code = statement_code(self._key, event.source, fields)
            is_signed = hmac.compare_digest(str(fields.get("code", "")).encode(errors="replace"), code.encode())
            return "" if is_signed else "it has not the code that statement_key makes"
        found = recognise(said.statement, said.database, said.sql_mode)
        ddl = found.ddl
        if found.what is not What.DDL or ddl is None or ddl.kind is DdlKind.OTHER:
            return "it changes no table's form"
        if not said.read:
            ddl = replace(ddl, read=())  # what it is LIKE has no topic, and only its form is read
        ddl = replace(ddl, additive=said.additive, session=said.session, collation=said.collation)
        if ddl != said or (ddl.kind is DdlKind.TRUNCATE) is not (event.op == TRUNCATE):
            return f"it does not do what its event says, {said.kind} {[*map(str, said.tables)]!s:.200}"
        if odd := oddity(said.statement, said.sql_mode):
            return f"{odd} {_WITH_KEY}"
        missing = [str(table) for table in ddl.tables if self._is_missing(table, fields["topics"])]
        return f"it names {missing[0]}, whose topic does not have it {_WITH_KEY}" if missing else ""

    def _is_missing(self, table: TableName, topics: Mapping[str, int]) -> bool:
        """Whether its topic does not have the statement. ``ddl`` looks which tables of a database are there."""
        return bool(table.name) and self._topic_of(table) not in topics

    def foreign(self, tables: list[TableName], topics: Mapping[str, int]) -> TableName | None:
        """A table whose topic is none of these; None if there is none, or a key says whose statement it is."""
        return None if self._key else next((one for one in tables if self._topic_of(one) not in topics), None)

    def _topic_of(self, table: TableName) -> str:
        found = self._topics.get(table)
        if found is None:
            try:
                found = topic_of(self._pattern, self._name, table)
            except BinlogError:
                found = ""  # no topic can have that name
            if len(self._topics) < _TABLES_MAX:
                self._topics[table] = found
        return found


def _well_formed(event: ChangeEvent, topic: str) -> Ddl:
    if event.op not in (DDL, TRUNCATE) or not isinstance(event.source.get("gtid"), str):
        raise ValueError("no statement of a transaction")
    ddl = read_statement(event)
    if topic not in event.fields["topics"]:
        raise ValueError("it is of other topics")
    return ddl
