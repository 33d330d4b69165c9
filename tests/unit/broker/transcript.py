"""Transcripts: requests in, answers out, played by the real core on a simulated disk. transcripts/README.md has the
language.

Invariants
    * Each answer that a connection gets is shown at the step after which it came: what is not in the transcript did
      not come.
    * What differs by clock or chance has a name: ``<tx:1.2>``, ``<now+500>``, ``<home>``, ``<uuid:name>``; any other
      32 hex digits are ``<hex:1>``, ``<hex:2>``, in the order of their first sight.
    * Where there are several homes each connection is to the home by which its name begins, and an id of a transaction
      names the home that issued it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

from tools.images.check import comparable
from tools.images.node import Answer, Client, Node, Served
from tools.images.requests import batch, part
from tools.simulated.clock import START_MS
from txmq.broker.cluster.cluster_view import RegistryState
from txmq.broker.commit.pipeline import APPLY_RETRY_S
from txmq.log import records
from txmq.model import Message
from txmq.protocol.grammar import VERBS
from txmq.protocol.grants import OPERATIONS
from txmq.protocol.scram import ScramAttempt, peer_name, peer_password
from txmq.protocol.transaction_bodies import DueHalf, encode_branch, parse_parts, split_halves
from txmq.redo import entries, inspect

from .support import stated
from .transcript_file import Life, Scenario, Step
from .transcript_worlds import Alone, Homes, Registered
from .verbs.access.access_support import keys

GENERATIONS_NAMED = 10  # handed out since a start, which counts on from its time in ms
EVERY = [
    f"{may}:{kind}:{name}"
    for kind, name in (("topic", "a"), ("group", "g"), ("resource", "<uuid:1>"))
    for may in OPERATIONS[kind]
]
SHARES = ("sessions", "unsettled", "streams", "payload_bytes", "sequences")
BINDING = bytes(range(32))  # of the broker's certificate
BRANCH = {"bqual": "b", "connection": 7, "wrote": True, "marker": True, "table": "t"}
_TOKEN = re.compile(r"'(?:[^'\\]|\\.)*'(?:\*\d+)?|\{[^}]*\}|\[[^\]]*\]|\S+")
_REQUEST = re.compile(r"([\w.]*)(>{1,3}) (.*)")
_REFUSED = re.compile(r"(.*: )?[45]\d\d ")
_PART = re.compile(r"(\S+)/(\d+)((?: \w+=\S+)*):(.*)")
_TIME = re.compile(r"(?<!\d)1[67]\d{11}(?!\d)")
_TXID = re.compile(r"([0-9a-f]{16}-[0-9a-f]{16})-([0-9a-f]+)-([0-9a-f]+)")
_HEX = re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")


def play(scenario: Scenario, life: Life) -> Scenario:
    """The scenario with the answers that came."""
    with pytest.MonkeyPatch.context() as limits:
        stage = _Stage(life, scenario.file, limits)
        for text in scenario.opening:
            stage.play(text)
        steps = [Step(step.text, stage.play(step.text), step.above) for step in scenario.steps]
    return Scenario(scenario.title, scenario.is_part, steps, scenario.below)


class _Stage:
    """A broker and its connections by name; the last ones of a name are meant, the older ones still listen."""

    def __init__(self, life: Life, file: list[Scenario], limits: pytest.MonkeyPatch) -> None:
        self._life, self._file, self._limits = life, file, limits
        self._settings: dict[str, object] = {}
        self._made: Alone | None = None
        self._at = ""
        self._is_first_life = True
        self._named: dict[str, Client] = {}
        self._connections: list[tuple[str, Client]] = []
        self._closed: list[Client] = []
        self._asked: dict[tuple[int, bytes], tuple[str, list[str]]] = {}  # what an answer is for, what of it is shown
        self._streamed: dict[str, list[bytes]] = {}
        self._hexes: list[str] = []
        self._is_brief = False  # of refusals only code and name are shown
        self._unsent: dict[int, bytes] = {}  # what goes together with the connection's next request
        self._journaled: dict[str, int] = {}  # how many entries were shown, by home

    @property
    def world(self) -> Alone:
        """The brokers; one, unless the scenario began with others."""
        if self._made is None:
            self._made = Alone(self._settings)
        return self._made

    @property
    def registered(self) -> Registered:
        """The same, of a scenario that began with ``registry``."""
        assert isinstance(self.world, Registered)
        return self.world

    @property
    def homes(self) -> list[str]:
        """The names of the homes that a step is about."""
        return [self._at] if self._at else [*self.world.nodes]

    @property
    def node(self) -> Node:
        """The first of these."""
        return self.world.nodes[self.homes[0]]

    @property
    def nodes(self) -> list[Node]:
        """All of these."""
        return [self.world.nodes[home] for home in self.homes]

    def play(self, text: str) -> list[str]:
        """One step, and what is true after each: who folded the journal has the broker's state."""
        lines = self.do(text)
        for node in self._made.nodes.values() if self._made is not None else ():
            if node.pipeline.is_idle:
                node.compare_follower()
        return lines

    def do(self, text: str) -> list[str]:
        """The lines that a step brings."""
        for word, given in self._life.words.items():
            text = text.replace(f"<{word}>", given)
        request = _REQUEST.fullmatch(text)
        if request is not None:
            return self._request(*request.groups())
        name, _, words = text.partition(" ")
        if name == "each":
            return self._each(*words.split(" do ", 1))
        if name == "at":
            self._at, _, text = words.partition(" ")
            try:
                return self.do(text)
            finally:
                self._at = ""
        command: Callable[..., list[str] | None] | None = getattr(self, f"_do_{name}", None)
        if command is None:
            raise ValueError(f"no step is called {name!r}: transcripts/README.md lists them")
        return [*(command(*words.split()) or ()), *self._arrivals()]

    def _each(self, values: str, text: str, place: str = "$") -> list[str]:
        """The step with each of the values in its place; what came of it once, if that is the same for all."""
        values, _, others = values.partition(" with ")
        listed = values.split(" | ") if " | " in values else values.split()
        steps = [(value, text.replace(place, value)) for value in listed]
        came = [(value, self._each(others, step, "%") if others else self.do(step)) for value, step in steps]
        likened = [[_likened(line, value, place) for line in lines] for value, lines in came]
        for same in ([lines for _, lines in came], likened):
            if all(lines == same[0] for lines in same):
                return same[0]
        return [f"{value}: {line}" for value, lines in came for line in lines]

    # --- commands ---

    def _do_brief(self) -> None:
        self._is_brief = True

    def _do_for(self, *_words: str) -> None:
        """See ``Scenario.lives``."""

    def _do_settings(self, *words: str) -> None:
        changes = {name: ast.literal_eval(value) for name, value in map(_pair, words)}
        self._settings |= changes
        for made in self.nodes if self._made is not None else ():
            for name, value in changes.items():
                object.__setattr__(made.settings, name, value)

    def _do_homes(self, *names: str) -> None:
        self._made = Homes(names, self._settings)

    def _do_registry(self, *names: str) -> None:
        self._made = Registered(names, self._settings)

    def _do_limit(self, *words: str) -> None:
        for name, value in map(_pair, words):
            self._limits.setattr(f"txmq.broker.{name}", int(value))

    def _do_connect(self, *names: str) -> None:
        for name in names or [""]:
            self._connect(name)

    def _do_session(self, *names: str) -> None:
        for name in names or [""]:
            self._do_resume("new", name)

    def _do_resume(self, which: str, name: str = "") -> None:
        answer = self._connect(name).hello(which)
        if answer.code != 200:
            raise AssertionError(f"no session {which}: {answer.text}")

    def _do_begin(self, *title: str) -> None:
        (begun,) = (one for one in self._file if one.title == " ".join(title))
        lines = [line for step in begun.steps for line in self.do(step.text)]
        if begun.is_part and (refused := [line for line in lines if _REFUSED.match(line)]):
            raise AssertionError(f"{begun.title}: {refused}")

    def _do_disconnect(self, name: str = "") -> None:
        client = self._named.pop(name)
        client.disconnect()
        self._closed.append(client)

    def _do_advance(self, time: str) -> None:
        self._do_freeze(time)
        for each in self.nodes:
            each.core.tick(each.clock.now_ms())
        self.world.pump()

    def _do_freeze(self, time: str) -> None:
        for clock in {id(each.clock): each.clock for each in self.nodes}.values():  # homes may share one
            clock.advance(_ms(time) / 1000)

    def _do_pass(self, time: str) -> None:
        self.world.pass_time(_ms(time) / 1000)

    def _do_jump(self, time: str) -> None:
        self.node.clock.jump(_ms(time))

    def _do_pump(self) -> None:
        self.world.pump()

    def _do_flush(self) -> None:
        self.node.flush()

    def _do_checkpoint(self) -> None:
        self.node.checkpoint()

    def _do_hold(self, what: str) -> None:
        if what == "asks":
            self.registered.holding.update(self.homes)
        elif what == "apply":
            self.node.hold_apply()
        else:
            self.node.hold_checkpoint()

    def _do_let(self, _go: str) -> None:
        self.node.let_go()

    def _do_force(self) -> None:
        self.node.force()

    def _do_retire(self) -> None:
        self.node.retire()

    def _do_restart(self, *words: str) -> None:
        either_way = words == ("either", "way")
        for home, each in zip(self.homes, self.nodes, strict=True):
            if either_way and self._life.after_checkpoint:
                each.checkpoint()
            elif either_way:
                each.clock.advance(APPLY_RETRY_S)  # what a checkpoint takes: times are the same either way
            self._connections = [pair for pair in self._connections if pair[1].node is not each]
            self._named = {name: client for name, client in self._named.items() if client.node is not each}
            lived = comparable(each.state)
            self.world.restart(home, is_led=words != ("waiting",))
            if either_way and not isinstance(self.world, Registered):
                _require_same(lived, comparable(self.world.nodes[home].state))
        self._is_first_life = False

    # --- users ---

    def _do_users(self, *words: str) -> None:
        fields = dict(_pair(word) for word in words if "=" in word)
        if isinstance(self.world, Homes):
            self.world.hear_of_users(self.homes, fields)
        else:
            self.world.add_users(words)

    def _do_grants(self, user: str, *grants: str) -> None:
        words = [word for grant in grants for word in (EVERY if grant == "every" else [grant])]
        fields = [tuple(self._resolve(word, self.node).split(":")) for word in words]
        for each in self.nodes:
            each.context.group.add_entry(entries.json_entry(entries.GRANTED, {"user": user, "grants": fields}))
            each.state.principals.fold(entries.GRANTED, {"user": user, "grants": fields})
        self.world.pump()

    def _do_tls(self, name: str, *certificate: str) -> None:
        client = self._named.get(name) or self._connect(name)
        client.client.binding = BINDING
        client.client.certificates, client.client.certificate = frozenset(certificate), " ".join(certificate)

    def _do_intercept(self, name: str) -> None:
        self._named[name].client.binding = BINDING[::-1]

    def _do_login(self, name: str, user: str, password: str = "pencil") -> list[str]:
        client = self._named.get(name) or self._connect(name)
        attempt = ScramAttempt(user, password, "nonce", None if client.client.binding is None else BINDING)
        return self._log_in(name, client, attempt)

    def _do_peer(self, name: str, asking: str) -> list[str]:
        client, state = self._connect(name), self.world.nodes[asking].state
        password = peer_password(state.principals.between_brokers, state.home, client.node.state.home)
        return self._log_in(name, client, ScramAttempt(peer_name(state.home), password, "nonce"))

    def _log_in(self, name: str, client: Client, attempt: ScramAttempt) -> list[str]:
        """Both messages of a login; ``200`` if the broker has proved that it knows the password, too."""
        answer = self._say(name, client, attempt.first())
        if answer is not None and answer.code == 200:
            answer = self._say(name, client, attempt.final(answer.body.removesuffix(b"\n")))
            if answer is not None and answer.code == 200:
                attempt.verify(answer.body.removesuffix(b"\n"))
                return ["200"]
        if answer is None:
            return ["(waits)"]
        return [f"{answer.code} {answer.error if self._is_brief else answer.text.rstrip()}"]

    def _say(self, name: str, client: Client, message: bytes) -> Answer | None:
        opaque = client.send("auth", "scram-sha-256", body=message)
        self._asked[id(client), opaque] = f"{name}: login", []
        self.world.pump()
        return client.received.pop(opaque, None)

    # --- the registry ---

    def _do_lead(self) -> None:
        for home in self.homes:
            self.registered.lead(home)

    def _do_refresh(self) -> None:
        self.registered.refresh(self.homes)

    def _do_close(self) -> None:
        for home in self.homes:
            self.registered.brokers[home].registry.close()

    def _do_perform(self, place: str) -> None:
        self.registered.perform(int(place))

    def _do_fail(self, place: str) -> None:
        self.registered.fail(int(place))

    def _do_deliver(self, place: str) -> None:
        self.registered.deliver(int(place))

    def _do_answer(self, place: str = "") -> None:
        if place:
            self.registered.answer(int(place))
        else:
            self.registered.answer_all()

    def _do_link(self, state: str) -> None:
        self.node.core.registry_state(RegistryState(state))

    # --- homes that ask each other ---

    @property
    def _among_homes(self) -> Homes:
        assert isinstance(self.world, Homes)
        return self.world

    def _do_cut(self, _off: str, home: str) -> None:
        self._among_homes.cluster.cut_off(self._among_homes.homes[home])

    def _do_mend(self, home: str) -> None:
        self._among_homes.cluster.away.discard(self._among_homes.homes[home].identity.node)

    def _do_come(self, _back: str, home: str) -> None:
        self._among_homes.cluster.come_back(self._among_homes.homes[home])

    def _do_talk(self, *now: str) -> None:
        if now:
            self._among_homes.cluster.talk()
        else:
            self._among_homes.cluster.pump()

    def _do_forget(self, _talk: str) -> None:
        self._show_talk()

    def _show_talk(self) -> list[str]:
        """What the home asked others since the last time."""
        cluster, number = self._among_homes.cluster, self.node.state.home
        found = [f"{ask.verb} {ask.txid}" for of, ask in cluster.asks if of == number]
        cluster.asks = [one for one in cluster.asks if one[0] != number]
        return [", ".join(f"{found.count(text)} {text}" for text in dict.fromkeys(found))] if found else []

    def _show_unsettled(self) -> list[str]:
        """How many transactions are not over, and how many of them their sessions owe the end of."""
        found = []
        for name, node in self.world.nodes.items():
            owed = sum(session.owed for session in node.state.sessions.values())
            if node.state.unsettled or owed:
                found.append(f"{name} {node.state.unsettled}, owed {owed}".lstrip())
        return [" / ".join(found) or "none"]

    def _do_disk(self, state: str) -> None:
        self.node.context.disk_full = state == "full"

    def _do_show(self, *places: str) -> list[str]:
        shown = getattr(self, f"_show_{places[0]}", None)
        if shown is not None:
            return [self._named_text(line, self.node) for line in shown(*places[1:]) if line] or ["none"]
        seen = [f"[{self._seen(place)}]" for place in places if place != "unsettled"]
        return [" ".join([*seen, *(["unsettled", *self._show_unsettled()] if "unsettled" in places else [])]).rstrip()]

    def _show_sessions(self) -> list[str]:
        return [" ".join(map(str, sorted(self.node.state.sessions)))] if self.node.state.sessions else []

    def _show_alarms(self) -> list[str]:
        return [_plain(alarm) for alarm in self.node.context.alarms]

    def _show_audit(self, *words: str) -> list[str]:
        """Lines of these events since the last time, and these of their fields."""
        cut = words.index("|") if "|" in words else len(words)
        events, fields = [word.replace("_", " ") for word in words[:cut]], words[cut + 1 :]
        context = self.node.context
        lines, context.audited = context.audited, []
        return [
            " ".join([line["event"], *(f"{key}={value}" for key, value in line.items() if _is_shown(key, fields))])
            for line in lines
            if not events or line["event"] in events
        ]

    def _show_journal(self) -> list[str]:
        """The kinds of entries since the last time, but for what a checkpoint leaves there: it changes nothing."""
        dumped = inspect.dump(self.node.disk)
        found = [kind for record in dumped for kind, _, _ in entries.split(record.payload)]
        kinds = [entries.NAMES[kind] for kind in found if kind != entries.CHECKPOINT]
        begun = self._journaled.get(self.homes[0], 0)
        self._journaled[self.homes[0]] = len(kinds)
        return [" ".join(kinds[begun:])] if kinds[begun:] else []

    def _show_shares(self) -> list[str]:
        """What each user has."""
        principals = self.node.state.principals
        found = {name: getattr(principals, name) for name in SHARES}
        for (kind, user), size in principals.made_sizes.items():
            found.setdefault(f"made {kind}", {})[user] = size
        rows = [f"{name} {_counts(counts)}" for name, counts in found.items() if counts]
        return ["; ".join(rows)] if rows else []

    def _show_asks(self) -> list[str]:
        self.registered.collect()
        return [
            f"{number} {home}: {type(ask).__name__}" for number, (home, _, ask) in enumerate(self.registered.held, 1)
        ]

    def _show_registry(self) -> list[str]:
        """Topics and those that were deleted, with the homes that have to drop them."""
        found = self.registered.brokers[self.homes[0]].registry.topics()
        topics = [(one.topic.config.name, one.topic.topic_id, one.homes) for one in found.topics]
        deleted = [(f"deleted {one.name}", one.topic_id, one.homes) for one in found.deleted]
        return [f"{name} id={number} {self._homes_named(homes)}" for name, number, homes in topics + deleted]

    def _homes_named(self, homes: Sequence[int]) -> str:
        names = {each.state.home: name for name, each in self.world.nodes.items()}
        return ",".join(names[home] for home in homes)

    def _show_anchors(self, *names: str) -> list[str]:
        registry = self.registered.brokers[self.homes[0]].registry
        found = [*registry.anchors("query", list(names)).items(), *registry.anchors("group", list(names)).items()]
        return [f"{name} {self._homes_named([home])}" for name, home in found if home is not None]

    # --- requests ---

    def _connect(self, text: str) -> Client:
        """A connection; ``name@user`` is a user's, ``@user`` that of the same name."""
        name, _, user = text.partition("@")
        name = name or user
        home = self.world.nodes.get(name.partition(".")[0], self.node)
        made = self._named[name] = home.connect()
        made.client.user = user
        self._connections.append((name, made))
        return made

    def _request(self, name: str, arrow: str, text: str) -> list[str]:
        if not name and name not in self._named and self._is_first_life and not self.world.has_names:
            self._do_session()
        client = self._named.get(name) or self._connect(name)
        tokens = _TOKEN.findall(text)
        cut = tokens.index("|") if "|" in tokens else len(tokens)
        verb, opaque = VERBS.get(tokens[0].encode()), b"n%d" % (len(self._asked) + 1)
        words, body = self._written(tokens[:cut], client.node)
        if body or (verb is not None and verb.has_body):
            words.append(str(len(body)))
        self._unsent[id(client)] = self._unsent.get(id(client), b"") + f"{' '.join(words)} ".encode()
        self._unsent[id(client)] += opaque + b"\r\n" + body
        shown = " ".join(tokens[: min(cut, 1 + (len(verb.arguments) if verb else 0))])
        self._asked[id(client), opaque] = (f"{name}: {shown}" if name else shown), tokens[cut + 1 :]
        if arrow == ">>>":
            return []
        client.send_bytes(self._unsent.pop(id(client)))
        if arrow == ">>":
            return self._arrivals()
        self.world.pump()
        answer = client.received.pop(opaque, None)
        own = "(waits)" if answer is None else self._told(answer, client, opaque)
        return [own, *self._arrivals()]

    def _written(self, tokens: list[str], home: Served) -> tuple[list[str], bytes]:
        """The words of a request, and its body."""
        contents = {token: self._content(token, home) for token in tokens if token[0] in "'{["}
        rows = next((content for token, content in contents.items() if token[0] == "'"), b"")
        words = [word for token in tokens if token not in contents for word in self._resolve(token, home).split()]
        words = [f"offsets={len(rows)}" if word == "offsets=*" else word for word in words]
        body = b"".join(contents[token] for token in tokens if token in contents)
        for word in words:
            if word.startswith("tx="):
                self._streamed.setdefault(word[3:], []).append(body)
        return words, body

    def _arrivals(self) -> list[str]:
        found = []
        for name, client in self._connections:
            for opaque in list(client.received):
                told = self._told(client.received.pop(opaque), client, opaque)
                found.append(f"{self._asked[id(client), opaque][0]}: {told}")
            if client.client.closing and client not in self._closed:
                found.append(f"{name}: closed".removeprefix(": "))
                self._closed.append(client)
        return found

    def _content(self, token: str, home: Served) -> bytes:
        if token[0] == "'":
            quoted, _, times = token.rpartition("'")
            return self._resolve(ast.literal_eval(quoted + "'"), home).encode("latin-1") * int(times[1:] or "1")
        inner = self._resolve(token[1:-1], home)
        if token[0] == "[":
            resource, uuid, *changes = inner.split()
            return encode_branch(resource, uuid, BRANCH | {k: json.loads(v) for k, v in map(_pair, changes)})
        named = _PART.fullmatch(inner)
        if named is None:
            return _batch(inner)
        topic, number, words, rest = named.groups()
        fields = dict(map(_pair, words.split()))
        return part(topic, int(number), _batch(rest), fields.get("keys", ""), int(fields.get("id", "0")))

    # --- names ---

    def _resolve(self, text: str, home: Served) -> str:
        text = text.replace("<db>", "resource=db uuid=<uuid:1> table=t")
        text = re.sub(r"<streamed:([\w.]+)>", lambda found: self._streamed_words(self._txid(found[1])), text)
        text = re.sub(r"<tx:([\w.]+)>", lambda found: self._txid(found[1]), text)
        text = re.sub(r"<uuid:(\w+)>", lambda found: found[1].encode().hex().rjust(32, "0"), text)
        text = re.sub(r"<hex:(\d+)>", lambda found: self._hexes[int(found[1]) - 1], text)
        text = re.sub(r"<session:([\w.]+)>", lambda found: home.wish(found[1]), text)
        text = re.sub(r"<password:(\w+)>", r'{"keys": <keys:\1>, "certificate": null}', text)
        text = re.sub(r"<keys:(\w+)>", lambda found: json.dumps(keys(found[1])), text)
        floor = home.state.saved.generation_floor
        text = re.sub(r"<generation\+(\d+)>", lambda found: str(floor + int(found[1])), text)
        now = home.clock.now_ms()
        text = re.sub(r"<now([+-]\d+)?>", lambda found: str(now + int(found[1] or "0")), text)
        for name, each in self.world.nodes.items():
            text = text.replace(f"<home:{name}>", f"{each.context.identity.node:016x}")
        identity = home.context.identity
        return text.replace("<cluster>", f"{identity.cluster:016x}").replace("<home>", f"{identity.node:016x}")

    def _txid(self, name: str) -> str:
        *home, session, counter = name.split(".")
        node = self.world.nodes[home[0]] if home else self.node
        return node.txid(int(session), int(counter))

    def _streamed_words(self, txid: str) -> str:
        return " ".join(f"{name}={number}" for name, number in stated(self._streamed[txid]).items())

    def _named_text(self, text: str, node: Served) -> str:
        identities = {name: each.context.identity for name, each in self.world.nodes.items()}
        places = {f"{known.cluster:016x}-{known.node:016x}": name for name, known in identities.items()}

        def named(found: re.Match[str]) -> str:
            home = places.get(found[1])
            if home is None:
                return found[0]
            return f"<tx:{f'{home}.' if home else ''}{int(found[2], 16)}.{int(found[3], 16)}>"

        text = _HEX.sub(lambda found: self._hex_name(found[0]), _TXID.sub(named, text))
        for place, home in places.items():
            text = text.replace(place[:16], "<cluster>").replace(place[17:], f"<home:{home}>" if home else "<home>")
        return _TIME.sub(lambda found: self._time_name(int(found[0]), node), text)

    def _hex_name(self, word: str) -> str:
        uuid = bytes.fromhex(word).lstrip(b"\0")
        if uuid.isalnum():
            return f"<uuid:{uuid.decode()}>"
        if word not in self._hexes:
            self._hexes.append(word)
        return f"<hex:{self._hexes.index(word) + 1}>"

    def _time_name(self, time_ms: int, node: Served) -> str:
        count = time_ms - node.state.saved.generation_floor
        if 1 <= count < GENERATIONS_NAMED:
            return f"<generation+{count}>"
        late_ms = time_ms - node.clock.now_ms()
        return f"<now{late_ms:+}>" if late_ms else "<now>"

    # --- what is shown ---

    def _told(self, answer: Answer, client: Client, opaque: bytes) -> str:
        asked, shown = self._asked[id(client), opaque]
        if answer.code == 200 and re.search(r"(^|: )get ", asked):
            return f"value {self._values(answer.body, client.node)}".rstrip()
        if answer.code == 200 and re.search(r"(^|: )checks ", asked):
            halves = [self._half(half, client.node) for half in split_halves(answer.body)]
            return self._named_text(" ".join(["200", *halves]), client.node)
        if answer.code == 200 and re.search(r"(^|: )parts ", asked):
            parts = [(one.topic, one.partition, one.batch) for one in parse_parts(answer.body)]
            return f"200 {self._parts(parts, client.node)}".rstrip()
        if self._is_brief and answer.error:
            return f"{answer.code} {answer.error}"
        text = answer.text.rstrip("\n")
        if shown and answer.code == 200:
            text = _chosen(text, shown) if shown != ["-"] else ""
        return self._named_text(f"{answer.code} {' / '.join(text.splitlines())}".rstrip(), client.node)

    def _seen(self, place: str) -> str:
        home, _, path = place.rpartition(":")
        node = self.world.nodes[home] if home else self.node
        topic, number = path.split("/")
        partition = node.partition(topic, int(number))
        return " ".join(self._message(message, node) for message in node.messages(partition))

    def _values(self, batches: bytes | bytearray, node: Served) -> str:
        found = []
        for raw in records.decode_raw(batches, "-", 0):
            found.append(f"@{raw.base_offset}")
            found += [self._message(message, node) for message in records.decode_batch(raw, "-", 0)]
        return " ".join(found)

    def _half(self, half: DueHalf, node: Served) -> str:
        return f"{half.txid} attempt {half.attempt} age {half.age_ms} {self._parts(half.parts, node)}"

    def _parts(self, parts: Iterable[tuple[str, int, bytearray]], node: Served) -> str:
        return " ".join(f"{{{topic}/{number}: {self._values(content, node)}}}" for topic, number, content in parts)

    def _message(self, message: Message, node: Served) -> str:
        value = (message.value or b"").decode("latin-1")
        if value.strip("\0") == "" and value:
            value = f"*{len(value)}"
        notes = [] if message.key == b"k" else [f"key={message.key.decode()}" if message.key is not None else "no key"]
        if message.timestamp_ms != START_MS:
            notes.append(f"time={self._time_name(message.timestamp_ms, node)}")
        return value + (f"({', '.join(notes)})" if notes else "")


