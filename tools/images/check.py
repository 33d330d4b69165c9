"""Plays scripts, opens what a crash left of them, and says what must be true of it.

=====  ==============================================================================================================
P1     what had been told (in a way that promises it) is there: messages at their offsets, outcomes, topics
P1     the newest fencing token of a database is not older than one that had been told
P6     the chain of an outbox ends with the newest of its pages that is decided
P2     each transaction is visible all or none, at the places of its outcome; offsets have no holes; messages stand in
       the order in which they were decided
P4     messages of a decision are invisible until every branch has completed
P5     what is prepared and not decided is still there, and invisible
P6     the offset that a transaction saves is saved exactly when its messages are placed
P6     the whole script asked again gets the answers it had got, and in the end every message of a put and of a
       committed transaction is there exactly once
P5     a decision is kept as long as a branch at another home has not reported it, and a branch that is placed until
       the home that decided knows it
P10    every CRC, place and offset of every partition is right, and every message is one of the script's
=====  ==============================================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tools.simulated.disk import SimDisk
from tools.simulated.disk_model import Trace
from txmq.broker.cluster.cluster_view import ClusterView
from txmq.broker.state.state import State
from txmq.broker.state.transaction import TransactionState
from txmq.log.verify import verify_log
from txmq.model import TopicPartition
from txmq.protocol.transaction_bodies import parse_result_lines
from txmq.xid import TxId

from .node import SMALL, Answer, Client, Node, small_settings
from .script import GROUP, OF_ANOTHER_HOME, QUERY, UUID, Ask, Script

SESSION = 1
OTHER_HOME = 0xB
Told = dict[bytes, Answer]
Visible = dict[bytes, tuple[TopicPartition, int]]


class Player:
    """One client of a script, over the lives of its broker; ``before_life`` gets the disk before each of them."""

    def __init__(
        self, script: Script, disk: SimDisk, *, before_life: Callable[[SimDisk], None] = lambda _disk: None
    ) -> None:
        self.script, self.disk, self._before_life = script, disk, before_life
        self.settings = SMALL if script.sync == "always" else small_settings(sync=script.sync)
        self.lives = 0
        self.node: Node
        self.client: Client

    def start(self, disk: SimDisk) -> None:
        """A new life: open and connect."""
        self.disk = disk
        self.lives += 1
        self._before_life(disk)
        self.node = Node(disk, self.settings)
        self.client = self.node.connect()

    def hello(self) -> None:
        """Make or resume the session."""
        self.node.context.sessions_from = SESSION  # whose number stands in what is asked again
        self.node.count_generations_anew()  # they stand there, too, and a later life has others
        wish = self.node.wish(f"{SESSION}.0") if SESSION in self.node.state.sessions else "new"
        opaque = self.client.send("hello", 1, "tester", extensions={"session": wish}, opaque=b"h%d" % self.lives)
        self.node.pump()
        assert self.client.received[opaque].code == 200, self.client.received[opaque]

    def send(self, ask: Ask) -> None:
        """Send one request of the script."""
        arguments, extensions, body = list(ask.arguments), dict(ask.extensions), ask.body
        if ask.verb == "query":
            body = "".join(f"{self.node.txid(SESSION, counter)}\n" for counter in ask.winners).encode()
            while self.node.state.queries.last_epoch < int(extensions["epoch"] or 0):
                self.node.connect().ask("query", "epoch", "*", body=b"")
        if ask.counter:
            txid = self.node.txid(SESSION, ask.counter)
            if "tx" in extensions:
                extensions["tx"] = txid
            else:
                arguments[0] = txid
        if "outbox" in extensions:
            after = int(extensions["after"] or 0)
            extensions["after"] = self.node.txid(SESSION, after) if after else "-"
        words = [word for word in OF_ANOTHER_HOME if word in extensions]
        for word in words:
            extensions[word] = other_txid(self.node, int(extensions[word] or 0))
        # There is no registry: topics are made as by a broker that is alone.
        self.node.context.cluster = ClusterView() if words else None
        self.client.send(ask.verb, *arguments, extensions=extensions, body=body, opaque=ask.opaque)

    def ask(self, ask: Ask) -> bool:
        """Send one request and let the node do what it can; a commit may wait for another one."""
        self.send(ask)
        self.node.pump()
        self.node.force()
        return ask.opaque in self.client.received or ask.verb == "commit"

    def run(self) -> None:
        """The whole script."""
        self.start(self.disk)
        self.play()

    def play(self) -> None:
        """The script, in the life that has begun."""
        self.hello()
        for step in self.script.steps:
            if isinstance(step, list):
                for ask in step:
                    self.send(ask)
                self.node.pump()
            elif step.what is None:
                self.start(self.node.kill())
                self.hello()
            else:
                step.what(self.node)


def other_txid(node: Node, counter: int) -> str:
    """A transaction of the other home."""
    return str(TxId(node.recovered.identity.cluster, OTHER_HOME, 1, counter))


def record(script: Script) -> Trace:
    """Play a script on an empty disk; what it did to it."""
    disk = SimDisk(record=True)
    assert disk.trace is not None
    Player(script, disk).run()
    return disk.trace


def check_image(script: Script, disk: SimDisk, *, again: bool = False) -> None:
    """Open what a crash left, and check everything.

    Args:
        again: also end the life that follows, and compare the state that the next one finds.
    """
    told = promised(script, disk)
    player = Player(script, disk)
    player.start(disk)
    check_recovered(script, player.node, told)
    answers = _repeat(script, player, told)
    _check_final(script, player.node, answers)
    if again:
        before = player.node.state
        before.led(0, 0, 0, before.limits, is_member=False)
        assert comparable(Node(player.node.kill(), player.settings).state) == comparable(before)


def promised(script: Script, disk: SimDisk) -> Told:
    """The answers that a crash may not take back: with ``sync = always`` all, else those before the last sync."""
    kept: Told = {}
    since: Told = {}
    for note in disk.notes:
        assert isinstance(note, tuple)
        if note[0] == "told":
            since[note[1]] = Answer(note[2], note[3])
        if note[0] == "forced" or script.sync == "always":
            kept.update(since)
            since = {}
    return kept


def comparable(state: State) -> dict[str, Any]:
    """A snapshot without what a restart changes: epoch and life."""
    snapshot = state.snapshot()
    for name in ("epoch", "life", "generation_floor"):
        del snapshot[name]
    for _topic, _number, partition, _producers in snapshot["partitions"]:
        partition[2] = None
    return snapshot


# --- after recovery --------------------------------------------------------------------------------------------------


def check_recovered(script: Script, node: Node, told: Told) -> None:
    """P1, P2, P5, P10 of a node that was just opened."""
    visible = _visible(script, node)
    for ask in script.asks:
        if ask.opaque in told and told[ask.opaque].code == 200:
            _check_told(ask, told[ask.opaque], node, visible)
    if any(opaque.startswith(b"h") for opaque in told):
        assert SESSION in node.state.sessions, "P1: the session is gone"
    for counter in script.transactions:
        _check_whole(script, counter, node, visible)
    _check_batches(script, node)
    _check_homes(script, told, node.disk, node)
    _check_offset(script, node)
    _check_tokens(script, node, told)
    _check_chain(script, node)
    verdict = verify_log(node.disk)
    assert verdict.is_sound, f"P10: {verdict.findings}"


def _visible(script: Script, node: Node) -> Visible:
    """Every message a reader can see, and where; in order and each once."""
    found: Visible = {}
    known = script.places
    order = {value: number for number, value in enumerate(known)}
    for partition in node.state.all_partitions():
        place = partition.topic, partition.number
        messages = node.messages(partition)
        assert len(messages) == partition.high_watermark - partition.log_start, f"P2: holes in {place}"
        numbers = []
        for message in messages:
            value = message.value or b""
            assert known.get(value) == place, f"P10: {value[:20]!r} in {place}"
            assert value not in found, f"P6: {value[:20]!r} twice"
            found[value] = place, message.offset
            numbers.append(order[value])
        assert numbers == sorted(numbers), f"P2: order in {place}: {numbers}"
    return found


def _check_offset(script: Script, node: Node) -> None:
    """Transactions alone save the offset, each a higher one: it is that of the last one that was decided."""
    saving = {counter: made.offset for counter, made in script.transactions.items() if made.offset}
    session = node.state.sessions.get(SESSION)
    if not saving or session is None:
        return
    decided = [offset for counter, offset in saving.items() if session.outcomes.get(counter) is not None]
    saved = node.state.saved.named.get(GROUP)
    place = next(iter(node.state.partitions_of), 0), 0
    found = saved.offsets.get(place) if saved is not None else None
    assert (found.offset if found else 0) == max(decided, default=0), f"P6: {found} saved, decided were {decided}"
    with_rows = {name for name, decided in node.state.decisions.incomplete.items() if decided.has_rows_to_come}
    unsettled = {*node.state.transactions, *with_rows, *node.state.branch_parts.held}
    waiting = {(SESSION, c) for c in saving if (SESSION, c) in unsettled}
    held = {name for name in node.state.saved.held.values() if name in waiting}
    open_ones = {(t.session, t.counter) for t in node.state.streams.values()}
    assert held == waiting - open_ones, f"P6: {held} hold the offset, {waiting} may still save it"


def _check_told(ask: Ask, answer: Answer, node: Node, visible: Visible) -> None:
    if b" - " in answer.body:
        _check_placing(ask, node)
    elif ask.verb in ("put", "commit", "decide") and ask.adds:
        for place, base_offset, values in _promised_places(ask, answer):
            _check_values(node, visible, place, base_offset, values)
    elif ask.verb in ("rollback", "outcome"):
        assert node.state.sessions[SESSION].outcomes[ask.counter] is None, f"P1: {ask.verb} of {ask.counter} is lost"
    elif ask.verb == "complete" and "branch" in ask.extensions:
        decided = node.state.decisions.incomplete.get((SESSION, ask.counter))
        assert decided is None or all(decided.homes.values()), f"P1: a home of {ask.counter} has not reported any more"
    elif ask.verb == "complete":
        incomplete = node.state.decisions.incomplete.get((SESSION, ask.counter))
        branch = incomplete.branch(str(ask.extensions["uuid"])) if incomplete is not None else None
        assert branch is None or branch["complete"], f"P1: a branch of {ask.counter} is not complete any more"
    elif ask.verb == "group":
        _check_group(ask, answer, node)
    elif ask.verb == "query":
        _check_query(ask, node)
    elif ask.verb == "prepare":
        known = node.state.transactions.get((SESSION, ask.counter))
        prepared = known is not None and known.state is TransactionState.PREPARED
        assert prepared or ask.counter in node.state.sessions[SESSION].outcomes, f"P5: {ask.counter} is lost"
    elif ask.verb == "topic" and ask.arguments[0] == "delete":
        assert ask.arguments[1] not in _names(node), f"P1: the end of topic {ask.arguments[1]} is lost"
    elif ask.verb == "topic":
        assert ask.arguments[1] in _names(node) or node.state.topics.next_id > len(_names(node)) + 1, "P1: topic lost"


def _check_placing(ask: Ask, node: Node) -> None:
    """What was told to wait for its place is decided."""
    waiting = node.state.transactions.get((SESSION, ask.counter))
    is_waiting = waiting is not None and waiting.state is TransactionState.PLACING
    kept = node.state.sessions[SESSION].outcomes.get(ask.counter)
    assert is_waiting or kept is not None, f"P1: the decision about {ask.counter} is lost"


def _check_homes(script: Script, told: Told, disk: SimDisk, node: Node) -> None:
    """Nothing is forgotten that another home still needs."""
    session, state = node.state.sessions.get(SESSION), node.state
    begun = {note[1] for note in disk.notes if isinstance(note, tuple) and note[0] == "reported"}
    for counter, made in script.transactions.items():
        is_committed = session is not None and session.outcomes.get(counter) is not None
        if made.is_branch and is_committed and counter not in begun:
            assert (SESSION, counter) in state.branch_parts.unreported, f"P5: nobody is told that {counter} is placed"
    over = {ask.counter for ask in script.asks if ask.verb == "complete" and "branch" in ask.extensions}
    for ask in script.asks:
        if "homes" in ask.extensions and ask.opaque in told and ask.counter not in over:
            assert (SESSION, ask.counter) in state.decisions.incomplete, f"P5: decision {ask.counter} is forgotten"


def _check_tokens(script: Script, node: Node, told: Told) -> None:
    """No database has gone back to a token that was followed by another one."""
    drawn = [(ask.opaque in told, str(ask.arguments[1])) for ask in script.asks if ask.verb == "token"]
    newest = node.state.fencing_tokens.newest.get(UUID)
    numbers = [token for _, token in drawn]
    at = numbers.index(newest) if newest is not None else -1
    assert not any(is_told for is_told, _ in drawn[at + 1 :]), f"P1: token {newest}, later ones had been told"


def _check_chain(script: Script, node: Node) -> None:
    """The chain of an outbox ends with the newest of its pages that is decided."""
    session, decided = node.state.sessions.get(SESSION), ""
    for counter, made in script.transactions.items():
        is_placed = session is not None and session.outcomes.get(counter) is not None
        if made.is_page and (is_placed or (SESSION, counter) in node.state.transactions):
            decided = node.txid(SESSION, counter)
    last = node.state.outbox_chains.last(UUID)
    assert last == decided, f"P6: the chain ends with {last}, the newest page that is decided is {decided}"


def _check_group(ask: Ask, answer: Answer, node: Node) -> None:
    """What was handed out was under a generation that is never handed out again; what was reset is saved."""
    saved = node.state.saved.named.get(GROUP)
    if ask.arguments[0] == "join":
        for topic, number, generation, *_ in json.loads(answer.body)["assigned"]:
            partition = node.partition(topic, number)
            known = saved.generations.get((partition.topic_id, number), 0) if saved is not None else 0
            assert known >= generation, f"P1: generation {generation} of {topic}-{number} may be handed out again"
    elif ask.arguments[0] == "reset":
        for topic, number, offset in json.loads(ask.body or b""):
            partition = node.partition(topic, number)
            at = saved.offsets.get((partition.topic_id, number)) if saved is not None else None
            assert at is not None, f"P1: the offset of {topic}-{number} is lost"
            assert at.offset >= offset, f"P1: offset {offset} of {topic}-{number} was saved, now {at.offset}"


def _check_query(ask: Ask, node: Node) -> None:
    """A driver's life that opened is never taken for an older one; a batch that is committed never comes again."""
    known, epoch = node.state.queries.named.get(QUERY), ask.extensions["epoch"]
    assert known is not None, "P1: the query is lost"
    assert node.state.queries.last_epoch >= int(epoch or 0), f"P1: epoch {epoch} may be drawn again"
    assert known.epoch >= int(epoch or 0), f"P1: epoch {known.epoch} after {epoch} was opened"
    if ask.arguments[0] == "commit":
        assert known.has(int(ask.extensions["batch"] or 0)), f"P1: batch {ask.extensions['batch']} is lost"
        outcomes = node.state.sessions[SESSION].outcomes
        assert all(outcomes[counter] is not None for counter in ask.winners), f"P1: {ask.winners} are lost"


