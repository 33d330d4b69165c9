"""``client.transactions``: list, inspect and resolve transactions that are in doubt.

Theory of operation. ``list`` pages through ``recover``; ``show`` joins the answer to ``outcome`` and the row of
``recover``, if there is one. ``commit`` and ``rollback`` resolve a *prepared* transaction without proof, in place of
its owner. The broker journals that as a heuristic outcome, which stays listed until ``forget``. ``complete`` ends the
wait for one branch of a *decided* transaction whose database will never answer, ``give_up_home`` that for a home.
``fence`` makes "never seen" final.

Invariants:
    * Only a prepared transaction is resolved here: a mistyped id is refused, not rolled back.
    * Every request may be repeated after a lost answer, and is, within the client's timeout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import quote

from txmq.errors import (
    BadRequestError,
    FencedError,
    LocalProtocolError,
    TransactionConflictError,
    UnknownTransactionError,
)
from txmq.log.records import decode
from txmq.model import Message, Outcome
from txmq.protocol.json_text import Fields, json_object
from txmq.protocol.transaction_bodies import PartResult, parse_outcome, parse_result_lines, split_parts
from txmq.xa.resolver_ports import recover_rows
from txmq.xid import TxId, home_word

if TYPE_CHECKING:
    from txmq.client.home_link import HomeLink
    from txmq.client.routes import Routes

_UUID = re.compile("[0-9a-f]{32}")
RECOVER_LIMIT = 1000  # transactions per request
REASON_LENGTH_MAX = 3000  # percent-encoded: it must fit a line
# The broker's words, and "in-doubt" for the first four.
STATES = ("in-doubt", "prepared", "placing", "decided", "placed", "heuristic", "all")
HEURISTICS = ("commit", "rollback", "mixed", "hazard")

FieldsList = list[Fields]
Parts = list[PartResult]
Messages = list[Message]


class Transactions:
    """``client.transactions``: look at transactions and resolve them by hand. Thread safety: any thread."""

    def __init__(self, routes: Routes, timeout: float) -> None:
        self._routes, self._timeout = routes, timeout

    # --- looking -----------------------------------------------------------------------------------------------------

    def list(self, state: str = "in-doubt") -> FieldsList:
        """The transactions in doubt, or in another state, oldest first.

        Args:
            state: ``in-doubt`` (the next four), ``prepared``, ``placing`` (decided, waits for its place), ``decided``
                (a branch has not completed), ``placed`` (a part, of which the home that decided was not told yet),
                ``heuristic`` (decided without proof) or ``all``.

        Returns:
            Fields as ``recover`` in docs/protocol.md.

        Raises:
            PartialResultError: homes of a cluster are away; it has the transactions of the others.
        """
        if state not in STATES:
            raise LocalProtocolError(f"state={state!r}: expected one of {', '.join(STATES)}")
        found = self._routes.ask_each(
            self._routes.all_links(), lambda link, timeout: [*self._rows(link, state, timeout)]
        )
        return sorted(found, key=lambda row: -row["age_ms"])

    def resources(self) -> FieldsList:
        """The databases that resolvers reach or not, and the branches prepared there, the oldest first.

        Returns:
            Fields as ``resource list`` in docs/protocol.md.

        Raises:
            PartialResultError: as ``list``.
        """
        return self._routes.ask_each(self._routes.all_links(), _resources)

    def messages(self, txid: TxId | str) -> Messages:
        """The messages of a prepared transaction, which readers do not see yet; their offsets are not assigned.

        Raises:
            UnknownTransactionError: it is not prepared.
        """
        text, found, count = _checked(txid), list[Message](), 0
        while True:
            body = self._link_of(text).control.repeat("parts", text, extensions={"after": count}, timeout=self._timeout)
            parts = split_parts(body)
            for topic, partition, batch, *_ in parts:
                found += decode(batch, topic.decode("ascii"), int(partition))
            count += len(parts)
            if not parts:
                return found

    def show(self, txid: TxId | str) -> Fields:
        """Look at one transaction: ``txid``, ``outcome``, its ``parts``, and the reason why it waits.

        Raises:
            FencedError: it ended so long ago, or in a session so long gone, that nothing is kept.
        """
        text = _checked(txid)
        try:
            word, lines = self._ask(text)
        except FencedError:  # a part that is placed may wait for longer than its outcome is kept
            row = self._row(text, "all")
            if row is None:
                raise
            return {"txid": text, "outcome": "committed", **row}
        fields: Fields = {"txid": text, "outcome": "unknown" if word == "prepared" else word}
        if word != "unknown":
            row = self._row(text, "prepared" if word == "prepared" else "all")
            fields |= {name: value for name, value in (row or {}).items() if name != "outcome"}
        if lines:
            fields["parts"] = [part._asdict() for part in lines]
        return fields

    def outcome(self, txid: TxId | str) -> Outcome:
        """Its outcome; UNKNOWN if it is open, prepared, or was never seen.

        It is also UNKNOWN if the messages were rolled back and the rows may be there: the body of the block had ended
        the database's transaction by itself, which is listed until it is forgotten.
        """
        text = _checked(txid)
        link = self._link_of(text)
        known = link.known_outcome(TxId.parse(text))
        if known is not None:
            return known
        if link.pending_commits.has_decided(text):
            return Outcome.COMMITTED  # its database has decided, and the broker is being told
        word, _ = self._ask(text)
        if word == "rolled-back" and self._is_hazard(text):
            return Outcome.UNKNOWN
        if word in ("committed", "rolled-back"):
            link.control.saw_outcome(TxId.parse(text))
        return {"committed": Outcome.COMMITTED, "rolled-back": Outcome.ROLLED_BACK}.get(word, Outcome.UNKNOWN)

    # --- resolving ---------------------------------------------------------------------------------------------------

    def commit(self, txid: TxId | str, reason: str) -> Parts:
        """Commit a prepared transaction without asking its database or application: readers see its messages.

        Args:
            reason: the reason, and the name of the operator; kept with the heuristic outcome.

        Returns:
            The offsets of its messages.

        Raises:
            UnknownTransactionError: it is not prepared here.
            TransactionConflictError: it was rolled back.

        Durability: decided, with the heuristic outcome, when this returns.
        """
        text = self._required(txid, Outcome.ROLLED_BACK)
        fields = {"heuristic": _encoded(reason)}
        body = self._link_of(text).control.repeat("commit", text, extensions=fields, body=(), timeout=self._timeout)
        return parse_result_lines(body)

    def rollback(self, txid: TxId | str, reason: str) -> None:
        """Roll a prepared transaction back without asking its database or application: its messages are dropped.

        Args:
            reason: the reason, and the name of the operator; kept with the heuristic outcome.

        Raises:
            UnknownTransactionError: it is not prepared here.
            TransactionConflictError: it is decided or committed, and cannot be rolled back.

        Durability: as ``commit``.
        """
        text = self._required(txid, Outcome.COMMITTED)
        fields = {"heuristic": _encoded(reason)}
        self._link_of(text).control.repeat("rollback", text, extensions=fields, timeout=self._timeout)

    def complete(self, txid: TxId | str, resource: str, heuristic: str, reason: str) -> None:
        """Stop waiting for one branch of a decided XA transaction: its database is gone, or decided alone.

        Args:
            resource: name or uuid of the branch's resource.
            heuristic: what became of the branch: ``commit``, ``rollback``, ``mixed`` or ``hazard`` (cannot be known).
            reason: the reason, and the name of the operator.

        Raises:
            UnknownTransactionError: the transaction waits for no branch in that resource.
        """
        if heuristic not in HEURISTICS:
            raise LocalProtocolError(f"heuristic={heuristic!r}: expected one of {', '.join(HEURISTICS)}")
        text, encoded = _checked(txid), _encoded(reason)
        row = self._row(text, "decided") or {"branches": []}
        waiting = [
            branch for branch in row["branches"]
            if resource in (branch["resource"], branch["uuid"]) and not branch["complete"]
        ]  # fmt: skip
        if not waiting:
            names = ", ".join(branch["resource"] for branch in row["branches"] if not branch["complete"])
            hint = f"; waited for: {names}" if names else ""
            raise UnknownTransactionError(
                f"no branch of transaction {text} in resource {resource!r} is waited for{hint}"
            )
        for branch in waiting:
            fields = {"uuid": branch["uuid"], "heuristic": heuristic, "reason": encoded}
            self._link_of(text).control.repeat("complete", text, extensions=fields, timeout=self._timeout)

    def give_up_home(self, txid: TxId | str, home: str, reason: str) -> bool:
        """Stop waiting for a home that is lost for ever, of a decided transaction or of a part that is placed.

        The decision stands. If the home comes back nevertheless, it rolls back what it has not placed; if it is the one
        that decided, it waits for the part, until it is told in the same way.

        Args:
            txid: of the transaction, or of its part at another home.
            home: id of the lost one, 16 hex digits, as ``show`` and ``txmq cluster describe`` have it.
            reason: the reason, and the name of the operator; kept as a heuristic hazard until ``forget``.

        Returns:
            Whether it is kept. It is not if that home is there, and has placed its part after all.

        Raises:
            UnknownTransactionError: the transaction waits for no such home.
            TransactionConflictError: a broker leads that home, and will end its part; or nothing is decided yet.
        """
        text = _checked(txid)
        hazard = {"heuristic": "hazard", "reason": _encoded(reason)}
        row = self._row(text, "in-doubt") or {}
        if row.get("state") == "prepared":
            raise TransactionConflictError(f"transaction {text} is prepared: commit it or roll it back first")
        waiting = {home_word(each["txid"]): each["txid"] for each in row.get("homes", ()) if not each["complete"]}
        if "of" in row:
            waiting[home_word(row["of"])] = row["of"]
        other = waiting.get(home)
        if other is None:
            hint = f"; waited for: {', '.join(waiting)}" if waiting else ""
            raise UnknownTransactionError(f"transaction {text} waits for no home {home[:40]!r}{hint}")
        leader = self._leader(text, home)
        is_placed = leader is not None and self._has_placed(None if "of" in row else other, home, leader)
        word = "of" if "of" in row else "branch"
        fields = {word: other} if is_placed else {word: other, **hazard}
        self._link_of(text).control.repeat("complete", text, extensions=fields, timeout=self._timeout)
        return not is_placed

    def _leader(self, txid: str, home: str) -> str | None:
        body = self._link_of(txid).control.repeat("cluster", "homes", timeout=self._timeout)
        return next((each["leader"] for each in json_object(body)["homes"] if each["home"] == home), None)

    def _has_placed(self, branch: str | None, home: str, leader: str) -> bool:
        """Whether a home that is led has ended its part by placing it, or without: an operator there said so."""
        if branch is not None:
            try:
                known = self.show(branch)
            except FencedError:
                return False
            if known.get("state") in (None, "heuristic") and known["outcome"] != "unknown":
                return bool(known["outcome"] == "committed")
        raise TransactionConflictError(
            f"home {home} is led at {leader}, and ends its part by itself within 30 s: nothing was done"
        )

    def fence(self, txid: TxId | str, resource: str | None = None) -> Outcome:
        """Its final outcome: an id that the broker never saw is journaled as rolled back.

        After that the XA branches of that id, listed by a database, may be rolled back by hand. UNKNOWN if it is
        prepared.

        Args:
            resource: uuid of a database, or its name if a resolver has reported it. To a user who may settle for that
                database, and has nothing else to do with the transaction, the answer is for the branch there, and so
                is the fence; to everybody else it is as without.

        Raises:
            ForbiddenError: the transaction is another user's, who may not settle for ``resource``.
            UnknownTransactionError: no resolver has reported a database of that name.
            BadRequestError: the broker is too old to fence for one database.
        """
        text = _checked(txid)
        link = self._link_of(text)
        fields: dict[str, str | int | bytes | None] = {"fence": None}
        if resource is not None:
            fields["uuid"] = self._uuid_of(resource, link)
        try:
            body = link.control.repeat("outcome", text, extensions=fields, timeout=self._timeout)
        except BadRequestError as error:
            if resource is None:
                raise
            hint = "an older broker fences for no database alone: upgrade it, or let an administrator fence all of it"
            raise BadRequestError(f"{error}; {hint}") from error
        word, _ = parse_outcome(body)
        return {"committed": Outcome.COMMITTED, "rolled-back": Outcome.ROLLED_BACK}.get(word, Outcome.UNKNOWN)

    def forget(self, txid: TxId | str) -> None:
        """Drop the heuristic outcomes of a transaction: its damage was repaired.

        Raises:
            UnknownTransactionError: no heuristic outcome of it is kept.
        """
        text = _checked(txid)
        is_kept = self._row(text, "heuristic") is not None
        try:
            self._link_of(text).control.repeat("forget", text, timeout=self._timeout)
        except UnknownTransactionError:
            if not is_kept:  # otherwise the first request succeeded, and its answer was lost
                raise

    # --- asking ------------------------------------------------------------------------------------------------------

    def _required(self, txid: TxId | str, contrary: Outcome) -> str:
        """The id, if the transaction is prepared, or has the wanted outcome already."""
        text = _checked(txid)
        word, _ = self._ask(text)
        if word == "unknown":
            raise UnknownTransactionError(f"transaction {text} is not prepared here: nothing was done")
        if word == contrary.value:
            raise TransactionConflictError(f"transaction {text} is {word} already: nothing was done")
        return text

    def _uuid_of(self, resource: str, link: HomeLink) -> str:
        if _UUID.fullmatch(resource):
            return resource
        found = {row["uuid"] for row in _resources(link, self._timeout) if resource == row["resource"] and row["uuid"]}
        if len(found) == 1:
            return str(found.pop())
        raise UnknownTransactionError(
            f"resource={resource[:80]!r}: {len(found) or 'no'} databases of that name were reported by resolvers; "
            "state the uuid, 32 hex digits, as a resolver's log and txmq tx list --json have it"
        )

    def _is_hazard(self, txid: str) -> bool:
        row = self._row(txid, "heuristic")
        return row is not None and any(fact["what"] == "heuristic-hazard" for fact in row["heuristics"])

    def _link_of(self, txid: str) -> HomeLink:
        return self._routes.link_of_home(TxId.parse(txid).home)

    def _ask(self, txid: str) -> tuple[str, Parts]:
        return parse_outcome(self._link_of(txid).control.repeat("outcome", txid, timeout=self._timeout))

    def _row(self, txid: str, state: str) -> Fields | None:
        return next(self._rows(self._link_of(txid), state, self._timeout, txid=txid), None)

    def _rows(self, link: HomeLink, state: str, timeout: float, **words: str) -> Iterator[Fields]:
        wanted: dict[str, str | int | bytes | None] = {**words, "limit": RECOVER_LIMIT}
        if state != "in-doubt":
            wanted["state"] = state
        return recover_rows(lambda stated: link.control.repeat("recover", extensions=stated, timeout=timeout), wanted)


def _resources(link: HomeLink, timeout: float) -> FieldsList:
    found: FieldsList = json_object(link.control.repeat("resource", "list", "*", body=(), timeout=timeout))["resources"]
    return found


def _checked(txid: TxId | str) -> str:
    try:
        return str(TxId.parse(str(txid)))
    except ValueError as error:
        raise LocalProtocolError(str(error)) from None


def _encoded(reason: str) -> str:
    with suppress(UnicodeEncodeError):  # half a surrogate pair from a shell
        encoded = quote(reason.strip(), safe="")
        if 0 < len(encoded) <= REASON_LENGTH_MAX:
            return encoded
    raise LocalProtocolError(f"reason={reason[:80]!r}: expected some text, at most {REASON_LENGTH_MAX} bytes encoded")