def _require_same(lived: dict[str, Any], redone: dict[str, Any]) -> None:
    """That the next life of a broker finds its state; what was streamed and not prepared is rolled back."""
    for name in lived if all(row[3] != "open" for row in lived["transactions"]) else ():
        if redone[name] != lived[name]:
            raise AssertionError(f"the next life finds other {name}: {redone[name]} instead of {lived[name]}")


def _is_shown(field: str, wanted: Sequence[str]) -> bool:
    return field in wanted if wanted else field not in {"event", "address", "connection", "client"}


def _likened(line: str, value: str, place: str) -> str:
    return re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", place, line)


def _counts(counts: Mapping[str, int]) -> str:
    return " ".join(f"{name}={count}" for name, count in sorted(counts.items()))


def _pair(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    return name, value


def _ms(time: str) -> int:
    unit = re.fullmatch(r"(-?[\d.]+)(ms|s|h)", time)
    if unit is None:
        raise ValueError(f"a time is written as 500ms, 1.5s or 24h: {time}")
    return round(float(unit[1]) * {"ms": 1, "s": 1000, "h": 3_600_000}[unit[2]])


def _batch(text: str) -> bytes:
    words, _, changes = text.partition(";")
    fields = dict(map(_pair, changes.split()))
    values = [bytes(int(word[1:])) if word[0] == "*" else word.encode() for word in words.split()]
    made = bytearray(
        batch(
            *values, producer=int(fields.get("producer", "-1")), epoch=int(fields.get("epoch", "0")),
            sequence=int(fields.get("sequence", "0")), time_ms=START_MS + int(fields.get("time", "0")),
        )
    )  # fmt: skip
    if "flip" in fields:
        made[int(fields["flip"])] ^= 1
    return bytes(made)


def _chosen(text: str, names: list[str]) -> str:
    if text[:1] not in ("{", "["):
        return "\n".join(line for line in text.splitlines() if line.split(" ", 1)[0] in names)
    top = json.loads(text)
    found = _kept(top, names) or {key: [] for key, value in top.items() if isinstance(value, list)}
    return _plain(found)[1:-1]


def _kept(value: Any, names: list[str]) -> Any:
    """What is left of a value: of dictionaries the keys that were named, at any depth."""
    if isinstance(value, list):
        return [kept for item in value if (kept := _kept(item, names))]
    if not isinstance(value, dict):
        return None
    found = {key: item if key in names else _kept(item, names) for key, item in value.items()}
    return {key: item for key, item in found.items() if key in names or item}


def _plain(value: Any) -> str:
    """JSON without its quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_plain(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_plain, value)) + "]"
    return value if isinstance(value, str) else json.dumps(value)