def _check_batches(script: Script, node: Node) -> None:
    """P2 over the transactions of one decision."""
    session = node.state.sessions.get(SESSION)
    for ask in script.asks:
        committed = {session is not None and session.outcomes.get(c) is not None for c in ask.winners}
        assert len(committed) < 2, f"P2: some of {ask.winners}, which one request decided, are committed"


def _promised_places(ask: Ask, answer: Answer) -> list[tuple[TopicPartition, int, tuple[bytes, ...]]]:
    if ask.verb == "query":
        return []  # the outcomes of its winners say where they are
    if ask.verb == "put":
        return [(ask.adds[0][0], int(answer.body), ask.adds[0][1])]
    lines = parse_result_lines(answer.body)
    offsets = [line.base_offset for line in lines if line.base_offset is not None]
    assert len(offsets) == len(ask.adds), f"{answer.body!r} for {len(ask.adds)} parts"
    return [(place, offset, values) for offset, (place, values) in zip(offsets, ask.adds, strict=True)]


def _check_values(
    node: Node, visible: Visible, place: TopicPartition, base_offset: int, values: tuple[bytes, ...]
) -> None:
    """Contiguous from ``base_offset`` on, as far as retention and deletion have left them."""
    if place[0] not in _names(node):
        return
    partition = node.partition(*place)
    for offset, value in enumerate(values, base_offset):
        if offset >= partition.high_watermark and partition in node.state.decisions.barriers.partitions():
            assert offset < partition.next_offset, f"P1: {value[:20]!r} is not at {offset} of {place}"
        elif offset >= partition.log_start:
            assert visible.get(value) == (place, offset), f"P1: {value[:20]!r} is not at {offset} of {place}"


