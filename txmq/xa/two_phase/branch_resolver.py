"""Finishes XA branches that their owners left: one resolver for each XA resource.

Theory of operation. A round knows two lists, the broker's decisions with a branch here that is not complete, and what
XA RECOVER lists as prepared, and works on both:

*Decided*. Each branch is committed, as soon as its owner has gone or has had a second; ``branch_verdict`` judges the
database's answer. If the branch is done, or ended in another way, ``complete`` is sent.

*Prepared without a decision*. The broker is asked for the outcome. Committed: it was decided a moment ago, and the next
round has it in the first list; one that is not there even then is committed all the same. Rolled back: XA ROLLBACK.
Unknown: when the owner has gone for a second or the deadline has passed by a second, the broker is made to roll it back
(which refuses a late ``decide``), and then the branch is. Waiting is courtesy; the broker's word makes it safe. The
resource's uuid goes with both questions: under a user of its own that may settle for it, the resolver is answered for
its branch alone. 410 (the session has ended, or a restored broker has lost it), a state in which another party decides,
or no grant: left to the operator, logged once.

*Which database*. A round begins with a look at the fencing token (``xa/fencing.py``): in a database that has not the
newest one nothing is done at all. From what is missing something is concluded when a token was drawn after that look,
on the same connection: that a decided branch is lost, that an owner was faster, that nothing is in doubt any more. That
a branch was committed is told without one: its marker says so, or the database has just done it.

*Failures.* A branch that cannot be ended now (its database does not answer, or its marker's row is locked) costs a
second; a round takes three of the decided ones and three of the others, and begins with those that have failed least.

*Not known, and listed* means that the owner's session still holds the branch. If the owner may be given up, the session
is ended (KILL), and the branch tried again.

Invariants:
    * only xids with our format id, this cluster and this database's uuid are touched (``branch.Recovery.prepared``),
      and only of transactions whose home is this broker;
    * nothing is rolled back unless the broker has said so durably; nothing is committed unless it has decided;
    * a branch that looks lost is looked at again a round later, and a token is drawn, before it is reported;
    * a round ends with a forced write, so that its rollbacks, and unanswered ones of owners, do not come back;
    * a marker leaves only when ``complete`` of its branch is durable: answered, or not in the broker's list any more.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from txmq.errors import (
    ClosedError,
    FencedError,
    ForbiddenError,
    NeverIssuedError,
    NotOwnerError,
    OverloadedError,
    TransactionConflictError,
    TxmqError,
    UnknownTransactionError,
)
from txmq.model import Outcome, TransactionKind
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import get_logger
from txmq.runtime.ports import Clock
from txmq.xa.database.marker_sweep import MarkerSweep
from txmq.xa.database.resource import PATIENCE_S
from txmq.xa.fencing import DRAW_EVERY_S, Fence, StrangeServerError
from txmq.xa.reporter import Hanging, Reporter
from txmq.xa.resolver_ports import (
    FAILURES_PER_ROUND_MAX,
    OWNER_GONE_MS,
    PAGE_SIZE,
    REQUEST_TIMEOUT_S,
    Answer,
    HomeClient,
    Homes,
    is_of_another,
    is_of_this_broker,
    list_transactions,
)
from txmq.xa.two_phase.branch_verdict import Verdict, verdict
from txmq.xa.two_phase.resource_ports import Ended, ListedXid, Recovery, XAResource
from txmq.xid import Xid, branch_xid

IN_FLIGHT_MAX = 500  # requests to the broker whose answers are not awaited yet
OWNER_TURN_MS = 1000  # a living owner commits its own branches; it has had its turn when the decision is older
DEADLINE_PASSED_MS = 1000
KILLED_PAUSE_S = 0.02  # until a killed session has let go of its branch
KILLED_TRIES = 10
REMEMBERED_MAX = 10_000
Words = dict[str, str | int | bytes | None]  # of a request
_T = TypeVar("_T")


class Decided(NamedTuple):
    """A branch of this resource that the broker has decided to commit."""

    txid: str
    xid: Xid
    has_marker: bool
    wrote: bool
    may_kill: bool


class Orphan(NamedTuple):
    """A prepared branch whose transaction is not among the decided ones."""

    listed: ListedXid
    txid: str
    is_given_up: bool  # the deadline has passed by a second, or this process itself has left it


class Work:
    """A round's results for decided branches.

    Attributes:
        sent: ``complete`` requests whose answers are not awaited yet, each with its verdict.
        finished: txids whose branch here is complete.
        suspects: txids whose branch looks lost.
        missing: branches that are not there, with what that means once a fencing token is drawn.
    """

    __slots__ = ("finished", "missing", "sent", "suspects")

    def __init__(self) -> None:
        self.sent: deque[tuple[str, Verdict, Answer]] = deque()
        self.finished: set[str] = set()
        self.suspects: set[str] = set()
        self.missing: list[tuple[Decided, Verdict]] = []


class Watched(NamedTuple):
    """A transaction that an owner in this process left, and a callback for its end."""

    txid: str
    on_resolved: Callable[[], None]


def is_gone(owner_line: str) -> bool:
    """Read ``owner connected`` or ``owner gone <ms>``."""
    words = owner_line.split()
    return words[:2] == ["owner", "gone"] and len(words) == 3 and int(words[2]) >= OWNER_GONE_MS


class BranchResolver:
    """The resolver of one XA resource.

    Args:
        client: one home; of ``homes``.

    Attributes:
        client, resource: as given; the resource is the database of the branches.
        has_failed: the last round left something undone.
        problem: the error that kept the last round from the database or the broker.

    Thread safety: ``completed`` and ``watch`` from any thread; the rest from one.
    """

    def __init__(self, client: HomeClient, resource: XAResource, clock: Clock, homes: Homes) -> None:
        self.resource, self.has_failed = resource, False
        self.problem: Exception | None = None
        self.client, self._clock, self._homes = client, clock, homes
        self._recovery: Recovery | None = None
        self._answers: deque[tuple[str, Answer]] = deque(maxlen=REMEMBERED_MAX)  # to ``complete``; others are swept
        self._left: deque[Watched] = deque()
        self._watched: dict[str, Watched] = {}
        self._sweep = MarkerSweep(client, clock, homes, name=resource.name, kind=TransactionKind.XA)
        self._suspects: set[str] = set()  # looked lost in the round before
        self._committed_before: set[str] = set()  # orphans that the broker called committed in the round before
        self._said: dict[str, str] = {}
        self._reporter = Reporter(client, resource, TransactionKind.XA, clock)
        self._is_reached = False  # in this round
        self._is_strange = False  # another database goes on, and that was logged
        self._draw_at = float("-inf")  # a token, with or without a reason
        self._failures = 0  # in this round, of decided ones, and then of others
        self._failed_before: Counter[str] = Counter()
        self._log = get_logger(resource=resource.name)

    # --- called by owners --------------------------------------------------------------------------------------------

    def completed(self, txid: str, answer: Answer) -> None:
        """Take the request of a ``complete``: the branch's marker may go once that is answered."""
        self._answers.append((txid, answer))

    def watch(self, txid: str, on_resolved: Callable[[], None]) -> None:
        """Call ``on_resolved`` when nothing is in doubt here of a transaction that its owner, in this process, left."""
        self._left.append(Watched(txid, on_resolved))

    def await_answers(self, until: float) -> None:
        """Wait for the answers to what ``completed`` took, until a monotonic time."""
        for _, answer in list(self._answers):
            with suppress(TxmqError):
                answer.result(max(until - self._clock.monotonic(), 0.0))

    # --- rounds ------------------------------------------------------------------------------------------------------

    @property
    def hanging(self) -> list[Hanging]:
        """Branches that were left prepared."""
        return self._reporter.hanging

    @property
    def wants_another_look(self) -> bool:
        """Whether the last round saw a loss that counts only if it is seen twice."""
        return bool(self._suspects or self._committed_before)

    def round(self) -> set[str]:
        """Finish what is due, then remove markers. Returns the txids whose branch here is finished."""
        was_failing, self.has_failed, self._failures = self.has_failed, False, 0
        self.problem, self._is_reached, resolved = None, False, set[str]()
        try:
            self.client.look()
            self._take_answers()
            resolved = self._resolve()
            self._sweep.keep(self._database)
        except ClosedError:
            raise
        except StrangeServerError as error:
            self._strange(error)
        except Exception as error:  # noqa: BLE001  one resource's trouble, of whatever driver, must not stop the others
            self._failed("resource or broker away", error, is_new=not was_failing)
            self.close()
        finally:
            if self._recovery is not None:
                self._recovery.limit.end()
        self._reporter.report(is_reachable=self._is_reached, problem=self.problem)
        return resolved

    def end(self) -> None:
        """Remove the last markers, if the database is there, close the connection to it, and report what is left."""
        with suppress(Exception):
            self._take_answers()
            self._sweep.delete_finished(self._opened)
        self.close()
        self._reporter.end()

    def close(self) -> None:
        """Close the connection to the database."""
        if self._recovery is not None:
            self._recovery.close()
            self._recovery = None

    def _resolve(self) -> set[str]:
        while self._left:
            left = self._left.popleft()
            self._watched[left.txid] = left
        database = self._database()
        rows = {row["txid"]: row for row in list_transactions(self.client, database.uuid, "decided", PAGE_SIZE)}
        all_of_it, homes = database.prepared(), self._homes
        listed = [entry for entry in all_of_it if not is_of_another(self.client, homes, str(entry.txid))]
        self._require_token(has_work=bool(rows or listed))
        now_ms = database.now_ms() if listed else 0
        self._is_reached = True
        self._report(listed, rows, now_ms)
        deadlines = {entry.xid: entry.deadline_ms for entry in listed}
        due = [found for row in rows.values() if (found := self._due(row, deadlines, now_ms)) is not None]
        finished = self._commit_decided(sorted(due, key=lambda item: self._failed_before[item.txid]))
        self._failures = 0
        orphans = [
            Orphan(entry, txid, txid in self._watched or now_ms > entry.deadline_ms + DEADLINE_PASSED_MS)
            for entry in listed
            if (txid := str(entry.txid)) not in rows and self._is_ours(txid)
        ]
        to_roll_back, committed_again = self._judge_orphans(orphans)
        finished |= committed_again | self._roll_back(
            sorted(to_roll_back, key=lambda item: self._failed_before[item[0].txid])
        )
        open_ones = rows.keys() | {str(entry.txid) for entry in listed}
        self._failed_before = Counter({txid: n for txid, n in self._failed_before.items() if txid in open_ones})
        if self._recovery is database:  # on another connection another one may answer
            self._notify_watchers(open_ones - finished)
        self._report((entry for entry in listed if str(entry.txid) not in finished), rows, now_ms)
        return finished

    def _report(self, left: Iterable[ListedXid], decided: Container[str], now_ms: int) -> None:
        found = []
        for entry in left:
            txid = str(entry.txid)
            why = "decided to commit, not committed here yet" if txid in decided else "nobody has decided yet"
            why = self._said.get(txid, why)
            found.append(Hanging(txid, entry.xid.bqual.decode("ascii"), now_ms - entry.deadline_ms, why))
        self._reporter.saw(found)

    def _is_ours(self, txid: str) -> bool:
        if is_of_this_broker(self.client.session, txid):
            return True
        # Another broker's, whose resolver resolves it; or this broker's, from before its journal was lost or replaced.
        self._say_once(txid, "prepared branch of another broker: its resolver, or an operator, resolves it")
        return False

    def _due(self, row: Mapping[str, Any], deadlines: Mapping[Xid, int], now_ms: int) -> Decided | None:
        """The branch of a decision here, if its owner has gone or has had its turn."""
        txid = row["txid"]
        uuid = self.resource.uuid
        branch = next((b for b in row["branches"] if b["uuid"] == uuid and not b["complete"]), None)
        is_gone = not row["owner_connected"] and row["owner_gone_ms"] >= OWNER_GONE_MS
        is_left = txid in self._watched
        if branch is None or not (is_left or not row["owner_connected"] or row["age_ms"] >= OWNER_TURN_MS):
            return None
        xid = branch_xid(txid, branch["bqual"])
        if xid is None:
            self._say_once(txid, "decided branch has a bqual that no database can have: an operator completes it")
            return None
        may_kill = is_gone or is_left or now_ms > deadlines.get(xid, now_ms)
        return Decided(txid, xid, branch["marker"], branch["wrote"], may_kill)

    # --- decided -----------------------------------------------------------------------------------------------------

    def _commit_decided(self, due: Iterable[Decided]) -> set[str]:
        """Commit, then judge the others after one later XA RECOVER. Returns the txids that are finished."""
        work, doubtful, looked_in = Work(), list[tuple[Decided, Ended]](), None
        for item in due:
            ended = self._attempt(item.txid, lambda item=item: self._database().commit(item.xid))  # type: ignore[misc]
            if ended is Ended.DONE:
                crash_point("resolver.xa.committed")
                self._send_complete(item, work)
            elif ended is not None:
                doubtful.append((item, ended))
        if doubtful:
            looked_in = self._database()
            listed = {entry.xid: entry for entry in looked_in.prepared()}
            for item, ended in doubtful:
                self._judge(item, ended, listed.get(item.xid), work)
        self._await_answers(work, 0)
        if work.missing and self._recovery is looked_in:
            self._fence().draw()
            for item, found in work.missing:
                self._send_complete(item, work, found)
            self._await_answers(work, 0)
        else:
            work.suspects.update(item.txid for item, _ in work.missing)
        self._suspects = work.suspects
        return work.finished

    def _judge(self, item: Decided, ended: Ended, held: ListedXid | None, work: Work) -> None:
        if held is not None:
            if item.may_kill and self._end_of_held(held, commits=True):
                self._send_complete(item, work)
            return
        outcome = None
        if item.has_marker:
            outcome = self._attempt(item.txid, lambda: self._database().marker_outcome(item.txid) or "none")
            if outcome is None:
                return  # not answered: nothing is known
        found = verdict(ended, outcome=outcome, has_marker=item.has_marker, wrote=item.wrote)
        if found is Verdict.DONE and outcome is not None:
            self._send_complete(item, work)
        elif found is Verdict.DONE or item.txid in self._suspects:
            work.missing.append((item, found))
        else:
            work.suspects.add(item.txid)
            self.has_failed = True

    def _send_complete(self, item: Decided, work: Work, found: Verdict = Verdict.DONE) -> None:
        extensions: dict[str, str | int | bytes | None] = {"uuid": self._database().uuid}
        if found is not Verdict.DONE:
            extensions["heuristic"] = "rollback" if found is Verdict.LOST else "hazard"
            extensions["reason"] = quote(f"branch in {self.resource.name} {found.value}", safe="")
        answer = self.client.control.submit("complete", item.txid, extensions=extensions, timeout=REQUEST_TIMEOUT_S)
        work.sent.append((item.txid, found, answer))
        self._await_answers(work, IN_FLIGHT_MAX)

    def _await_answers(self, work: Work, left: int) -> None:
        while len(work.sent) > left:
            txid, found, answer = work.sent.popleft()
            if self._is_complete(txid, answer):
                crash_point("resolver.xa.completed")
                work.finished.add(txid)
                if found is Verdict.DONE:
                    self._sweep.finished.append(txid)
                    self._log.info("transaction resolved", txid=txid, outcome="committed")
                else:
                    self._log.error("heuristic: decided to commit, the branch is not", txid=txid, verdict=found.value)

    def _is_complete(self, txid: str, answer: Answer) -> bool:
        try:
            answer.result(REQUEST_TIMEOUT_S)  # from now: the database's work since the request may have taken longer
        except (TransactionConflictError, UnknownTransactionError, FencedError) as error:
            self._say_once(txid, "broker does not know of a decision it made", error=str(error))
        except TxmqError as error:
            self._failed("outcome not reported to the broker", error, txid=txid)
        else:
            return True
        return False

    # --- prepared without a decision ---------------------------------------------------------------------------------

    def _judge_orphans(self, orphans: Iterable[Orphan]) -> tuple[list[tuple[Orphan, bool]], set[str]]:
        """Orphans rolled back in the broker, durably, and whether their sessions may be ended; txids committed."""
        found: list[tuple[Orphan, bool]] = []
        fenced: list[Orphan] = []
        committed, finished = set[str](), set[str]()
        for orphan, body in self._answered(orphans, "outcome", {"owner": None, **self._own_branch()}):
            word, _, rest = body.decode("ascii", "replace").partition("\n")
            is_given_up = orphan.is_given_up or is_gone(rest)
            if word == Outcome.ROLLED_BACK.value:
                found.append((orphan, is_given_up))
            elif word == Outcome.COMMITTED.value:
                if orphan.txid in self._committed_before and self._commit_forgotten(orphan):
                    finished.add(orphan.txid)
                else:
                    committed.add(orphan.txid)
            elif word == Outcome.UNKNOWN.value and is_given_up:
                fenced.append(orphan)
            elif word != Outcome.UNKNOWN.value:
                self._say_once(orphan.txid, "prepared branch of a transaction that another party decides", state=word)
        self._committed_before = committed
        for orphan in self._fenced(fenced):
            crash_point("resolver.xa.fenced")
            found.append((orphan, True))
        return found, finished

    def _own_branch(self) -> Words:
        return {"uuid": self._database().uuid} if self.client.session.fences_by_database else {}

    def _fenced(self, orphans: Iterable[Orphan]) -> Iterable[Orphan]:
        """Have the broker roll them back, or what they have here; those of which it has said so."""
        words = self._own_branch()
        if not words:
            yield from (orphan for orphan, _ in self._answered(orphans, "rollback", {}))
            return
        for orphan, body in self._answered(orphans, "outcome", {"fence": None, **words}):
            if body.rstrip() == Outcome.ROLLED_BACK.value.encode():
                yield orphan  # else it was decided or prepared meanwhile: the next round sees it

    def _answered(self, orphans: Iterable[Orphan], verb: str, extensions: Words) -> Iterable[tuple[Orphan, bytes]]:
        """Ask for all, many at a time. Yields those that were answered."""
        sent: deque[tuple[Orphan, Answer]] = deque()
        waiting = deque(orphans)
        while waiting or sent:
            while waiting and len(sent) < IN_FLIGHT_MAX:
                orphan = waiting.popleft()
                control = self.client.control
                sent.append(
                    (orphan, control.submit(verb, orphan.txid, extensions=extensions, timeout=REQUEST_TIMEOUT_S))
                )
            orphan, answer = sent.popleft()
            try:
                yield orphan, answer.result(REQUEST_TIMEOUT_S)
            except NeverIssuedError as error:
                # The broker that was lost may have decided, and other branches may be committed.
                self._say_once(
                    orphan.txid,
                    "prepared branch of a session that the broker lost: it was restored; an operator resolves it",
                    error=str(error),
                )
            except FencedError as error:
                self._say_once(
                    orphan.txid,
                    "prepared branch whose outcome is not kept any more: an operator resolves it",
                    error=str(error),
                )
            except TransactionConflictError:
                pass  # decided meanwhile: the next round sees it
            except OverloadedError as error:  # its session is full of fences: no reason to leave the others alone
                self._say_once(orphan.txid, "prepared branch that the broker does not fence yet", error=str(error))
            except ForbiddenError as error:
                self._say_once(orphan.txid, "prepared branch of another user's transaction", error=str(error))
            except NotOwnerError as error:
                self._say_once(orphan.txid, "prepared branch of another broker", error=str(error))

    def _commit_forgotten(self, orphan: Orphan) -> bool:
        """Commit a branch that the broker holds for complete (an old copy of the database?); whether it has ended."""
        ended = self._attempt(orphan.txid, lambda: self._database().commit(orphan.listed.xid))
        is_done = ended is Ended.DONE
        if ended is Ended.NOT_KNOWN and orphan.is_given_up:
            is_done = self._end_of_held(orphan.listed, commits=True)
        self._log.warning("branch was prepared behind its completion", txid=orphan.txid, ended=str(ended))
        return is_done

    def _roll_back(self, orphans: Iterable[tuple[Orphan, bool]]) -> set[str]:
        """Roll the branches back, and make that durable; txids that are finished."""
        done: set[str] = set()
        doubtful: list[tuple[Orphan, bool]] = []
        for orphan, may_kill in orphans:
            xid, txid = orphan.listed.xid, orphan.txid
            ended = self._attempt(txid, lambda xid=xid: self._database().rollback(xid))  # type: ignore[misc]
            if ended in (Ended.DONE, Ended.ROLLED_BACK):
                done.add(txid)
            elif ended is Ended.NOT_KNOWN:
                doubtful.append((orphan, may_kill))
        looked_in = self._database() if doubtful else None
        listed = {entry.xid for entry in looked_in.prepared()} if looked_in is not None else set()
        missing = {orphan.txid for orphan, _ in doubtful if orphan.listed.xid not in listed}  # its owner was faster
        for orphan, may_kill in doubtful:
            if may_kill and orphan.txid not in missing and self._end_of_held(orphan.listed, commits=False):
                done.add(orphan.txid)
        if done or missing:
            crash_point("resolver.xa.rolled_back")
            self._database().force()
            if missing and self._recovery is looked_in:
                self._fence().draw()
                done |= missing
            for txid in sorted(done):
                self._log.info("transaction resolved", txid=txid, outcome="rolled-back")
        return done

    # --- held by a session -------------------------------------------------------------------------------------------

    def _end_of_held(self, held: ListedXid, *, commits: bool) -> bool:
        """End the session that holds a branch, then the branch; whether it has ended."""
        return bool(self._attempt(str(held.txid), lambda: self._killed_and_ended(held, commits=commits)))

    def _killed_and_ended(self, held: ListedXid, *, commits: bool) -> bool:
        database = self._database()
        is_killed = database.kill(held.connection)
        if is_killed:
            self._log.warning("session ended: it held a prepared branch", txid=str(held.txid))
        for _ in range(KILLED_TRIES if is_killed else 1):
            database.limit.work(PATIENCE_S)
            ended = database.commit(held.xid) if commits else database.rollback(held.xid)
            if ended is Ended.DONE or (ended is Ended.ROLLED_BACK and not commits):
                return True
            self._clock.sleep(KILLED_PAUSE_S)
        self.has_failed = True
        return False

    # --- owners' answers ---------------------------------------------------------------------------------------------

    def _take_answers(self) -> None:
        """Look at the answers to owners of this process."""
        while self._answers and self._answers[0][1].done:
            txid, answer = self._answers.popleft()
            try:
                answer.result()
            except TxmqError as error:
                self._log.debug("complete was not answered: the broker lists it", txid=txid, error=str(error))
            else:
                self._sweep.finished.append(txid)

    def _notify_watchers(self, still_open: set[str]) -> None:
        gone = [txid for txid in self._watched if txid not in still_open]
        if gone:
            # A forced write as well: what an owner rolled back without an answer may come back with a crash.
            self._fence().draw()
        for txid in gone:
            self._watched.pop(txid).on_resolved()

    # --- fencing tokens ----------------------------------------------------------------------------------------------

    def _require_token(self, *, has_work: bool) -> None:
        """Make sure that this is the database that goes on; now and then by a new token, which outdates copies.

        Raises:
            StrangeServerError: it is another one.
        """
        now = self._clock.monotonic()
        if now >= self._draw_at:
            self._fence().draw()
            self._draw_at = now + DRAW_EVERY_S
        elif has_work:
            self._fence().check()
        self._is_strange = False

    def _fence(self) -> Fence:
        home = f"{self.client.session.home:016x}"
        return Fence(self._database(), home, self.client.control, self.resource.new_token)

    def _strange(self, error: StrangeServerError) -> None:
        self.has_failed, self.problem, self._is_reached = True, self.problem or error, False
        say = self._log.debug if self._is_strange else self._log.error
        say("branches left alone", error=str(error))
        self._is_strange, self._draw_at = True, float("-inf")
        self._suspects, self._committed_before = set(), set()  # of another database, perhaps, than the next round's
        self.close()

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _database(self) -> Recovery:
        if self._recovery is None:
            self._opened()
            try:
                self._fence().check()
            except BaseException:
                self.close()
                raise
        return self._opened()

    def _opened(self) -> Recovery:
        if self._recovery is None:
            self._recovery = self.resource.open_recovery(f"{self.client.session.cluster:016x}")
        self._recovery.limit.work(PATIENCE_S)
        return self._recovery

    def _attempt(self, txid: str, work: Callable[[], _T]) -> _T | None:
        """Do something for one transaction; None if the driver raised: the others go on on a new connection."""
        if self._failures >= FAILURES_PER_ROUND_MAX:
            return None
        try:
            return work()
        except TxmqError:
            raise
        except Exception as error:  # noqa: BLE001  of whatever driver
            self._failures += 1
            self._failed_before[txid] += 1
            self.close()
            self._failed("transaction undecided", error, txid=txid)
            return None

    def _say_once(self, txid: str, event: str, **fields: object) -> None:
        if txid not in self._said:
            if len(self._said) >= REMEMBERED_MAX:
                self._said.clear()
            self._said[txid] = event
            self._log.warning(event, txid=txid, **fields)

    def _failed(self, event: str, error: Exception | None, *, is_new: bool = True, **fields: object) -> None:
        self.has_failed = True
        self.problem = self.problem or error
        say: Callable[..., None] = self._log.warning if is_new else self._log.debug
        say(event, error=repr(error), **fields)