def _check_whole(script: Script, counter: int, node: Node, visible: Visible) -> None:
    session = node.state.sessions.get(SESSION)
    outcome = session.outcomes.get(counter) if session else None
    parts = script.transactions[counter].parts
    if not isinstance(outcome, tuple):
        seen = [value for _, values in parts for value in values if value in visible]
        assert not seen, f"P2: {seen} of transaction {counter}, which is not committed"
        return
    assert len(outcome) == len(parts), f"P2: {len(outcome)} of {len(parts)} parts of transaction {counter}"
    for (topic_id, _number, base_offset, count), (place, values) in zip(outcome, parts, strict=True):
        assert count == len(values)
        if node.state.topics.with_id(topic_id) is not None:
            _check_values(node, visible, place, base_offset, values)
    incomplete = node.state.decisions.incomplete.get((SESSION, counter))
    kept = [value for place, values in parts for value in values if value in visible or _is_behind(node, place)]
    seen = [value for value in kept if value in visible]
    has_rows_to_come = incomplete is not None and incomplete.has_rows_to_come
    assert not (seen and (has_rows_to_come or (SESSION, counter) in node.state.branch_parts.held)), (
        f"P4: {seen} of transaction {counter}, whose branches are not complete"
    )
    assert not seen or len(seen) == len(kept), f"P2: {seen} of transaction {counter}, the rest is held"


def _is_behind(node: Node, place: TopicPartition) -> bool:
    """Whether something in a partition is held back."""
    return place[0] in _names(node) and node.partition(*place) in node.state.decisions.barriers.partitions()


def _names(node: Node) -> set[str]:
    return {topic.config.name for topic in node.state.topics}


# --- asking again ----------------------------------------------------------------------------------------------------


def _repeat(script: Script, player: Player, told: Told) -> Told:
    """The client asks everything again, from the beginning."""
    player.hello()
    asked = [ask for ask in script.asks if not _is_done(script, ask, player.node) and player.ask(ask)]
    answers = {ask.opaque: player.client.received[ask.opaque] for ask in asked}
    for ask in asked:
        answer = answers[ask.opaque]
        before = told.get(ask.opaque)
        was_placing = before is not None and b" - " in before.body
        if before is not None and not ask.once and before.code == 200 and not script.deleted and not was_placing:
            assert answer == before, f"P6: request {ask.number} ({ask.verb}): {before}, then {answer}"
        refusals = {409} if ask.counter and (ask.once or _is_stream(script, ask)) else set()
        if ask.verb == "query":
            refusals = {410}  # of a life of the driver that is over
        elif ask.verb == "token":
            refusals = {409}  # others have followed
        assert answer.code in {200, *refusals}, f"request {ask.number} ({ask.verb}) again: {answer}"
    return answers


def _is_stream(script: Script, ask: Ask) -> bool:
    return script.transactions[ask.counter].fate == "stream"


def _is_done(script: Script, ask: Ask, node: Node) -> bool:
    """Topics are not made twice, and a deleted one is not asked for."""
    names = _names(node)
    if ask.verb == "group" and ask.arguments[0] == "join" and any(t.offset for t in script.transactions.values()):
        return GROUP in node.state.saved.named  # its transactions are those of the first generation
    if any(name not in names and script.topics.index(name) + 1 < node.state.topics.next_id for name in ask.topics):
        return True
    return ask.verb == "topic" and ask.arguments[0] == "create" and ask.arguments[1] in names


def _check_final(script: Script, node: Node, answers: Told) -> None:
    visible = _visible(script, node)
    for ask in script.asks:
        answer = answers.get(ask.opaque)
        if ask.adds and answer is not None and answer.code == 200 and (ask.verb == "put" or not script.deleted):
            for place, base_offset, values in _promised_places(ask, answer):
                _check_values(node, visible, place, base_offset, values)
    _check_offset(script, node)
    for counter, transaction in script.transactions.items():
        _check_whole(script, counter, node, visible)
        outcomes = node.state.sessions[SESSION].outcomes
        if transaction.fate == "committed" and not script.deleted:
            assert outcomes.get(counter) is not None, f"P6: transaction {counter} is not committed in the end"
        elif transaction.fate == "rolled-back":
            assert outcomes[counter] is None, f"P6: transaction {counter} is not rolled back in the end"
        elif transaction.fate == "prepared":
            assert (SESSION, counter) in node.state.transactions, f"P5: transaction {counter} is gone"
